"""gpt-oss: every message of the model names its channel, and a call its recipient.

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary
to=functions.f <|constrain|>json<|message|>{…}<|call|>, or … <|channel|>final<|message|>answer

The prompt ends with `<|start|>assistant`; `<|return|>` and `<|call|>` end an answer, so it has at
most one call.

Source: github.com/openai/harmony, docs/format.md.
"""

import random
import re

from engine.errors import InvalidRequest
from router.text.forms.calling import (
    ANY_TEXT,
    NAME,
    AnswerRules,
    CallGrammar,
    Calling,
    TokenOf,
    any_call,
    arguments,
    literal,
    mark,
)
from router.text.forms.deltas import (
    MAX_HEAD_LEN,
    CallParser,
    Content,
    Delta,
    Reasoning,
    first_mark,
    merged,
)

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_MARKS = (CHANNEL, MESSAGE, START, END, CONSTRAIN, CALL, RETURN)
_HEADS = (CHANNEL, START, MESSAGE, "to=functions.")
_RECIPIENT = re.compile(rf"to=functions\.({NAME})")
_TEXT = r"TEXT: /(?s:.*)/"


class Harmony:
    """The form of gpt-oss, for reasoning and calls."""

    name = "openai"
    marks = _MARKS

    def grammar(
        self, calling: Calling, token_of: TokenOf, answer: AnswerRules = ANY_TEXT
    ) -> CallGrammar:
        """Returns the grammar of reasoning, then a call, or an answer if no call is required.

        Raises InvalidRequest.
        """
        if (missing := missing_mark(token_of)) is not None:
            raise InvalidRequest(f"tools: this model has no token {missing}", param="tools")
        held = arguments(calling)
        calls = [
            f"call_{i}: {_written_call(name, token_of)} edge arguments_{i} edge"
            for i, name in enumerate(calling.functions)
        ]
        ways = any_call(calling)
        if not calling.at_least_one:
            ways = f"{ways} | {_final(answer, token_of)}"
        first = f"start: {_said(token_of)} ({ways} | {_thought(token_of)})"
        if not calling.at_least_one:
            first += f" | {answer.expression}"
        lines = [first, _TEXT, *calls, *answer.rules, *held.rules]
        return CallGrammar("\n".join(dict.fromkeys(lines)), held.unheld)

    def parser(self, calling: Calling, rng: random.Random) -> "HarmonyParser":
        """Returns a parser of one answer."""
        return HarmonyParser(rng)


def missing_mark(token_of: TokenOf) -> str | None:
    """Returns the first mark that is not a token of the model; None if all are tokens."""
    return next((mark for mark in _MARKS if token_of(mark) is None), None)


def final_grammar(answer: AnswerRules, token_of: TokenOf) -> str:
    """Returns the grammar of reasoning and an answer, or of an answer without marks."""
    ways = f"{_final(answer, token_of)} | {_thought(token_of)}"
    first = f"start: {_said(token_of)} ({ways}) | {answer.expression}"
    return "\n".join([first, _TEXT, "edge: / /?", *answer.rules])


def _said(token_of: TokenOf) -> str:
    """Returns an expression for the messages before the last: reasoning, and text before calls."""
    channel, message, begin, end = (mark(m, token_of) for m in _MARKS[:4])
    return f'({channel} ("analysis" | "commentary") {message} TEXT {end} {begin} "assistant")*'


def _thought(token_of: TokenOf) -> str:
    """Returns an expression for reasoning at which an answer ends.

    Without it, a model that still reasons could not end its answer before its limit.
    """
    channel, message = (mark(m, token_of) for m in _MARKS[:2])
    return f'{channel} "analysis" {message} TEXT'


def _final(answer: AnswerRules, token_of: TokenOf) -> str:
    channel, message = (mark(m, token_of) for m in _MARKS[:2])
    head = f'{channel} "final" (edge {mark(CONSTRAIN, token_of)} "json")? {message}'
    return f"{head} {answer.expression}"


def _written_call(name: str, token_of: TokenOf) -> str:
    """Returns an expression for a call's head, with the recipient before or after the channel."""
    channel, message = (mark(m, token_of) for m in _MARKS[:2])
    kind = f'(edge {mark(CONSTRAIN, token_of)}? "json")?'
    to, where = literal(f"to=functions.{name}"), '("commentary" | "analysis")'
    return f'(({channel} {where} " " {to} | " " {to} {channel} {where}) {kind} {message})'


class HarmonyParser(CallParser):
    """Parses one answer of gpt-oss, with or without tools."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._in_calls = True  # True throughout, as all text is in messages
        self._in_head = True
        self._is_begin = True  # True until the first head is complete
        self._channel = ""
        self._is_call = False  # True if the present message is a call

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns the remaining text. An incomplete head is not shown."""
        rest, self._pending = self._pending, ""
        if self._in_head and (not self._is_begin or any(mark in rest for mark in _MARKS)):
            return []
        return [] if is_cut else merged([self._delta(rest)])

    def _step(self) -> list[Delta] | None:
        if not self._in_head:
            return self._body()
        head, found, rest = first_mark(self._pending, (MESSAGE,))
        if self._is_begin and not _may_be_head(self._pending):
            self._in_head = self._is_begin = False  # an answer without marks is shown as it is
            return []
        if found is None:
            if len(self._pending) > MAX_HEAD_LEN:
                self._in_head = False  # this is no message, so all of it is shown as the answer
                return []
            return None
        self._pending, self._in_head, self._is_begin = rest, False, False
        _, _, channel = head.rpartition(CHANNEL)
        self._channel = (channel.split() or [""])[0]
        self.is_reasoning = self._channel == "analysis"
        recipient = _RECIPIENT.search(head)
        self._is_call = recipient is not None
        return [] if recipient is None else [self._begun(recipient[1])]

    def _body(self) -> list[Delta] | None:
        text, found, rest = first_mark(self._pending, (END, START, CALL, RETURN, CHANNEL))
        self._pending = rest
        if found is None:
            return [self._delta(text)] if text else None
        self._in_head, self.is_reasoning = True, False
        return [self._delta(text)]

    def _delta(self, text: str) -> Delta:
        if self._is_call:
            return self._arguments(text)
        return Reasoning(text) if self._channel == "analysis" else Content(text)


def _may_be_head(text: str) -> bool:
    """True if the text so far may be the beginning of a message's head."""
    text = text.lstrip()
    return any(text.startswith(begin) or begin.startswith(text) for begin in _HEADS)

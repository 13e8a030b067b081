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
    NAME,
    Calling,
    TokenOf,
    any_call,
    arguments,
    literal,
)
from router.text.forms.deltas import (
    CallArguments,
    Content,
    Delta,
    Reasoning,
    first_mark,
    merged,
    new_call,
)

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_MARKS = (CHANNEL, MESSAGE, START, END, CONSTRAIN, CALL, RETURN)
_RECIPIENT = re.compile(rf"to=functions\.({NAME})")
MAX_HEAD_LEN = 1024  # characters of a message's head


class Harmony:
    """Reasoning and calls of gpt-oss."""

    name = "openai"
    marks = _MARKS

    def grammar(self, calling: Calling, token_of: TokenOf) -> str:
        """Reasoning, then a call, or any text if none is required. Raises InvalidRequest."""
        ids = {mark: token_of(mark) for mark in _MARKS}
        missing = next((mark for mark, token_id in ids.items() if token_id is None), None)
        if missing is not None:
            raise InvalidRequest(f"tools: this model has no token {missing}", param="tools")
        channel, message, start, end, constrain = (f"<[{ids[m]}]>" for m in _MARKS[:5])
        again = f'{start} "assistant"'
        said = f'({channel} "analysis" {message} TEXT {end} {again})*'
        call = f'{channel} "commentary to=functions." ({any_call(calling)})'
        final = f'{channel} "final" {message} TEXT'
        return "\n".join(
            [
                f"start: {said} {call if calling.at_least_one else f'({call} | {final})'}",
                r"TEXT: /(?s:.*)/",
                *(
                    f'call_{i}: {literal(name)} " "? {constrain} "json" {message} arguments_{i}'
                    for i, name in enumerate(calling.functions)
                ),
                *arguments(calling),
            ]
        )

    def parser(self, calling: Calling, rng: random.Random) -> "HarmonyParser":
        """Returns a parser of one answer."""
        return HarmonyParser(rng)


class HarmonyParser:
    """Parses one answer of gpt-oss, also one without tools."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pending = ""
        self._in_head = True
        self._channel = ""
        self._is_call = False  # the message that comes now
        self.num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """True inside a message of the analysis channel."""
        return not self._in_head and self._channel == "analysis"

    def feed(self, text: str) -> list[Delta]:
        """Takes more text of the answer and returns what it makes certain."""
        self._pending += text
        deltas: list[Delta] = []
        while (more := self._head() if self._in_head else self._body()) is not None:
            deltas += more
        return merged(deltas)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """Returns what was held back; a head that was cut is not shown."""
        rest, self._pending = self._pending, ""
        return [] if self._in_head or is_cut else merged([self._delta(rest)])

    def _head(self) -> list[Delta] | None:
        head, found, rest = first_mark(self._pending, (MESSAGE,))
        if found is None:
            if len(self._pending) > MAX_HEAD_LEN:
                self._in_head = False  # no message of this form: all of it is an answer
                return []
            return None
        self._pending, self._in_head = rest, False
        _, _, channel = head.rpartition(CHANNEL)
        self._channel = (channel.split() or [""])[0]
        recipient = _RECIPIENT.search(head)
        self._is_call = recipient is not None
        if recipient is None:
            return []
        self.num_calls += 1
        return [new_call(self._rng, self.num_calls - 1, recipient[1])]

    def _body(self) -> list[Delta] | None:
        text, found, rest = first_mark(self._pending, (END, START, CALL, RETURN, CHANNEL))
        self._pending = rest
        if found is None:
            return [self._delta(text)] if text else None
        self._in_head = True
        return [self._delta(text)]

    def _delta(self, text: str) -> Delta:
        if self._is_call:
            return CallArguments(self.num_calls - 1, text)
        return Reasoning(text) if self._channel == "analysis" else Content(text)

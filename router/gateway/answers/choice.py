"""One choice of an answer: converts the router's updates to pieces that may be sent.

This module contains no HTTP and no JSON.
"""

import random
from array import array
from collections.abc import Callable, Iterator, Sequence

import msgspec

from engine.messages import FinishReason, Logprobs
from router.gateway.metrics.meters import ChoiceMeter
from router.gateway.requests.calls import CheckedCall
from router.machine.requests import Finished, Outcome, Timeline, Update
from router.text.detokenizer import AnswerText, PlainTextState
from router.text.forms.deltas import (
    AnswerParser,
    CallArguments,
    CallBegun,
    Content,
    Delta,
    Reasoning,
)
from router.text.logprobs import Entry, ScoredText, prompt_entries
from router.text.native import NativeText

SCORED_AT_ONCE = 16  # tokens handled at once, with up to twenty alternatives each
PLAIN_AT_ONCE = 256

CallDelta = CallBegun | CallArguments


class AnswerPiece(msgspec.Struct, frozen=True, gc=False):
    """A new part of one choice.

    The last piece has an `outcome`; if the choice finished, also `finish`.
    """

    choice: int  # index of the choice
    text: str
    num_tokens: int  # tokens of the choice so far
    entries: tuple[Entry, ...] = ()
    calls: tuple[CallDelta, ...] = ()  # parts of tool calls, sent after the text
    token_ids: tuple[int, ...] = ()  # ids of the new tokens, if the client wants them
    outcome: Outcome | None = None
    finish: str | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended the choice
    reasoning: str = ""  # sent before the text
    embedding: bytes = b""  # in the form of `engine.messages.PrefillDone`

    @property
    def is_empty(self) -> bool:
        """True if the piece has no text, tool calls, token ids or log-probabilities to send."""
        shown = self.text or self.entries or self.calls or self.token_ids or self.reasoning
        return not shown

    def parts(self, num_entries: int) -> "Iterator[AnswerPiece]":
        """Splits the piece into pieces with at most `num_entries` entries per piece.

        The first piece has the text, the last piece has the outcome.
        """
        entries = self.entries
        if len(entries) <= num_entries:
            yield self
            return
        yield AnswerPiece(
            self.choice,
            self.text,
            self.num_tokens,
            entries[:num_entries],
            token_ids=self.token_ids,
            reasoning=self.reasoning,
        )
        last = (len(entries) - 1) // num_entries * num_entries
        for begin in range(num_entries, last, num_entries):
            more = entries[begin : begin + num_entries]
            yield AnswerPiece(self.choice, "", self.num_tokens, more)
        yield msgspec.structs.replace(
            self, text="", reasoning="", token_ids=(), entries=entries[last:]
        )


class PromptScores:
    """The log-probabilities of one prompt, if requested.

    The first choice of the prompt receives them.
    """

    def __init__(self) -> None:
        self.entries: tuple[Entry, ...] = ()
        self.are_known = False  # True once the log-probabilities have arrived
        self.waiting: list[Callable[[], None]] = []  # called when the log-probabilities arrive


class AnswerChoice:
    """The progress of one choice whose answer is only text, without stop strings."""

    num_at_once = PLAIN_AT_ONCE  # tokens handled without a pause, in some milliseconds
    begins_with_scores = False  # True if the next piece has scores of the prompt's tokens
    awaited: PromptScores | None = None  # the first piece needs these log-probabilities

    def __init__(
        self,
        index: int,
        call: CheckedCall,
        prompt: PromptScores,
        meter: ChoiceMeter,
        *,
        in_cpp: bool = False,
    ) -> None:
        """If `in_cpp` is set, C++ may handle the choice's tokens."""
        self.index = index
        self.request = request = call.requests[index]
        self.shown_id = call.asked.client_id or request.request_id
        self.version = call.served.name
        self.outcome: Outcome | None = None
        self.timeline: Timeline | None = None
        self.prompt = prompt
        self.num_reasoning_tokens = 0
        self.logprobs = array("d")  # one log-probability per token, if the choice is scored
        leads = not index % call.num_candidates
        # Token ids of a prompt's first choice, kept if its used blocks are reported to stores.
        self.noted_ids: list[int] | None = [] if call.notes is not None and leads else None
        self._meter = meter
        self._last_s = 0.0  # time of the last update
        body, text = call.body, call.served.text
        vocabulary = text.vocabulary if in_cpp and self.noted_ids is None else None
        self.state = PlainTextState() if vocabulary is None else NativeText()
        meter.state = self.state
        shows_special = body.skip_special_tokens is False
        marks = () if call.reader is None else call.reader.marks
        self._text = AnswerText(
            text.detokenizer(request.token_ids, marks, shows_all=shows_special, state=self.state),
            prompt_len=len(request.token_ids),
            limits=request.limits,
            stop=body.stop_strings,
            shows_stop=bool(body.include_stop_str_in_output),
            state=self.state,
        )
        if isinstance(self.state, NativeText):
            assert vocabulary is not None
            self.state.describe(
                vocabulary,
                end_ids=sorted(self._text.hidden_end_ids),
                min_tokens=self._text.min_tokens,
                gaps=meter.gaps,
                shows_special=shows_special,
            )

    def receive(self, update: Update, now_s: float) -> AnswerPiece:
        """Applies an update, and returns the piece that can be sent now."""
        self._last_s = now_s
        if update.token_ids:
            self._meter.tokens(len(update.token_ids), now_s)
            if self.noted_ids is not None:
                self.noted_ids += update.token_ids
        if update.timeline is not None:
            self.timeline = update.timeline
        return self._piece(update)

    def _piece(self, update: Update) -> AnswerPiece:
        text, finish = self._text.push(update.token_ids), None
        self.outcome = outcome = update.outcome
        if isinstance(outcome, Finished):
            text, finish = text + self._text.finish(), outcome.reason.value
        num_tokens = self.state.num_tokens
        return AnswerPiece(self.index, text, num_tokens, outcome=outcome, finish=finish)

    @property
    def last_s(self) -> float:
        """The time of the last update, in seconds."""
        return max(self._last_s, self.state.last_s)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the choice so far."""
        return self.state.num_tokens

    def measure(self) -> None:
        """Records the metrics of an ended choice.

        Called once, after the client has received the end.
        """
        if self.outcome is not None:
            self._meter.finish(self.outcome, self.timeline)


class FormedChoice(AnswerChoice):
    """A choice that needs more than its text: scores, parsing, stop strings, token ids or an echo.

    Also a choice of a request that only asks for its prompt.

    A `parser` separates reasoning and tool calls from the text. The first piece begins with the
    echo of the prompt. If log-probabilities are requested, the echo includes the log-probabilities
    of the prompt. Only the first choice of a prompt receives them, so the other choices wait until
    `prompt` has them.
    """

    def __init__(
        self,
        index: int,
        call: CheckedCall,
        prompt: PromptScores,
        meter: ChoiceMeter,
        parser: AnswerParser | None,
    ) -> None:
        super().__init__(index, call, prompt, meter)
        request, body = self.request, call.body
        self._call, self._body, self._parser = call, body, parser
        self._last_id: int | None = None
        scored = request.sampling.logprobs is not None or request.prompt_logprobs is not None
        self._is_scored = scored
        if scored:
            self.num_at_once = SCORED_AT_ONCE
        self._echo = call.echoes[index // call.num_candidates]
        self.begins_with_scores = body.echoes_scores
        if body.echoes_scores and request.leader is not None:
            self.awaited = prompt
        has_scores = body.num_top_logprobs is not None
        self._scores_all_tokens = has_scores and body.scores_all_tokens
        self._scored: ScoredText | None = None
        if has_scores and not self._scores_all_tokens:
            self._scored = ScoredText(self._text)

    def _piece(self, update: Update) -> AnswerPiece:
        has_tokens, body, state = bool(update.token_ids), self._body, self.state
        if has_tokens and self._is_scored:
            self._record_scores(update)
        if has_tokens and body.is_only_prompt:
            update = _without_answer(update)
        num_before = state.num_tokens
        deltas: list[Delta] = []
        if self._parser is not None:
            text = ""
            deltas, entries = self._parsed(self._parser, update)
        else:
            text, entries = self._pushed(update.token_ids, update.logprobs)
        token_ids = update.token_ids[: state.num_tokens - num_before]
        if self._scores_all_tokens:
            entries = tuple(zip(token_ids, update.logprobs, strict=False))
        if token_ids:
            self._last_id = token_ids[-1]
        ends = update.outcome is not None or self._text.stopped
        if ends:
            text, entries = self._end(text, entries, update.outcome)
        reasoning, calls = "", tuple[CallDelta, ...]()
        if self._parser is not None:
            if ends:
                is_cut = self.outcome != Finished(FinishReason.STOP)
                deltas += [*self._parser.feed(text), *self._parser.finish(is_cut=is_cut)]
            reasoning, text, calls = _split(deltas)
        if has_tokens and self._echo is not None:
            text, entries = self._take_echo(text, entries)
        return AnswerPiece(
            self.index,
            text,
            state.num_tokens,
            entries,
            calls,
            token_ids if body.return_token_ids else (),
            self.outcome,
            self._finish_reason() if ends else None,
            self._stop_reason() if ends else None,
            reasoning if body.shows_reasoning else "",
            update.embedding,
        )

    def _pushed(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]
    ) -> tuple[str, tuple[Entry, ...]]:
        """Adds tokens. Returns the text that can be sent now, and the entries of that text."""
        if self._scored is None:
            return self._text.push(token_ids), ()
        return self._scored.push(token_ids, logprobs)

    def _parsed(
        self, parser: AnswerParser, update: Update
    ) -> tuple[list[Delta], tuple[Entry, ...]]:
        """Parses tokens one by one, to count the tokens of reasoning."""
        deltas, entries = list[Delta](), list[Entry]()
        for place, token_id in enumerate(update.token_ids):
            if self._text.stopped:
                break
            text, more = self._pushed((token_id,), update.logprobs[place : place + 1])
            entries += more
            found = parser.feed(text) if text else []
            deltas += found
            has_reasoned = bool(found) and isinstance(found[0], Reasoning)
            self.num_reasoning_tokens += has_reasoned or parser.is_reasoning
        return deltas, tuple(entries)

    def _end(
        self, text: str, entries: tuple[Entry, ...], outcome: Outcome | None
    ) -> tuple[str, tuple[Entry, ...]]:
        """Ends the choice and returns its last text and entries."""
        if isinstance(outcome, Finished) and not self._text.stopped:
            scored = self._scored
            rest, more = (self._text.finish(), ()) if scored is None else scored.finish()
            text, entries = text + rest, entries + more
        # The last text may contain a stop string.
        self.outcome = Finished(FinishReason.STOP) if self._text.stopped else outcome
        return text, entries

    def _finish_reason(self) -> str | None:
        """Returns OpenAI's finish reason; None if the choice failed."""
        if not isinstance(self.outcome, Finished):
            return None
        reason = self.outcome.reason
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if has_calls and reason is FinishReason.STOP else reason.value

    def _stop_reason(self) -> str | int | None:
        """Returns the stop string or the client's own stop token that ended the choice."""
        if self._text.stopped:
            return self._text.stop_string
        if self._last_id not in self._call.stop_token_ids:
            return None
        return self._last_id if self.outcome == Finished(FinishReason.STOP) else None

    def _record_scores(self, update: Update) -> None:
        self.logprobs.extend([scores.logprob for scores in update.logprobs])
        request, prompt = self.request, self.prompt
        if request.prompt_logprobs is not None and not prompt.are_known:
            prompt.entries = prompt_entries(request.token_ids, update.prompt_logprobs)
            prompt.are_known = True
            for wake in prompt.waiting:
                wake()

    def _take_echo(self, text: str, entries: tuple[Entry, ...]) -> tuple[str, tuple[Entry, ...]]:
        """Returns the text and entries of the first piece, which begin with the echo."""
        assert self._echo is not None
        text, self._echo = self._echo + text, None
        if self.begins_with_scores:
            assert self.prompt.are_known
            entries, self.begins_with_scores = self.prompt.entries + entries, False
        return text, entries


def choice_of(
    index: int,
    call: CheckedCall,
    prompt: PromptScores,
    meter: ChoiceMeter,
    *,
    rng: random.Random,
    in_cpp: bool,
) -> AnswerChoice:
    """Returns a new choice. Ids of tool calls are drawn from `rng`.

    If `in_cpp` is set, C++ may handle the choice's tokens.
    """
    body, sampling = call.body, call.requests[index].sampling
    if (
        call.reader is None
        and sampling.logprobs is None
        and call.requests[index].prompt_logprobs is None
        and not body.echoes_prompt
        and not body.stop_strings
        and not call.stop_token_ids
        and not body.return_token_ids
        and not body.is_only_prompt
    ):
        in_cpp = in_cpp and not body.usage_in_every_chunk
        return AnswerChoice(index, call, prompt, meter, in_cpp=in_cpp)
    parser = None if call.reader is None else call.reader.parser(rng)
    return FormedChoice(index, call, prompt, meter, parser)


def _without_answer(update: Update) -> Update:
    """Returns the update without answer tokens, for a request that only asks for its prompt."""
    outcome = update.outcome
    if isinstance(outcome, Finished):
        outcome = Finished(FinishReason.LENGTH)
    return msgspec.structs.replace(update, token_ids=(), logprobs=(), outcome=outcome)


def _split(deltas: Sequence[Delta]) -> tuple[str, str, tuple[CallDelta, ...]]:
    """Splits deltas into reasoning, text for the user, and tool calls."""
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    text = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    calls = tuple(delta for delta in deltas if isinstance(delta, CallBegun | CallArguments))
    return reasoning, text, calls

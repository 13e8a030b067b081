"""One choice of an answer: the router's updates go in, what may be shown comes out in pieces.

It does not know HTTP or JSON, and of the other choices only that there may be some.
"""

from collections.abc import Sequence

import msgspec

from engine.messages import FinishReason, Logprobs
from router.gateway.metrics import ChoiceMeter
from router.machine.requests import Decision, Finished, Outcome, Request, Timeline, Update
from router.text.detokenizer import AnswerText
from router.text.logprobs import Entry, ScoredText, mean_logprob, prompt_entries
from router.text.structured import CALL_BEGIN, CALL_END
from router.text.tokenizer import TextModel
from router.text.tool_calls import (
    CallArguments,
    CallBegun,
    Content,
    Delta,
    ToolCallParser,
)

CallDelta = CallBegun | CallArguments


class Piece(msgspec.Struct, frozen=True, gc=False):
    """More of one choice. With an `outcome` it is the last one; then `finish` says why, if well."""

    choice: int  # its index
    text: str
    num_tokens: int  # of the choice so far
    entries: tuple[Entry, ...] = ()
    calls: tuple[CallDelta, ...] = ()  # behind the text
    outcome: Outcome | None = None
    finish: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show yet."""
        return not (self.text or self.entries or self.calls)


class TextRules(msgspec.Struct, frozen=True):
    """How the tokens of each choice become text. Log-probabilities come out if `scored`."""

    stop: tuple[str, ...] = ()
    scored: bool = False


class Choice:
    """How far one choice has come. A `parser` takes calls of tools out of the text."""

    def __init__(
        self,
        index: int,
        request: Request,
        text: TextModel,
        *,
        rules: TextRules,
        parser: ToolCallParser | None,
        meter: ChoiceMeter,
    ) -> None:
        self.index = index
        self.request = request
        self.outcome: Outcome | None = None
        self.timeline: Timeline | None = None
        self.last_s = 0.0  # when the last update came
        self.prompt_entries: tuple[Entry, ...] = ()
        self._meter = meter
        self._scores: list[Logprobs] = []
        asked = (request.sampling.logprobs, request.prompt_logprobs)
        self._is_scored = any(count is not None for count in asked)
        self._parser = parser
        marks = () if parser is None else (CALL_BEGIN, CALL_END)
        self._text = AnswerText(
            text.detokenizer(request.token_ids, marks),
            prompt_len=len(request.token_ids),
            limits=request.limits,
            stop=rules.stop,
        )
        self._scored = ScoredText(self._text) if rules.scored else None
        # Whether tokens become text and nothing else, and only tokens end it.
        self.is_plain = not (rules.scored or self._is_scored or rules.stop or parser is not None)

    def take(self, update: Update, now_s: float) -> Piece:
        """What this update makes ready to be shown."""
        self.last_s = now_s
        entries: tuple[Entry, ...] = ()
        if self._scored is None:
            text = self._text.push(update.token_ids)
        else:
            text, entries = self._scored.push(update.token_ids, update.logprobs)
        if update.token_ids:
            self._meter.tokens(len(update.token_ids), now_s)
            if self._is_scored:
                self._note_scores(update)
        if update.timeline is not None:
            self.timeline = update.timeline
        outcome = update.outcome
        if outcome is None and not self._text.stopped:
            if self._parser is None:
                return Piece(self.index, text, self._text.num_tokens, entries)
            text, calls = _told(self._parser.feed(text))
            return Piece(self.index, text, self._text.num_tokens, entries, calls)
        return self._last(text, entries, outcome, now_s)

    def take_tokens(self, token_ids: Sequence[int], now_s: float) -> str:
        """What tokens alone make ready to be shown, of a choice that `is_plain` and goes on."""
        self.last_s = now_s
        self._meter.tokens(len(token_ids), now_s)
        return self._text.push(token_ids)

    @property
    def decision(self) -> Decision | None:
        """Where it runs and why, as far as the router has told."""
        return None if self.timeline is None else self.timeline.decision

    @property
    def num_tokens(self) -> int:
        """Tokens of the choice so far."""
        return self._text.num_tokens

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, the one that ended it included."""
        return mean_logprob(self._scores[: self.num_tokens])

    def _last(
        self, text: str, entries: tuple[Entry, ...], outcome: Outcome | None, now_s: float
    ) -> Piece:
        if isinstance(outcome, Finished):
            rest, more = ("", ()) if self._text.stopped else self._flush()
            text, entries = text + rest, entries + more
        # A stop string may be found in the very last text.
        self.outcome = Finished(FinishReason.STOP) if self._text.stopped else outcome
        assert self.outcome is not None
        self._meter.end(self.outcome, self.timeline, now_s)
        calls: tuple[CallDelta, ...] = ()
        if self._parser is not None:
            text, calls = _told([*self._parser.feed(text), *self._parser.finish()])
        return Piece(
            choice=self.index,
            text=text,
            num_tokens=self._text.num_tokens,
            entries=entries,
            calls=calls,
            outcome=self.outcome,
            finish=self._finish_reason(),
        )

    def _finish_reason(self) -> str | None:
        """Why it ended, as clients are told; None where it failed."""
        if not isinstance(self.outcome, Finished):
            return None
        reason = self.outcome.reason
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if has_calls and reason is FinishReason.STOP else reason.value

    def _flush(self) -> tuple[str, tuple[Entry, ...]]:
        if self._scored is None:
            return self._text.finish(), ()
        return self._scored.finish()

    def _note_scores(self, update: Update) -> None:
        self._scores += update.logprobs
        request = self.request
        if request.prompt_logprobs is not None and not self.prompt_entries:
            self.prompt_entries = prompt_entries(request.token_ids, update.prompt_logprobs)


def _told(deltas: Sequence[Delta]) -> tuple[str, tuple[CallDelta, ...]]:
    """Text for the user, and calls of tools."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    return text, tuple(delta for delta in deltas if not isinstance(delta, Content))

"""The common parts of answer writers: dialects, heading, ending, token counts and failures.

The head of a response is sent with the first token. So a request that fails before its first token
gets the HTTP status of its failure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgspec
from starlette.types import Send

from router.access.limits import KeyUse
from router.edge.responses import send_json
from router.gateway.answers.choice import AnswerChoice, AnswerPiece, CallDelta
from router.gateway.requests.body import CompletionDetails, PromptDetails, TokenUsage
from router.gateway.requests.calls import CheckedCall
from router.gateway.requests.chat import (
    AnswerMessage,
    CalledFunction,
    CallPart,
    ChatChoice,
    DeltaFunction,
    ShownCall,
)
from router.gateway.requests.completion import CompletionChoice
from router.inbox.api_errors import ErrorReply, error_body
from router.inbox.fair_queue import Turn
from router.machine.requests import UNFIT, Failed, Finished, Outcome, Rejected, Timeline
from router.text.forms.deltas import CallArguments, CallBegun
from router.text.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    Entry,
    LogprobsWriter,
    mean_logprob,
)

DECISION_HEADER = "x-baton-decision"
TIMELINE_HEADER = "x-baton-timeline"
IGNORED_HEADER = "x-baton-ignored"  # header that lists the ignored fields of a request
TIMED_OUT = "request_timeout"  # error code of an answer that exceeded the client's timeout
MAX_RETRY_AFTER_S = 3600.0

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of one endpoint's answers, with the constant parts of a stream's chunks.

    A choice in a chunk has the form `[{"index":` index `text_start` text `text_end` logprobs and so
    on.
    """

    id_prefix: str
    object_name: str
    chunk_name: str
    is_chat: bool
    text_start: bytes
    text_end: bytes
    no_text: bytes  # in a chunk that only ends the choice: replaces start, text and end

    def whole_choice(
        self,
        text: str,
        calls: Sequence[CallDelta],
        finish_reason: str,
        logprobs: Mapping[str, Any] | None,
        reasoning: str = "",
    ) -> ChatChoice | CompletionChoice:
        """Returns a choice for an answer that is not streamed."""
        scores, finish = cast("Any", logprobs), cast("Any", finish_reason)
        if not self.is_chat:
            return CompletionChoice(index=0, finish_reason=finish, text=text, logprobs=scores)
        message = AnswerMessage(content=text)
        if calls:
            message.content, message.tool_calls = text or None, _whole_calls(calls)
        if reasoning:
            message.reasoning_content = message.reasoning = reasoning
        return ChatChoice(index=0, finish_reason=finish, message=message, logprobs=scores)

    def logprobs_writer(self, call: CheckedCall, num_top: int) -> LogprobsWriter:
        """Returns the writer of one choice's log-probabilities."""
        writer = ChatLogprobs if self.is_chat else CompletionLogprobs
        by_id = bool(call.body.return_tokens_as_token_ids)
        return writer(call.served.text.bytes_of, num_top, ids_for_names=by_id)


def _whole_calls(deltas: Sequence[CallDelta]) -> list[ShownCall]:
    calls = [delta for delta in deltas if isinstance(delta, CallBegun)]
    pieces: list[list[str]] = [[] for _ in calls]
    for delta in deltas:
        if isinstance(delta, CallArguments):
            pieces[delta.index].append(delta.text)
    arguments = map("".join, pieces)
    return [
        ShownCall(id=call.id, function=CalledFunction(call.name, text))
        for call, text in zip(calls, arguments, strict=True)
    ]


def reasoning_fields(text: str) -> dict[str, str]:
    """Returns reasoning under both names that clients read: DeepSeek's, and vLLM's newer name."""
    return {"reasoning_content": text, "reasoning": text}


def call_delta(delta: CallDelta) -> CallPart:
    """Returns a chunk's part of a tool call. The first part has the name, without arguments."""
    if isinstance(delta, CallArguments):
        return CallPart(delta.index, DeltaFunction(delta.text))
    return CallPart(delta.index, DeltaFunction("", delta.name), delta.id, "function")


EMBEDDING = Dialect(
    id_prefix="embd-",
    object_name="list",
    chunk_name="",  # embeddings are not streamed
    is_chat=False,
    text_start=b"",
    text_end=b"",
    no_text=b"",
)
CHAT = Dialect(
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    chunk_name="chat.completion.chunk",
    is_chat=True,
    text_start=b',"delta":{"content":',
    text_end=b"}",
    no_text=b',"delta":{}',
)
COMPLETION = Dialect(
    id_prefix="cmpl-",
    object_name="text_completion",
    chunk_name="text_completion",
    is_chat=False,
    text_start=b',"text":',
    text_end=b"",
    no_text=b',"text":""',
)


class Heading(msgspec.Struct, frozen=True):
    """The values that all chunks and choices of one answer share."""

    dialect: Dialect
    call: CheckedCall
    created: int  # Unix time, in seconds
    choices: Sequence[AnswerChoice]
    use: KeyUse | None  # remaining quota of the key; None if the key has no limits
    trace_headers: Mapping[str, str]  # W3C trace context of the answer; empty if it has no trace
    turn: Turn  # awaited before each part of long work

    @property
    def headers(self) -> dict[str, str]:
        """Returns the headers of the answer. The router's decision is JSON without line breaks."""
        headers = {"x-request-id": self.call.asked.shown_id}
        if self.use is not None:
            headers |= self.use.headers(self.call.asked.received_s)
        if self.trace_headers:
            headers.update(self.trace_headers)
        if self.call.ignored:
            headers[IGNORED_HEADER] = ", ".join(self.call.ignored)
        debugs = self.call.asked.debugs(DECISION_HEADER)
        timeline = self.choices[0].timeline if debugs else None
        if timeline is not None and timeline.decision is not None:
            shown = msgspec.structs.replace(timeline.decision, candidates=())  # a short head
            headers[DECISION_HEADER] = _encode(shown).decode()
        return headers

    def fields(self, object_name: str) -> dict[str, Any]:
        """Returns the first fields of each chunk, or of the whole answer."""
        call = self.call
        own = call.asked.client_id
        return {
            "id": call.first.request_id if own is None else self.dialect.id_prefix + own,
            "object": object_name,
            "created": self.created,
            "model": call.model,
            "system_fingerprint": call.served.port.fingerprint() or None,
        }


class Ending(msgspec.Struct, frozen=True):
    """The end of an answer. A total is computed when a writer reads it."""

    outcome: Outcome
    call: CheckedCall
    choices: Sequence[AnswerChoice]

    @property
    def shown(self) -> Sequence[int]:
        """The indices of the choices to send, in order.

        For each prompt, these are the choices with the highest mean log-probability.
        """
        call, choices = self.call, self.choices
        if call.body.num_choices == call.num_candidates or not isinstance(self.outcome, Finished):
            return range(len(choices))
        shown: list[int] = []
        for first in range(0, len(choices), call.num_candidates):
            group = range(first, first + call.num_candidates)
            ranked = sorted(group, key=lambda index: -_mean_logprob(choices[index]))
            shown += ranked[: call.body.num_choices]
        return shown

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the first choice; None if the router gave none."""
        return self.choices[0].timeline

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return self.call.prompt_len

    @property
    def completion_tokens(self) -> int:
        """The number of tokens of all choices, including choices that are not sent."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens that were cached."""
        timelines = [leader.timeline for leader in self._leaders]
        return sum(each.num_cached_tokens for each in timelines if each is not None)

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of `completion_tokens` that are reasoning."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def prompt_entries(self) -> Sequence[tuple[Entry, ...]]:
        """The log-probabilities of each prompt."""
        return [leader.prompt.entries for leader in self._leaders]

    @property
    def _leaders(self) -> Sequence[AnswerChoice]:
        return self.choices[:: self.call.num_candidates]

    def usage(self) -> TokenUsage:
        """Returns token counts under OpenAI's names, with drafted tokens if any were drafted."""
        usage = usage_of(self.prompt_tokens, self.completion_tokens)
        cached = None if self.timeline is None else PromptDetails(self.num_cached_tokens)
        usage.prompt_tokens_details = cached
        timelines = [choice.timeline for choice in self.choices if choice.timeline is not None]
        num_drafted = sum(timeline.num_drafted_tokens for timeline in timelines)
        details = CompletionDetails()
        if num_drafted:
            num_accepted = sum(timeline.num_accepted_tokens for timeline in timelines)
            details.accepted_prediction_tokens = num_accepted
            details.rejected_prediction_tokens = num_drafted - num_accepted
        if num_reasoning := self.num_reasoning_tokens:
            details.reasoning_tokens = num_reasoning
        if num_drafted or num_reasoning:
            usage.completion_tokens_details = details
        return usage


def _mean_logprob(choice: AnswerChoice) -> float:
    """Returns the mean log-probability of a choice's tokens, including the token that ended it."""
    return mean_logprob(choice.logprobs[: choice.num_tokens])


def usage_of(prompt_tokens: int, completion_tokens: int) -> TokenUsage:
    """Returns the three token counts of OpenAI's `usage`."""
    return TokenUsage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


class AnswerWriter(Protocol):
    """Sends one answer: first the pieces of its choices, then its ending."""

    @property
    def is_full(self) -> bool:
        """True if further pieces would have to wait for `flush`."""
        return False

    def write(self, piece: AnswerPiece) -> None:
        """Writes a piece, perhaps an empty one.

        The first call also starts the answer.
        """
        ...

    async def flush(self) -> None:
        """Sends waiting pieces; returns when the client has room for more."""
        return

    async def end(self, ending: Ending) -> None:
        """Sends waiting pieces and the end. Without any token, `end` is called without `write`."""
        ...


async def write_and_wait(writer: AnswerWriter, piece: AnswerPiece) -> None:
    """Writes a piece; returns when the client has room for more."""
    writer.write(piece)
    if writer.is_full:
        await writer.flush()


async def send_failure(send: Send, outcome: Outcome) -> None:
    """Sends the error of a request that ended before any part of its answer was sent."""
    status, headers = failure_head(outcome)
    await send_json(send, status, failure_body(outcome), headers)


def failure_head(outcome: Outcome) -> tuple[int, dict[str, str]]:
    """Returns the HTTP status and headers for an outcome other than Finished."""
    status, retry_after_s = 503, 1.0
    if isinstance(outcome, Rejected):
        status, retry_after_s = 429, outcome.retry_after_s
    elif isinstance(outcome, Failed) and outcome.code == UNFIT:
        return 400, {}
    elif isinstance(outcome, Failed) and outcome.code == TIMED_OUT:
        status = 504
    return status, {"retry-after": str(max(1, math.ceil(min(retry_after_s, MAX_RETRY_AFTER_S))))}


def failure_body(outcome: Outcome) -> ErrorReply:
    """Returns the error body for an outcome other than Finished."""
    if isinstance(outcome, Rejected):
        return error_body(outcome.message, kind="rate_limit_error", code="rate_limit_exceeded")
    if isinstance(outcome, Failed):
        kind = "invalid_request_error" if outcome.code == UNFIT else "server_error"
        return error_body(outcome.message, kind=kind, code=outcome.code)
    return error_body("the request was cancelled", kind="server_error", code="request_failed")

"""What clients get: OpenAI's answers, whole or as server-sent events, and its errors.

Decides the bytes of a response and when its head is sent: with the first token, so that a request
that is refused before it gets a status that says so. Everything of a chunk that does not change
from token to token is encoded once. It does not know where tokens come from.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.types import Send

from engine.errors import InvalidRequest
from router.access.limits import LimitExceeded
from router.gateway.answers import CallDelta, Piece
from router.machine.requests import (
    Cancelled,
    Decision,
    Failed,
    Finished,
    Outcome,
    Rejected,
    Timeline,
)
from router.text.logprobs import (
    BytesOf,
    ChatLogprobs,
    CompletionLogprobs,
    Entry,
    LogprobsWriter,
    prompt_logprobs,
)
from router.text.tool_calls import CallArguments, CallBegun

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
DECISION_HEADER = "x-baton-decision"
MAX_RETRY_AFTER_S = 3600.0
LONG_PROMPT_TOKENS = 256  # more take milliseconds to tell of, with twenty alternatives each

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one endpoint writes an answer: the pieces of a chunk's only choice around what varies.

    A choice's chunk is `[{"index":` index `text_start` text `text_end` logprobs and so on.
    """

    id_prefix: str
    object_name: str
    chunk_name: str
    is_chat: bool
    text_start: bytes
    text_end: bytes
    finish_start: bytes  # of the chunk that ends the choice

    def whole_choice(
        self,
        text: str,
        calls: Sequence[CallDelta],
        finish_reason: str,
        logprobs: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """A choice of an answer that is sent at once, without its index."""
        choice: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish_reason}
        if not self.is_chat:
            return choice | {"text": text}
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": _whole_calls(calls)}
        return choice | {"message": message}

    def logprobs_writer(self, bytes_of: BytesOf, num_top: int) -> LogprobsWriter:
        """For one choice."""
        return (ChatLogprobs if self.is_chat else CompletionLogprobs)(bytes_of, num_top)


def _whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    calls = [delta for delta in deltas if isinstance(delta, CallBegun)]
    arguments = [""] * len(calls)
    for delta in deltas:
        if isinstance(delta, CallArguments):
            arguments[delta.index] += delta.text
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
        for call, text in zip(calls, arguments, strict=True)
    ]


def _call_delta(delta: CallDelta) -> dict[str, Any]:
    """As streams have it: the name comes first, with no arguments yet."""
    if isinstance(delta, CallArguments):
        return {"index": delta.index, "function": {"arguments": delta.text}}
    function = {"name": delta.name, "arguments": ""}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


_INDEX = b'[{"index":'
_ROLE = b',"delta":{"role":"assistant","content":""}'
_CALLS = b',"delta":{"tool_calls":['
_UNSCORED = b',"logprobs":null'
_UNFINISHED = b',"finish_reason":null}]'

CHAT = Dialect(
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    chunk_name="chat.completion.chunk",
    is_chat=True,
    text_start=b',"delta":{"content":',
    text_end=b"}",
    finish_start=b',"delta":{},"logprobs":null,"finish_reason":',
)
COMPLETION = Dialect(
    id_prefix="cmpl-",
    object_name="text_completion",
    chunk_name="text_completion",
    is_chat=False,
    text_start=b',"text":',
    text_end=b"",
    finish_start=b',"text":"","logprobs":null,"finish_reason":',
)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the client wants beside the text.

    `echo` is the prompt, which each choice begins with; `num_top` of the likeliest tokens come with
    each one, and None means no log-probabilities at all. The `decision` comes in the head.
    """

    usage: bool = False
    usage_in_every_chunk: bool = False
    timeline: bool = False
    decision: bool = False
    echo: str = ""
    num_top: int | None = None
    num_prompt_top: int | None = None


class Heading(msgspec.Struct, frozen=True):
    """What every chunk of one answer repeats, and what its choices have in common."""

    dialect: Dialect
    answer_id: str
    created: int
    model: str
    prompt_tokens: int
    num_choices: int
    fingerprint: Callable[[], str]  # known when the answer begins
    bytes_of: BytesOf
    wish: Wish
    decision: Callable[[], Decision | None]  # known with the first token
    limit_headers: Callable[[], Mapping[str, str]] = dict  # what remains of the key's limits

    @property
    def headers(self) -> dict[str, str]:
        """What the head of every answer says. Its decision is JSON, which has no line breaks."""
        headers = {"x-request-id": self.answer_id, **self.limit_headers()}
        if self.wish.decision and (decision := self.decision()) is not None:
            headers[DECISION_HEADER] = _encode(decision).decode()
        return headers


class Ending(msgspec.Struct, frozen=True):
    """How an answer ended.

    Of the choices, `shown` are sent in this order; all of them count. `timeline` is the first
    one's, None where the router gave none.
    """

    outcome: Outcome
    shown: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    timeline: Timeline | None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    prompt_entries: tuple[Entry, ...] = ()

    def usage(self) -> dict[str, Any]:
        """Token counts as OpenAI names them. What was drafted is told where anything was."""
        details = None
        if self.timeline is not None:
            details = {"cached_tokens": self.timeline.num_cached_tokens}
        counts = _usage(self.prompt_tokens, self.completion_tokens)
        usage: dict[str, Any] = {**counts, "prompt_tokens_details": details}
        if self.num_drafted_tokens:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.num_accepted_tokens,
                "rejected_prediction_tokens": self.num_drafted_tokens - self.num_accepted_tokens,
            }
        return usage


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class AnswerWriter(Protocol):
    """Sends one answer: pieces of its choices as they come, then its ending."""

    @property
    def is_ready(self) -> bool:
        """Whether `write_at_once` may be called now."""
        ...

    @property
    def shows_text_alone(self) -> bool:
        """Whether `write_text` will do for all that is text and nothing else."""
        ...

    def write_at_once(self, piece: Piece) -> None:
        """More of a choice that goes on, perhaps nothing."""
        ...

    def write_text(self, choice: int, text: str) -> None:
        """The same, if it is some text alone."""
        ...

    async def write(self, piece: Piece) -> None:
        """More of a choice, perhaps nothing; the first call means that there is an answer."""
        ...

    async def end(self, ending: Ending) -> None:
        """The last call, and the only one where there was no token."""
        ...


class WholeAnswer:
    """Sends an answer when it is complete."""

    def __init__(self, heading: Heading, send: Send) -> None:
        self._heading = heading
        self._send = send
        self._pieces: list[list[Piece]] = [[] for _ in range(heading.num_choices)]

    @property
    def is_ready(self) -> bool:
        """Nothing is ever waited for."""
        return True

    @property
    def shows_text_alone(self) -> bool:
        """Where there is nothing else, nothing is lost."""
        return True

    def write_at_once(self, piece: Piece) -> None:
        """Keeps the piece."""
        self._pieces[piece.choice].append(piece)

    def write_text(self, choice: int, text: str) -> None:
        """Keeps the text."""
        self._pieces[choice].append(Piece(choice, text, 0))

    async def write(self, piece: Piece) -> None:
        """Keeps the piece."""
        self._pieces[piece.choice].append(piece)

    async def end(self, ending: Ending) -> None:
        """Sends everything, or the error."""
        if not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
            return
        long = len(ending.prompt_entries) > LONG_PROMPT_TOKENS
        data = await asyncio.to_thread(self._body, ending) if long else self._body(ending)
        await _send_data(self._send, 200, data, self._heading.headers)

    def _body(self, ending: Ending) -> bytes:
        heading = self._heading
        body = _head(heading, heading.dialect.object_name)
        choices = [self._choice(index, ending) for index in ending.shown]
        body["choices"] = [{"index": i, **choice} for i, choice in enumerate(choices)]
        body["usage"] = ending.usage()
        if heading.wish.num_prompt_top is not None:
            self._tell_prompt_logprobs(body, ending.prompt_entries, heading.wish.num_prompt_top)
        if heading.wish.timeline:
            body["baton_timeline"] = ending.timeline
        return _encode(body)

    def _choice(self, index: int, ending: Ending) -> dict[str, Any]:
        pieces, wish, dialect = self._pieces[index], self._heading.wish, self._heading.dialect
        finish = pieces[-1].finish
        assert finish is not None
        logprobs = None
        if wish.num_top is not None:
            entries = [entry for piece in pieces for entry in piece.entries]
            if wish.echo:
                entries[:0] = ending.prompt_entries
            writer = dialect.logprobs_writer(self._heading.bytes_of, wish.num_top)
            logprobs = writer.shape(entries)
        text = wish.echo + "".join(piece.text for piece in pieces)
        calls = [delta for piece in pieces for delta in piece.calls]
        return dialect.whole_choice(text, calls, finish, logprobs)

    def _tell_prompt_logprobs(
        self, body: dict[str, Any], entries: tuple[Entry, ...], num_top: int
    ) -> None:
        """vLLM has them once in a chat's answer, and in each choice of a completion."""
        scores = prompt_logprobs(entries, self._heading.bytes_of, num_top)
        for place in [body] if self._heading.dialect.is_chat else body["choices"]:
            place["prompt_logprobs"] = scores


class BodyPipe(Protocol):
    """Carries parts of a body that has begun, past `send`: soon, in order, without waiting for
    anything. What goes past the pipe is sent after a `flush`.

    Who waits at a server's `send` does so in a task of its own, whose turn comes later: that costs
    more than all else that is done for a token.
    """

    is_ready: bool  # whether the client is there and reads fast enough

    def write(self, data: bytes) -> None:
        """Sends a part, which is not empty, soon."""
        ...

    def flush(self) -> None:
        """Sends what is to be sent soon: before anything goes past the pipe."""
        ...


class StreamedAnswer:
    """Sends an answer as events: parts of it through `pipe` where there is one and it is ready."""

    def __init__(self, heading: Heading, send: Send, pipe: BodyPipe | None) -> None:
        self._heading = heading
        self._send = send
        self._pipe = pipe
        self._turn = asyncio.Lock()  # choices of one answer wait for one another
        self._is_open = False  # the head is sent, and nothing waits to be
        self._chunk: _ChunkEncoder | None = None  # None: the head of the response is not sent
        self._unfinished = heading.num_choices
        self._last = b""  # the end of the last choice, which is sent with the end of the answer

    @property
    def is_ready(self) -> bool:
        """Whether the head is sent and nothing waits to be."""
        return self._is_open and self._pipe is not None and self._pipe.is_ready

    @property
    def shows_text_alone(self) -> bool:
        """Unless each chunk says how many tokens there are by then."""
        return not self._heading.wish.usage_in_every_chunk

    def write_at_once(self, piece: Piece) -> None:
        """Sends a chunk, unless there is nothing to show."""
        assert self._chunk is not None
        assert self._pipe is not None
        if data := self._chunk.of(piece):
            self._pipe.write(data)

    def write_text(self, choice: int, text: str) -> None:
        """Sends a chunk."""
        assert self._chunk is not None
        assert self._pipe is not None
        self._pipe.write(self._chunk.of_text(choice, text))

    async def write(self, piece: Piece) -> None:
        """Sends a chunk, unless there is nothing to show."""
        async with self._turn:
            self._is_open = False
            await self._write(piece)
            self._is_open = True

    async def _write(self, piece: Piece) -> None:
        chunk = self._chunk
        data = b""
        if chunk is None:
            data, chunk = await self._open()
        data += chunk.of(piece)
        if piece.finish is not None:
            self._unfinished -= 1
            finish = chunk.finish(piece.choice, piece.finish)
            if self._unfinished:
                data += finish
            else:
                self._last = finish
        if data:
            await self._send_body(data, more_body=True)

    async def end(self, ending: Ending) -> None:
        """Sends the last chunks. A stream that breaks off has no [DONE]."""
        outcome = ending.outcome
        if self._chunk is None and not isinstance(outcome, Finished):
            await send_failure(self._send, outcome)
            return
        data, chunk = await self._open()
        if isinstance(outcome, Finished):
            data += self._last + self._extras(chunk, ending) + DONE
        elif not isinstance(outcome, Cancelled):
            data += b"data: " + _encode(_failure_body(outcome)) + b"\n\n"
        await self._send_body(data, more_body=False)

    def _extras(self, chunk: "_ChunkEncoder", ending: Ending) -> bytes:
        data = b""
        if self._heading.wish.usage:
            data += chunk.extra(b"usage", ending.usage())
        if self._heading.wish.timeline:
            data += chunk.extra(b"baton_timeline", ending.timeline)
        return data

    async def _open(self) -> tuple[bytes, "_ChunkEncoder"]:
        """Sends the head if it is not sent yet; the first chunks and the encoder of the others."""
        if self._chunk is not None:
            return b"", self._chunk
        self._chunk = _ChunkEncoder(self._heading)
        headers = {
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would collect events
            **self._heading.headers,
        }
        await _send_head(self._send, 200, EVENT_STREAM, headers)
        return self._chunk.first(), self._chunk

    async def _send_body(self, data: bytes, *, more_body: bool) -> None:
        if self._pipe is not None:
            self._pipe.flush()
        await self._send({"type": "http.response.body", "body": data, "more_body": more_body})


class _ChunkEncoder:
    """Events of one stream; what they share is encoded once."""

    def __init__(self, heading: Heading) -> None:
        dialect, wish = heading.dialect, heading.wish
        head = _encode(_head(heading, dialect.chunk_name)).removesuffix(b"}")
        indices = [str(index).encode() for index in range(heading.num_choices)]
        self._before = b"data: " + head + b',"choices":'
        self._before_index = [self._before + _INDEX + index for index in indices]
        self._before_text = [before + dialect.text_start for before in self._before_index]
        self._after = b',"usage":null}\n\n' if wish.usage else b"}\n\n"
        self._after_text = dialect.text_end + _UNSCORED + _UNFINISHED + self._after
        self._dialect = dialect
        self._wish = wish
        self._is_plain = wish.num_top is None and not wish.usage_in_every_chunk
        self._prompt_tokens = heading.prompt_tokens
        self._logprobs = [
            dialect.logprobs_writer(heading.bytes_of, wish.num_top or 0) for _ in indices
        ]

    def first(self) -> bytes:
        """What each choice begins with."""
        data = b""
        for before, before_text in zip(self._before_index, self._before_text, strict=True):
            if self._dialect.is_chat:
                data += before + _ROLE + _UNSCORED + _UNFINISHED + self._after
            if self._wish.echo:
                data += before_text + _encode(self._wish.echo) + self._after_text
        return data

    def of_text(self, choice: int, text: str) -> bytes:
        """Text alone, where nobody wants to know more."""
        return self._before_text[choice] + _encode(text) + self._after_text

    def of(self, piece: Piece) -> bytes:
        """All that is to be shown of a piece, perhaps nothing."""
        text = piece.text
        if self._is_plain and not piece.calls:
            return self.of_text(piece.choice, text) if text else b""
        data = self._text(piece) if text or piece.entries else b""
        return data + self._calls(piece) if piece.calls else data

    def _text(self, piece: Piece) -> bytes:
        text = self._before_text[piece.choice] + _encode(piece.text)
        return text + self._dialect.text_end + self._scores(piece) + self._counted(piece)

    def _calls(self, piece: Piece) -> bytes:
        """One chunk for each part of a call."""
        before, after = self._before_index[piece.choice] + _CALLS, b"]}" + _UNSCORED + _UNFINISHED
        deltas = (_encode(_call_delta(delta)) for delta in piece.calls)
        return b"".join(before + delta + after + self._after for delta in deltas)

    def finish(self, index: int, reason: str) -> bytes:
        before = self._before_index[index] + self._dialect.finish_start
        return before + _encode(reason) + b"}]" + self._after

    def extra(self, name: bytes, value: object) -> bytes:
        """A chunk without choices."""
        return self._before + b'[],"' + name + b'":' + _encode(value) + b"}\n\n"

    def _scores(self, piece: Piece) -> bytes:
        if self._wish.num_top is None:
            return _UNSCORED + _UNFINISHED
        scores = self._logprobs[piece.choice].shape(piece.entries)
        return b',"logprobs":' + _encode(scores) + _UNFINISHED

    def _counted(self, piece: Piece) -> bytes:
        """The end of a chunk, with the usage of its choice so far where that is wanted."""
        if not self._wish.usage_in_every_chunk:
            return self._after
        return b',"usage":' + _encode(_usage(self._prompt_tokens, piece.num_tokens)) + b"}\n\n"


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error as OpenAI shapes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_KIND_OF_STATUS = {503: "server_error", 429: "rate_limit_error"}


async def send_invalid(send: Send, error: InvalidRequest) -> None:
    """Answers a request that nobody computes: mostly the client's fault, with 503 ours."""
    code: str | None = getattr(error, "code", None)
    kind = _KIND_OF_STATUS.get(error.status, "invalid_request_error")
    body = error_body(error.message, kind=kind, param=error.param, code=code)
    # A body that was not read to its end leaves the connection unusable.
    headers = {"connection": "close"} if error.status in (408, 413) else {}
    if error.status == 503:
        headers["retry-after"] = "1"
    if isinstance(error, LimitExceeded):
        headers |= error.headers
    await send_json(send, error.status, body, headers)


async def send_failure(send: Send, outcome: Outcome) -> None:
    """Answers a request that ended before anything was sent of its answer."""
    if isinstance(outcome, Rejected):
        status, retry_after_s = 429, outcome.retry_after_s
    else:
        status, retry_after_s = 503, 1.0
    headers = {"retry-after": str(max(1, math.ceil(min(retry_after_s, MAX_RETRY_AFTER_S))))}
    await send_json(send, status, _failure_body(outcome), headers)


async def send_json(
    send: Send, status: int, body: object, headers: Mapping[str, str] | None = None
) -> None:
    """A complete JSON response."""
    await _send_data(send, status, _encode(body), headers)


async def _send_data(
    send: Send, status: int, data: bytes, headers: Mapping[str, str] | None
) -> None:
    await _send_head(send, status, JSON, {"content-length": str(len(data)), **(headers or {})})
    await send({"type": "http.response.body", "body": data, "more_body": False})


async def _send_head(
    send: Send, status: int, content_type: bytes, headers: Mapping[str, str]
) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    encoded.append((b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": encoded})


def _failure_body(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Rejected):
        return error_body(outcome.message, kind="rate_limit_error", code="rate_limit_exceeded")
    if isinstance(outcome, Failed):
        return error_body(outcome.message, kind="server_error", code=outcome.code)
    return error_body("the request was cancelled", kind="server_error", code="request_failed")


def _head(heading: Heading, object_name: str) -> dict[str, Any]:
    return {
        "id": heading.answer_id,
        "object": object_name,
        "created": heading.created,
        "model": heading.model,
        "system_fingerprint": heading.fingerprint() or None,
    }

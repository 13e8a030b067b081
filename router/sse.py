"""What clients get: OpenAI's answers, whole or as server-sent events, and its errors.

Decides the bytes of a response and when its head is sent: with the first token, so that a request
that is refused before it gets a status that says so. Everything of a chunk that does not change
from token to token is encoded once. It does not know where tokens come from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.types import Send

from engine.errors import InvalidRequest
from router.requests import Cancelled, Failed, Finished, Outcome, Rejected, Timeline

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
MAX_RETRY_AFTER_S = 3600.0

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one endpoint writes an answer: the pieces of a chunk's only choice around what varies."""

    id_prefix: str
    object_name: str
    chunk_name: str
    first_choice: bytes  # of the chunk that begins the stream; empty: there is none
    text_choice: tuple[bytes, bytes]
    finish_choice: tuple[bytes, bytes]

    def whole_choice(self, text: str, finish_reason: str) -> dict[str, Any]:
        """The choice of an answer that is sent at once."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.first_choice:
            return choice | {"message": {"role": "assistant", "content": text, "refusal": None}}
        return choice | {"text": text}


_UNFINISHED = b',"logprobs":null,"finish_reason":null}]'

CHAT = Dialect(
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    chunk_name="chat.completion.chunk",
    first_choice=b'[{"index":0,"delta":{"role":"assistant","content":""}' + _UNFINISHED,
    text_choice=(b'[{"index":0,"delta":{"content":', b"}" + _UNFINISHED),
    finish_choice=(b'[{"index":0,"delta":{},"logprobs":null,"finish_reason":', b"}]"),
)
COMPLETION = Dialect(
    id_prefix="cmpl-",
    object_name="text_completion",
    chunk_name="text_completion",
    first_choice=b"",
    text_choice=(b'[{"index":0,"text":', _UNFINISHED),
    finish_choice=(b'[{"index":0,"text":"","logprobs":null,"finish_reason":', b"}]"),
)


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk of one answer repeats, and what the client wants beside the text."""

    dialect: Dialect
    answer_id: str
    created: int
    model: str
    prompt_tokens: int
    include_usage: bool
    usage_in_every_chunk: bool
    include_timeline: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended. `timeline` is None where the router gave none."""

    outcome: Outcome
    prompt_tokens: int
    completion_tokens: int
    timeline: Timeline | None

    def usage(self) -> dict[str, Any]:
        """Token counts as OpenAI names them."""
        details = None
        if self.timeline is not None:
            details = {"cached_tokens": self.timeline.num_cached_tokens}
        counts = _usage(self.prompt_tokens, self.completion_tokens)
        return {**counts, "prompt_tokens_details": details}


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class AnswerWriter(Protocol):
    """Sends one answer: text as it comes, then its ending."""

    async def text(self, text: str, num_tokens: int, fingerprint: str) -> None:
        """More of the answer, perhaps empty; the first call means that there is an answer.

        `num_tokens` counts the tokens of the whole answer so far.
        """
        ...

    async def end(self, ending: Ending, fingerprint: str) -> None:
        """The last call, and the only one where there was no token."""
        ...


class WholeAnswer:
    """Sends an answer when it is complete."""

    def __init__(self, heading: Heading, send: Send) -> None:
        self._heading = heading
        self._send = send
        self._pieces: list[str] = []

    async def text(self, text: str, num_tokens: int, fingerprint: str) -> None:
        """Keeps the text."""
        self._pieces.append(text)

    async def end(self, ending: Ending, fingerprint: str) -> None:
        """Sends everything, or the error."""
        if not isinstance(ending.outcome, Finished):
            await send_failure(self._send, ending.outcome)
            return
        heading = self._heading
        choice = heading.dialect.whole_choice("".join(self._pieces), ending.outcome.reason.value)
        body = _head(heading, heading.dialect.object_name, fingerprint)
        body |= {"choices": [choice], "usage": ending.usage()}
        if heading.include_timeline:
            body["baton_timeline"] = ending.timeline
        await send_json(self._send, 200, body, {"x-request-id": heading.answer_id})


class StreamedAnswer:
    """Sends an answer as events."""

    def __init__(self, heading: Heading, send: Send) -> None:
        self._heading = heading
        self._send = send
        self._chunk: _ChunkEncoder | None = None  # None: the head of the response is not sent

    async def text(self, text: str, num_tokens: int, fingerprint: str) -> None:
        """Sends a chunk, unless all text is held back."""
        data, chunk = await self._open(fingerprint)
        if text:
            data += chunk.text(text, num_tokens)
        if data:
            await self._send_body(data, more_body=True)

    async def end(self, ending: Ending, fingerprint: str) -> None:
        """Sends the last chunks. A stream that breaks off has no [DONE]."""
        outcome = ending.outcome
        if self._chunk is None and not isinstance(outcome, Finished):
            await send_failure(self._send, outcome)
            return
        data, chunk = await self._open(fingerprint)
        if isinstance(outcome, Finished):
            data += chunk.finish(outcome.reason.value) + self._extras(chunk, ending) + DONE
        elif not isinstance(outcome, Cancelled):
            data += b"data: " + _encode(_failure_body(outcome)) + b"\n\n"
        await self._send_body(data, more_body=False)

    def _extras(self, chunk: "_ChunkEncoder", ending: Ending) -> bytes:
        data = b""
        if self._heading.include_usage:
            data += chunk.extra(b"usage", ending.usage())
        if self._heading.include_timeline:
            data += chunk.extra(b"baton_timeline", ending.timeline)
        return data

    async def _open(self, fingerprint: str) -> tuple[bytes, "_ChunkEncoder"]:
        """Sends the head if it is not sent yet; the first chunk and the encoder of the others."""
        if self._chunk is not None:
            return b"", self._chunk
        self._chunk = _ChunkEncoder(self._heading, fingerprint)
        headers = {
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would collect events
            "x-request-id": self._heading.answer_id,
        }
        await _send_head(self._send, 200, EVENT_STREAM, headers)
        return self._chunk.first(), self._chunk

    async def _send_body(self, data: bytes, *, more_body: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more_body})


class _ChunkEncoder:
    """Events of one stream; what they share is encoded once."""

    def __init__(self, heading: Heading, fingerprint: str) -> None:
        dialect = heading.dialect
        head = _encode(_head(heading, dialect.chunk_name, fingerprint)).removesuffix(b"}")
        self._before = b"data: " + head + b',"choices":'
        self._after = b',"usage":null}\n\n' if heading.include_usage else b"}\n\n"
        self._dialect = dialect
        before_text, after_text = dialect.text_choice
        self._before_text = self._before + before_text
        self._after_text = after_text + self._after
        self._counted_after_text = after_text if heading.usage_in_every_chunk else None
        self._prompt_tokens = heading.prompt_tokens

    def first(self) -> bytes:
        choice = self._dialect.first_choice
        return self._before + choice + self._after if choice else b""

    def text(self, text: str, num_tokens: int) -> bytes:
        if self._counted_after_text is None:
            return self._before_text + _encode(text) + self._after_text
        usage = _encode(_usage(self._prompt_tokens, num_tokens))
        after = self._counted_after_text + b',"usage":' + usage + b"}\n\n"
        return self._before_text + _encode(text) + after

    def finish(self, reason: str) -> bytes:
        before, after = self._dialect.finish_choice
        return self._before + before + _encode(reason) + after + self._after

    def extra(self, name: bytes, value: object) -> bytes:
        """A chunk without choices."""
        return self._before + b'[],"' + name + b'":' + _encode(value) + b"}\n\n"


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error as OpenAI shapes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def send_invalid(send: Send, error: InvalidRequest) -> None:
    """Answers a request that is the client's fault."""
    code: str | None = getattr(error, "code", None)
    body = error_body(error.message, kind="invalid_request_error", param=error.param, code=code)
    # A body that was not read to its end leaves the connection unusable.
    headers = {"connection": "close"} if error.status in (408, 413) else {}
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
    data = _encode(body)
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
    message = outcome.message if isinstance(outcome, Failed) else "the request was cancelled"
    return error_body(message, kind="server_error", code="request_failed")


def _head(heading: Heading, object_name: str, fingerprint: str) -> dict[str, Any]:
    return {
        "id": heading.answer_id,
        "object": object_name,
        "created": heading.created,
        "model": heading.model,
        "system_fingerprint": fingerprint or None,
    }

"""Sends an answer as server-sent events.

The parts of a chunk that are the same for every token are encoded once.
"""

from typing import Any

import msgspec
from starlette.types import Send

from router.edge.exchange import BodyPipe
from router.edge.responses import EVENT_STREAM, send_head
from router.gateway.answers.choice import SCORED_AT_ONCE, AnswerPiece
from router.gateway.answers.writing import (
    TIMELINE_HEADER,
    AnswerWriter,
    Ending,
    Heading,
    call_delta,
    failure_body,
    reasoning_fields,
    send_failure,
    usage_of,
)
from router.inbox.json_parts import encode_lazy
from router.machine.requests import (
    Cancelled,
    Finished,
)
from router.text.logprobs import LogprobsWriter

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # prevents nginx from buffering events
}
_ROLE = b',"delta":{"role":"assistant","content":""}'
_CALLS = b',"delta":{"tool_calls":['
_UNSCORED = b',"logprobs":null'
_GOES_ON = b',"finish_reason":null'
_UNFINISHED = _GOES_ON + b"}]"

_encode = msgspec.json.Encoder().encode


class EventWriter(AnswerWriter):
    """Sends a response of server-sent events, directly through the pipe while the pipe is ready.

    The head of the response is sent with the first events.
    """

    def __init__(self, heading: Heading, send: Send, pipe: BodyPipe | None) -> None:
        self.heading = heading
        self.pipe = pipe
        self.unsent: list[Any] = []  # pieces or events that wait for `flush`
        self._send = send
        self._has_head = False  # True once the head is sent
        self._is_open = False  # True if the head is sent, and no data is waiting to be sent

    @property
    def is_full(self) -> bool:
        """True if the head of the response is not sent yet, or if data is waiting to be sent."""
        pipe = self.pipe
        return not (self._is_open and pipe is not None and pipe.is_ready and not self.unsent)

    async def send(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends events, or the end of the body if `is_last`.

        Returns when the client has room for more.
        """
        self._is_open = False
        if not self._has_head:
            self._has_head = True
            headers = {**STREAM_HEADERS, **self.heading.headers}
            await send_head(self._send, 200, EVENT_STREAM, headers)
        if self.pipe is not None:
            self.pipe.flush()
        if data or is_last:
            body = {"type": "http.response.body", "body": data, "more_body": not is_last}
            await self._send(body)
        self._is_open = True


class StreamedAnswer(EventWriter):
    """Sends an answer as server-sent events."""

    def __init__(self, heading: Heading, send: Send, pipe: BodyPipe | None) -> None:
        super().__init__(heading, send, pipe)
        self._chunks: _ChunkEncoder | None = None  # None until the head of the response is sent
        self._unfinished = len(heading.call.requests)
        self._last = b""  # the last choice's last chunk, sent with the end of the answer

    def frame_of(self, choice: int) -> tuple[bytes, bytes]:
        """Returns the bytes before and after the text of each chunk.

        The stream must not be full.
        """
        assert self._chunks is not None
        return self._chunks.before_text[choice], self._chunks.after_text

    def write(self, piece: AnswerPiece) -> None:
        """Sends the chunks of a piece now, or keeps the piece for `flush`."""
        if self._chunks is None or self.is_full:
            self.unsent.append(piece)
        elif data := self._encoded(self._chunks, piece):
            assert self.pipe is not None
            self.pipe.write(data)

    async def flush(self) -> None:
        """Sends all pending pieces; log-probabilities of a long prompt are sent in parts."""
        while self.unsent:
            piece = self.unsent.pop(0)
            is_short = len(piece.entries) <= SCORED_AT_ONCE
            for number, part in enumerate((piece,) if is_short else piece.parts(SCORED_AT_ONCE)):
                if number:
                    await self.heading.turn()
                data, chunks = self._opened()
                await self.send(data + self._encoded(chunks, part))

    async def end(self, ending: Ending) -> None:
        """Sends the last chunks. The stream of a failed answer has no [DONE]."""
        await self.flush()
        outcome, call = ending.outcome, self.heading.call
        if self._chunks is None and not isinstance(outcome, Finished):
            await send_failure(self._send, outcome)
            return
        data, chunks = self._opened()
        if isinstance(outcome, Finished):
            data += self._last
            if call.body.usage_in_stream:
                data += chunks.extra(b"usage", ending.usage())
            if call.asked.debugs(TIMELINE_HEADER):
                data += chunks.extra(b"baton_timeline", ending.timeline)
            data += DONE
        elif not isinstance(outcome, Cancelled):
            data += b"data: " + _encode(failure_body(outcome)) + b"\n\n"
        await self.send(data, is_last=True)

    def _opened(self) -> "tuple[bytes, _ChunkEncoder]":
        """Returns the first chunks of the choices and the encoder; no chunks if they were already
        sent.
        """
        if self._chunks is not None:
            return b"", self._chunks
        self._chunks = _ChunkEncoder(self.heading)
        return self._chunks.first, self._chunks

    def _encoded(self, chunks: "_ChunkEncoder", piece: AnswerPiece) -> bytes:
        """Returns the chunks of a piece to send now.

        The chunks of the answer's last piece are kept for `end`.
        """
        data = chunks.of(piece)
        if piece.finish is None:
            return data
        self._unfinished -= 1
        if self._unfinished:
            return data
        self._last = data
        return b""


class _ChunkEncoder:
    """Encodes the events of one stream; the common parts of all chunks are encoded once."""

    def __init__(self, heading: Heading) -> None:
        dialect, call, body = heading.dialect, heading.call, heading.call.body
        head = _encode(heading.fields(dialect.chunk_name)).removesuffix(b"}")
        self._head = b"data: " + head + b',"choices":'
        self._after = b',"usage":null}\n\n' if body.usage_in_stream else b"}\n\n"
        self.after_text = dialect.text_end + _UNSCORED + _UNFINISHED + self._after
        self.before_text: list[bytes] = []  # by choice: constant bytes before a chunk's text
        self._before_index: list[bytes] = []
        self._dialect = dialect
        self._call = call
        self._counts = body.usage_in_every_chunk
        self._has_ids = bool(body.return_token_ids)
        self._has_scores = body.num_top_logprobs is not None
        self._is_plain = not (self._has_scores or self._counts or self._has_ids)
        self._without_prompt: set[int] = set()  # choices whose prompt's token ids are not sent yet
        self._logprobs: list[LogprobsWriter] = []
        prompt = b',"prompt_token_ids":' + _encode(call.first.token_ids) if self._has_ids else b""
        first: list[bytes] = []
        for index in range(len(call.requests)):
            before = self._head + b'[{"index":%d' % index
            self._before_index.append(before)
            self.before_text.append(before + dialect.text_start)
            if dialect.is_chat:
                end = self._after if not self._counts else self._counted(index, 0)
                first.append(before + _ROLE + _UNSCORED + _UNFINISHED + prompt + end)
            elif self._has_ids:
                self._without_prompt.add(index)
            if body.num_top_logprobs is not None:
                self._logprobs.append(dialect.logprobs_writer(call, body.num_top_logprobs))
        self.first = b"".join(first)  # the first chunk of each choice of a chat

    def of(self, piece: AnswerPiece) -> bytes:
        """Returns the chunks of a piece; empty if the piece has nothing to send.

        The finish reason is in the chunk of the last text, as in vLLM.
        """
        text, index, calls = piece.text, piece.choice, piece.calls
        after = self._after if not self._counts else self._counted(index, piece.num_tokens)
        before, reasons, data = self._before_index[index], _GOES_ON, b""
        if piece.reasoning:
            delta = _encode(reasoning_fields(piece.reasoning))
            data = before + b',"delta":' + delta + _UNSCORED + _UNFINISHED + after
        if piece.finish is not None:
            reasons = b',"finish_reason":' + _encode(piece.finish)
            reasons += b',"stop_reason":' + _encode(piece.stop_reason)
        is_joint = piece.finish is not None and not calls
        if is_joint or text or piece.entries or piece.token_ids:
            if self._dialect.is_chat and not text:  # a chat's delta without text is empty
                data += before + self._dialect.no_text
            else:
                data += self.before_text[index] + _encode(text) + self._dialect.text_end
            data += _UNSCORED if self._is_plain else self._scores(piece)
            data += reasons if is_joint else _GOES_ON
            data += (b"}]" if self._is_plain else self._ids(piece) + b"}]") + after
        for call in calls:
            delta = _encode(call_delta(call))
            data += before + _CALLS + delta + b"]}" + _UNSCORED + _UNFINISHED + after
        if calls and piece.finish is not None:
            data += before + self._dialect.no_text + _UNSCORED + reasons + b"}]" + after
        return data

    def _ids(self, piece: AnswerPiece) -> bytes:
        """Returns the token ids of a piece's chunk, if the client wants them."""
        data = b',"token_ids":' + _encode(piece.token_ids) if self._has_ids else b""
        if piece.choice in self._without_prompt:
            self._without_prompt.remove(piece.choice)
            prompt_ids = self._call.requests[piece.choice].token_ids
            data += b',"prompt_token_ids":' + _encode(prompt_ids)
        return data

    def extra(self, name: bytes, value: object) -> bytes:
        """Returns a chunk without choices, with one further field."""
        return self._head + b'[],"' + name + b'":' + _encode(value) + b"}\n\n"

    def _scores(self, piece: AnswerPiece) -> bytes:
        if not self._has_scores or (self._dialect.is_chat and not piece.entries):
            return _UNSCORED
        scores = self._logprobs[piece.choice].shape(piece.entries)
        return b',"logprobs":' + encode_lazy(scores)

    def _counted(self, choice: int, num_tokens: int) -> bytes:
        """Returns the end of a chunk, with the token counts of the choice so far."""
        usage = usage_of(len(self._call.requests[choice].token_ids), num_tokens)
        return b',"usage":' + _encode(usage) + b"}\n\n"

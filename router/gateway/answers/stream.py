"""Sends an answer as server-sent events.

The parts of a chunk that are the same for every token are encoded once.
"""

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
    "x-accel-buffering": "no",  # otherwise nginx would buffer events
}
_INDEX = b'[{"index":'
_ROLE = b',"delta":{"role":"assistant","content":""}'
_CALLS = b',"delta":{"tool_calls":['
_UNSCORED = b',"logprobs":null'
_GOES_ON = b',"finish_reason":null'
_UNFINISHED = _GOES_ON + b"}]"

_encode = msgspec.json.Encoder().encode


class EventStream:
    """The body of a response of server-sent events. It uses `pipe` when the pipe is ready.

    The head of the response is sent with the first events.
    """

    def __init__(self, heading: Heading, send: Send, pipe: BodyPipe | None) -> None:
        self.pipe = pipe
        self.has_head = False  # True once the head is sent
        self._heading = heading
        self._send = send
        self._is_open = False  # the head is sent, and nothing is waiting to be sent

    @property
    def is_full(self) -> bool:
        """True if events have to wait for `send`."""
        return not (self._is_open and self.pipe is not None and self.pipe.is_ready)

    def write(self, data: bytes) -> None:
        """Sends events without waiting; if the stream is full, they are kept."""
        assert self.pipe is not None
        if data:
            self.pipe.write(data)

    async def send(self, data: bytes, *, is_last: bool = False) -> None:
        """Sends events, or the end of the body, and waits until the client has room for more."""
        self._is_open = False
        if not self.has_head:
            self.has_head = True
            headers = {**STREAM_HEADERS, **self._heading.headers}
            await send_head(self._send, 200, EVENT_STREAM, headers)
        if self.pipe is not None:
            self.pipe.flush()
        if data or is_last:
            body = {"type": "http.response.body", "body": data, "more_body": not is_last}
            await self._send(body)
        self._is_open = True


class StreamedAnswer(AnswerWriter):
    """Sends an answer as events."""

    def __init__(self, heading: Heading, send: Send, pipe: BodyPipe | None) -> None:
        self.events = EventStream(heading, send, pipe)
        self._heading = heading
        self._send = send
        self._chunk: _ChunkEncoder | None = None  # None until the head of the response is sent
        self._unsent: list[AnswerPiece] = []
        self._unfinished = heading.num_choices
        self._last = b""  # the end of the last choice, sent together with the end of the answer

    @property
    def is_full(self) -> bool:
        """True if the head is not sent yet, or some data is waiting to be sent."""
        return bool(self._unsent) or self.events.is_full

    @property
    def shows_text_alone(self) -> bool:
        """False if each chunk also reports the number of tokens so far."""
        return not self._heading.call.body.usage_in_every_chunk

    def frame_of(self, choice: int) -> tuple[bytes, bytes]:
        """The bytes around the text of each chunk, in a stream that is not full."""
        assert self._chunk is not None
        return self._chunk.before_text[choice], self._chunk.after_text

    def write(self, piece: AnswerPiece) -> None:
        """Sends the chunks of a piece, if it has anything to show."""
        if self._chunk is None or self.is_full:
            self._unsent.append(piece)
        else:
            self.events.write(self._encoded(self._chunk, piece))

    async def flush(self) -> None:
        """Sends all pending pieces; log-probabilities of a long prompt are sent in parts."""
        while self._unsent:
            for number, part in enumerate(self._unsent.pop(0).parts(SCORED_AT_ONCE)):
                if number:
                    await self._heading.turn()
                data, chunk = self._opened()
                await self.events.send(data + self._encoded(chunk, part))

    async def end(self, ending: Ending) -> None:
        """Sends the last chunks. A failed stream has no [DONE]."""
        await self.flush()
        outcome = ending.outcome
        if self._chunk is None and not isinstance(outcome, Finished):
            await send_failure(self._send, outcome)
            return
        data, chunk = self._opened()
        if isinstance(outcome, Finished):
            data += self._last
            if self._heading.call.body.usage_in_stream:
                data += chunk.extra(b"usage", ending.usage())
            if self._heading.call.asked.debugs(TIMELINE_HEADER):
                data += chunk.extra(b"baton_timeline", ending.timeline)
            data += DONE
        elif not isinstance(outcome, Cancelled):
            data += b"data: " + _encode(failure_body(outcome)) + b"\n\n"
        await self.events.send(data, is_last=True)

    def _opened(self) -> tuple[bytes, "_ChunkEncoder"]:
        """Returns the encoder, and the first chunks if they are not sent yet."""
        if self._chunk is not None:
            return b"", self._chunk
        self._chunk = _ChunkEncoder(self._heading)
        return self._chunk.first(), self._chunk

    def _encoded(self, chunk: "_ChunkEncoder", piece: AnswerPiece) -> bytes:
        """Returns the chunks of a piece that are to be sent now."""
        if piece.finish is None:
            return chunk.of(piece)
        self._unfinished -= 1
        data = chunk.finish(piece)
        if self._unfinished:
            return data
        self._last = data
        return b""


class _ChunkEncoder:
    """Encodes the events of one stream; their common parts are encoded once."""

    def __init__(self, heading: Heading) -> None:
        dialect, call, body = heading.dialect, heading.call, heading.call.body
        head = _encode(heading.fields(dialect.chunk_name)).removesuffix(b"}")
        self._head = b"data: " + head + b',"choices":'
        begin = self._head + _INDEX
        self._before_index = [begin + b"%d" % index for index in range(heading.num_choices)]
        self.before_text = [before + dialect.text_start for before in self._before_index]
        self._after = b',"usage":null}\n\n' if body.usage_in_stream else b"}\n\n"
        self.after_text = dialect.text_end + _UNSCORED + _UNFINISHED + self._after
        self._dialect = dialect
        self._call = call
        self._counts = body.usage_in_every_chunk
        num_top = body.num_top_logprobs
        self._has_scores = num_top is not None
        self._is_plain = num_top is None and not (self._counts or body.return_token_ids)
        has_ids = body.return_token_ids and not dialect.is_chat
        self._without_prompt = set(range(heading.num_choices)) if has_ids else set()
        self._logprobs: list[LogprobsWriter] = []
        if num_top is not None:
            bytes_of, by_id = call.served.text.bytes_of, bool(body.return_tokens_as_token_ids)
            self._logprobs = [
                dialect.logprobs_writer(bytes_of, num_top, ids_for_names=by_id)
                for _ in self._before_index
            ]

    def first(self) -> bytes:
        """Returns the chunks with which each choice of a chat begins."""
        if not self._dialect.is_chat:
            return b""
        chunk = _ROLE + _UNSCORED + _UNFINISHED
        if self._call.body.return_token_ids:
            chunk += b',"prompt_token_ids":' + _encode(self._call.first.token_ids)
        befores = enumerate(self._before_index)
        return b"".join([before + chunk + self._counted(i, 0) for i, before in befores])

    def of_text(self, choice: int, text: str) -> bytes:
        """Returns a chunk with only text."""
        return self.before_text[choice] + _encode(text) + self.after_text

    def of(self, piece: AnswerPiece) -> bytes:
        """Returns the chunks of a piece; empty if there is nothing to show."""
        text = piece.text
        if piece.reasoning:
            rest = msgspec.structs.replace(piece, reasoning="")
            return self._reasoning(piece) + self.of(rest)
        if self._is_plain and not piece.calls:
            return self.of_text(piece.choice, text) if text else b""
        has_chunk = text or piece.entries or piece.token_ids
        data = self._before(piece) + self._behind(piece, _GOES_ON) if has_chunk else b""
        return data + self._calls(piece) if piece.calls else data

    def finish(self, piece: AnswerPiece) -> bytes:
        """Returns the chunks of a choice's last piece. Text and reason share one, as in vLLM."""
        if piece.reasoning:
            rest = msgspec.structs.replace(piece, reasoning="")
            return self._reasoning(piece) + self.finish(rest)
        reasons = b',"finish_reason":' + _encode(piece.finish)
        reasons += b',"stop_reason":' + _encode(piece.stop_reason)
        if not piece.calls:
            return self._before(piece) + self._behind(piece, reasons)
        end = self._before_index[piece.choice] + self._dialect.no_text + _UNSCORED + reasons
        return self.of(piece) + end + b"}]" + self._counted(piece.choice, piece.num_tokens)

    def _before(self, piece: AnswerPiece) -> bytes:
        """Returns the chunk of a piece up to its text. A chat's delta without text is empty."""
        if self._dialect.is_chat and not piece.text:
            return self._before_index[piece.choice] + self._dialect.no_text
        return self.before_text[piece.choice] + _encode(piece.text) + self._dialect.text_end

    def _behind(self, piece: AnswerPiece, reasons: bytes) -> bytes:
        """Returns the part of a piece's chunk after its text."""
        data = self._scores(piece) + reasons
        if self._call.body.return_token_ids:
            data += b',"token_ids":' + _encode(piece.token_ids)
        if piece.choice in self._without_prompt:
            self._without_prompt.remove(piece.choice)
            prompt_ids = self._call.requests[piece.choice].token_ids
            data += b',"prompt_token_ids":' + _encode(prompt_ids)
        return data + b"}]" + self._counted(piece.choice, piece.num_tokens)

    def _calls(self, piece: AnswerPiece) -> bytes:
        """Returns one chunk for each part of a tool call."""
        before, after = self._before_index[piece.choice] + _CALLS, b"]}" + _UNSCORED + _UNFINISHED
        deltas = (_encode(call_delta(delta)) for delta in piece.calls)
        after += self._counted(piece.choice, piece.num_tokens)
        return b"".join(before + delta + after for delta in deltas)

    def _reasoning(self, piece: AnswerPiece) -> bytes:
        delta = b',"delta":' + _encode(reasoning_fields(piece.reasoning))
        data = self._before_index[piece.choice] + delta + _UNSCORED + _GOES_ON
        return data + b"}]" + self._counted(piece.choice, piece.num_tokens)

    def extra(self, name: bytes, value: object) -> bytes:
        """Returns a chunk without choices."""
        return self._head + b'[],"' + name + b'":' + _encode(value) + b"}\n\n"

    def _scores(self, piece: AnswerPiece) -> bytes:
        if not self._has_scores or (self._dialect.is_chat and not piece.entries):
            return _UNSCORED
        scores = self._logprobs[piece.choice].shape(piece.entries)
        return b',"logprobs":' + encode_lazy(scores)

    def _counted(self, choice: int, num_tokens: int) -> bytes:
        """Returns the end of a chunk, with the choice's usage so far if the client wants it."""
        if not self._counts:
            return self._after
        usage = usage_of(len(self._call.requests[choice].token_ids), num_tokens)
        return b',"usage":' + _encode(usage) + b"}\n\n"

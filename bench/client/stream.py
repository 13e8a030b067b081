"""The HTTP session of a client, and the parser of streamed answers: events and their chunks.

Events are parsed while bytes arrive. The cuts between network packets have no influence. Parsing
follows the WHATWG HTML standard, §9.2.6. A line ends with CRLF, LF or CR. A line with a colon first
is a comment. A blank line ends an event. The `data` lines of one event are joined with LF. An event
without data is dropped. `id` and `retry` are ignored, because a benchmark never reconnects.

`finish` departs from the standard. The standard drops an event that the end of the stream cut
short; `finish` returns it, because some servers omit the last blank line.

Chunks come from OpenAI-compatible servers. Fields that a server leaves out have defaults, since
servers differ. Parsing fails only for data that is not JSON, or whose fields have other types.
"""

from dataclasses import dataclass

import aiohttp
import msgspec

# shorter than the servers' own timeout (uvicorn: 5 s), so the client closes first
KEEP_ALIVE_S = 2.0


def http_session(timeout_s: float, *, reuses_connections: bool = True) -> aiohttp.ClientSession:
    """Opens an HTTP session without a limit on connections. `timeout_s` limits one request."""
    connector = (
        aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        if reuses_connections
        else aiohttp.TCPConnector(limit=0, force_close=True)
    )
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s)
    )


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event. `data` is bytes, because most of it is JSON, and the JSON parser reads bytes."""

    data: bytes
    kind: bytes = b"message"


class SseParser:
    """Parses the pieces of one response into events."""

    def __init__(self) -> None:
        self._rest = b""  # an incomplete line
        self._ended_in_cr = False  # True: a leading LF belongs to the previous line end
        self._at_start = True
        self._data: list[bytes] = []
        self._kind = b""

    def feed(self, piece: bytes) -> list[SseEvent]:
        """Parses `piece` and returns the events that it completes."""
        if not piece:
            return []
        if self._ended_in_cr:
            piece = piece.removeprefix(b"\n")
        lines = (self._rest + piece).splitlines(keepends=True)
        self._ended_in_cr = piece.endswith(b"\r")
        self._rest = b""
        if lines and not lines[-1].endswith((b"\r", b"\n")):
            self._rest = lines.pop()
        return [event for line in lines if (event := self._add(line.rstrip(b"\r\n")))]

    def finish(self) -> list[SseEvent]:
        """Returns the last event if the stream ended before the event's blank line."""
        last_line, self._rest = self._rest, b""
        return [event for line in (last_line, b"") if (event := self._add(line))]

    def _add(self, line: bytes) -> SseEvent | None:
        if self._at_start:
            line = line.removeprefix(BYTE_ORDER_MARK)
            self._at_start = False
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._kind = value
        return None

    def _dispatch(self) -> SseEvent | None:
        data, kind = self._data, self._kind
        self._data, self._kind = [], b""
        if not data:
            return None
        return SseEvent(data=b"\n".join(data), kind=kind or b"message")


DONE = b"[DONE]"  # marks the end of a stream
NO_INDEX = -1


class ChunkDelta(msgspec.Struct):
    """The text that a chunk adds to an answer of the chat endpoint."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkLogprobs(msgspec.Struct):
    """Log-probabilities of the completions endpoint, one for each token of the chunk."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float]] | None = None


class ChunkChoice(msgspec.Struct):
    """The text and log-probabilities that a chunk adds to one choice."""

    index: int = NO_INDEX
    text: str | None = None
    delta: ChunkDelta | None = None
    finish_reason: str | None = None
    logprobs: ChunkLogprobs | None = None

    @property
    def said(self) -> str:
        """Returns the text of this chunk, without reasoning."""
        return self.text or (self.delta.content if self.delta else None) or ""

    @property
    def has_content(self) -> bool:
        """Returns True if the chunk has text or reasoning."""
        delta = self.delta or ChunkDelta()
        return bool(self.said or delta.reasoning_content or delta.reasoning)


class ChunkPromptDetails(msgspec.Struct):
    """Numbers of prompt tokens by kind."""

    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    """The server's token counts. A count is None if the server did not send it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: ChunkPromptDetails | None = None


class AnswerChunk(msgspec.Struct):
    """One event of the stream. `baton_timeline` has the seconds of Baton's stages."""

    choices: list[ChunkChoice] | None = None
    usage: ChunkUsage | None = None
    error: object = None
    baton_timeline: dict[str, object] | None = None


decode_chunk = msgspec.json.Decoder(AnswerChunk).decode


def shown(data: bytes) -> str:
    """Returns the first bytes of an event's data, as text for error messages."""
    return data[:200].decode(errors="replace")

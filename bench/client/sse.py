"""Parses server-sent events as bytes arrive, independent of how the network cuts them. Pure.

Follows the WHATWG HTML standard, §9.2.6. A line ends with CRLF, LF or CR. A line that starts with a
colon is a comment. A blank line ends an event. The `data` lines of one event are joined with LF. An
event without data is dropped. `id` and `retry` are ignored, because a benchmark never reconnects.

`finish` departs from the standard. The standard drops an event that the end of the stream cut
short; `finish` returns it, because some servers omit the last blank line.
"""

from dataclasses import dataclass

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event. `data` stays bytes, because most of it is JSON and its parser takes bytes."""

    data: bytes
    kind: bytes = b"message"


class SseParser:
    """Turns the pieces of one response into events."""

    def __init__(self) -> None:
        self._rest = b""  # a line without its end
        self._ended_in_cr = False  # if true, a leading LF belongs to the previous line
        self._at_start = True
        self._data: list[bytes] = []
        self._kind = b""

    def feed(self, piece: bytes) -> list[SseEvent]:
        """Returns the events that `piece` completes."""
        if not piece:
            return []
        if self._ended_in_cr:
            piece = piece.removeprefix(b"\n")
        lines = (self._rest + piece).splitlines(keepends=True)
        self._ended_in_cr = piece.endswith(b"\r")
        self._rest = b""
        if lines and not lines[-1].endswith((b"\r", b"\n")):
            self._rest = lines.pop()
        return [event for line in lines if (event := self._take(line.rstrip(b"\r\n")))]

    def finish(self) -> list[SseEvent]:
        """Returns the last event if the stream ended before its blank line."""
        last_line, self._rest = self._rest, b""
        return [event for line in (last_line, b"") if (event := self._take(line))]

    def _take(self, line: bytes) -> SseEvent | None:
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

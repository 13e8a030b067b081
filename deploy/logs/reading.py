"""Reads the latest log lines of services from their rings, and lines that are written later.

`read_pieces` reads bytes on the node that has the rings. `merged` turns the bytes of all nodes into
lines, in order of time. A *cursor* contains the read position of each ring. Each answer has a
cursor. The caller sends the cursor back to get later lines. The size of each answer and of each
ring is bounded.
"""

import base64
import binascii
import contextlib
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from deploy.logs.ring import MAX_LINE_BYTES, RingFile, rings
from engine.errors import ConfigError

DEFAULT_LINES = 100
MAX_LINES = 5000  # maximum number of lines in the answer to a query without a cursor
READ_BYTES = 4 * 2**20  # maximum number of bytes that one query reads from all rings of a node
# Minimum number of bytes to read per ring: more than one line.
LEAST_READ_BYTES = 2 * MAX_LINE_BYTES
MAX_CURSOR_BYTES = 2**20
TORN = "[the end of this line is lost] "


Position = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class RingPosition(msgspec.Struct, frozen=True, array_like=True):
    """A position in a ring. All lines before the position have been read."""

    generation: Position
    offset: Position


class LogsQuery(msgspec.Struct, frozen=True):
    """A query for the last lines, or for the lines after the positions in a cursor."""

    service: str | None = None  # None: all services
    lines: int = DEFAULT_LINES  # number of last lines; ignored if `places` is set
    places: dict[str, RingPosition] | None = None


class RingPiece(msgspec.Struct, frozen=True):
    """Bytes that were read from one ring, in whole lines."""

    service: str
    text: bytes
    end: RingPosition
    is_overwritten: bool = False  # True if unread lines after the given position were overwritten
    has_more: bool = False


class LogPieces(msgspec.Struct, frozen=True):
    """The answers of all nodes. On a cluster, a ring has the key NAME@NODE."""

    pieces: dict[str, RingPiece]
    known: list[str]  # names of all services that have a ring
    silent: list[str] = []  # nodes that did not answer


def read_pieces(folder: Path, query: LogsQuery) -> LogPieces:
    """Reads the rings in a folder."""
    found = rings(folder)
    chosen = {name: files for name, files in found.items() if query.service in (None, name)}
    most = max(READ_BYTES // max(len(chosen), 1), LEAST_READ_BYTES)
    pieces = {}
    for name, files in chosen.items():
        with contextlib.suppress(OSError):  # the files have just changed: read them next time
            if query.places is None:
                pieces[name] = _tail(name, files, min(query.lines, MAX_LINES), most)
            else:
                pieces[name] = _rest(name, files, query.places.get(name), most)
    return LogPieces(pieces, list(found))


def merged(pieces: Iterable[RingPiece], most: int | None = None) -> list[dict[str, Any]]:
    """Returns the lines of all pieces in order of time, but at most the last `most` lines."""
    lines = [line for piece in pieces for line in _lines(piece)]
    lines.sort(key=lambda line: str(line["time"]))
    return lines if most is None else lines[max(len(lines) - most, 0) :]


def cursor_of(places: Mapping[str, RingPosition]) -> str:
    """Encodes positions as a cursor: a text for a URL."""
    return base64.urlsafe_b64encode(zlib.compress(msgspec.json.encode(places))).decode()


def positions_of(cursor: str) -> dict[str, RingPosition]:
    """Decodes the positions of a cursor. Raises ConfigError if it is invalid."""
    try:
        packed = base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True)
        text = zlib.decompressobj().decompress(packed, MAX_CURSOR_BYTES)
        return msgspec.json.decode(text, type=dict[str, RingPosition])
    except (binascii.Error, zlib.error, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError("`after` is no cursor that an answer gave") from error


def _tail(name: str, files: list[RingFile], num_lines: int, most: int) -> RingPiece:
    """Reads the last lines of a ring. Starts with the ring's newest file."""
    text, end = b"", None
    for file in reversed(files):
        size = file.path.stat().st_size
        begin = max(size - (most - len(text)), 0)
        part = _read(file, begin, size - begin)
        complete = part[: part.rfind(b"\n") + 1]
        if end is None:
            end = RingPosition(file.generation, begin + len(complete))
        if begin:  # the part begins inside a line
            complete = complete[complete.find(b"\n") + 1 :]
        text = complete + text
        if begin or text.count(b"\n") >= num_lines:
            break
    assert end is not None
    return RingPiece(name, _last_lines(text, num_lines), end)


def _rest(name: str, files: list[RingFile], place: RingPosition | None, most: int) -> RingPiece:
    """Reads the lines of a ring that follow a position."""
    known = {file.generation for file in files}
    first = RingPosition(files[0].generation, 0)
    is_overwritten = place is not None and place.generation not in known
    at = first if place is None or is_overwritten else place
    text = b""
    for file in (each for each in files if each.generation >= at.generation):
        begin = at.offset if file.generation == at.generation else 0
        part = _read(file, begin, most - len(text))
        end = part.rfind(b"\n") + 1
        if not end and len(part) > MAX_LINE_BYTES:  # the part is longer than any line may be
            end = len(part)
        text += part[:end]
        at = RingPosition(file.generation, begin + end)
        if len(text) + MAX_LINE_BYTES >= most:
            return RingPiece(name, text, at, is_overwritten, has_more=True)
    return RingPiece(name, text, at, is_overwritten)


def _read(file: RingFile, begin: int, num_bytes: int) -> bytes:
    fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.pread(fd, max(num_bytes, 0), begin)
    finally:
        os.close(fd)


def _last_lines(text: bytes, number: int) -> bytes:
    """Returns the last `number` lines of a text that ends with a newline."""
    at = len(text)
    for _ in range(number + 1):
        at = text.rfind(b"\n", 0, at)
        if at < 0:
            return text
    return text[at + 1 :]


def _lines(piece: RingPiece) -> Iterable[dict[str, Any]]:
    """Yields the lines as objects. A partial line that a killed process left is marked."""
    time = ""
    for raw in piece.text.splitlines():
        if not raw:
            continue
        try:
            line = msgspec.json.decode(raw, type=dict[str, Any])
            time = line["time"] = str(line["time"])
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
            text = raw[:MAX_LINE_BYTES].decode("ascii", "backslashreplace")
            line = {"time": time, "level": "error", "process": piece.service, "logger": ""}
            line["message"] = TORN + text
        yield line

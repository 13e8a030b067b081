"""A request machine's events and effects, with one msgpack record per event.

    {"version": 6, "config": {...}}                              first record
    {"now_s": 1.5, "kind": "Arrived", "event": {...}, "effects": [["SendTo", {...}], ...]}

A machine is a function of its configuration and its events. A fresh machine that gets the recorded
events at the recorded times must return the same effects. `replay` finds the differences. So it
reproduces bugs, and checks that the simulator runs the same router.

With `slo`, either both machines must use the router's C++ or neither may, since C++ breaks ties
with its own generator. The first record says whether C++ was used, and `replay` refuses a mismatch.

A recording is as confidential as the prompts and answers in it. The length of a record is not known
before it is read, so files are read by msgpack's streaming `Unpacker`, within `MAX_RECORD_BYTES`. A
truncated record at the end of a file is left out. Each record is then decoded by its type, with
msgspec.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from engine.config import RouterConfig
from engine.errors import ProtocolError
from engine.messages import PROTOCOL_VERSION
from router.machine.events import (
    Arrived,
    BlockEventsMissed,
    BlocksChanged,
    ClientGone,
    FromWorker,
    RouterEffect,
    RouterEvent,
    Stepped,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from router.machine.machine import RouterMachine

_EVENTS: dict[str, type[RouterEvent]] = {
    kind.__name__: kind
    for kind in (
        WorkerJoined,
        WorkerLost,
        Arrived,
        ClientGone,
        FromWorker,
        Stepped,
        BlocksChanged,
        BlockEventsMissed,
        Tick,
    )
}


class _Head(msgspec.Struct, frozen=True):
    version: int
    config: RouterConfig


_HEAD_FIELDS = {"version", "config"}  # these fields of the first record exist in every version
MAX_RECORD_BYTES = 256 * 2**20  # maximum size of an event with its effects


class _Event(msgspec.Struct, frozen=True):
    now_s: float
    kind: str
    event: msgspec.Raw
    effects: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event with its time and its effects; for each effect, its kind and its msgpack."""

    now_s: float
    event: RouterEvent
    effects: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An event whose effects differ from the recorded effects. Both are given as JSON."""

    number: int  # number of the record; the first is 1
    kind: str
    recorded: bytes
    replayed: bytes


class Recorder:
    """Encodes the events and the effects of a machine as records."""

    def __init__(self, config: RouterConfig, write: Callable[[bytes], object]) -> None:
        """`write` is called with each complete record, in order."""
        self._write = write
        self._encoder = msgspec.msgpack.Encoder()
        write(self._encoder.encode(_Head(PROTOCOL_VERSION, config)))

    def record(self, event: RouterEvent, now_s: float, effects: Iterable[RouterEffect]) -> None:
        """Encodes and writes an event and its effects."""
        record = {
            "now_s": now_s,
            "kind": type(event).__name__,
            "event": event,
            "effects": _named(effects),
        }
        self._write(self._encoder.encode(record))


def records_of(path: Path) -> Iterator[bytes]:
    """Yields the complete records of a file. Raises OSError, ProtocolError."""
    with path.open("rb") as framed, path.open("rb") as file:
        unpacker = msgpack.Unpacker(framed, max_buffer_size=MAX_RECORD_BYTES)  # reads in parts
        begin = 0
        while True:
            try:
                unpacker.skip()
            except msgpack.OutOfData:
                return
            except (msgpack.UnpackException, ValueError) as error:
                reason = f"{type(error).__name__} behind byte {begin}"
                raise ProtocolError(f"{path} is not a recording: {reason}") from error
            end = unpacker.tell()
            if end - begin > MAX_RECORD_BYTES:
                raise ProtocolError(f"{path}: a record of {end - begin} bytes behind byte {begin}")
            yield file.read(end - begin)
            begin = end


def is_recording(first: bytes) -> bool:
    """True if the first record of a file looks like the head of a recording."""
    try:
        return set(msgspec.msgpack.decode(first, type=dict[str, msgspec.Raw])) >= _HEAD_FIELDS
    except msgspec.DecodeError:
        return False


def read(records: Iterable[bytes]) -> Iterator[Recorded]:
    """Yields the recorded events, in order. Raises ProtocolError."""
    rest = iter(records)
    _read_head(rest)
    for _, record, event in _parse(rest):
        effects = msgspec.msgpack.decode(record.effects, type=list[tuple[str, msgspec.Raw]])
        yield Recorded(record.now_s, event, tuple((kind, bytes(raw)) for kind, raw in effects))


def replay(
    records: Iterable[bytes],
    make_machine: Callable[[RouterConfig], RouterMachine] = RouterMachine,
) -> Iterator[Mismatch]:
    """Feeds recorded events to a fresh machine, and yields the differences.

    Raises ProtocolError if the file is not a recording or cannot be replayed here.
    """
    rest = iter(records)
    head = _read_head(rest)
    machine = make_machine(head.config)
    for number, record, event in _parse(rest):
        effects = machine.handle(event, record.now_s)
        replayed, recorded = msgspec.msgpack.encode(_named(effects)), bytes(record.effects)
        if replayed != recorded:
            yield Mismatch(number, record.kind, _as_json(recorded), _as_json(replayed))


def _read_head(records: Iterator[bytes]) -> _Head:
    first = next(records, None)
    if first is None:
        raise ProtocolError("a recording is empty")
    try:
        head = msgspec.msgpack.decode(first, type=_Head)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"record 1 of a recording: {error}") from error
    if head.version != PROTOCOL_VERSION:
        versions = f"{head.version} and {PROTOCOL_VERSION}"
        raise ProtocolError(f"a recording's protocol version differs: {versions}")
    return head


def _parse(records: Iterable[bytes]) -> Iterator[tuple[int, _Event, RouterEvent]]:
    for number, data in enumerate(records, start=2):
        try:
            record = msgspec.msgpack.decode(data, type=_Event)
            kind = _EVENTS.get(record.kind)
            if kind is None:
                raise ProtocolError(f"record {number} of a recording: no event is a {record.kind}")
            event: RouterEvent = msgspec.msgpack.decode(record.event, type=kind)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"record {number} of a recording: {error}") from error
        yield number, record, event


def _named(effects: Iterable[RouterEffect]) -> list[tuple[str, Any]]:
    return [(type(effect).__name__, effect) for effect in effects]


def _as_json(effects: bytes) -> bytes:
    return msgspec.json.encode(msgspec.msgpack.decode(effects))

"""A request machine's events and effects, one JSON line an event.

    {"version": 6, "config": {...}, "is_native": true}           first line
    {"now_s": 1.5, "kind": "Arrived", "event": {...}, "effects": [["SendTo", {...}], ...]}

A machine is a function of its configuration and its events. A fresh one that gets the recorded
events at the recorded times must return the same effects. `replay` finds the differences. That
checks the simulator's claim to run the same router, and it reproduces bugs.

With `slo` both machines must have the router's C++ or both not, since another generator breaks ties
there. A recording says which, and `replay` refuses the other.

A recording holds prompts and answers, so it is as confidential as they are. A line that was cut off
at the end of a file is left out.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.config import RouterConfig, RouterPolicy
from engine.errors import ProtocolError
from engine.messages import PROTOCOL_VERSION
from router.machine.events import (
    Arrived,
    BlocksChanged,
    BlocksUnheard,
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
from router.native.library import is_native
from router.native.machine import native_machine

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
        BlocksUnheard,
        Tick,
    )
}


class _Head(msgspec.Struct, frozen=True):
    version: int
    config: RouterConfig
    is_native: bool = False  # the router's C++ was there


_HEAD_FIELDS = {"version", "config"}  # of any version


class _Line(msgspec.Struct, frozen=True):
    now_s: float
    kind: str
    event: msgspec.Raw
    effects: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event, its time, and the kinds of effects that it had with the effects as JSON."""

    now_s: float
    event: RouterEvent
    effects: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A recorded event after which a machine did something else, and both as JSON."""

    line: int
    kind: str
    recorded: bytes
    replayed: bytes


class Recorder:
    """Writes down what a machine is told and what it answers."""

    def __init__(self, config: RouterConfig, write: Callable[[bytes], object]) -> None:
        """`write` takes whole lines, in order."""
        self._write = write
        self._encoder = msgspec.json.Encoder()
        write(self._encoder.encode(_Head(PROTOCOL_VERSION, config, is_native())) + b"\n")

    def note(self, event: RouterEvent, now_s: float, effects: Iterable[RouterEffect]) -> None:
        """The machine was told this, and this came of it."""
        line = {
            "now_s": now_s,
            "kind": type(event).__name__,
            "event": event,
            "effects": _named(effects),
        }
        self._write(self._encoder.encode(line) + b"\n")


def lines_of(path: Path) -> Iterator[bytes]:
    """The whole lines of a file. Raises OSError."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def is_recording(first_line: bytes) -> bool:
    """True if a file with this first line may be a recording."""
    try:
        return set(msgspec.json.decode(first_line, type=dict[str, msgspec.Raw])) >= _HEAD_FIELDS
    except msgspec.DecodeError:
        return False


def read(lines: Iterable[bytes]) -> Iterator[Recorded]:
    """Returns the recorded events, in order. Raises ProtocolError."""
    for _, line, event in _parse(_after_head(lines)):
        effects = msgspec.json.decode(line.effects, type=list[tuple[str, msgspec.Raw]])
        yield Recorded(line.now_s, event, tuple((kind, bytes(raw)) for kind, raw in effects))


def read_events(lines: Iterable[bytes]) -> Iterator[tuple[float, RouterEvent]]:
    """The recorded events and their times, without what came of them. Raises ProtocolError."""
    for _, line, event in _parse(_after_head(lines)):
        yield line.now_s, event


def replay(
    lines: Iterable[bytes], make_machine: Callable[[RouterConfig], RouterMachine] = native_machine
) -> Iterator[Mismatch]:
    """Feeds recorded events to a fresh machine.

    Raises ProtocolError for what is no recording, and for one that this router cannot repeat.
    """
    rest = iter(lines)
    head = _read_head(rest)
    if head.config.policy is RouterPolicy.SLO and head.is_native != is_native():
        with_it, without = ("was", "is not") if head.is_native else ("was not", "is")
        raise ProtocolError(
            f"the router's C++ {with_it} there when this was recorded, and {without} here: "
            "placements would differ"
        )
    machine = make_machine(head.config)
    for number, line, event in _parse(rest):
        effects = machine.handle(event, line.now_s)
        replayed, recorded = msgspec.json.encode(_named(effects)), bytes(line.effects)
        if replayed != recorded:
            yield Mismatch(number, line.kind, recorded, replayed)


def read_config(lines: Iterator[bytes]) -> RouterConfig:
    """The configuration of the machine that was recorded; takes the first line."""
    return _read_head(lines).config


def _read_head(lines: Iterator[bytes]) -> _Head:
    first = next(lines, None)
    if first is None:
        raise ProtocolError("a recording is empty")
    try:
        head = msgspec.json.decode(first, type=_Head)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"line 1 of a recording: {error}") from error
    if head.version != PROTOCOL_VERSION:
        versions = f"{head.version} and {PROTOCOL_VERSION}"
        raise ProtocolError(f"a recording's protocol version differs: {versions}")
    return head


def _after_head(lines: Iterable[bytes]) -> Iterator[bytes]:
    rest = iter(lines)
    read_config(rest)
    return rest


def _parse(lines: Iterable[bytes]) -> Iterator[tuple[int, _Line, RouterEvent]]:
    for number, text in enumerate(lines, start=2):
        try:
            line = msgspec.json.decode(text, type=_Line)
            kind = _EVENTS.get(line.kind)
            if kind is None:
                raise ProtocolError(f"line {number} of a recording: no event is a {line.kind}")
            event: RouterEvent = msgspec.json.decode(line.event, type=kind)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"line {number} of a recording: {error}") from error
        yield number, line, event


def _named(effects: Iterable[RouterEffect]) -> list[tuple[str, Any]]:
    return [(type(effect).__name__, effect) for effect in effects]

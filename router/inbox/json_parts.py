"""Encodes JSON in parts, for values that would take long in one call.

Encoding holds the interpreter lock, and creating the objects to encode takes even longer. Here a
value is encoded in short parts, each when it is requested. The items of a `LazyItems` are created
when they are encoded. Other work can run between two parts. Structs must have no tags.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from router.inbox.fair_queue import Turn

PART_BYTES = 2**14  # approximate size, one to three milliseconds of log-probabilities
NUM_AT_ONCE = 64  # number of items of a plain list per call of the encoder

ValueT = TypeVar("ValueT")

_encode = msgspec.json.Encoder().encode


class LazyItems(Generic[ValueT]):
    """A list in JSON whose items are `make(value)` for each value, computed when encoded."""

    def __init__(self, values: Sequence[ValueT], make: Callable[[ValueT], object]) -> None:
        self._values = values
        self._make = make

    def __iter__(self) -> Iterator[object]:
        return map(self._make, self._values)


encode_lazy = msgspec.json.Encoder(enc_hook=list).encode  # for short values, all at once


def json_parts(value: object) -> Iterator[bytes]:
    """Yields the JSON of a value in parts of about `PART_BYTES`. There is at least one part."""
    part = bytearray()
    for piece in _pieces(value):
        part += piece
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part)


async def joined_in_turns(parts: Iterator[bytes], turn: Turn) -> bytes:
    """Returns all parts joined. Each part is encoded in a separate turn."""
    data = bytearray()
    for part in parts:
        data += part
        if len(part) >= PART_BYTES:
            await turn()
    return bytes(data)


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, msgspec.Struct):
        value = {
            name: field
            for name, field in msgspec.structs.asdict(value).items()
            if field is not msgspec.UNSET
        }
    if isinstance(value, dict):
        mark = b"{"
        for key, each in value.items():
            yield mark + _encode(key) + b":"
            yield from _pieces(each)
            mark = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, LazyItems):
        yield from _listed(map(_encode, value))
    elif isinstance(value, list | tuple) and value:
        is_nested = isinstance(value[0], dict | list | tuple | LazyItems | msgspec.Struct)
        yield from _nested(value) if is_nested else _listed(_slices(value))
    else:
        yield _encode(value)


def _listed(items: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the JSON of a list whose items are JSON already."""
    mark = b"["
    for item in items:
        yield mark + item
        mark = b","
    yield b"]" if mark == b"," else b"[]"


def _nested(values: Sequence[object]) -> Iterator[bytes]:
    mark = b"["
    for value in values:
        yield mark
        yield from _pieces(value)
        mark = b","
    yield b"]"


def _slices(values: Sequence[object]) -> Iterator[bytes]:
    """Yields the items of a flat list, in groups that are quick to encode."""
    for begin in range(0, len(values), NUM_AT_ONCE):
        yield _encode(values[begin : begin + NUM_AT_ONCE])[1:-1]

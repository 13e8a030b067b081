"""Bounds what a ModelInferRequest costs, by its tags on the wire, before it is parsed. Pure.

protobuf makes an object for each nested message, of 90 bytes and more for two bytes on the wire. It
does so in one call, during which no other thread runs. So the tags of all messages and the numbers
of packed fields are counted first. Strings and raw contents need no look: they take as much memory
as they have bytes.

Source: protobuf's documentation, "Encoding".
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from router.gateway.inference.tensors import MAX_ITEMS
from router.inbox.api_errors import ApiError, invalid_value

MAX_FIELDS = 4096  # in a request, nested messages included; counting takes 2 ms
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True)
class _Message:
    """The fields of a message whose contents are checked, by number."""

    messages: "Mapping[int, _Message]" = field(default_factory=dict)
    numbers: Collection[int] = ()  # fields of packed whole numbers


_ENTRY = _Message({2: _Message()})  # a parameter
_CONTENTS = _Message(numbers=range(1, 6))
_TENSOR = _Message({4: _ENTRY, 5: _CONTENTS}, numbers=(3,))
_REQUEST = _Message({4: _ENTRY, 5: _TENSOR, 6: _Message({2: _ENTRY})})


def check_wire(data: bytes) -> None:
    """Raises ApiError if a request has too many fields, or is no message of protobuf."""
    _Walk(data).check(_REQUEST, 0, len(data))


def no_message() -> ApiError:
    """The error for bytes that protobuf cannot read."""
    return invalid_value("this is not a ModelInferRequest", None)


class _Walk:
    """Counts the fields of one message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = 0

    def check(self, message: _Message, begin: int, end: int) -> None:
        """Counts the fields of a message and of its nested messages."""
        for number, start, stop in self._fields(begin, end):
            if (inner := message.messages.get(number)) is not None:
                self.check(inner, start, stop)
            elif number in message.numbers and stop - start > MAX_ITEMS:
                self._check_packed(start, stop)

    def _check_packed(self, start: int, stop: int) -> None:
        """Counts the last bytes of numbers, which are below 128."""
        octets = np.frombuffer(self._data, np.uint8, stop - start, start)
        if np.count_nonzero(octets < 128) > MAX_ITEMS:
            raise invalid_value(f"a tensor has more than {MAX_ITEMS} items", "inputs")

    def _fields(self, place: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Counts all fields. Yields the number, begin and end of each field of bytes."""
        while place < end:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise invalid_value(f"the request has more than {MAX_FIELDS} fields", "inputs")
            tag, place = self._varint(place, end)
            match tag & 7:
                case 0:
                    _, place = self._varint(place, end)
                case 1:
                    place += 8
                case 5:
                    place += 4
                case 2:
                    length, place = self._varint(place, end)
                    if place + length > end:
                        raise no_message()
                    yield tag >> 3, place, place + length
                    place += length
                case _:
                    raise no_message()
        if place != end:
            raise no_message()

    def _varint(self, place: int, end: int) -> tuple[int, int]:
        """Reads a number. Returns it and the place behind it."""
        value = 0
        for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
            if place >= end:
                raise no_message()
            byte = self._data[place]
            place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, place
        raise no_message()

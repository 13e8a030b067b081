"""Limits the cost of parsing a ModelInferRequest: counts its fields in the encoded bytes. Pure.

protobuf makes an object of at least 90 bytes for each nested message, which may have only two
encoded bytes. Parsing is one call, during which no other thread runs. So the fields of all messages
and the numbers in packed fields are counted first. Strings and raw contents are not counted,
because their memory is proportional to their bytes.

Source: protobuf's documentation, "Encoding".
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from router.gateway.inference.tensors import MAX_ITEMS
from router.inbox.api_errors import ApiError, invalid_value

MAX_FIELDS = 4096  # maximum fields per request, with nested messages; counting takes 2 ms
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True)
class _Message:
    """The type of a message whose fields are counted.

    `messages` has nested types by field number.
    """

    messages: "Mapping[int, _Message]" = field(default_factory=dict)
    numbers: Collection[int] = ()  # field numbers of packed integers


_ENTRY = _Message({2: _Message()})  # an entry of the map `parameters`
_CONTENTS = _Message(numbers=range(1, 6))
_TENSOR = _Message({4: _ENTRY, 5: _CONTENTS}, numbers=(3,))
_REQUEST = _Message({4: _ENTRY, 5: _TENSOR, 6: _Message({2: _ENTRY})})


def check_wire(data: bytes) -> None:
    """Raises ApiError if a request has too many fields, or is not a protobuf message."""
    _Walk(data).check(_REQUEST, 0, len(data))


def no_message() -> ApiError:
    """Returns the error for bytes that protobuf cannot read."""
    return invalid_value("this is not a ModelInferRequest", None)


class _Walk:
    """Counts the fields of one request."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = 0

    def check(self, message: _Message, begin: int, end: int) -> None:
        """Counts the fields of a message and of its nested messages. Raises ApiError."""
        for number, start, stop in self._fields(begin, end):
            if (inner := message.messages.get(number)) is not None:
                self.check(inner, start, stop)
            elif number in message.numbers and stop - start > MAX_ITEMS:
                self._check_packed(start, stop)

    def _check_packed(self, start: int, stop: int) -> None:
        """Counts packed numbers: the last byte of each number is below 128. Raises ApiError."""
        octets = np.frombuffer(self._data, np.uint8, stop - start, start)
        if np.count_nonzero(octets < 128) > MAX_ITEMS:
            raise invalid_value(f"a tensor has more than {MAX_ITEMS} items", "inputs")

    def _fields(self, place: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Counts all fields. Yields number, start and end of each length-delimited field."""
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
        """Reads a varint. Returns its value and the position after it."""
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

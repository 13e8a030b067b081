"""Reads the header of a GGUF file: its key/values, and where its tensors lie.

    "GGUF", version u32, number of tensors u64, number of key/values u64
    key/values      key, type u32, value
    tensors         name, number of dimensions u32, dimensions u64, type u32, offset u64
    data            begins at a multiple of `general.alignment`, as each tensor does

Numbers are little-endian. A string is its length (u64) and UTF-8. An array is the type of its
values (u32), their number (u64) and the values. Dimensions are listed from the innermost one.

Each count, length and offset is compared with the rest of the file before memory of that size is
allocated. CheckpointError names the file, the fault, and the key or tensor.

Source: `docs/gguf.md` of ggml.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from engine.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # both versions have the same layout
MAX_HEADER_BYTES = 64 * 2**20  # four times the size of the longest known vocabularies
MAX_PAIRS = 2**16
MAX_TENSORS = 2**17
MAX_ARRAY_LEN = 2**22
MAX_DIMS = 4  # the largest number of dimensions in ggml
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16

_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_LEAST_BYTES = {_STRING: 8, **{kind: struct.calcsize(code) for kind, code in _NUMBERS.items()}}

BLOCKS = {  # tensor types that this module reads: values and bytes of one block
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
}
_TYPES = (  # names of the tensor types by number; `-`: a number that ggml no longer uses
    "F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS"
    " IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - MXFP4"
)
TYPE_NAMES = {number: name for number, name in enumerate(_TYPES.split()) if name != "-"}

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's type, its shape (outermost dimension first), and its bytes in the file."""

    type_name: str
    shape: tuple[int, ...]
    begin: int  # offset in the file, in bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file: its key/values, and its tensors by name."""

    path: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorPlace]


def read_gguf(path: Path) -> GgufHeader:
    """Reads the header of a GGUF file. Raises CheckpointError if the file is bad or not
    supported.
    """
    size = path.stat().st_size
    if size < len(MAGIC):
        raise CheckpointError(f"{path}: corrupted: not a GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reading(path, data, size).header()


class _Reading:
    """A cursor over the bytes of the header."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._end = min(size, MAX_HEADER_BYTES)
        self._at = 0

    def header(self) -> GgufHeader:
        num_tensors, num_pairs = self._counts()
        values: dict[str, Value] = {}
        for _ in range(num_pairs):
            key = self._string("a key")
            if key in values:
                raise self._corrupted(f"the key {key!r:.80} occurs twice")
            values[key] = self._value(key)
        if values.get("split.count", 1) not in (0, 1):
            raise CheckpointError(f"{self._path}: is split into several files; merge them first")
        described = self._described(num_tensors)
        start = self._aligned(values)
        tensors = {name: self._placed(name, start, *each) for name, each in described.items()}
        return GgufHeader(self._path, values, tensors)

    def _counts(self) -> tuple[int, int]:
        if self._take(len(MAGIC), "its first bytes") != MAGIC:
            raise self._corrupted("not a GGUF file")
        version = self._number("I", "its version")
        if version not in VERSIONS:
            kind = "a big-endian file" if version & 0xFFFF == 0 else f"GGUF version {version}"
            raise CheckpointError(f"{self._path}: {kind} is not read, only versions 2 and 3")
        num_tensors, num_pairs = (self._number("Q", "its counts") for _ in range(2))
        if num_tensors > MAX_TENSORS or num_pairs > MAX_PAIRS:
            raise self._corrupted(f"it claims {num_tensors} tensors and {num_pairs} key/values")
        return num_tensors, num_pairs

    def _value(self, key: str) -> Value:
        kind = self._number("I", key)
        if kind != _ARRAY:
            return self._scalar(kind, key)
        kind, length = self._number("I", key), self._number("Q", key)
        if kind == _ARRAY:
            raise CheckpointError(f"{self._path}: {key!r:.80} holds arrays of arrays")
        least = _LEAST_BYTES.get(kind, 1) * length
        if length > MAX_ARRAY_LEN or least > self._end - self._at:
            raise self._corrupted(f"{key!r:.80} claims {length} values")
        if kind == _STRING:
            return cast("list[Scalar]", self._strings(length, key))
        if kind not in _NUMBERS:
            raise self._unknown(kind, key)
        return list(struct.unpack(f"<{length}{_NUMBERS[kind]}", self._take(least, key)))

    def _scalar(self, kind: int, key: str) -> Scalar:
        if kind == _STRING:
            return self._string(key)
        if kind not in _NUMBERS:
            raise self._unknown(kind, key)
        return cast("Scalar", self._number(_NUMBERS[kind], key))

    def _described(self, num_tensors: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Returns the tensors' shapes, types and offsets in the file, by tensor name."""
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._string("a tensor's name")
            if name in found:
                raise self._corrupted(f"the tensor {name!r:.80} occurs twice")
            num_dims = self._number("I", name)
            if not 1 <= num_dims <= MAX_DIMS:
                raise self._corrupted(f"{name!r:.80} has {num_dims} dimensions")
            dims = struct.unpack(f"<{num_dims}Q", self._take(8 * num_dims, name))
            found[name] = dims[::-1], self._number("I", name), self._number("Q", name)
        return found

    def _aligned(self, values: Mapping[str, Value]) -> int:
        """Returns the offset of the data section. All later offsets are multiples of the
        alignment.
        """
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT:
            raise self._corrupted(f"general.alignment is {alignment!r}")
        if alignment & (alignment - 1):
            raise self._corrupted(f"general.alignment is {alignment}, no power of two")
        return -(-self._at // alignment) * alignment

    def _placed(
        self, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> TensorPlace:
        type_name = TYPE_NAMES.get(kind, f"number {kind}")
        if type_name not in BLOCKS:
            known = ", ".join(BLOCKS)
            raise CheckpointError(
                f"{self._path}: {name:.80} has type {type_name}; read are {known}"
            )
        block_len, block_bytes = BLOCKS[type_name]
        num_values = prod(shape)
        if num_values == 0 or shape[-1] % block_len:
            raise self._corrupted(f"{name!r:.80} has shape {list(shape)}, and type {type_name}")
        num_bytes = num_values // block_len * block_bytes
        if start + offset + num_bytes > self._size:
            raise self._corrupted(
                f"{name!r:.80} ends at byte {start + offset + num_bytes} of {self._size}"
            )
        return TensorPlace(type_name, shape, start + offset, num_bytes)

    def _string(self, what: str) -> str:
        return self._strings(1, what)[0]

    def _strings(self, number: int, what: str) -> list[str]:
        """Reads consecutive strings in one call, because a vocabulary has a hundred thousand
        strings.
        """
        found, at, end, data = [], self._at, self._end, self._data
        for _ in range(number):
            begin = at + _LENGTH.size
            if begin > end or (at := begin + _LENGTH.unpack_from(data, at)[0]) > end:
                raise self._corrupted(f"it ends within {what!r:.80}")
            found.append(data[begin:at])
        self._at = at
        try:
            return [each.decode() for each in found]
        except UnicodeDecodeError:
            raise self._corrupted(f"{what!r:.80} is not UTF-8") from None

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code), what))[0]

    def _take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self._end - self._at:
            raise self._corrupted(f"it ends within {what!r:.80}")
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def _unknown(self, kind: int, key: str) -> CheckpointError:
        return self._corrupted(f"{key!r:.80} has a value of unknown type {kind}")

    def _corrupted(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: corrupted: {why}")

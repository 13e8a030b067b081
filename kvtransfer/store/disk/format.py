"""The header of a slot on disk, and the check of a table of headers.

One table holds the headers of all slots, in order; `src/transfer/disk.h` has the same structure:

    bytes      field
    0 … 8      magic, "BATON-KV"
    8 … 16     version; 1 if there is a parent, else 0
    16 … 64    identity of model and layout; hash of the block; hash of its parent, or zeros
    64 … 104   bytes of the payload; xxh3-64 of the payload; sequence number; slot; slots per slab
    104 … 120  zeros
    120 … 128  xxh3-64 of the bytes before

Numbers are little-endian. For input below 241 bytes, XXH3 is another algorithm, which Baton's C++
does not have. So shorter input is padded with zeros to 256 bytes before hashing.

An empty slot has a header of zeros. The header includes the slot number and the slots per slab.
These detect a table that belongs to slabs of another geometry, and would point to wrong payloads.

Pure: arrays and bytes only.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from engine.messages import HASH_BYTES

HEADER_BYTES = 128
ALIGNMENT = 4096  # bytes; offsets of slots and direct I/O need this alignment
VERSION = 1
SEQUENCE_END = 1 << 63
MAGIC = b"BATON-KV"
EMPTY = bytes(HEADER_BYTES)

HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("has_parent", "<u4"),
        ("identity", "V16"),
        ("hash", "V16"),
        ("parent", "V16"),
        ("payload_bytes", "<u8"),
        ("payload_checksum", "<u8"),
        ("sequence", "<u8"),
        ("slot", "<u8"),
        ("slab_slots", "<u8"),
        ("reserved", "V16"),
        ("checksum", "<u8"),
    ]
)
_UNSEALED = struct.Struct("<8sII16s16s16sQQQQQ16s")  # a header without its own checksum
_CHECKSUM = struct.Struct("<Q")
_PAYLOAD_CHECKSUM_OFFSET = 72
_SHORTEST_BYTES = 241

Headers = npt.NDArray[np.void]  # shape [n], of type HEADER
Checksums = Callable[[Headers], npt.NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class DiskGeometry:
    """The sizes that determine the place of each block on disk, and the identity of the blocks."""

    identity: bytes  # identity of model and layout, 16 bytes
    block_bytes: int
    slab_slots: int  # slots of each slab; the last slab may have fewer
    max_slots: int

    @property
    def stride_bytes(self) -> int:
        """Bytes from one slot to the next: the size of a block, rounded up for direct I/O."""
        return -(-self.block_bytes // ALIGNMENT) * ALIGNMENT


class HeaderVerdict(IntEnum):
    """The result of checking an entry of the table: no fault, or the first fault found."""

    FINE = 0
    EMPTY = 1
    NO_HEADER = 2  # the magic number is wrong
    OTHER_VERSION = 3
    DAMAGED = 4  # the write was torn, or bits are flipped
    OTHER_IDENTITY = 5
    OTHER_GEOMETRY = 6  # different payload size, slot number or slab size
    NO_SEQUENCE = 7  # a sequence number that no store can have reached
    DUPLICATE = 8  # another slot has a later copy of the same block


@dataclass(frozen=True, slots=True, eq=False)
class RecoveredBlocks:
    """The blocks on disk, oldest first. Arrays are [n]; row i of each array describes block i."""

    slots: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.void]  # type V16, the hash of each block
    # type V16, the hash of each block's parent; zeros without a parent
    parents: npt.NDArray[np.void]
    has_parent: npt.NDArray[np.bool_]
    sequences: npt.NDArray[np.uint64]
    checksums: npt.NDArray[np.uint64]  # checksum of each payload

    def __len__(self) -> int:
        return len(self.slots)

    def slot_by_hash(self) -> dict[bytes, int]:
        """Returns a dict from each block to its slot, oldest block first."""
        return dict(zip(self.hashes.tolist(), self.slots.tolist(), strict=True))

    def parent_by_hash(self) -> dict[bytes, bytes | None]:
        """Returns a dict from each block to its parent, oldest block first."""
        parents = zip(self.parents.tolist(), self.has_parent.tolist(), strict=True)
        found = (parent if has_parent else None for parent, has_parent in parents)
        return dict(zip(self.hashes.tolist(), found, strict=True))


_COLUMNS = tuple(field.name for field in fields(RecoveredBlocks))


def unsealed_header(
    geometry: DiskGeometry, slot: int, *, block_hash: bytes, parent: bytes | None, sequence: int
) -> bytes:
    """Returns a header without its two checksums, which the engine computes during the write."""
    return _UNSEALED.pack(
        MAGIC,
        VERSION,
        parent is not None,
        geometry.identity,
        block_hash,
        parent or bytes(HASH_BYTES),
        geometry.block_bytes,
        0,
        sequence,
        slot,
        geometry.slab_slots,
        bytes(HASH_BYTES),
    ) + bytes(_CHECKSUM.size)


def sealed_header(unsealed: bytes, payload_checksum: int) -> bytes:
    """Returns the header with the checksum of the payload and the checksum of the header."""
    header = bytearray(unsealed)
    _CHECKSUM.pack_into(header, _PAYLOAD_CHECKSUM_OFFSET, payload_checksum)
    _CHECKSUM.pack_into(header, _UNSEALED.size, disk_checksum(header[: _UNSEALED.size]))
    return bytes(header)


def disk_checksum(content: bytes | bytearray | memoryview) -> int:
    """Returns the xxh3-64 of a payload, or of a header without its own checksum."""
    if len(content) < _SHORTEST_BYTES:
        content = bytes(content).ljust(256, b"\0")
    return xxhash.xxh3_64_intdigest(content)


def judge(
    headers: Headers, first_slot: int, geometry: DiskGeometry, checksums: Checksums
) -> npt.NDArray[np.uint8]:
    """Returns a HeaderVerdict for each entry of a part of the table, from slot `first_slot` on."""
    num_headers = len(headers)
    words = headers.view("<u8").reshape(num_headers, HEADER_BYTES // 8)
    slots = np.arange(first_slot, first_slot + num_headers, dtype=np.uint64)
    tests = (
        (HeaderVerdict.EMPTY, ~words.any(axis=1)),
        (HeaderVerdict.NO_HEADER, headers["magic"] != np.void(MAGIC)),
        (HeaderVerdict.OTHER_VERSION, headers["version"] != VERSION),
        (HeaderVerdict.DAMAGED, headers["checksum"] != checksums(headers)),
        (HeaderVerdict.OTHER_IDENTITY, headers["identity"] != np.void(geometry.identity)),
        (
            HeaderVerdict.OTHER_GEOMETRY,
            (headers["payload_bytes"] != geometry.block_bytes)
            | (headers["slot"] != slots)
            | (headers["slab_slots"] != geometry.slab_slots),
        ),
        (HeaderVerdict.NO_SEQUENCE, headers["sequence"] >= SEQUENCE_END),
    )
    verdicts = np.select([test for _, test in tests], [verdict for verdict, _ in tests], 0)
    return verdicts.astype(np.uint8)


def claimed(headers: Headers) -> RecoveredBlocks:
    """Returns the blocks that valid headers name, in the order of the headers."""
    return RecoveredBlocks(
        slots=headers["slot"].astype(np.int64),
        hashes=headers["hash"].copy(),
        parents=headers["parent"].copy(),
        has_parent=headers["has_parent"] != 0,
        sequences=headers["sequence"].copy(),
        checksums=headers["payload_checksum"].copy(),
    )


def merged(pieces: Sequence[RecoveredBlocks]) -> RecoveredBlocks:
    """Returns the blocks of all pieces, oldest first. Of blocks with equal hashes, only the latest
    is kept.

    There must be at least one piece.
    """
    joined = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in _COLUMNS}
    order = np.argsort(joined["sequences"], kind="stable")
    order = _without_duplicates(order, joined["hashes"])
    return RecoveredBlocks(**{name: column[order] for name, column in joined.items()})


def _without_duplicates(
    order: npt.NDArray[np.int64], hashes: npt.NDArray[np.void]
) -> npt.NDArray[np.int64]:
    """Returns `order` without the rows whose hash occurs again in a later row."""
    halves = np.sort(hashes.view("<u8")[::2])
    if not np.any(halves[1:] == halves[:-1]):  # this is the usual case, and much faster
        return order
    last_by_hash = {block_hash: i for i, block_hash in enumerate(hashes[order].tolist())}
    return order[np.sort(np.fromiter(last_by_hash.values(), np.int64, len(last_by_hash)))]

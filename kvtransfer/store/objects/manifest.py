"""The manifest of a segment: the blocks in the segment, with their offsets and checksums.

    magic 8 bytes | version u32 | xxh3-64 of the body u64 | body (msgpack), all little-endian

The manifest is written after its segment, so it proves that the segment is complete. It contains
the name of its segment, so it cannot be used for another. Pure: no I/O.

Checksums are xxh3-64, as on the wire between workers. Each byte of a block is hashed once on write
and once on read, so speed matters: xxh3 is some ten times as fast as BLAKE2b. A damaged block
passes the check with a chance of 2^-64. A checksum without a key does not protect against forgery:
an account that may write to the folder can store any KV under any hash.
"""

import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from engine.messages import HASH_BYTES
from engine.worker.blocks import BlockHash
from kvtransfer.native.copying import checksum

MAGIC = b"BatonKVM"
MANIFEST_VERSION = 1
SEGMENT_BLOCKS = 64
IDENTITY_BYTES = 16
MAX_MANIFEST_BYTES = 8192  # 64 blocks need 4.6 KB

_HEADER = struct.Struct("<8sIQ")

_Digest = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class ManifestFault(StrEnum):
    """The first reason why a manifest cannot be used."""

    SIZE = "manifest_size"
    MAGIC = "manifest_magic"
    VERSION = "manifest_version"
    CHECKSUM = "manifest_checksum"
    FORMAT = "manifest_format"
    FOREIGN = "manifest_foreign"  # the manifest of another segment, model or layout


class ManifestBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block of a segment: `length` bytes from `offset` on, with the xxh3-64 `checksum`."""

    block_hash: _Digest
    parent: _Digest | None
    offset: _Count
    length: _Count
    checksum: _Count

    @property
    def end(self) -> int:
        """Offset of the first byte after the block."""
        return self.offset + self.length


class SegmentTerms(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The facts of a segment that a reader checks: its name, identity and sizes.

    `identity` is the digest of the model's fingerprint and the layout of its KV.
    """

    name: Annotated[str, msgspec.Meta(max_length=64)]
    identity: _Digest
    block_bytes: _Count
    segment_bytes: _Count


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    terms: SegmentTerms
    blocks: Annotated[
        tuple[ManifestBlock, ...], msgspec.Meta(min_length=1, max_length=SEGMENT_BLOCKS)
    ]


_body = msgspec.msgpack.Decoder(_Body)


def describe_blocks(
    blocks: Sequence[tuple[BlockHash, BlockHash | None]], payload: bytes, block_bytes: int
) -> tuple[ManifestBlock, ...]:
    """Returns the entries of blocks, given as (hash, parent), that fill `payload` in order."""
    view = memoryview(payload)
    return tuple(
        ManifestBlock(block_hash, parent, start, block_bytes, checksum(view[start:][:block_bytes]))
        for start, (block_hash, parent) in zip(
            range(0, len(payload), block_bytes), blocks, strict=True
        )
    )


def encode_manifest(terms: SegmentTerms, blocks: Sequence[ManifestBlock]) -> bytes:
    """Returns the manifest of a segment with these blocks."""
    body = msgspec.msgpack.encode(_Body(terms, tuple(blocks)))
    return _HEADER.pack(MAGIC, MANIFEST_VERSION, checksum(body)) + body


def decode_manifest(data: bytes, terms: SegmentTerms) -> tuple[ManifestBlock, ...] | ManifestFault:
    """Returns the blocks of the segment with these terms, or why the manifest cannot be used.

    Each returned block lies in the segment, has `block_bytes` bytes, and a hash of its own.
    """
    if not _HEADER.size < len(data) <= MAX_MANIFEST_BYTES:
        return ManifestFault.SIZE
    magic, version, expected = _HEADER.unpack_from(data)
    if magic != MAGIC:
        return ManifestFault.MAGIC
    if version != MANIFEST_VERSION:
        return ManifestFault.VERSION
    if checksum(data[_HEADER.size :]) != expected:
        return ManifestFault.CHECKSUM
    try:
        body = _body.decode(data[_HEADER.size :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ManifestFault.FORMAT
    if body.terms != terms:
        return ManifestFault.FOREIGN
    return body.blocks if _is_sound(body.blocks, terms) else ManifestFault.FORMAT


def _is_sound(blocks: Sequence[ManifestBlock], terms: SegmentTerms) -> bool:
    in_place = all(
        block.length == terms.block_bytes and block.end <= terms.segment_bytes for block in blocks
    )
    return in_place and len({block.block_hash for block in blocks}) == len(blocks)

"""The manifest of a segment: the blocks in the segment, with their offsets and checksums.

    magic 8 bytes | version u32 | xxh3-64 of the body u64 | body (msgpack), all little-endian

The manifest is written after its segment, so it proves that the segment is complete. The manifest
contains the name of its segment, so it cannot be used for another segment. Pure: no I/O.

Checksums are xxh3-64, as on the wire between workers. Each byte of a block is hashed once on write
and once on read, so speed matters: xxh3 is some ten times as fast as BLAKE2b. A damaged block
passes the check with a chance of 2^-64. A checksum without a key does not protect against forgery:
an account that may write to the folder can store any KV under any hash.

A listing shows segments by the names of their objects:

    <folder>/<seconds since 1970>-<writer>-<number>.segment     blocks without gaps
    <folder>/<seconds since 1970>-<writer>-<number>.manifest    written after the segment, and
                                                                deleted before it

The writer is a random number that a store draws at each start. So stores never write the same
object and need no coordination. An object is never changed. Objects with other names are ignored.
"""

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

import msgspec

from engine.messages import HASH_BYTES
from engine.worker.blocks import BlockHash
from kvtransfer.native.copying import checksum

MAGIC = b"BatonKVM"
MANIFEST_VERSION = 1
SEGMENT_BLOCKS = 64
IDENTITY_BYTES = 16
MAX_MANIFEST_BYTES = 8192  # a manifest of 64 blocks needs 4.6 KB

_HEADER = struct.Struct("<8sIQ")

_Digest = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class ManifestFault(StrEnum):
    """The reason why a manifest cannot be used: the first fault found."""

    SIZE = "manifest_size"
    MAGIC = "manifest_magic"
    VERSION = "manifest_version"
    CHECKSUM = "manifest_checksum"
    FORMAT = "manifest_format"
    FOREIGN = "manifest_foreign"  # the manifest belongs to another segment, model or layout


class ManifestBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A block in a segment: `length` bytes from `offset` on, whose xxh3-64 is `checksum`."""

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
    """The facts about a segment that its reader checks: name, identity and sizes.

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
    """Returns manifest entries for blocks (hash, parent) that fill `payload` in order."""
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
    """Returns the blocks of the segment with these terms, or why the manifest is unusable.

    Each returned block lies within the segment and has `block_bytes` bytes. No hash occurs twice.
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


MANIFEST_SUFFIX = ".manifest"
SEGMENT_SUFFIX = ".segment"
WRITER_BYTES = 8

GARBAGE_AGE_S = 86_400.0
OWN_GARBAGE_AGE_S = 3_600.0

_OBJECT = re.compile(r"(([0-9a-f]{10})-[0-9a-f]{16}-[0-9a-f]{8})\.(manifest|segment)")


class ObjectFacts(NamedTuple):
    """A listed object. `modified_s` is in seconds since 1970; None if the store does not say."""

    name: str
    num_bytes: int
    modified_s: float | None


class ListedSegment(NamedTuple):
    """A listed segment with the sizes of its two objects; a size is None if the object is
    absent.
    """

    name: str
    segment_bytes: int | None
    manifest_bytes: int | None
    written_s: float  # time of writing, in seconds since 1970

    @property
    def num_bytes(self) -> int:
        """The size of both objects together."""
        return (self.segment_bytes or 0) + (self.manifest_bytes or 0)

    @property
    def is_half(self) -> bool:
        """True if one of the two objects is absent."""
        return self.segment_bytes is None or self.manifest_bytes is None

    def has_our_size(self, max_segment_bytes: int) -> bool:
        """Returns True if both objects exist and have sizes that this store could have written."""
        if self.segment_bytes is None or self.manifest_bytes is None:
            return False
        is_manifest = 0 < self.manifest_bytes <= MAX_MANIFEST_BYTES
        return is_manifest and 0 < self.segment_bytes <= max_segment_bytes


def segment_name(written_s: int, writer: str, number: int) -> str:
    """Returns the name of a writer's segment. Sorted names are in the order of writing."""
    return f"{written_s:010x}-{writer}-{number:08x}"


def pair_objects(objects: Iterable[ObjectFacts]) -> list[ListedSegment]:
    """Returns the listed segments, oldest first."""
    found: dict[str, ListedSegment] = {}
    for facts in objects:
        match = _OBJECT.fullmatch(facts.name)
        if match is None or facts.num_bytes < 0:
            continue
        name, named_s, kind = match.group(1), float(int(match.group(2), 16)), match.group(3)
        modified_s = named_s if facts.modified_s is None else facts.modified_s
        one = found.get(name, ListedSegment(name, None, None, modified_s))
        one = one._replace(written_s=max(one.written_s, modified_s))
        if kind == "segment":
            found[name] = one._replace(segment_bytes=facts.num_bytes)
        else:
            found[name] = one._replace(manifest_bytes=facts.num_bytes)
    return sorted(found.values(), key=lambda one: (one.written_s, one.name))


def find_garbage(
    segments: Iterable[ListedSegment], bad: Collection[str], writer: str, now_s: float
) -> Iterator[str]:
    """Yields the names of old segments that are incomplete or unusable.

    `bad` are the names of segments with an unusable manifest. `now_s` is in seconds since 1970.
    Another writer may not have written its segment's manifest yet, so only segments that are a day
    old count.
    """
    for one in segments:
        is_own = one.name.split("-")[1] == writer
        oldest_s = now_s - (OWN_GARBAGE_AGE_S if is_own else GARBAGE_AGE_S)
        if (one.is_half or one.name in bad) and one.written_s < oldest_s:
            yield one.name

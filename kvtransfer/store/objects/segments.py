"""The index of known segments: finds blocks, and chooses segments to delete. Pure: no I/O.

A segment passes through these states, each at most once:

    1. added     its bytes count; its manifest has not been read or written yet
    2. filled    its blocks can be found; with an unusable manifest it has no blocks
    3. hidden    being deleted: its blocks cannot be found, and its bytes still count
    4. removed

The bytes of a segment count from before its write until after its deletion. So `num_bytes` is never
less than the bytes that this store has in the object store.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.worker.blocks import BlockHash
from kvtransfer.store.objects.manifest import SEGMENT_BLOCKS, ManifestBlock


class ObjectBlock(NamedTuple):
    """A block to write to the object store. `payload` is the block's record of `block_bytes`
    bytes.
    """

    block_hash: BlockHash
    parent: BlockHash | None
    payload: bytes | memoryview


class ObjectEntry(NamedTuple):
    """A block that is in the object store."""

    block_hash: BlockHash
    parent: BlockHash | None


class SegmentRead(NamedTuple):
    """A range of a segment that consists of these blocks without gaps."""

    name: str
    blocks: tuple[ManifestBlock, ...]

    @property
    def start(self) -> int:
        """Offset of the range's first byte in the segment."""
        return self.blocks[0].offset

    @property
    def end(self) -> int:
        """Offset after the range's last byte in the segment."""
        return self.blocks[-1].end


@dataclass(slots=True)
class _Segment:
    num_bytes: int
    written_s: float
    blocks: dict[BlockHash, ManifestBlock] = field(default_factory=dict)
    is_filled: bool = False
    is_bad: bool = False
    is_hidden: bool = False


class SegmentIndex:
    """Indexes the segments of one identity and the blocks in them. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._segments: dict[str, _Segment] = {}
        # names of the segments that have each block; reads use the last segment
        self._homes: dict[BlockHash, list[str]] = {}
        self.num_bytes = 0

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._homes

    @property
    def names(self) -> list[str]:
        """The names of all known segments."""
        return list(self._segments)

    @property
    def bad(self) -> set[str]:
        """Names of segments whose manifest cannot be used."""
        return {name for name, segment in self._segments.items() if segment.is_bad}

    def entries(self) -> list[ObjectEntry]:
        """Yields each block that can be found, once."""
        blocks = (self._segments[homes[-1]].blocks[key] for key, homes in self._homes.items())
        return [_entry(block) for block in blocks]

    def add(self, name: str, num_bytes: int, written_s: float) -> None:
        """Adds a segment whose blocks are not known yet, with its name and size."""
        assert name not in self._segments
        self._segments[name] = _Segment(num_bytes, written_s)
        self.num_bytes += num_bytes

    def correct_size(self, name: str, num_bytes: int) -> None:
        """Sets a segment's size to the size in a listing."""
        self.num_bytes += num_bytes - self._segments[name].num_bytes
        self._segments[name].num_bytes = num_bytes

    def needs_manifest(self, name: str) -> bool:
        """Returns True if the segment's manifest has not been read yet."""
        return not self._segments[name].is_filled

    def fill(self, name: str, blocks: Sequence[ManifestBlock]) -> None:
        """Adds the blocks of a segment, unless the segment has been hidden or removed."""
        segment = self._segments.get(name)
        if segment is None or segment.is_hidden or segment.is_filled:
            return
        segment.is_filled = True
        for block in blocks:
            block_hash = BlockHash(block.block_hash)
            segment.blocks[block_hash] = block
            self._homes.setdefault(block_hash, []).append(name)

    def mark_bad(self, name: str) -> None:
        """Marks a segment's manifest as unusable, so that it is not read again."""
        if name in self._segments:
            self._segments[name].is_bad = self._segments[name].is_filled = True

    def remove_block(self, name: str, block_hash: BlockHash) -> None:
        """Removes a damaged block, so that it is never read from this segment again."""
        segment = self._segments.get(name)
        if segment is not None and segment.blocks.pop(block_hash, None) is not None:
            self._leave(block_hash, name)

    def hide(self, names: Iterable[str]) -> None:
        """Hides segments that are about to be deleted: their blocks cannot be found any more."""
        for name in names:
            segment = self._segments.get(name)
            if segment is None:
                continue
            segment.is_hidden = True
            for block_hash in segment.blocks:
                self._leave(block_hash, name)
            segment.blocks.clear()

    def remove(self, names: Iterable[str]) -> None:
        """Removes segments that no longer exist."""
        for name in names:
            if name in self._segments:
                self.hide([name])
                self.num_bytes -= self._segments.pop(name).num_bytes

    def choose_victims(self, num_bytes: int) -> list[str] | None:
        """Returns the oldest segments to delete to make room for `num_bytes` more bytes.

        Returns None if `num_bytes` exceeds the limit even after all deletions.
        """
        if num_bytes > self._max_bytes:
            return None
        excess = self.num_bytes + num_bytes - self._max_bytes
        victims: list[str] = []
        if excess > 0:
            ages = sorted((one.written_s, name) for name, one in self._segments.items())
            for _, name in ages:
                victims.append(name)
                excess -= self._segments[name].num_bytes
                if excess <= 0:
                    break
        return victims

    def plan_reads(self, hashes: Iterable[BlockHash]) -> list[SegmentRead]:
        """Returns the ranges that contain these blocks. Adjacent blocks share a range.

        Unknown blocks have no range.
        """
        by_segment: dict[str, list[ManifestBlock]] = {}
        for block_hash in dict.fromkeys(hashes):
            if homes := self._homes.get(block_hash):
                block = self._segments[homes[-1]].blocks[block_hash]
                by_segment.setdefault(homes[-1], []).append(block)
        return [
            SegmentRead(name, run)
            for name, blocks in by_segment.items()
            for run in _runs(sorted(blocks, key=lambda block: block.offset))
        ]

    def validate(self) -> None:
        """Asserts that all parts of the index are consistent."""
        assert self.num_bytes == sum(one.num_bytes for one in self._segments.values())
        homes = {(key, name) for key, names in self._homes.items() for name in names}
        assert homes == {(key, name) for name, one in self._segments.items() for key in one.blocks}
        assert all(self._homes.values())
        assert not any(one.blocks for one in self._segments.values() if one.is_hidden or one.is_bad)

    def _leave(self, block_hash: BlockHash, name: str) -> None:
        homes = self._homes[block_hash]
        homes.remove(name)
        if not homes:
            del self._homes[block_hash]


def choose_blocks(
    blocks: Sequence[ObjectBlock], block_bytes: int, known: Container[BlockHash]
) -> list[ObjectBlock]:
    """Returns the blocks to write to a new segment: each block that is not known yet, once.

    Raises ValueError if there are too many blocks for a segment, or a block has a wrong size.
    """
    if len(blocks) > SEGMENT_BLOCKS:
        raise ValueError(f"{len(blocks)} blocks, but a segment holds {SEGMENT_BLOCKS}")
    for block in blocks:
        if memoryview(block.payload).nbytes != block_bytes:
            raise ValueError(f"a block does not have {block_bytes} bytes")
    fresh = {block.block_hash: block for block in blocks if block.block_hash not in known}
    return list(fresh.values())


def _entry(block: ManifestBlock) -> ObjectEntry:
    parent = None if block.parent is None else BlockHash(block.parent)
    return ObjectEntry(BlockHash(block.block_hash), parent)


def _runs(blocks: Sequence[ManifestBlock]) -> Iterator[tuple[ManifestBlock, ...]]:
    """Yields maximal runs of adjacent blocks. `blocks` must be sorted by offset."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i].offset != blocks[i - 1].end:
            yield tuple(blocks[start:i])
            start = i

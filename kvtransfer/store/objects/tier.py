"""Keeps blocks in an object store and finds them again. No call waits for the object store.

Blocks are written in immutable segments of up to 64 blocks. Each segment has a manifest, which is
written after the segment. So any number of stores can share a folder: there is no common index, and
no object is ever changed. If two stores write the same block, two copies exist, which is harmless.
A store finds the segments of other stores when it lists the folder, on `open` and `refresh`.

Every call returns a future at once. Another thread sets the future's value in bounded time.
Failures of the object store are counted, and the caller sees a miss; no future raises them. A block
is returned only if its length and checksum are correct.

One thread writes, lists and deletes. So a listing never meets a half-written segment of this store.

`max_bytes` bounds all segments of this identity, including segments of other stores. If a new
segment has no room, the oldest segments are deleted. The size of a listing is not bounded: fsspec
returns it whole. Objects of other programs under this URL are neither read nor deleted.
"""

import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from engine.clock import Clock, unix_time_s
from engine.worker.blocks import BlockHash
from kvtransfer.native.copying import checksum
from kvtransfer.store.objects.calls import CallThreads, TimedCall
from kvtransfer.store.objects.files import ByteRange, ObjectFiles, ObjectStoreFailed
from kvtransfer.store.objects.manifest import (
    IDENTITY_BYTES,
    MANIFEST_SUFFIX,
    MANIFEST_VERSION,
    MAX_MANIFEST_BYTES,
    SEGMENT_BLOCKS,
    SEGMENT_SUFFIX,
    WRITER_BYTES,
    ListedSegment,
    ManifestBlock,
    ManifestFault,
    SegmentTerms,
    decode_manifest,
    describe_blocks,
    encode_manifest,
    find_garbage,
    pair_objects,
    segment_name,
)
from kvtransfer.store.objects.segments import (
    ObjectBlock,
    ObjectEntry,
    SegmentIndex,
    SegmentRead,
    choose_blocks,
)

T = TypeVar("T")

MANIFESTS_PER_READ = 64
# number of newest manifests that are read; together they have up to a million blocks
MAX_MANIFESTS = 16_384

Payloads = Mapping[BlockHash, memoryview]


@dataclass(frozen=True, slots=True)
class ObjectLimits:
    """The limits on calls to the object store: time and number."""

    get_timeout_s: float = 10.0
    put_timeout_s: float = 60.0
    refresh_timeout_s: float = 60.0  # longest time of `refresh` and `drop`, seconds
    num_readers: int = 4
    max_waiting: int = 32
    max_stuck: int = 4


class ObjectTier:
    """The blocks of one identity in one object store. Any thread may call the methods."""

    def __init__(
        self,
        url: str,
        identity: bytes,
        *,
        block_bytes: int,
        max_bytes: int,
        limits: ObjectLimits,
        clock: Clock,
    ) -> None:
        assert len(identity) == IDENTITY_BYTES
        assert block_bytes > 0
        self._identity = identity
        self._block_bytes = block_bytes
        self._limits = limits
        self._files = ObjectFiles(url, f"kv{MANIFEST_VERSION}-{identity.hex()}")
        # guards the three fields below; never held during a call to the object store
        self._lock = threading.Lock()
        self._index = SegmentIndex(max_bytes)
        self._counts: Counter[str] = Counter()
        self._num_written = 0
        self._writer = ""
        self._threads = CallThreads(
            {"read": limits.num_readers, "write": 1},
            max_waiting=limits.max_waiting,
            max_stuck=limits.max_stuck,
            clock=clock,
            count=self._count_error,
        )

    def open(self) -> Future[int]:
        """Starts the threads and the first `refresh`. Raises ConfigError if the URL is unusable."""
        self._files.open()
        self._writer = secrets.token_hex(WRITER_BYTES)
        self._threads.open()
        return self.refresh()

    def close(self) -> None:
        """Ends all calls as failed. Blocks that were written remain in the object store."""
        self._threads.close()

    # ------------------------------------------------------------ immediate answers

    def has(self, block_hash: BlockHash) -> bool:
        """Returns True if the block is known to be in the object store."""
        with self._lock:
            return block_hash in self._index

    def hashes(self) -> list[ObjectEntry]:
        """Returns all blocks that are known to be in the object store."""
        with self._lock:
            return self._index.entries()

    @property
    def num_bytes(self) -> int:
        """The bytes of all known objects, including objects that are being written or deleted."""
        with self._lock:
            return self._index.num_bytes

    def counters(self) -> dict[str, int]:
        """Returns the counters since the start. Counters of faults are named `errors:reason`."""
        with self._lock:
            return dict(self._counts)

    def why_off(self) -> str | None:
        """Returns the reason why no calls to the object store are made at present, or None."""
        return self._threads.why_off()

    # ------------------------------------------------------------ calls

    def refresh(self) -> Future[int]:
        """Lists the folder, and deletes garbage and excess. Value: the number of known blocks."""
        return self._threads.submit(
            "write", self._refresh, otherwise=0, timeout_s=self._limits.refresh_timeout_s
        )

    def put(self, blocks: Sequence[ObjectBlock]) -> Future[frozenset[BlockHash]]:
        """Writes up to 64 blocks as a segment. Blocks that are known already are left out.

        Value: those of the blocks that are in the object store afterwards. Payloads must not change
        until then. Raises ValueError if there are too many blocks, or a block has a wrong size.
        """
        with self._lock:
            fresh = choose_blocks(blocks, self._block_bytes, self._index)
        if not fresh:
            return _done(frozenset(block.block_hash for block in blocks))
        return self._threads.submit(
            "write",
            lambda call: self._put(call, blocks),
            otherwise=frozenset(),
            timeout_s=self._limits.put_timeout_s,
        )

    def get(self, hashes: Iterable[BlockHash]) -> Future[Payloads]:
        """Reads blocks. Value: the payloads of the blocks that were found and are undamaged."""
        with self._lock:
            reads = self._index.plan_reads(hashes)
        if not reads:
            return _done({})
        return self._threads.submit(
            "read",
            lambda _: self._get(reads),
            otherwise={},
            timeout_s=self._limits.get_timeout_s,
        )

    def drop(self) -> Future[bool]:
        """Deletes all objects of this identity, in all stores. Value: True if all are deleted."""
        return self._threads.submit(
            "write", self._drop, otherwise=False, timeout_s=self._limits.refresh_timeout_s
        )

    # ------------------------------------------------------------ on the call threads

    def _refresh(self, call: TimedCall[int]) -> int:
        listed = pair_objects(self._files.list_all())
        if call.is_over:
            return 0
        self._compare(listed)
        self._read_manifests(call, listed)
        with self._lock:
            bad = self._index.bad
        self._delete(call, list(find_garbage(listed, bad, self._writer, unix_time_s())))
        self._make_room(call, 0)
        return len(self.hashes())

    def _compare(self, listed: Sequence[ListedSegment]) -> None:
        with self._lock:
            self._index.remove(set(self._index.names) - {one.name for one in listed})
            known = set(self._index.names)
            for one in listed:
                if one.name in known:
                    self._index.correct_size(one.name, one.num_bytes)
                else:
                    self._index.add(one.name, one.num_bytes, one.written_s)

    def _read_manifests(self, call: TimedCall[int], listed: Sequence[ListedSegment]) -> None:
        """Reads the manifests that have not been read yet, newest first."""
        with self._lock:
            wanted = [
                one
                for one in reversed(listed[-MAX_MANIFESTS:])
                if not one.is_half and self._index.needs_manifest(one.name)
            ]
        for first in range(0, len(wanted), MANIFESTS_PER_READ):
            if call.is_over:
                return
            some = wanted[first : first + MANIFESTS_PER_READ]
            ranges = [ByteRange(_manifest(one.name), 0, MAX_MANIFEST_BYTES) for one in some]
            try:
                answers = self._files.read(ranges)
            except ObjectStoreFailed as error:  # the next listing reads these manifests again
                answers = [error for _ in some]
            for one, data in zip(some, answers, strict=True):
                self._learn(one, data)

    def _learn(self, one: ListedSegment, data: bytes | ObjectStoreFailed | None) -> None:
        if data is None:
            return  # another store has deleted the segment since the listing
        if isinstance(data, ObjectStoreFailed):
            self._count_error("store")
            return
        found: tuple[ManifestBlock, ...] | ManifestFault = ManifestFault.SIZE
        if one.segment_bytes and one.has_our_size(SEGMENT_BLOCKS * self._block_bytes):
            found = decode_manifest(data, self._terms(one.name, one.segment_bytes))
        if isinstance(found, ManifestFault):
            self._count_error(found)
        with self._lock:
            if isinstance(found, ManifestFault):
                self._index.mark_bad(one.name)
            else:
                self._index.fill(one.name, found)

    def _put(
        self, call: TimedCall[frozenset[BlockHash]], blocks: Sequence[ObjectBlock]
    ) -> frozenset[BlockHash]:
        with self._lock:
            fresh = choose_blocks(blocks, self._block_bytes, self._index)
        # This is a copy: after the deadline the owner may reuse the payloads, and checksums would
        # cover the wrong bytes. `is_over` is set before the future, and checked before writing.
        payload = b"".join(block.payload for block in fresh)
        wanted = frozenset(block.block_hash for block in blocks)
        if fresh and not self._write(call, fresh, payload):
            return wanted - {block.block_hash for block in fresh}
        return wanted

    def _write(
        self, call: TimedCall[frozenset[BlockHash]], fresh: Sequence[ObjectBlock], payload: bytes
    ) -> bool:
        """Writes a segment and its manifest. Returns False if there is no room or no time left."""
        written_s = unix_time_s()
        with self._lock:
            name = segment_name(written_s, self._writer, self._num_written)
            self._num_written += 1
        described = describe_blocks([block[:2] for block in fresh], payload, self._block_bytes)
        manifest = encode_manifest(self._terms(name, len(payload)), described)
        num_bytes = len(payload) + len(manifest)
        if not self._make_room(call, num_bytes):
            return False
        with self._lock:
            self._index.add(name, num_bytes, written_s)
        is_whole = False
        try:
            self._files.write(_segment(name), payload)
            if not call.is_over:
                self._files.write(_manifest(name), manifest)
                is_whole = True
        finally:
            if not is_whole:
                self._erase([name])
        with self._lock:
            self._index.fill(name, described)
            self._counts["blocks_put"] += len(fresh)
            self._counts["segments_put"] += 1
        return True

    def _get(self, reads: Sequence[SegmentRead]) -> Payloads:
        found: dict[BlockHash, memoryview] = {}
        ranges = [ByteRange(_segment(one.name), one.start, one.end) for one in reads]
        for read, data in zip(reads, self._files.read(ranges), strict=True):
            if isinstance(data, bytes):
                found.update(self._verify(read, data))
            elif data is None:
                self._count_error("segment_gone")
                with self._lock:
                    # the segment's bytes count until the next listing
                    self._index.hide([read.name])
            else:
                self._count_error("store")
        with self._lock:
            self._counts["blocks_got"] += len(found)
        return found

    def _verify(self, read: SegmentRead, data: bytes) -> Payloads:
        """Returns the undamaged blocks of a range. Removes the damaged blocks from the index."""
        good: dict[BlockHash, memoryview] = {}
        has_length = len(data) == read.end - read.start
        for block in read.blocks:
            payload = memoryview(data)[block.offset - read.start : block.end - read.start]
            if has_length and checksum(payload) == block.checksum:
                good[BlockHash(block.block_hash)] = payload
                continue
            self._count_error("block_checksum" if has_length else "block_length")
            with self._lock:
                self._index.remove_block(read.name, BlockHash(block.block_hash))
        return good

    def _drop(self, call: TimedCall[bool]) -> bool:
        listed = pair_objects(self._files.list_all())
        if call.is_over:
            return False
        self._compare(listed)
        self._delete(call, [one.name for one in listed])
        return not call.is_over

    # ------------------------------------------------------------ deletion

    def _make_room(self, call: TimedCall[T], num_bytes: int) -> bool:
        """Deletes the oldest segments to make room. Returns True if there is room and time left."""
        with self._lock:
            victims = self._index.choose_victims(num_bytes)
        if victims is None:
            self._count_error("no_room")
            return False
        self._delete(call, victims)
        return not call.is_over

    def _delete(self, call: TimedCall[T], names: Sequence[str]) -> None:
        """Deletes segments together with their manifests."""
        with self._lock:
            self._index.hide(names)
        if names and not call.is_over:
            self._erase(names)
            with self._lock:
                self._counts["segments_deleted"] += len(names)

    def _erase(self, names: Sequence[str]) -> None:
        """Deletes manifests before their segments, so that no manifest exists without its
        segment.
        """
        self._files.delete([_manifest(name) for name in names])
        self._files.delete([_segment(name) for name in names])
        with self._lock:
            self._index.remove(names)

    # ------------------------------------------------------------ helpers

    def _terms(self, name: str, segment_bytes: int) -> SegmentTerms:
        return SegmentTerms(name, self._identity, self._block_bytes, segment_bytes)

    def _count_error(self, reason: str) -> None:
        with self._lock:
            self._counts[f"errors:{reason}"] += 1


def _done(value: T) -> Future[T]:
    """Returns a completed future, for a call that does not need the object store."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _manifest(name: str) -> str:
    return name + MANIFEST_SUFFIX


def _segment(name: str) -> str:
    return name + SEGMENT_SUFFIX

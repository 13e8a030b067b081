"""Events about a worker's cached blocks, for subscribers such as routers.

All changes in one step are one *batch*, and batches are numbered from 0. Each batch is published
once. From the numbers a subscriber finds out which batches it has missed. It requests these batches
if the worker still has them, otherwise a *snapshot* of all cached blocks. The ZeroMQ frames are:

    published          topic, number (8 bytes, big-endian), batch
    asked for batches  "", number of the first
    asked for all      "", "snapshot of all"
    answered           "", number, batch      as often as needed, then "", 2**64 - 1, ""

The answer repeats the request's first frame. If this frame is the incarnation of a worker, only
this incarnation answers. Every piece of a snapshot has the number of the next batch to be
published, and the first piece begins with AllBlocksCleared.

A batch is MessagePack, [unix time, [event, ...]]. An event is a map that contains its kind.
Framing, names and the request for batches are vLLM's, so subscribers of vLLM also work with Baton.
The snapshot and the use of the empty frame are Baton's own. Token ids are left out unless
configured, because they reveal users' texts to every subscriber. Sockets use CURVE
(`engine.net.curve`).

This module has no sockets, and does not know the subscribers.

Sources: vLLM 0.32, vllm/distributed/kv_events.py (`EventBatch`, `KVCacheEvent`,
`ZmqEventPublisher`); events are maps since vllm#42892.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Annotated

import msgspec

from engine.errors import ProtocolError
from engine.messages import Hash, Incarnation, WorkerId
from engine.worker.blocks import BlockHash, CacheEvent, Evicted, Stored

NUMBER_BYTES = 8
END_NUMBER = 2 ** (8 * NUMBER_BYTES) - 1  # -1 in vLLM
SNAPSHOT = b"snapshot of all"
MAX_BATCHES = 10_000  # batches kept for subscribers that have missed some; vLLM's `buffer_steps`
MAX_KEPT_BYTES = 16 * 2**20  # total size of the kept batches, in bytes
MAX_BLOCKS_PER_BATCH = 4096
MAX_BATCH_BYTES = 4 * 2**20  # enough bytes for blocks of 128 tokens with their ids
MAX_MEDIUM_CHARS = 16


class Medium(StrEnum):
    """The place where a store keeps blocks, by its name in events."""

    HOST = "host"  # the store's memory, from which sinks can pull
    DISK = "disk"
    OBJECT = "object"


# Media from which a store must first read blocks into memory. The faster medium comes first.
LOWER_MEDIA = (Medium.DISK, Medium.OBJECT)

# Text, not `Medium`, because other servers have other media.
MediumName = Annotated[str, msgspec.Meta(max_length=MAX_MEDIUM_CHARS)]


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks are now cached. Each block follows the block before it in the list; the first block
    follows the parent.

    `token_ids` are the tokens of all blocks, or empty. `medium` is the place where a store keeps
    the blocks; workers leave it empty. The LoRA fields belong to vLLM's format and stay empty.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int  # tokens of one block
    lora_id: int | None
    medium: MediumName | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """These blocks are no longer cached."""

    block_hashes: list[Hash]
    medium: MediumName | None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """All blocks were removed, so no block is cached."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The changes in one step, in order."""

    ts: float  # unix time, seconds
    events: list[BlockEvent]
    data_parallel_rank: int | None = 0


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(EventBatch)

Numbered = tuple[int, bytes]  # the number of a batch, and the encoded batch


def topic_of(worker_id: WorkerId, incarnation: Incarnation) -> bytes:
    """Returns the topic under which a worker's batches are published."""
    return f"kv@{worker_id}@{incarnation}".encode()


def encode_number(number: int) -> bytes:
    """Encodes the number of a batch."""
    return number.to_bytes(NUMBER_BYTES, "big")


def decode_number(frame: bytes) -> int:
    """Decodes the number of a batch. Raises ProtocolError."""
    if len(frame) != NUMBER_BYTES:
        raise ProtocolError(f"a number of {len(frame)} bytes")
    return int.from_bytes(frame, "big")


def decode_batch(frame: bytes) -> list[BlockEvent]:
    """Decodes the events of a batch. Raises ProtocolError."""
    try:
        return _decoder.decode(frame).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad batch of block events: {error}") from error


def decode_answer(frames: Sequence[bytes]) -> tuple[int, list[BlockEvent]] | None:
    """Decodes a piece of an answer, without its first frame. Returns None at the end of the answer.
    Raises ProtocolError.
    """
    if len(frames) != 2:
        raise ProtocolError(f"an answer of {len(frames)} frames")
    number = decode_number(frames[0])
    return None if number == END_NUMBER else (number, decode_batch(frames[1]))


def events_of(
    changes: Sequence[CacheEvent], block_size: int, *, with_token_ids: bool = False
) -> list[BlockEvent]:
    """Returns the events for a step's changes. Consecutive evicted blocks become one event.
    Consecutive stored blocks become one event if each follows the block before it.
    """
    events: list[BlockEvent] = []
    last: BlockEvent | None = None
    for item in changes:
        if isinstance(item, Evicted):
            if isinstance(last, BlockRemoved) and last.medium == item.medium:
                last.block_hashes.append(item.block_hash)
                continue
            last = BlockRemoved([item.block_hash], medium=item.medium)
        else:
            token_ids = item.token_ids if with_token_ids else ()
            if (
                isinstance(last, BlockStored)
                and last.block_hashes[-1] == item.parent
                and last.medium == item.medium
            ):
                last.block_hashes.append(item.block_hash)
                last.token_ids.extend(token_ids)
                continue
            last = BlockStored(
                [item.block_hash],
                item.parent,
                list(token_ids),
                block_size,
                lora_id=None,
                medium=item.medium,
                lora_name=None,
            )
        events.append(last)
    return events


class EventLog:
    """The recent batches of a worker, and all blocks that are cached now."""

    def __init__(
        self,
        *,
        block_size: int,
        with_token_ids: bool = False,
        max_batches: int = MAX_BATCHES,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._events_of = partial(events_of, block_size=block_size, with_token_ids=with_token_ids)
        self._max_batches = max_batches
        self._max_kept_bytes = max_kept_bytes
        self._recent: deque[bytes] = deque()  # the last of them has the number `num_batches` - 1
        self._recent_bytes = 0
        # The cached blocks of each medium, with their parents, oldest first.
        self._cached: defaultdict[str | None, dict[BlockHash, BlockHash | None]]
        self._cached = defaultdict(dict)
        self.num_batches = 0

    def append(self, changes: Sequence[CacheEvent], unix_s: float) -> list[Numbered]:
        """Adds changes. Returns the new batches: none if nothing changed, several for many
        blocks.
        """
        numbered = []
        for start in range(0, len(changes), MAX_BLOCKS_PER_BATCH):
            part = changes[start : start + MAX_BLOCKS_PER_BATCH]
            payload = _encode(EventBatch(unix_s, self._events_of(part)))
            self._recent.append(payload)
            self._recent_bytes += len(payload)
            numbered.append((self.num_batches, payload))
            self.num_batches += 1
        while len(self._recent) > self._max_batches or self._recent_bytes > self._max_kept_bytes:
            self._recent_bytes -= len(self._recent.popleft())
        for item in changes:
            if isinstance(item, Stored):
                self._cached[item.medium][item.block_hash] = item.parent
            else:
                self._cached[item.medium].pop(item.block_hash, None)
        return numbered

    def since(self, first: int) -> list[Numbered]:
        """Returns the kept batches, from number `first` on."""
        oldest = self.num_batches - len(self._recent)
        start = min(max(first, oldest), self.num_batches)
        return list(enumerate(islice(self._recent, start - oldest, None), start))

    def snapshot(self, unix_s: float) -> Iterator[Numbered]:
        """Yields all blocks that are cached now, in pieces. Each piece is computed when it is
        requested.
        """
        number = self.num_batches
        cached = [
            Stored(block, parent, (), medium)
            for medium, parents in self._cached.items()
            for block, parent in parents.items()
        ]
        return self._pieces(number, cached, unix_s)

    def _pieces(self, number: int, cached: list[Stored], unix_s: float) -> Iterator[Numbered]:
        events: list[BlockEvent] = [AllBlocksCleared()]
        for start in range(0, max(len(cached), 1), MAX_BLOCKS_PER_BATCH):
            part = cached[start : start + MAX_BLOCKS_PER_BATCH]
            events += self._events_of(part)
            yield number, _encode(EventBatch(unix_s, events))
            events = []

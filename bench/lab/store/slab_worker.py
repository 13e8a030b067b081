"""One end of pulls from a store's slab, as a process that `bench.lab.store.study` drives.

    python -m bench.lab.store.slab_worker

A source is a store's core with a store's memory, in which all slots are full. `StoreMachine`
handles each offer like a gateway's request, and opens the lease. Sinks and commands are those of
`bench kv`.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing

import msgspec

from bench.lab.kv.cases import layout_of
from bench.lab.kv.worker import TIMING, TransferWorker
from bench.peers.driver import drive, stdout_for_answers
from bench.peers.kv_memory import fill
from engine.clock import MonotonicClock
from engine.config import Transport
from engine.messages import (
    ComputePrompt,
    Decode,
    GatewayId,
    Incarnation,
    LeaseRef,
    OfferPrefix,
    PrefixOffered,
    SeqId,
    WorkerId,
)
from engine.net.trust import Secret
from engine.worker.block_events import Medium
from engine.worker.blocks import BlockHash, BlockId
from engine.worker.events import Emit, Event, FromGateway, LeaseEnded
from engine.worker.intake import PromptFacts
from kvtransfer.endpoint import EndpointConfig, TransferEndpoint
from kvtransfer.memory import SharedMemory, SharedPool
from kvtransfer.messages import Identity
from kvtransfer.store.eviction.leaf_lru import LeafLru
from kvtransfer.store.intake import IntakePace
from kvtransfer.store.machine import StoreMachine, StoreTerms
from kvtransfer.store.shelf import Shelf

SOURCE_SEED = 1
GATEWAY = GatewayId("bench")
HASH_BYTES = 16


class SlabSource:
    """A store whose slots are all full. The hash of the block in slot i is the number i."""

    def __init__(self, name: str, *, pool_bytes: int, block_bytes: int) -> None:
        self._clock = MonotonicClock()
        # events of leases, and the error that ended the transfer thread; the thread appends them
        self._ended: list[Event | BaseException] = []
        self._num_offers = 0
        memory = SharedMemory.make(pool_bytes)
        self.pool = SharedPool(pool_bytes // block_bytes, block_bytes, memory)
        self._endpoint = TransferEndpoint(
            EndpointConfig(
                worker_id=WorkerId(name),
                incarnation=Incarnation(name),
                identity=Identity("bench", layout_of(block_bytes)),
                secret=Secret("bench"),
                transport=Transport.SHM,
                timing=TIMING,
            ),
            pool=self.pool,
            clock=self._clock,
            on_event=self._ended.append,
            on_crash=self._ended.append,
        )
        num_slots = pool_bytes // block_bytes
        shelf = Shelf(num_slots, LeafLru())
        blocks = [_hash_of(i) for i in range(num_slots)]
        slots = {block: BlockId(i) for i, block in enumerate(blocks)}
        shelf.put_all(slots, dict.fromkeys(blocks))
        terms = StoreTerms(
            name=name,
            block_size=1,
            block_bytes=block_bytes,
            address=self._endpoint.open(),
            pace=IntakePace(),
            read=_read_slots,
        )
        self._machine = StoreMachine(terms, {Medium.HOST: shelf})

    def offer(self, slots: Sequence[int]) -> LeaseRef:
        """Leases these slots as the prefix of a prompt. Raises the error that ended the transfer
        thread.
        """
        self._take_ends()
        self._num_offers += 1
        # A store does not offer the last token, because it must be computed. So one token is added.
        message = OfferPrefix(SeqId(f"offer-{self._num_offers}"), [*slots, 0])
        lease: LeaseRef | None = None
        for effect in self._machine.handle(FromGateway(GATEWAY, message), self._clock.now_s()):
            if isinstance(effect, Emit):
                assert isinstance(effect.message, PrefixOffered)
                lease = effect.message.lease
            else:
                self._endpoint.perform(effect)  # type: ignore[arg-type]  # memory only: no disk
        assert lease is not None
        assert lease.num_blocks == len(slots)
        return lease

    def close(self) -> None:
        """Stops the endpoint and frees the memory."""
        self._endpoint.close()
        self.pool.close()

    def _take_ends(self) -> None:
        while self._ended:
            ended = self._ended.pop(0)
            if isinstance(ended, BaseException):
                raise ended
            if isinstance(ended, LeaseEnded):
                self._machine.handle(ended, self._clock.now_s())


class SlabWorker(TransferWorker):
    """Sources over slabs of stores, and sinks as in `bench kv`."""

    def __init__(self) -> None:
        super().__init__(Transport.SHM)
        self._sources: dict[int, SlabSource] = {}

    def open_source(self, pool_bytes: int, block_sizes: list[int]) -> dict[str, object]:
        """Opens stores whose slots contain random bytes."""
        for size in block_sizes:
            source = SlabSource(f"slab-{size}", pool_bytes=pool_bytes, block_bytes=size)
            fill(source.pool.blocks, SOURCE_SEED)
            self._sources[size] = source
        return {"source": None}

    def offer(self, block_bytes: int, pulls: list[list[int]], way: str) -> dict[str, object]:
        """Leases the blocks of each pull."""
        source = self._sources[block_bytes]
        return {"offers": [msgspec.to_builtins(source.offer(slots)) for slots in pulls]}

    def rows(self, end: str, block_bytes: int) -> object:
        """Returns the blocks of the source or of the sink, for this block size."""
        if end == "source":
            return self._sources[block_bytes].pool.blocks
        return super().rows(end, block_bytes)

    def close(self) -> None:
        """Closes all sources and sinks."""
        for source in self._sources.values():
            source.close()
        super().close()


def _read_slots(message: ComputePrompt | Decode | OfferPrefix, block_size: int) -> PromptFacts:
    """Returns the facts of a prompt whose token ids are numbers of slots."""
    slots = list(message.token_ids)
    return PromptFacts([_hash_of(slot) for slot in slots], max(slots))


def _hash_of(slot: int) -> BlockHash:
    return BlockHash(slot.to_bytes(HASH_BYTES, "little"))


def main() -> None:
    """Answers commands until standard input is closed."""
    out = stdout_for_answers()
    with ExitStack() as stack:
        drive(lambda: stack.enter_context(closing(SlabWorker())), sys.stdin, out)


if __name__ == "__main__":
    main()

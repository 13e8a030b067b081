"""One end of Baton's transfers, as a process that `bench.lab.kv.contest` drives.

    python -m bench.lab.kv.worker MOVER

A source or a sink is a `TransferEndpoint` over a `SharedPool`. Each block size has its own
endpoint, because both ends must have the same block size. If the mover splits the heads, each rank
of the source has its own endpoint. A sink always has one rank. The block size is the size of the
sink's records.

The time of a pull ends when the endpoint reports `PullDone`, so it includes the check that the
blocks are valid. Before the pull starts, the source is attached and the lease is held, as for a
request that waits for its prefill.
"""

import queue
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any, NoReturn

import msgspec
import numpy as np

from bench.lab.kv.cases import HeadSplit, layout_of, split_of
from bench.peers.driver import drive, stdout_for_answers
from bench.peers.kv_memory import TransferEnd, digest, fill
from engine.clock import MonotonicClock
from engine.config import Transport
from engine.errors import BatonError
from engine.messages import Incarnation, LeaseId, LeaseRef, RankAddress, SeqId, WorkerId
from engine.net.trust import Secret
from engine.worker.blocks import BlockId
from engine.worker.events import (
    Event,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    StartPull,
)
from kvtransfer.endpoint import EndpointConfig, TransferEndpoint
from kvtransfer.lease.effects import Timing
from kvtransfer.memory import host_pool
from kvtransfer.messages import Identity
from kvtransfer.native.copying import copy_records
from kvtransfer.records import plan_pieces

SOURCE_SEED = 1
PULL_TIMEOUT_S = 30.0
HOLD_S = 0.02  # seconds to wait until all leases are held: many round trips on one host
TIMING = Timing(ttl_s=600.0)  # long leases, because a lease waits while other movers are measured

_clock = MonotonicClock()


class TransferError(BatonError):
    """A pull failed; the message says why."""


class OpenEndpoint:
    """An open endpoint over a pool of blocks of one size."""

    def __init__(
        self, name: str, transport: Transport, *, num_blocks: int, identity: Identity
    ) -> None:
        self._events: queue.SimpleQueue[tuple[float, Event | BaseException]] = queue.SimpleQueue()
        self._num_named = 0
        self.pool = host_pool(num_blocks, identity.record.block_bytes, transport)
        self.pool.open()
        config = EndpointConfig(
            worker_id=WorkerId(name),
            incarnation=Incarnation(name),
            identity=identity,
            secret=Secret("bench"),
            transport=transport,
            timing=TIMING,
        )
        self._endpoint = TransferEndpoint(
            config,
            pool=self.pool,
            clock=_clock,
            on_event=self._stamp,
            on_crash=self._stamp,
        )
        self.address = self._endpoint.open()

    def lease(self, blocks: Sequence[int]) -> LeaseRef:
        """Leases these blocks. All of them are ready."""
        lease_id = LeaseId(self._new_name())
        self._endpoint.perform(OpenLease(lease_id, len(blocks)))
        self._endpoint.perform(GrowLease(lease_id, tuple(map(BlockId, blocks))))
        return LeaseRef(lease_id, self.address, len(blocks))

    def hold(self, lease: LeaseRef) -> SeqId:
        """Asks a source to hold a lease. Returns the name for pulling it."""
        seq_id = SeqId(self._new_name())
        self._endpoint.perform(HoldLease(seq_id, lease))
        return seq_id

    def pull(self, seq_id: SeqId, blocks: Sequence[int]) -> float:
        """Pulls the blocks of a held lease. Returns the seconds. Raises TransferError."""
        wanted = tuple(enumerate(map(BlockId, blocks)))
        begin_s = _clock.now_s()
        self._endpoint.perform(StartPull(seq_id, wanted))
        return self._end_of_pull(seq_id) - begin_s

    def close(self) -> None:
        """Stops the endpoint and frees the memory."""
        self._endpoint.close()
        self.pool.close()

    def _stamp(self, event: Event | BaseException) -> None:
        self._events.put((_clock.now_s(), event))

    def _new_name(self) -> str:
        self._num_named += 1
        return f"{self.address.worker_id}-{self._num_named}"

    def _end_of_pull(self, seq_id: SeqId) -> float:
        while True:
            try:
                at_s, event = self._events.get(timeout=PULL_TIMEOUT_S)
            except queue.Empty:
                raise TransferError(f"no end of a pull in {PULL_TIMEOUT_S:g} s") from None
            match event:
                case PullDone() if event.seq_id == seq_id:
                    return at_s
                case LeaseEnded() | PullDone():
                    continue
                case _:
                    _raise(event)


class TransferWorker(TransferEnd):
    """The sources or sinks of one transport, by block size. Each method is a command."""

    def __init__(self, transport: Transport, split: HeadSplit | None = None) -> None:
        super().__init__()
        self._transport = transport
        self._split = split
        self._ends: dict[int, list[OpenEndpoint]] = {}  # endpoints of all ranks, by block size
        self.facts: dict[str, object] = {"version": "", "ways": [""]}

    def open_source(self, pool_bytes: int, block_sizes: list[int]) -> dict[str, object]:
        """Opens sources with random bytes. Returns the sources' addresses."""
        self._open("source", pool_bytes, block_sizes)
        for end in self._all():
            fill(end.pool.blocks, SOURCE_SEED)
        return {"source": [msgspec.to_builtins(end.address) for end in self._all()]}

    def open_sink(
        self, pool_bytes: int, block_sizes: list[int], source: object
    ) -> dict[str, object]:
        """Opens sinks and writes to all pages of their pools. Each offer names its source."""
        self._open("sink", pool_bytes, block_sizes)
        for end in self._all():
            end.pool.blocks[:] = 0
        return {}

    def offer(self, block_bytes: int, pulls: list[list[int]], way: str) -> dict[str, object]:
        """Leases the blocks of each pull."""
        return {"offers": [msgspec.to_builtins(self._lease(block_bytes, one)) for one in pulls]}

    def _lease(self, block_bytes: int, blocks: list[int]) -> LeaseRef:
        leases = [rank.lease(blocks) for rank in self._ends[block_bytes]]
        first, *others = (lease.source for lease in leases)
        ranks = tuple(RankAddress(other.address, other.shard) for other in others)
        source = msgspec.structs.replace(first, others=ranks)
        return msgspec.structs.replace(leases[0], source=source)

    def pull(
        self, block_bytes: int, pulls: list[list[list[int]]], offers: list[Any], way: str
    ) -> dict[str, object]:
        """Holds all leases, then carries out the pulls one by one."""
        (end,) = self._ends[block_bytes]
        held = [end.hold(msgspec.convert(offer, LeaseRef)) for offer in offers]
        threading.Event().wait(HOLD_S)
        return {
            "seconds": [
                end.pull(seq_id, blocks) for seq_id, (_, blocks) in zip(held, pulls, strict=True)
            ]
        }

    def rows(self, end: str, block_bytes: int) -> Any:
        """Returns the blocks of the first rank's pool for this block size."""
        return self._ends[block_bytes][0].pool.blocks

    def digest(self, end: str, block_bytes: int, blocks: list[int]) -> dict[str, object]:
        """Hashes these blocks: the sink's actual blocks, or the source's blocks in the form that
        the sink should receive.
        """
        if self._split is None or end == "sink":
            return super().digest(end, block_bytes, blocks)
        expected = np.zeros((len(blocks), block_bytes), np.uint8)
        layout = self._split.layout(block_bytes)
        for rank, shard in zip(self._ends[block_bytes], self._split.sources, strict=True):
            pieces = plan_pieces(layout, shard, self._split.sink)
            copy_records(expected, None, rank.pool.blocks, blocks, pieces)
        return {"digest": digest(expected, [*range(len(blocks))])}

    def close(self) -> None:
        """Closes all endpoints."""
        for end in self._all():
            end.close()

    def _all(self) -> list[OpenEndpoint]:
        return [end for ranks in self._ends.values() for end in ranks]

    def _open(self, role: str, pool_bytes: int, block_sizes: list[int]) -> None:
        for size in block_sizes:
            self._ends[size] = [
                OpenEndpoint(
                    f"{role}-{self._transport}-{size}",
                    self._transport,
                    num_blocks=pool_bytes // size,
                    identity=identity,
                )
                for identity in self._identities(role, size)
            ]

    def _identities(self, role: str, block_bytes: int) -> list[Identity]:
        """Returns the identities of the ranks."""
        split = self._split
        if split is None:
            return [Identity("bench", layout_of(block_bytes))]
        layout = split.layout(block_bytes)
        if role == "sink":
            return [Identity("bench", layout, split.sink)]
        return [Identity("bench", layout, shard, group=split.sources) for shard in split.sources]


def _raise(event: Event | BaseException) -> NoReturn:
    if isinstance(event, BaseException):
        raise TransferError("the endpoint crashed") from event
    reason = event.reason if isinstance(event, PullFailed) else f"unexpected {event}"
    raise TransferError(f"a pull failed: {reason}")


def main() -> None:
    """Answers commands until standard input is closed."""
    out = stdout_for_answers()
    backend, split = split_of(sys.argv[1])
    with ExitStack() as stack:
        drive(
            lambda: stack.enter_context(closing(TransferWorker(Transport(backend), split))),
            sys.stdin,
            out,
        )


if __name__ == "__main__":
    main()

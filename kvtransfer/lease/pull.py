"""The state of one pull at its sink, and the state of a source in the sink machine.

A source is one rank of a worker. A sequence that pulls from several ranks has one pull from each,
each under its own id: see `kvtransfer.lease.group`.

This module changes the state of a pull. `kvtransfer.lease.sink` decides when, and what is sent.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.messages import LeaseId, LeaseRef, SeqId, TransferAddress
from engine.worker.blocks import BlockId
from engine.worker.events import PullDone
from kvtransfer.lease.effects import Fetch, SendToSource, Timing
from kvtransfer.messages import MAX_BLOCKS_PER_READ, Hold, LeaseWord, Ready, Release, ToSource


@dataclass(frozen=True, slots=True)
class Means:
    """The transport that fetches blocks of a source, and how many it fetches at once."""

    transport: str  # the transport's name in PullDone
    batch_blocks: int = MAX_BLOCKS_PER_READ  # most blocks in one Fetch
    window_blocks: int = MAX_BLOCKS_PER_READ  # most blocks in flight from that source
    resends: bool = False  # True if lost blocks must be asked for again


@dataclass(slots=True)
class KnownSource:
    """A source with at least one lease held here, or recently held."""

    address: TransferAddress
    heard_s: float
    asked_s: float | None = None  # time of the oldest unanswered message
    data_s: float = 0.0  # time at which it last sent blocks
    attached: bool = False
    given_up: list[Release] = field(default_factory=list)  # sent once attached
    num_blocks: int = 0
    means: Means = Means("")
    num_asked: int = 0  # blocks in flight, over all pulls
    lacks_room: bool = False  # True if the window is too full for a pull's next batch
    pulls: dict[LeaseId, "Pull"] = field(default_factory=dict)  # oldest first

    def ask(self, message: ToSource, now_s: float) -> SendToSource:
        """Returns a message to send. The source must answer each message, so a deadline starts."""
        if self.asked_s is None:
            self.asked_s = now_s
        return SendToSource(self.address.address, message)

    def deadline_s(self, timing: Timing) -> float:
        """Returns when to drop the source: its answer is overdue, or no pull needs it."""
        if self.asked_s is not None:
            return self.asked_s + timing.silence_s
        return math.inf if self.pulls else self.heard_s + timing.ttl_s

    def validate(self) -> None:
        """Asserts the source's invariants."""
        assert self.num_asked == sum(len(pull.asked) for pull in self.pulls.values())
        assert self.num_asked <= self.means.window_blocks
        assert self.num_asked > 0 or not self.lacks_room  # otherwise no arrival would make room
        for lease_id, pull in self.pulls.items():
            assert pull.lease.lease_id == lease_id
            assert pull.source is self
            pull.validate()


@dataclass(slots=True)
class Pull:
    """A lease that the sink holds, and the states of its blocks, by index in the lease.

    A wanted block goes from `todo` to `asked` to `here`, and back to `todo` if it was lost.
    """

    seq_id: SeqId
    lease: LeaseRef
    source: KnownSource
    pull_id: int
    next_hold_s: float
    source_blocks: list[int] = field(default_factory=list)  # ids at the source of the ready blocks
    word: LeaseWord | None = None  # the lease's word, once known
    wanted: dict[int, BlockId] | None = None  # None while the sequence waits for memory
    todo: deque[int] = field(default_factory=deque)  # blocks to ask for, in this order
    asked: set[int] = field(default_factory=set)  # blocks in flight
    asked_s: float = 0.0  # time of the latest request for blocks
    waiting_s: float = 0.0  # start of the wait for a block; asking again does not reset it
    here: dict[int, None] = field(default_factory=dict)  # arrived blocks, in order of arrival
    good: set[int] = field(default_factory=set)  # blocks `here` that are proven correct
    num_damaged: int = 0  # messages whose checksum was wrong
    stamp: int = -1  # the latest Hold's
    num_here_at_stamp: int = 0
    releasing: bool = False  # all blocks are here and Release is sent
    done: bool = False  # PullDone is reported; only the answer to Release is missing
    busy_s: float | None = None  # since when blocks or the confirmation are in flight; None: idle
    transfer_s: float = 0.0  # total time in flight before `busy_s`
    hidden_s: float = 0.0  # part of `transfer_s` before the source computed its last block

    def learn(self, ready: Ready, now_s: float) -> str | None:
        """Records the blocks that are ready. Returns a fault if the source named invalid blocks."""
        if ready.stamp == self.stamp:
            self.good.update(list(self.here)[: self.num_here_at_stamp])
        self.word = ready.word
        if ready.first > len(self.source_blocks):
            return None  # a gap that the next Hold will fill
        blocks = ready.block_ids
        if blocks and not (min(blocks) >= 0 and max(blocks) < self.source.num_blocks):
            return "source named a block it has not"
        if ready.first < 0 or ready.first + len(blocks) > self.lease.num_blocks:
            return "source named too many blocks"
        was_complete = len(self.source_blocks) == self.lease.num_blocks
        self.source_blocks[ready.first : ready.first + len(blocks)] = blocks
        if not was_complete and len(self.source_blocks) == self.lease.num_blocks:
            self.hidden_s = self._transferred_s(now_s)
        return None

    def fetch_next(self, now_s: float) -> Fetch | None:
        """Asks for the next batch; None if no block is ready or the window has no room for it."""
        batch = self._next_batch()
        if not batch:
            return None
        assert self.wanted is not None
        if not self.asked:
            self.waiting_s = now_s
        self.asked.update(batch)
        self.asked_s = now_s
        self.busy(now_s)
        self.source.num_asked += len(batch)
        return Fetch(
            self.seq_id,
            self.source.address.address,
            self.lease.lease_id,
            indices=tuple(batch),
            source_blocks=tuple(map(self.source_blocks.__getitem__, batch)),
            block_ids=tuple(map(self.wanted.__getitem__, batch)),
            word=self.word,
        )

    def _next_batch(self) -> list[int]:
        """Takes a whole batch, or the last blocks, from `todo` if the window has room for them.

        A smaller batch is never taken: a nearly full window would then get single blocks.
        """
        means = self.source.means
        room = means.window_blocks - self.source.num_asked
        most = min(means.batch_blocks, means.window_blocks, len(self.todo))
        num_ready = len(self.source_blocks)
        if room < most and (room == 0 or self.todo[room] < num_ready):
            self.source.lacks_room = True
            return []
        batch: list[int] = []
        while len(batch) < most and self.todo[0] < num_ready:
            batch.append(self.todo.popleft())
        return batch

    def arrive(self, indices: Iterable[int], now_s: float, *, are_good: bool) -> None:
        """Records blocks that have arrived in their places."""
        for i in indices:
            if i in self.asked:
                self.asked.remove(i)
                self.source.num_asked -= 1
                self.here[i] = None
                if are_good:
                    self.good.add(i)
        self.waiting_s = now_s
        if not self.asked:
            self.idle(now_s)

    def lose(self, indices: set[int]) -> None:
        """Puts lost blocks back at the front of `todo`."""
        self.source.num_asked -= len(indices)
        self.asked -= indices
        self.todo.extendleft(sorted(indices, reverse=True))

    # ------------------------------------------------------------ messages and reports

    def hold(self, stamp: int) -> Hold:
        """Returns a renewal. Its answer will prove that the blocks that are here now are good."""
        self.stamp, self.num_here_at_stamp = stamp, len(self.here)
        return Hold(self.lease.lease_id, len(self.source_blocks), stamp)

    def release(self) -> Release:
        """Returns the message that gives up the lease."""
        return Release(self.lease.lease_id, self.pull_id)

    def finish(self, now_s: float) -> PullDone:
        """Returns the report that all blocks are here and good."""
        self.done = True
        total_s = self._transferred_s(now_s)
        transport = self.source.means.transport
        return PullDone(self.seq_id, transport, total_s, total_s - self.hidden_s)

    # ------------------------------------------------------------ time

    def busy(self, now_s: float) -> None:
        """Starts the time in flight, of blocks or of the confirmation."""
        if self.busy_s is None:
            self.busy_s = now_s

    def idle(self, now_s: float) -> None:
        """Stops the time in flight."""
        if self.busy_s is not None:
            self.transfer_s += now_s - self.busy_s
            self.busy_s = None

    def _transferred_s(self, now_s: float) -> float:
        return self.transfer_s + (0.0 if self.busy_s is None else now_s - self.busy_s)

    def blocks_deadline_s(self, timing: Timing) -> float:
        """Returns when to give up blocks in flight, if the source sends no block of any pull."""
        if not self.asked:
            return math.inf
        return max(self.waiting_s, self.source.data_s) + timing.silence_s

    def reread_s(self, timing: Timing) -> float:
        """Returns when to ask again for blocks that the source has to send."""
        if not self.asked or not self.source.means.resends:
            return math.inf
        return max(self.asked_s, self.source.data_s) + timing.reread_s

    def validate(self) -> None:
        """Asserts the pull's invariants."""
        parts = (set(self.todo), self.asked, set(self.here))
        assert set().union(*parts) == set(self.wanted or ())
        assert sum(map(len, parts)) == len(self.wanted or ())
        assert self.good <= set(self.here)
        assert len(self.source_blocks) <= self.lease.num_blocks
        assert not self.done or (self.releasing and len(self.good) == len(self.here))
        assert (self.busy_s is not None) == bool(self.asked or self.releasing != self.done)

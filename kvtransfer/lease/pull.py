"""The state of one pull at its sink, and the state of a source in the sink machine.

A source is one rank of a worker. A sequence that pulls from several ranks has a separate pull, with
its own id, from each rank: see `kvtransfer.lease.group`.

This module changes the state of a pull. `kvtransfer.lease.sink` decides when to change it, and
which messages to send.
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
    """The transport that fetches a source's blocks, and the limits on blocks in flight."""

    transport: str  # name of the transport, for PullDone
    batch_blocks: int = MAX_BLOCKS_PER_READ  # largest number of blocks in one Fetch
    window_blocks: int = MAX_BLOCKS_PER_READ  # most blocks in flight from that source
    resends: bool = False  # True if the sink must ask again for lost blocks


@dataclass(slots=True)
class KnownSource:
    """A source with a lease that this sink holds, or has held recently."""

    address: TransferAddress
    heard_s: float
    asked_s: float | None = None  # time at which the oldest unanswered message was sent
    data_s: float = 0.0  # time at which the source last sent blocks
    attached: bool = False
    # releases to send once the sink is attached
    given_up: list[Release] = field(default_factory=list)
    num_blocks: int = 0
    means: Means = Means("")
    num_asked: int = 0  # number of blocks in flight, over all pulls
    lacks_room: bool = False  # True if the window has no room for the next batch of some pull
    pulls: dict[LeaseId, "Pull"] = field(default_factory=dict)  # pulls by lease, oldest first

    def ask(self, message: ToSource, now_s: float) -> SendToSource:
        """Returns the message to send, and starts the deadline for the source's answer."""
        if self.asked_s is None:
            self.asked_s = now_s
        return SendToSource(self.address.address, message)

    def deadline_s(self, timing: Timing) -> float:
        """Returns when to drop the source: its answer is overdue, or no pull has used it for
        long.
        """
        if self.asked_s is not None:
            return self.asked_s + timing.silence_s
        return math.inf if self.pulls else self.heard_s + timing.ttl_s

    def validate(self) -> None:
        """Asserts the source's invariants."""
        assert self.num_asked == sum(len(pull.asked) for pull in self.pulls.values())
        assert self.num_asked <= self.means.window_blocks
        # only the arrival of blocks in flight can make room
        assert self.num_asked > 0 or not self.lacks_room
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
    source_blocks: list[int] = field(default_factory=list)  # ids of the ready blocks at the source
    word: LeaseWord | None = None  # the lease's word, once the sink has received it
    # local blocks by index; None while the sequence waits for memory
    wanted: dict[int, BlockId] | None = None
    todo: deque[int] = field(default_factory=deque)  # indices of blocks to ask for, in this order
    asked: set[int] = field(default_factory=set)  # indices of blocks in flight
    asked_s: float = 0.0  # time of the latest request for blocks
    waiting_s: float = 0.0  # start of the wait for a block, which asking again does not restart
    # indices of arrived blocks, in order of arrival
    here: dict[int, None] = field(default_factory=dict)
    good: set[int] = field(default_factory=set)  # indices of arrived blocks that are proven correct
    num_damaged: int = 0  # number of messages whose checksum was wrong
    stamp: int = -1  # stamp of the latest Hold
    num_here_at_stamp: int = 0
    releasing: bool = False  # all blocks have arrived, and Release is sent
    done: bool = False  # PullDone is reported; only the answer to Release is missing
    # start of the present time in flight, of blocks or the confirmation; None: nothing is in flight
    busy_s: float | None = None
    transfer_s: float = 0.0  # time in flight before `busy_s`, seconds
    hidden_s: float = 0.0  # part of that time before the source had computed its last block

    def learn(self, ready: Ready, now_s: float) -> str | None:
        """Records the ready blocks of a lease. Returns a fault if the source named invalid
        blocks.
        """
        if ready.stamp == self.stamp:
            self.good.update(list(self.here)[: self.num_here_at_stamp])
        self.word = ready.word
        if ready.first > len(self.source_blocks):
            # blocks before these are unknown; the answer to the next Hold will name them
            return None
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
        """Asks for the next batch. Returns None if no block is ready or the window has no room."""
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
        """Removes the next batch from `todo`, if the window has room for the whole batch.

        Only the last batch of a pull may be smaller. Otherwise a nearly full window would be filled
        up with single blocks.
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
        """Records that blocks have been written to their local places."""
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
        """Returns a renewal. Its answer will prove that the blocks that have arrived by now are
        good.
        """
        self.stamp, self.num_here_at_stamp = stamp, len(self.here)
        return Hold(self.lease.lease_id, len(self.source_blocks), stamp)

    def release(self) -> Release:
        """Returns the message that releases the lease."""
        return Release(self.lease.lease_id, self.pull_id)

    def finish(self, now_s: float) -> PullDone:
        """Returns the report that all blocks have arrived and are good."""
        self.done = True
        total_s = self._transferred_s(now_s)
        transport = self.source.means.transport
        return PullDone(self.seq_id, transport, total_s, total_s - self.hidden_s)

    # ------------------------------------------------------------ time

    def busy(self, now_s: float) -> None:
        """Starts counting the time in flight, for blocks or the confirmation."""
        if self.busy_s is None:
            self.busy_s = now_s

    def idle(self, now_s: float) -> None:
        """Stops counting the time in flight."""
        if self.busy_s is not None:
            self.transfer_s += now_s - self.busy_s
            self.busy_s = None

    def _transferred_s(self, now_s: float) -> float:
        return self.transfer_s + (0.0 if self.busy_s is None else now_s - self.busy_s)

    def blocks_deadline_s(self, timing: Timing) -> float:
        """Returns when to fail the pull if the source sends no block of any pull until then."""
        if not self.asked:
            return math.inf
        return max(self.waiting_s, self.source.data_s) + timing.silence_s

    def reread_s(self, timing: Timing) -> float:
        """Returns when to ask again for blocks that the source should have sent."""
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

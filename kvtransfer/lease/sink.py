"""The sink's end of the lease protocol.

The life of a pull:

    hold ──start──> pulling ──all wanted blocks here──> releasing ──Ended(released)──> PullDone
      │                │                                    │
      └── abort, Ended(other reason), refusal, source silent for `silence_s` ──> PullFailed

If every block is known to be good, PullDone is reported at once. The pull then stays in releasing
until the source confirms the Release.

What each event does (— cannot happen, or changes nothing):

    event            no such pull    held            pulling             releasing
    start            PullFailed      pulling         —                   —
    Ready            —               recorded        fetches             recorded
    blocks arrive    —               —               fetches. All here:  —
                                                     Release. All good:
                                                     PullDone as well
    our Release      —               PullFailed      PullFailed          PullDone
    confirmed
    other Ended      —               PullFailed      PullFailed          PullFailed
    abort            —               Release and PullFailed in each of the three
    renewal due      —               Hold            Hold                Release
    reread_s over    —               —               asks again          —
    silence_s over   —               PullFailed in each of the three
                                     (after PullDone, a pull reports nothing more)

The sink keeps a lease alive before it has memory for the blocks. So the lease does not expire while
the sequence waits at the sink.

A block is *good* once it is proven to have the content that the lease promised. Blocks that the
source sent are good, because it sends only blocks of an open lease. A block that the sink copied
from the source's memory is good once the lease is proven to have been open after the copy. Any of
these proves that:

* the lease's word in shared memory, read after the copy, which costs no message
* the answer to a later Hold
* the answer to this pull's Release, which follows the last copy

If the source freed the blocks during the copy, the sink discards the copied bytes. The proof does
not depend on the network: a late, lost, repeated or reordered message can only make a pull fail.

A pull that fails reports its good blocks. While the lease is open, the sink asks again for lost
blocks.

A source's deadline runs from the first message that the source has not answered. So time in which
the sink was paused does not count as the source's silence. `next_wake_s` returns the time of the
next `sweep`.

The machine uses no socket, memory or block pool. The confirmation by the source is Baton's own
design.
"""

import math
from collections.abc import Sequence
from itertools import count
from operator import attrgetter

from engine.messages import Incarnation, LeaseId, LeaseRef, SeqId
from engine.worker.blocks import BlockId
from engine.worker.events import PullFailed
from kvtransfer.lease.effects import (
    END_REASONS,
    LOST_WHILE_WAITING,
    RELEASED,
    CloseSource,
    SinkEffect,
    Timing,
    UseSource,
)
from kvtransfer.lease.pull import KnownSource, Means, Pull
from kvtransfer.messages import (
    AttachBody,
    Attached,
    AttachRefused,
    Data,
    Ended,
    Identity,
    MaySeal,
    Ready,
    ToSink,
    attach,
)
from kvtransfer.wire import Disagreement, agree

ABORTED = "aborted"  # reason of a pull that its own worker gave up
MAX_DAMAGED = 3  # number of damaged messages that may be accidental; after more, the pull fails


class SinkMachine:
    """All pulls of one rank of a worker. Only the methods of this class change them."""

    def __init__(self, *, incarnation: Incarnation, identity: Identity, timing: Timing) -> None:
        self._incarnation = incarnation
        self._identity = identity
        self._timing = timing
        self._pulls: dict[SeqId, Pull] = {}
        self._sources: dict[str, KnownSource] = {}
        self._next_pull_id = 0
        self._stamps = count()
        self.num_rereads = 0  # number of blocks that were asked for again

    @property
    def num_pulls(self) -> int:
        """The number of leases that the sink holds or pulls from."""
        return len(self._pulls)

    # ------------------------------------------------------------ orders of the worker

    def hold(self, seq_id: SeqId, lease: LeaseRef, now_s: float) -> list[SinkEffect]:
        """Renews a lease until `start` or `abort` is called."""
        assert seq_id not in self._pulls
        effects: list[SinkEffect] = []
        address = lease.source.address
        source = self._sources.get(address)
        if source is not None and source.address.incarnation != lease.source.incarnation:
            effects += self._lose_source(address, "source restarted")
            source = None
        is_new = source is None
        if source is None:
            source = self._sources[address] = KnownSource(lease.source, heard_s=now_s)
        assert lease.lease_id not in source.pulls
        pull = Pull(seq_id, lease, source, self._next_pull_id, now_s + self._timing.hold_every_s)
        self._next_pull_id += 1
        self._pulls[seq_id] = source.pulls[lease.lease_id] = pull
        if is_new:
            body = AttachBody(self._incarnation, lease.source.incarnation, self._identity)
            effects.append(source.ask(attach(body), now_s))
        elif source.attached:
            effects.append(source.ask(pull.hold(next(self._stamps)), now_s))
        return effects

    def start(
        self, seq_id: SeqId, blocks: tuple[tuple[int, BlockId], ...], now_s: float
    ) -> list[SinkEffect]:
        """Starts to pull these blocks (index in the lease, local block id), in this order."""
        pull = self._pulls.get(seq_id)
        if pull is None:
            return [PullFailed(seq_id, LOST_WHILE_WAITING)]
        assert pull.wanted is None
        wanted = dict(blocks)
        if wanted and not (min(wanted) >= 0 and max(wanted) < pull.lease.num_blocks):
            return self._give_up(pull, "lease is too short", now_s)
        pull.wanted = wanted
        pull.todo.extend(wanted)
        return self._advance(pull, now_s)

    def awaited(self, seq_id: SeqId) -> list[BlockId]:
        """Returns the local ids of a pull's blocks that the sink has not asked for yet."""
        pull = self._pulls.get(seq_id)
        if pull is None or pull.wanted is None:
            return []
        return [pull.wanted[index] for index in pull.todo]

    def abort(self, seq_id: SeqId, now_s: float) -> list[SinkEffect]:
        """Gives up a lease. After its PullFailed is reported, the pull writes no more."""
        pull = self._pulls.get(seq_id)
        return [] if pull is None or pull.done else self._give_up(pull, ABORTED, now_s)

    # ------------------------------------------------------------ messages of sources

    def receive(self, address: str, message: ToSink, now_s: float) -> list[SinkEffect]:
        """Handles a source's message. Call this for a Data once its blocks have been written."""
        source = self._sources.get(address)
        if source is None:
            return []
        source.heard_s, source.asked_s = now_s, None
        match message:
            case Attached():
                return self._on_attached(source, message, now_s)
            case AttachRefused():
                return self._lose_source(address, f"source refused: {message.field} differs")
            case Ready():
                return self._on_ready(source, message, now_s)
            case Ended():
                return self._on_ended(source, message, now_s)
            case Data():
                source.data_s = now_s
                return []
            case MaySeal():
                return []

    def _on_attached(
        self, source: KnownSource, message: Attached, now_s: float
    ) -> list[SinkEffect]:
        address = source.address.address
        if message.incarnation != source.address.incarnation:
            return self._lose_source(address, "source restarted")
        if source.attached:
            return []  # the source's first answer has been handled already
        try:
            wire = agree(message.identity, self._identity)
            if message.identity.shard != source.address.shard:
                raise Disagreement("shard")
        except Disagreement as error:
            return self._lose_source(address, f"source refused: {error.field} differs")
        source.attached, source.num_blocks = True, message.num_blocks
        effects: list[SinkEffect] = [UseSource(address, wire, message)]
        effects += [source.ask(release, now_s) for release in source.given_up]
        source.given_up = []
        effects += [
            source.ask(pull.hold(next(self._stamps)), now_s) for pull in source.pulls.values()
        ]
        return effects

    def _on_ready(self, source: KnownSource, message: Ready, now_s: float) -> list[SinkEffect]:
        pull = source.pulls.get(message.lease_id)
        if pull is None:
            return []
        fault = pull.learn(message, now_s)
        return self._advance(pull, now_s) if fault is None else self._give_up(pull, fault, now_s)

    def _on_ended(self, source: KnownSource, message: Ended, now_s: float) -> list[SinkEffect]:
        pull = source.pulls.get(message.lease_id)
        if pull is None:
            return []
        confirmed = message.reason == RELEASED and message.pull_id == pull.pull_id
        if pull.releasing and confirmed:
            self._remove(pull)
            return [] if pull.done else [pull.finish(now_s)]
        reason = message.reason if message.reason in END_REASONS else "ended"
        return [*self._drop(pull, f"lease {reason}"), *self._advance_all(source, now_s)]

    def _pull_under(self, address: str, lease_id: LeaseId) -> Pull | None:
        """Returns the pull from that source under that lease, or None."""
        source = self._sources.get(address)
        return None if source is None else source.pulls.get(lease_id)

    # ------------------------------------------------------------ reports of the transport

    def use_transport(self, address: str, means: Means) -> None:
        """Sets the transport that fetches that source's blocks."""
        self._sources[address].means = means

    def refuse_source(self, address: str, reason: str) -> list[SinkEffect]:
        """Drops a source whose blocks cannot be read at this sink."""
        return self._lose_source(address, reason)

    def places(self, address: str, message: Data) -> list[BlockId | None]:
        """Returns the local block for each block of a Data. A block that no pull waits for gets
        None.
        """
        pull = self._pull_under(address, message.lease_id)
        if pull is None or pull.wanted is None:
            return [None] * len(message.indices)
        return [pull.wanted[i] if i in pull.asked else None for i in message.indices]

    def fetched(
        self,
        address: str,
        lease_id: LeaseId,
        indices: Sequence[int],
        now_s: float,
        *,
        are_good: bool,
    ) -> list[SinkEffect]:
        """Records fetched blocks of a lease. `are_good`: the blocks are proven correct already."""
        pull = self._pull_under(address, lease_id)
        if pull is None:
            return []
        pull.arrive(indices, now_s, are_good=are_good)
        if pull.source.lacks_room:  # another pull, whose batch may fit into the window now
            return self._advance_all(pull.source, now_s)
        return self._advance(pull, now_s)

    def damaged(
        self, address: str, lease_id: LeaseId, indices: Sequence[int], now_s: float
    ) -> list[SinkEffect]:
        """Asks again for blocks with a wrong checksum. Fails the pull after `MAX_DAMAGED` of
        them.
        """
        pull = self._pull_under(address, lease_id)
        if pull is None:
            return []
        pull.num_damaged += 1
        if pull.num_damaged > MAX_DAMAGED:
            return self._give_up(pull, "blocks arrive damaged", now_s)
        return self._ask_again(pull, pull.asked.intersection(indices), now_s)

    def fetch_failed(
        self, address: str, lease_id: LeaseId, reason: str, now_s: float
    ) -> list[SinkEffect]:
        """Fails a pull whose blocks cannot be fetched."""
        pull = self._pull_under(address, lease_id)
        return [] if pull is None else self._give_up(pull, reason, now_s)

    # ------------------------------------------------------------ deadlines

    def sweep(self, now_s: float) -> list[SinkEffect]:
        """Renews leases, asks again for lost blocks, and drops silent sources."""
        effects: list[SinkEffect] = []
        for source in list(self._sources.values()):
            if source.deadline_s(self._timing) <= now_s:
                effects += self._lose_source(source.address.address, "source silent")
        for pull in list(self._pulls.values()):
            if pull.blocks_deadline_s(self._timing) <= now_s:
                effects += self._give_up(pull, "source sends no blocks", now_s)
                continue
            if pull.reread_s(self._timing) <= now_s:
                effects += self._ask_again(pull, set(pull.asked), now_s)
            if pull.next_hold_s <= now_s:
                pull.next_hold_s = now_s + self._timing.hold_every_s
                if pull.source.attached:
                    releasing = pull.releasing
                    message = pull.release() if releasing else pull.hold(next(self._stamps))
                    effects.append(pull.source.ask(message, now_s))
        return effects

    def next_wake_s(self) -> float | None:
        """Returns the time of the next renewal or deadline."""
        wakes = [source.deadline_s(self._timing) for source in self._sources.values()]
        wakes += [pull.next_hold_s for pull in self._pulls.values()]
        for pull in self._pulls.values():
            if pull.asked:
                wakes += [pull.reread_s(self._timing), pull.blocks_deadline_s(self._timing)]
        wake_s = min(wakes, default=math.inf)
        return None if wake_s == math.inf else wake_s

    def validate(self) -> None:
        """Asserts the machine's invariants."""
        assert sum(len(source.pulls) for source in self._sources.values()) == len(self._pulls)
        for pull in self._pulls.values():
            assert self._sources[pull.lease.source.address].pulls[pull.lease.lease_id] is pull
        for source in self._sources.values():
            source.validate()

    # ------------------------------------------------------------ pulling

    def _advance_all(self, source: KnownSource, now_s: float) -> list[SinkEffect]:
        """Continues all pulls from a source, because the window may have room.

        The pull whose last request is the oldest comes first. So all pulls share the window, and a
        short hand-over does not wait for the end of a long pull. If the window has no room for a
        pull's batch, no other pull asks for blocks. Thus many short pulls cannot keep a large batch
        out of the window.
        """
        source.lacks_room = False
        pulls = [
            pull for pull in source.pulls.values() if not (pull.wanted is None or pull.releasing)
        ]
        pulls.sort(key=attrgetter("asked_s"))
        return [effect for pull in pulls for effect in self._advance(pull, now_s)]

    def _advance(self, pull: Pull, now_s: float) -> list[SinkEffect]:
        """Fetches ready blocks while the window has room; releases the lease at the end."""
        if pull.wanted is None or pull.releasing or not pull.source.attached:
            return []
        if len(pull.here) == len(pull.wanted):
            pull.releasing = True
            release = pull.source.ask(pull.release(), now_s)
            if len(pull.good) == len(pull.wanted):
                return [pull.finish(now_s), release]
            pull.busy(now_s)
            return [release]
        effects: list[SinkEffect] = []
        while not pull.source.lacks_room and pull.todo and (fetch := pull.fetch_next(now_s)):
            effects.append(fetch)
        return effects

    def _ask_again(self, pull: Pull, indices: set[int], now_s: float) -> list[SinkEffect]:
        """Asks again for blocks that count as lost. The pull's deadline stays the same."""
        waiting_s = pull.waiting_s
        pull.lose(indices)
        self.num_rereads += len(indices)
        source = pull.source
        if source.lacks_room:
            effects = self._advance_all(source, now_s)
        else:
            effects = self._advance(pull, now_s)
        pull.waiting_s = waiting_s
        if not pull.asked:
            # the pull has nothing in flight until other pulls leave room in the window
            pull.idle(now_s)
        return effects

    # ------------------------------------------------------------ ends

    def _give_up(self, pull: Pull, reason: str, now_s: float) -> list[SinkEffect]:
        """Fails a pull and sends a Release to the source."""
        source = pull.source
        effects = self._drop(pull, reason)
        if source.attached:
            effects.append(source.ask(pull.release(), now_s))
        else:
            source.given_up.append(pull.release())
        return [*effects, *self._advance_all(source, now_s)]

    def _drop(self, pull: Pull, reason: str) -> list[SinkEffect]:
        """Ends a pull. Returns PullFailed with the good blocks, unless PullDone was reported."""
        self._remove(pull)
        good = tuple(sorted(pull.good))
        return [] if pull.done else [PullFailed(pull.seq_id, reason, good)]

    def _remove(self, pull: Pull) -> None:
        pull.source.num_asked -= len(pull.asked)
        del pull.source.pulls[pull.lease.lease_id]
        del self._pulls[pull.seq_id]

    def _lose_source(self, address: str, reason: str) -> list[SinkEffect]:
        """Fails all pulls from a source and closes its connection."""
        lost = list(self._sources[address].pulls.values())
        effects: list[SinkEffect] = [e for pull in lost for e in self._drop(pull, reason)]
        del self._sources[address]
        return [*effects, CloseSource(address)]

"""Joins the parts of several members into one pull or lease.

This module is used in two places. At rank 0 of a worker, each rank's endpoint is a member of all
pulls and leases of the worker. At one rank of a sink, the ranks of a source are the members of a
pull: each member provides a share of every block.

The life of a pull:

    held ──start──> pulling ──all parts done──> PullDone
      │                │
      └── a part fails, a member is lost, abort ──> ending ──all parts have ended──> PullFailed

The life of a lease:

    open ──all parts released──> LeaseEnded(released)
      │
      └── a part ends otherwise, a member is lost, revoke ──> ending ──all parts ended──> LeaseEnded

While a pull or lease is ending, its other parts are ordered to end too. Its end is reported once,
when no part can write or be read any more. A block has arrived once every member has provided its
share of the block.

Orders and reports may cross on the way. So a start may reach a member whose part has already
failed. The member then reports a second failure, which is ignored. The worker may also start a held
pull whose failure has been reported. Then the pull fails a second time, as at a single endpoint.

The classes use neither an endpoint nor a pool.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.messages import LeaseId, LeaseRef, SeqId
from engine.worker.blocks import BlockId
from engine.worker.events import (
    AbortPull,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    RevokeLease,
    StartPull,
    TransferOrder,
    TransferReport,
)
from kvtransfer.lease.effects import LOST_WHILE_WAITING, RELEASED, SinkEffect
from kvtransfer.lease.sink import SinkMachine
from kvtransfer.messages import Identity
from kvtransfer.wire import Disagreement, ranks_to_hold

Member = int


class ToMember(msgspec.Struct, frozen=True):
    """Give an order to a member. All orders are given before any report is handled."""

    member: Member
    order: TransferOrder


def part_id(seq_id: SeqId, member: Member) -> SeqId:
    """Returns the id of one member's part of a pull. Used if all members share one sink machine."""
    return SeqId(f"{seq_id}#{member}")


GroupEffect = ToMember | TransferReport


@dataclass(slots=True)
class _GroupPull:
    open: list[Member]  # members whose parts have not ended
    idle: Collection[Member]  # members that lease blocks but provide no bytes
    wanted: frozenset[int] | None = None  # indices in the lease; None until the pull starts
    # wanted indices whose block at least one part failed to bring
    missing: set[int] = field(default_factory=set)
    failure: str | None = None  # reason of the first part that failed
    is_ending: bool = False
    longest: PullDone | None = None
    exposed_s: float = 0.0

    def record(self, member: Member, ended: PullDone | PullFailed) -> None:
        """Records the end of a member's part."""
        self.open.remove(member)
        if isinstance(ended, PullDone):
            self.exposed_s = max(self.exposed_s, ended.exposed_s)
            if member not in self.idle and ended.transfer_s >= self._longest_s:
                self.longest = ended
            return
        self.failure = self.failure or ended.reason
        if member not in self.idle:
            self.missing |= (self.wanted or frozenset()).difference(ended.arrived)

    @property
    def _longest_s(self) -> float:
        return 0.0 if self.longest is None else self.longest.transfer_s

    def report(self, seq_id: SeqId) -> PullDone | PullFailed:
        """Returns the report for the whole pull, all parts of which have ended."""
        if self.failure is not None:
            arrived = (self.wanted or frozenset()) - self.missing
            return PullFailed(seq_id, self.failure, tuple(sorted(arrived)))
        assert self.longest is not None, "a pull has a part that brings bytes"
        return PullDone(seq_id, self.longest.transport, self._longest_s, self.exposed_s)


class PullGroups:
    """The pulls of all members. Only the methods of this class change them."""

    def __init__(self) -> None:
        self._pulls: dict[SeqId, _GroupPull] = {}
        self._lost: dict[Member, str] = {}

    @property
    def num_pulls(self) -> int:
        """The number of pulls whose end has not been reported."""
        return len(self._pulls)

    def hold(
        self, seq_id: SeqId, leases: Mapping[Member, LeaseRef], *, idle: Collection[Member] = ()
    ) -> list[GroupEffect]:
        """Orders each member to hold its lease. `idle` members provide no bytes."""
        assert seq_id not in self._pulls
        for member in leases:
            if member in self._lost:
                return [PullFailed(seq_id, self._lost[member])]
        self._pulls[seq_id] = _GroupPull([*leases], idle)
        return [ToMember(member, HoldLease(seq_id, lease)) for member, lease in leases.items()]

    def start(self, order: StartPull) -> list[GroupEffect]:
        """Starts all parts. If a part has failed already, the pull's end is reported later."""
        pull = self._pulls.get(order.seq_id)
        if pull is None:
            return [PullFailed(order.seq_id, LOST_WHILE_WAITING)]
        if pull.is_ending:
            return []
        assert pull.wanted is None
        pull.wanted = frozenset([index for index, _ in order.blocks])
        nothing = StartPull(order.seq_id, ())
        return [ToMember(member, nothing if member in pull.idle else order) for member in pull.open]

    def abort(self, order: AbortPull) -> list[GroupEffect]:
        """Aborts all parts of a pull."""
        pull = self._pulls.get(order.seq_id)
        return [] if pull is None else self._give_up(order.seq_id, pull)

    def ended(self, member: Member, report: PullDone | PullFailed) -> list[GroupEffect]:
        """Handles a member's report of an end. Only the first report of each part counts."""
        pull = self._pulls.get(report.seq_id)
        if pull is None or member not in pull.open:
            return []
        pull.record(member, report)
        effects = [] if pull.failure is None else self._give_up(report.seq_id, pull)
        if not pull.open:
            del self._pulls[report.seq_id]
            effects.append(pull.report(report.seq_id))
        return effects

    def lose(self, member: Member, reason: str) -> list[GroupEffect]:
        """Marks a member as lost. Its parts of present and later pulls fail."""
        self._lost[member] = reason
        seq_ids = [seq_id for seq_id, pull in self._pulls.items() if member in pull.open]
        return [e for i in seq_ids for e in self.ended(member, PullFailed(i, reason))]

    def _give_up(self, seq_id: SeqId, pull: _GroupPull) -> list[GroupEffect]:
        if pull.is_ending:
            return []
        pull.is_ending = True
        return [ToMember(member, AbortPull(seq_id)) for member in pull.open]

    def validate(self) -> None:
        """Asserts the invariants of all pulls."""
        for pull in self._pulls.values():
            assert pull.open
            assert len(set(pull.open)) == len(pull.open)
            assert not self._lost.keys() & pull.open
            assert pull.failure is None or pull.is_ending
            assert pull.missing <= (pull.wanted or frozenset())


class RankedPulls:
    """The pulls of one sink rank from workers of several ranks. A pull has a part per source rank.

    The machine `sink` has the parts, each under its own id. Pulls of `sink` that are not parts do
    not use this class.
    """

    def __init__(self, identity: Identity, sink: SinkMachine) -> None:
        self._identity = identity
        self._sink = sink
        self._pulls = PullGroups()
        # ids of the parts, by pull; only pulls whose end is not reported
        self.parts: dict[SeqId, list[SeqId]] = {}
        # the pull and the member of each part, by the part's id
        self.wholes: dict[SeqId, tuple[SeqId, Member]] = {}

    def order(self, order: HoldLease | StartPull | AbortPull, now_s: float) -> list[SinkEffect]:
        """Carries out an order of the worker."""
        match order:
            case HoldLease():
                return self._hold(order, now_s)
            case StartPull():
                return self._perform(self._pulls.start(order), now_s)
            case AbortPull():
                return self._perform(self._pulls.abort(order), now_s)

    def awaited(self, seq_id: SeqId) -> list[BlockId]:
        """Returns the local blocks that at least one part has not asked for yet."""
        parts = self.parts.get(seq_id, ())
        return [*dict.fromkeys(block for part in parts for block in self._sink.awaited(part))]

    def ended(self, end: PullDone | PullFailed, now_s: float) -> list[SinkEffect]:
        """Handles the end of a part. Call this after performing all effects that came with the end.

        Otherwise the end of the whole pull could be reported before a fetch of another part.
        """
        if end.seq_id not in self.wholes:
            return []  # the part failed again, after the end of its pull
        seq_id, member = self.wholes[end.seq_id]
        whole = msgspec.structs.replace(end, seq_id=seq_id)
        return self._perform(self._pulls.ended(member, whole), now_s)

    def _hold(self, order: HoldLease, now_s: float) -> list[SinkEffect]:
        """Holds the lease at each source rank that provides a share of this rank's blocks."""
        own, ranks = self._identity, order.lease.source.ranks
        shards = tuple(rank.shard for rank in ranks)
        try:
            found = ranks_to_hold(own.layout, shards, own.ranks, own.shard)
        except Disagreement as error:
            return [PullFailed(order.seq_id, f"source refused: {error.field} differs")]
        self.parts[order.seq_id] = []
        leases = {i: msgspec.structs.replace(order.lease, source=ranks[i]) for i in found.held}
        return self._perform(self._pulls.hold(order.seq_id, leases, idle=found.idle), now_s)

    def _perform(self, effects: list[GroupEffect], now_s: float) -> list[SinkEffect]:
        performed: list[SinkEffect] = []
        for effect in effects:
            match effect:
                case ToMember(rank, HoldLease(seq_id, lease)):
                    part = part_id(seq_id, rank)
                    self.wholes[part] = seq_id, rank
                    self.parts[seq_id].append(part)
                    performed += self._sink.hold(part, lease, now_s)
                case ToMember(rank, StartPull(seq_id, blocks)):
                    performed += self._sink.start(part_id(seq_id, rank), blocks, now_s)
                case ToMember(rank, AbortPull(seq_id)):
                    performed += self._sink.abort(part_id(seq_id, rank), now_s)
                case PullDone(seq_id) | PullFailed(seq_id):
                    for part in self.parts.pop(seq_id, ()):
                        del self.wholes[part]
                    performed.append(effect)
        return performed


@dataclass(slots=True)
class _GroupLease:
    open: list[Member]  # members whose parts have not ended
    reason: str = RELEASED  # the reason of the first part that was not released
    is_ending: bool = False


class LeaseGroups:
    """The leases of all members. Only the methods of this class change them."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._leases: dict[LeaseId, _GroupLease] = {}
        self._lost: dict[Member, str] = {}

    @property
    def num_leases(self) -> int:
        """The number of leases whose end has not been reported."""
        return len(self._leases)

    def open(self, order: OpenLease) -> list[GroupEffect]:
        """Opens the lease at each member."""
        assert order.lease_id not in self._leases
        for reason in self._lost.values():
            return [LeaseEnded(order.lease_id, reason)]
        self._leases[order.lease_id] = _GroupLease([*self._members])
        return [ToMember(member, order) for member in self._members]

    def grow(self, order: GrowLease) -> list[GroupEffect]:
        """Grows the lease at each member where its part is open."""
        lease = self._leases.get(order.lease_id)
        return [] if lease is None else [ToMember(member, order) for member in lease.open]

    def revoke(self, order: RevokeLease) -> list[GroupEffect]:
        """Revokes the lease at each member where its part is open."""
        lease = self._leases.get(order.lease_id)
        if lease is None or lease.is_ending:
            return []
        lease.is_ending = True
        return [ToMember(member, order) for member in lease.open]

    def ended(self, member: Member, report: LeaseEnded) -> list[GroupEffect]:
        """Handles a member's report that its part has ended."""
        lease = self._leases.get(report.lease_id)
        if lease is None or member not in lease.open:
            return []
        lease.open.remove(member)
        effects: list[GroupEffect] = []
        if report.reason != RELEASED:
            lease.reason = report.reason if lease.reason == RELEASED else lease.reason
            effects = self.revoke(RevokeLease(report.lease_id))
        if not lease.open:
            del self._leases[report.lease_id]
            effects.append(LeaseEnded(report.lease_id, lease.reason))
        return effects

    def lose(self, member: Member, reason: str) -> list[GroupEffect]:
        """Marks a member as lost. Its parts of present and later leases end."""
        self._lost[member] = reason
        lease_ids = [lease_id for lease_id, one in self._leases.items() if member in one.open]
        return [e for i in lease_ids for e in self.ended(member, LeaseEnded(i, reason))]

    def validate(self) -> None:
        """Asserts the invariants of all leases."""
        for lease in self._leases.values():
            assert lease.open
            assert set(lease.open) <= set(self._members) - self._lost.keys()
            assert lease.reason == RELEASED or lease.is_ending

"""Pulls and leases of several members; their orders and reports cross on the way.

Each member has a queue of orders and a queue of reports. A member behaves as an endpoint does: a
held or running part may end at any time, and only a running part writes. Members may die.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from engine.messages import LeaseRef, TransferAddress
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
from kvtransfer.lease.group import GroupEffect, LeaseGroups, PullGroups, ToMember
from tests.kits.seeds import seeds

LEASE = LeaseRef("l", TransferAddress("p", "life", "tcp://p"), 4)


@dataclass
class FakeMember:
    """A member's endpoint, whose parts end at random."""

    rng: random.Random
    orders: deque[TransferOrder] = field(default_factory=deque)
    reports: deque[TransferReport] = field(default_factory=deque)
    held: set[str] = field(default_factory=set)
    # by part: the wanted indices of the lease
    writing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)
    # by part: the good blocks that arrived at this member
    arrived: dict[str, set[int]] = field(default_factory=dict)
    is_dead: bool = False

    def take_order(self) -> None:
        match self.orders.popleft():
            case HoldLease(seq_id):
                self.held.add(seq_id)
            case StartPull(seq_id, blocks) if seq_id in self.held:
                self.held.remove(seq_id)
                self.writing[seq_id] = tuple(index for index, _ in blocks)
            case StartPull(seq_id):
                self.reports.append(PullFailed(seq_id, "lease was lost while waiting"))
            case AbortPull(seq_id):
                self.fail(seq_id, "aborted")
            case OpenLease(lease_id):
                self.leases.add(lease_id)
            case RevokeLease(lease_id):
                self.end_lease(lease_id, "revoked")

    def fail(self, seq_id: str, reason: str) -> None:
        wanted = self.writing.pop(seq_id, ())
        if seq_id in self.held or wanted:
            self.held.discard(seq_id)
            arrived = tuple(i for i in wanted if self.rng.random() < 0.7)
            self.arrived[seq_id] = set(arrived)
            self.reports.append(PullFailed(seq_id, reason, arrived))

    def end_lease(self, lease_id: str, reason: str) -> None:
        if lease_id in self.leases:
            self.leases.remove(lease_id)
            self.reports.append(LeaseEnded(lease_id, reason))

    def happen(self, *, faults: bool) -> None:
        """Ends a random part, with success or failure."""
        bad = faults and self.rng.random() < 0.3
        if self.writing and not bad:
            seq_id = self.rng.choice(sorted(self.writing))
            self.arrived[seq_id] = set(self.writing.pop(seq_id))
            self.reports.append(PullDone(seq_id, "fake", self.rng.random()))
        elif bad and (self.writing or self.held):
            self.fail(self.rng.choice(sorted({*self.writing, *self.held})), "source silent")
        if self.leases:
            reason = "expired" if bad else "released"
            self.end_lease(self.rng.choice(sorted(self.leases)), reason)


class Crossing:
    """The groups, their members, and a worker's core that gives orders."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.members = [FakeMember(rng) for _ in range(rng.randint(1, 4))]
        self.pulls, self.leases = PullGroups(), LeaseGroups(range(len(self.members)))
        self.wanted: dict[str, tuple[int, ...]] = {}
        self.reported: Counter[str] = Counter()  # number of reported ends of each pull and lease
        self.expected: Counter[str] = Counter()
        self.num_named = 0

    def perform(self, effects: list[GroupEffect]) -> None:
        for effect in effects:
            match effect:
                case ToMember(member, order):
                    self.members[member].orders.append(order)
                case LeaseEnded(lease_id):
                    self.reported[lease_id] += 1
                    assert not any(lease_id in one.leases for one in self.alive())
                case PullDone(seq_id) | PullFailed(seq_id):
                    self.reported[seq_id] += 1
                    self.check_end(seq_id, effect)
        self.pulls.validate()
        self.leases.validate()

    def check_end(self, seq_id: str, report: PullDone | PullFailed) -> None:
        for member in self.alive():
            assert seq_id not in member.writing
            assert seq_id not in member.held, "it could still be started"
        wanted = self.wanted.get(seq_id, ())
        good = wanted if isinstance(report, PullDone) else report.arrived
        for member in self.members:
            assert not good or set(good) <= member.arrived[seq_id]

    def alive(self) -> list[FakeMember]:
        return [member for member in self.members if not member.is_dead]

    def order(self) -> None:
        """Gives a random order of the core."""
        seq_id, lease_id = f"s{self.num_named}", f"l{self.num_named}"
        match self.rng.choice(["hold", "start", "abort", "open", "grow", "revoke"]):
            case "hold":
                self.num_named += 1
                self.expected[seq_id] = 1
                leases = dict.fromkeys(range(len(self.members)), LEASE)
                self.perform(self.pulls.hold(seq_id, leases))
            case "start":
                for seq_id in [s for s in self.expected if s[0] == "s" and s not in self.wanted]:
                    self.start(seq_id)
                    return
            case "abort" if self.num_named:
                self.perform(self.pulls.abort(AbortPull(f"s{self.rng.randrange(self.num_named)}")))
            case "open":
                self.num_named += 1
                self.expected[lease_id] = 1
                self.perform(self.leases.open(OpenLease(lease_id, 4)))
            case "grow" if self.num_named:
                grow = GrowLease(f"l{self.rng.randrange(self.num_named)}", (1,))
                self.perform(self.leases.grow(grow))
            case "revoke" if self.num_named:
                revoke = RevokeLease(f"l{self.rng.randrange(self.num_named)}")
                self.perform(self.leases.revoke(revoke))

    def start(self, seq_id: str) -> None:
        # the pull failed before its start, and now fails a second time
        self.expected[seq_id] += self.reported[seq_id]
        self.wanted[seq_id] = tuple(self.rng.sample(range(4), self.rng.randint(1, 4)))
        blocks = tuple((index, 0) for index in self.wanted[seq_id])
        self.perform(self.pulls.start(StartPull(seq_id, blocks)))

    def step(self, *, faults: bool) -> None:
        """Runs one step of one member: it handles an order, sends a report, or ends a part."""
        number = self.rng.randrange(len(self.members))
        member = self.members[number]
        if member.is_dead:
            return
        what = self.rng.random()
        if what < 0.4 and member.orders:
            member.take_order()
        elif what < 0.8 and member.reports:
            self.take_report(number)
        elif what < 0.98:
            member.happen(faults=faults)
        elif faults and self.rng.random() < 0.2:
            member.is_dead = True
            for seq_id in self.expected:
                member.arrived.setdefault(seq_id, set())
            self.perform(self.pulls.lose(number, "died"))
            self.perform(self.leases.lose(number, "died"))

    def take_report(self, number: int) -> None:
        report = self.members[number].reports.popleft()
        groups = self.leases if isinstance(report, LeaseEnded) else self.pulls
        self.perform(groups.ended(number, report))

    def run_down(self) -> None:
        for seq_id in self.expected:
            if seq_id[0] == "s" and seq_id not in self.wanted:
                self.start(seq_id)
        for _ in range(100):
            for number, member in enumerate(self.members):
                while member.orders and not member.is_dead:
                    member.take_order()
                while member.reports and not member.is_dead:
                    self.take_report(number)
                if not member.is_dead:
                    member.happen(faults=False)


@pytest.mark.parametrize("seed", seeds(200))
@pytest.mark.parametrize("faults", [False, True], ids=["good", "faulty"])
def test_every_pull_and_lease_ends_once_after_all_its_parts(seed, faults):
    rng = random.Random(seed)
    crossing = Crossing(rng)
    for _ in range(150):
        if rng.random() < 0.2:
            crossing.order()
        crossing.step(faults=faults)
    crossing.run_down()
    assert crossing.reported == crossing.expected
    assert crossing.pulls.num_pulls == crossing.leases.num_leases == 0
    for member in crossing.alive():
        assert not any((member.held, member.writing, member.leases, member.reports))

"""Sources of two ranks, on a network that disturbs messages and cuts connections.

Each lease is open at both ranks, and a pull has one part for each rank. `LeaseGroups` joins the
parts at the source, and `RankedPulls` joins them at the sink, as real endpoints do. The checks of
`test_lease_protocol` hold for each part.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from engine.messages import LeaseRef, RankAddress
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
)
from kvtransfer.lease.effects import SinkEffect
from kvtransfer.lease.group import GroupEffect, LeaseGroups, RankedPulls, ToMember
from tests.kits.seeds import seeds
from tests.props.test_lease_protocol import FAULTS, RANKS, Pull, Sink, World, deliver_some

FAULTS_HERE = [fault for fault in FAULTS if fault not in ("restart", "die")]


@dataclass(eq=False)
class WholePull:
    """The test's record of one pull from both source ranks."""

    seq_id: str
    sink: Sink
    lease_id: str
    num_blocks: int
    parts: dict[int, Pull] = field(default_factory=dict)
    reports: list[PullDone | PullFailed] = field(default_factory=list)
    is_started: bool = False


class PartsOf:
    """The machine of a sink. It records each part that `RankedPulls` starts as a `Pull` of the
    test.
    """

    def __init__(self, sink: Sink, wholes: dict[str, WholePull]) -> None:
        self._sink = sink
        self._wholes = wholes
        self.abort = sink.machine.abort
        self.awaited = sink.machine.awaited

    def hold(self, part_id: str, lease: LeaseRef, now_s: float) -> list[SinkEffect]:
        # each rank restarts independently of the other
        here = self._sink.world.sources[lease.source.address].here
        lease = msgspec.structs.replace(lease, source=here)
        part = self._sink.pulls[part_id] = Pull(part_id, self._sink, lease)
        seq_id, _, rank = part_id.rpartition("#")
        self._wholes[seq_id].parts[int(rank)] = part
        return self._sink.machine.hold(part_id, lease, now_s)

    def start(
        self, part_id: str, blocks: tuple[tuple[int, int], ...], now_s: float
    ) -> list[SinkEffect]:
        part = self._sink.pulls[part_id]
        wanted = self._sink.want(part, [index for index, _ in blocks])
        return self._sink.machine.start(part_id, wanted, now_s)


class RankedWorld:
    """A source of two ranks, two sinks of one rank each, and the groups that join the parts."""

    def __init__(self, rng: random.Random) -> None:
        self.world = World(
            copies_at_once=(rng.random() < 0.5, rng.random() < 0.5),
            windows=(rng.choice([1, 2, 64]), rng.choice([1, 2, 64])),
            sources=RANKS,
        )
        self.sources = list(self.world.sources.values())
        self.leases = LeaseGroups(range(len(self.sources)))
        self.lease_ends: list[str] = []
        self.rng = rng
        self.orders: list[deque[OpenLease | GrowLease | RevokeLease]] = [deque() for _ in RANKS]
        self.pulls: dict[str, WholePull] = {}
        self.ranked = {
            sink: RankedPulls(sink.identity, PartsOf(sink, self.pulls))  # type: ignore[arg-type]
            for sink in self.world.sinks
        }

    # ------------------------------------------------------------ orders of the two cores

    def open(self, num_blocks: int) -> LeaseRef | None:
        if any(num_blocks > len(source.process.free) for source in self.sources):
            return None
        if any(isinstance(order, OpenLease) for orders in self.orders for order in orders):
            return None  # a lease that a rank has yet to open needs the free memory
        lease_id = self.world.new_name("lease")
        self.perform_leases(self.leases.open(OpenLease(lease_id, num_blocks)))
        first, second = (source.here for source in self.sources)
        others = (RankAddress(second.address, second.shard),)
        return LeaseRef(lease_id, msgspec.structs.replace(first, others=others), num_blocks)

    def grow(self, lease_id: str, num_blocks: int) -> None:
        self.perform_leases(self.leases.grow(GrowLease(lease_id, (0,) * num_blocks)))

    def revoke(self, lease_id: str) -> None:
        self.perform_leases(self.leases.revoke(RevokeLease(lease_id)))

    def hold(self, sink: Sink, lease: LeaseRef) -> WholePull:
        seq_id = self.world.new_name("seq")
        pull = self.pulls[seq_id] = WholePull(seq_id, sink, lease.lease_id, lease.num_blocks)
        self.order(pull, HoldLease(seq_id, lease))
        return pull

    def start(self, pull: WholePull) -> None:
        pull.is_started = True
        pull.reports.clear()  # an earlier end was the end of the hold, not of this pull
        blocks = tuple((index, 0) for index in range(pull.num_blocks))
        order = StartPull(pull.seq_id, blocks)
        if pull.seq_id in self.ranked[pull.sink].parts:
            self.order(pull, order)
        else:  # the sink's own order, as an endpoint performs it
            self.perform(pull.sink, pull.sink.machine.start(pull.seq_id, blocks, self.world.now_s))

    def abort(self, pull: WholePull) -> None:
        for part in pull.parts.values():
            part.aborted = True
        self.order(pull, AbortPull(pull.seq_id))

    def order(self, pull: WholePull, order: HoldLease | StartPull | AbortPull) -> None:
        self.perform(pull.sink, self.ranked[pull.sink].order(order, self.world.now_s))

    # ------------------------------------------------------------ what follows

    def perform(self, sink: Sink, effects: list[SinkEffect]) -> None:
        for effect in effects:
            if isinstance(effect, PullDone | PullFailed) and effect.seq_id in self.pulls:
                self.end(self.pulls[effect.seq_id], effect)
            else:
                sink.perform([effect])

    def perform_leases(self, effects: list[GroupEffect]) -> None:
        for effect in effects:
            match effect:
                case ToMember(rank, order):
                    self.orders[rank].append(order)
                case LeaseEnded(lease_id, reason):
                    assert not any(lease_id in s.process.leased for s in self.sources)
                    assert not any(OpenLease(lease_id, n) in self.orders[1] for n in range(5))
                    self.lease_ends.append(reason)

    def end(self, pull: WholePull, report: PullDone | PullFailed) -> None:
        pull.reports.append(report)
        assert len(pull.reports) == 1, f"{pull.seq_id} ended twice"
        parts = [part.lease.lease_id for part in pull.parts.values() if not part.ends]
        assert not parts, "a part may still write"
        for part in pull.parts.values():
            (last,) = part.ends
            good = (part.wanted or ()) if isinstance(last, PullDone) else last.arrived
            assert isinstance(last, PullDone) or not isinstance(report, PullDone)
            assert isinstance(report, PullDone) or set(report.arrived) <= set(good)

    def settle(self) -> None:
        """Handles the ends of parts, after all other effects of the same events."""
        for sink, ranked in self.ranked.items():
            while sink.ended:
                _, end = sink.ended.popleft()
                self.perform(sink, ranked.ended(end, self.world.now_s))
        while any(source.ended for source in self.sources):
            for rank, source in enumerate(self.sources):
                while source.ended:
                    self.perform_leases(self.leases.ended(rank, source.ended.popleft()))
                    self.leases.validate()
        self.world.validate()

    def deliver_orders(self, *, share: float = 1.0) -> None:
        """Delivers orders to the ranks of the source. Orders to the second rank arrive late."""
        for source, orders in zip(self.sources, self.orders, strict=True):
            while orders and (source is self.sources[0] or self.rng.random() < share):
                match orders.popleft():
                    case OpenLease(lease_id, num_blocks):
                        assert source.open(lease_id, num_blocks) is not None
                    case GrowLease(lease_id, blocks):
                        source.grow(lease_id, len(blocks))
                    case RevokeLease(lease_id):
                        source.revoke(lease_id)

    def sweep(self) -> None:
        self.world.sweep()
        self.settle()

    def run_down(self) -> None:
        world = self.world
        world.keep_busy(busy=False)
        for _ in range(400):
            self.deliver_orders()
            world.deliver_all()
            self.settle()
            if world.letters or any(self.orders):
                continue
            machines = [s.machine for s in world.sinks]
            machines += [s.process.machine for s in self.sources]
            wakes = [w for w in (m.next_wake_s() for m in machines) if w is not None]
            if not wakes:
                return
            world.now_s = max(world.now_s, min(wakes))
            self.sweep()
        raise AssertionError("it does not come to rest")


def disturb(ranked: RankedWorld, rng: random.Random, faults: frozenset[str], pull: WholePull):
    world = ranked.world
    fault = rng.choice(FAULTS_HERE)
    if fault not in faults or rng.random() > 0.15:
        return
    if fault == "revoke":
        ranked.revoke(pull.lease_id)
    elif fault == "abort":
        ranked.abort(pull)
    elif fault == "cut":
        world.cut(rng.choice(ranked.sources).address)
    elif fault == "busy":
        world.keep_busy(busy=not world.busy)
    elif fault == "delay":
        world.now_s += rng.choice([1.0, 3.0, 8.0])
        ranked.sweep()


def busy_day(rng: random.Random, faults: frozenset[str]) -> RankedWorld:
    ranked = RankedWorld(rng)
    world = ranked.world
    pulls: list[WholePull] = []
    for _ in range(100):
        lease = ranked.open(rng.randint(1, 4)) if rng.random() < 0.4 else None
        if lease is not None:
            pulls.append(ranked.hold(rng.choice(world.sinks), lease))
        for pull in pulls[-6:]:
            if not pull.is_started and rng.random() < 0.3:
                ranked.start(pull)
            if rng.random() < 0.3:
                ranked.grow(pull.lease_id, 1)
            ranked.deliver_orders(share=0.2)
            deliver_some(world, rng, faults)
            ranked.settle()
            disturb(ranked, rng, faults, pull)
            ranked.settle()
        world.now_s += 0.1
        ranked.deliver_orders(share=0.7)
        ranked.sweep()
    for pull in pulls:
        if not pull.is_started:
            ranked.start(pull)
        ranked.grow(pull.lease_id, 4)
    ranked.run_down()
    assert all(len(pull.reports) == 1 for pull in pulls)
    assert not any(sink.machine.num_pulls or sink.connections for sink in world.sinks)
    assert not any(one.parts or one.wholes for one in ranked.ranked.values())
    assert not any(source.process.machine.num_leases for source in ranked.sources)
    assert ranked.leases.num_leases == 0
    return ranked


@pytest.mark.parametrize("seed", seeds(10))
def test_on_a_good_network_every_pull_is_done_at_both_ranks(seed):
    ranked = busy_day(random.Random(seed), frozenset())
    assert len(ranked.pulls) > 10
    ends = [end for pull in ranked.pulls.values() for end in pull.reports]
    assert all(isinstance(end, PullDone) for end in ends)
    assert ranked.lease_ends == ["released"] * len(ends)


@pytest.mark.parametrize("seed", seeds(100))
def test_on_a_bad_network_every_pull_ends_once_and_after_both_parts(seed):
    rng = random.Random(seed)
    ranked = busy_day(rng, frozenset(fault for fault in FAULTS_HERE if rng.random() < 0.4))
    assert len(ranked.lease_ends) == len(ranked.pulls)

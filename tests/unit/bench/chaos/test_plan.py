"""Faults and requests of `bench chaos` are determined by its seed."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from bench.chaos.faults import (
    ORDER_WITHIN_S,
    Director,
    FaultFailed,
    Orders,
    candidates,
)
from bench.chaos.plan import (
    LONG_SILENCE_S,
    OF_GATEWAYS,
    OF_RAY,
    ChaosPlan,
    Fault,
    FaultKind,
    check,
    chosen,
    faults_of,
    kinds_in_turn,
)
from bench.chaos.run import is_whole
from bench.chaos.streams import KINDS, chaos_requests
from bench.processes.deployment import NOTHING, OrderFailed, SeenGateway, SeenPools, SeenWorker
from engine.clock import MonotonicClock
from engine.errors import ConfigError
from engine.messages import Role

ALL = tuple(kind for kind in FaultKind if kind not in OF_RAY)
PLAN = ChaosPlan(num_requests=1000, rate_per_s=4, every_s=5, kinds=ALL, seed=3, store_mib=64)


def test_the_same_seed_gives_the_same_faults_and_another_one_others():
    assert faults_of(PLAN) == faults_of(PLAN)
    assert faults_of(PLAN) != faults_of(replace(PLAN, seed=4))


def test_kills_come_every_so_many_seconds_with_another_fault_between_each_two():
    faults = faults_of(PLAN)
    kills_s = [fault.at_s for fault in faults if fault.kind is FaultKind.KILL]
    assert len(kills_s) == 250 / 5
    assert {round(later - earlier, 9) for earlier, later in pairwise(kills_s)} == {5.0}
    between = [fault.kind is FaultKind.KILL for fault in faults]
    assert all(one is not other for one, other in pairwise(between))
    assert {fault.kind for fault in faults} == set(ALL)
    assert all(0 < fault.at_s < PLAN.duration_s for fault in faults)


@pytest.mark.parametrize("kind", [FaultKind.STOP, FaultKind.PARTITION])
def test_some_silences_last_longer_than_they_are_believed_and_some_do_not(kind):
    silences_s = [fault.seconds for fault in faults_of(replace(PLAN, kinds=(kind,)))]
    assert LONG_SILENCE_S in silences_s
    assert min(silences_s) < LONG_SILENCE_S / 2


def test_a_victim_is_drawn_from_all_candidates():
    def hit(draw: float) -> str | None:
        return chosen(Fault(0.0, FaultKind.KILL, draw), ["a", "b", "c"])

    assert [hit(0.0), hit(0.34), hit(0.999)] == ["a", "b", "c"]
    assert chosen(Fault(0.0, FaultKind.KILL, 0.5), []) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ()}, "at least one kind"),
        ({"gateways": 1}, "another one"),
        ({"rate_per_s": 0.0}, "above 0"),
        ({"prefill": 1, "decode": 1}, "at least two workers"),
        ({"kinds": (FaultKind.EVERYTHING, FaultKind.GCS)}, "of processes"),
        ({"kinds": (FaultKind.EVERYTHING,), "decode": 1}, "two decode workers"),
    ],
)
def test_a_plan_that_can_show_nothing_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(PLAN, **changes))


def worker(name: str, role: Role, /, **changes) -> SeenWorker:
    whole = SeenWorker(name, role, role, "serving", True, 7, 0, 0, 0, num_blocks=9, free_blocks=9)
    return msgspec.structs.replace(whole, **changes)


def pools(*workers: SeenWorker, gateways=("g0", "g1"), **changes) -> SeenPools:
    known = [SeenGateway(name, 8, "serving", None, members_version=5) for name in gateways]
    whole = SeenPools(settled=True, version=5, workers=list(workers), gateways=known)
    return msgspec.structs.replace(whole, **changes)


P0, P1 = (worker(name, Role.PREFILL) for name in ("p0", "p1"))
D0, D1 = (worker(name, Role.DECODE) for name in ("d0", "d1"))


def test_every_worker_may_be_hit_while_pools_are_complete():
    assert candidates(FaultKind.KILL, pools(P0, P1, D0, D1), held=()) == ["d0", "d1", "p0", "p1"]


OF_WORKERS = sorted(
    set(FaultKind)
    - OF_GATEWAYS
    - OF_RAY
    - {FaultKind.POOL, FaultKind.STOP_CONTROLLER, FaultKind.EVERYTHING, FaultKind.STORE}
)


@pytest.mark.parametrize("kind", OF_WORKERS)
def test_no_fault_takes_the_last_working_worker_of_a_pool(kind):
    for changes in (
        {"state": "starting"},
        {"is_connected": False},
        {"role": Role.DRAINED, "target": Role.DRAINED, "state": "drained"},
        {"role": Role.PREFILL},  # the worker has an order to decode, but does not decode yet
    ):
        other = worker("d1", Role.DECODE, **changes)
        assert candidates(kind, pools(P0, P1, D0, other), held=()) == ["p0", "p1"]
    assert candidates(kind, pools(P0, P1, D0, D1), held=["d1"]) == ["p0", "p1"]
    assert candidates(kind, pools(P0, P1, D0, D1), held=["d1", "p0"]) == []
    assert candidates(kind, pools(P0, P1, D0), held=()) == ["p0", "p1"]


@pytest.mark.parametrize("kind", list(FaultKind))
def test_no_fault_while_a_gateway_does_not_know_all_workers(kind):
    late = SeenGateway("g1", 8, "serving", None, members_version=4)
    starting = SeenGateway("g1", None, "starting", "it does not report", members_version=5)
    whole = pools(P0, P1, D0, D1)
    assert candidates(kind, whole, held=())
    for other in (late, starting):
        seen = msgspec.structs.replace(whole, gateways=[whole.gateways[0], other])
        assert candidates(kind, seen, held=()) == []


def test_a_whole_pool_is_hit_only_while_all_workers_work():
    assert candidates(FaultKind.POOL, pools(P0, D0, D1), held=()) == ["decode", "prefill"]
    assert candidates(FaultKind.POOL, pools(P0, D0, D1), held=["d1"]) == []
    assert candidates(FaultKind.POOL, pools(P0, P1), held=()) == []
    pool = Fault(0.0, FaultKind.POOL, 0.0)
    _, faults = directed(pools(P0, D0, D1), pool, kinds=(FaultKind.POOL,))
    assert faults == [(FaultKind.POOL, "decode", [7, 7])]


def test_a_gateway_is_hit_only_while_there_is_another_one():
    assert candidates(FaultKind.GATEWAY, pools(P0, D0), held=()) == ["g0", "g1"]
    assert candidates(FaultKind.GATEWAY, pools(P0, D0), held=["g0"]) == []


def test_the_rarest_kind_goes_first_and_a_kill_is_nothing_else():
    fault = Fault(0.0, FaultKind.DRAIN, 0.5)
    kinds = kinds_in_turn(ALL, fault, {FaultKind.DRAIN: 1, FaultKind.FLIP: 1})
    assert kinds[-2:] == [FaultKind.DRAIN, FaultKind.FLIP]
    assert set(kinds) == set(ALL) - {FaultKind.KILL}
    assert kinds_in_turn(ALL, fault, {})[0] is FaultKind.DRAIN
    assert kinds_in_turn(ALL, replace(fault, kind=FaultKind.KILL), {}) == [FaultKind.KILL]


class SeenDeployment:
    """A deployment with a given state."""

    pid = 99

    def __init__(self, seen: SeenPools) -> None:
        self._seen = seen

    async def check(self) -> SeenPools:
        return self._seen


class Noted:
    """Injects no fault, but records the requested faults."""

    def __init__(self) -> None:
        self.faults: list[tuple[FaultKind, str, int]] = []

    async def inject(self, fault: Fault, victim: str, pid: int) -> str:
        self.faults.append((fault.kind, victim, pid))
        return ""


def directed(seen: SeenPools, *faults: Fault, kinds=ALL) -> tuple[Director, list]:
    noted = Noted()
    injectors = dict.fromkeys(FaultKind, noted)
    clock = MonotonicClock()
    director = Director(SeenDeployment(seen), injectors, clock, kinds=kinds)
    asyncio.run(director.run(faults, clock.now_s()))
    return director, noted.faults


def test_fault_without_victim_gives_way_to_another_kind():
    kinds = (FaultKind.KILL, FaultKind.DRAIN, FaultKind.GATEWAY)
    drain = Fault(0.0, FaultKind.DRAIN, 0.0)
    director, faults = directed(pools(P0, D0), drain, kinds=kinds)
    assert faults == [(FaultKind.GATEWAY, "g0", [8])]
    assert [fault.kind for fault in director.injected] == [FaultKind.GATEWAY]
    director, faults = directed(pools(P0, P1, D0), drain, kinds=kinds)
    assert faults == [(FaultKind.DRAIN, "p0", [7])]


def test_kill_without_victim_is_skipped():
    director, faults = directed(pools(P0, D0), Fault(0.0, FaultKind.KILL, 0.0))
    assert not faults
    assert [fault.kind for fault in director.skipped] == [FaultKind.KILL]


class LaterClock:
    """A clock on which, at every reading, an order's deadline has passed."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 2 * ORDER_WITHIN_S
        return self._now_s


class StubbornDeployment:
    """Accepts orders, but its only worker never changes its role."""

    def __init__(self, *, refuses: bool = False) -> None:
        self._worker = P0
        self._refuses = refuses
        self.orders: list[Role] = []

    async def check(self) -> SeenPools:
        return pools(self._worker)

    async def flip(self, victim: str, role: Role) -> None:
        if self._refuses:
            raise OrderFailed("409")
        self.orders.append(role)
        state = "serving" if role is P0.role else "flipping"
        self._worker = msgspec.structs.replace(self._worker, state=state, target=role)

    async def drain(self, victim: str) -> None:
        await self.flip(victim, Role.DRAINED)


@pytest.mark.parametrize(
    ("kind", "ordered"), [(FaultKind.FLIP, Role.DECODE), (FaultKind.DRAIN, Role.DRAINED)]
)
def test_an_order_that_was_not_carried_out_is_taken_back(kind, ordered):
    deployment = StubbornDeployment()
    with pytest.raises(FaultFailed, match=f"as {ordered} in 20 s"):
        asyncio.run(Orders(deployment, LaterClock()).inject(Fault(0.0, kind, 0.0), "p0", 7))
    assert deployment.orders == [ordered, Role.PREFILL]


@pytest.mark.parametrize(
    "other",
    [
        worker("d1", Role.PREFILL),
        worker("d1", Role.DRAINED, state="drained"),
        worker("d1", Role.MIXED),
    ],
)
def test_pools_are_not_whole_while_an_order_is_not_undone_though_nothing_else_is_wanted(other):
    plan = ChaosPlan(prefill=1, decode=2)
    assert is_whole(pools(P0, D0, D1), plan)
    assert not is_whole(pools(P0, D0, other), plan)
    assert not is_whole(pools(P0, D0), plan)


def test_pools_are_whole_when_nothing_is_under_way_or_held():
    plan = ChaosPlan(prefill=1, decode=1)
    assert is_whole(pools(P0, D0), plan)
    for changed in (
        pools(P0, D0, settled=False),
        pools(P0, worker("d0", Role.DECODE, running_seqs=1)),
        pools(P0, worker("d0", Role.DECODE, waiting_seqs=1)),
        pools(P0, worker("d0", Role.DECODE, open_leases=1)),
        pools(P0, worker("d0", Role.DECODE, free_blocks=8)),
    ):
        assert not is_whole(changed, plan)
    assert not is_whole(NOTHING, plan)


def test_blocks_that_are_neither_free_nor_cached_are_leaked():
    held = worker("d1", Role.DECODE, free_blocks=6, open_leases=2)
    assert pools(P0, D0).leaked == (0, 0)
    assert pools(P0, held).leaked == (3, 2)
    # the worker reports more free blocks than it has
    assert pools(worker("d1", Role.DECODE, free_blocks=10)).leaked == (1, 0)


def test_requests_are_of_all_kinds_and_each_names_its_seed():
    made = chaos_requests(500, vocab=range(5, 4096), model="m", seed=1)
    assert made == chaos_requests(500, vocab=range(5, 4096), model="m", seed=1)
    counts = Counter(ask.kind for ask in made)
    assert counts.keys() == KINDS.keys()
    assert min(counts.values()) > 20
    bodies = [json.loads(ask.body) for ask in made]
    assert all(body["stream"] and "seed" in body for body in bodies)
    assert all(body.get("n", 1) == ask.num_choices for ask, body in zip(made, bodies, strict=True))
    assert {ask.num_choices for ask in made} == {1, 2, 3}

"""Workers that become silent, return or die."""

from itertools import pairwise

from deploy.pools.events import (
    Disconnected,
    PoolTick,
    RoleSeen,
    WorkerStarted,
    WorkerStartFailed,
    WorkerStopped,
)
from deploy.pools.orders import Flip
from deploy.pools.restarts import LAST_RESTART_S, QUICK_TRIES
from deploy.pools.workers.record import WorkerState
from deploy.pools.workers.sightings import FLIP_TIMEOUT_S, UNREACHABLE_S
from engine.control import Pools
from engine.messages import Role, WorkerId
from tests.kits.pools import intent_of, settled

P, D = Role.PREFILL, Role.DECODE


def test_dead_worker_is_restarted_after_growing_pauses():
    world = settled()
    world.fails_always = {D}
    world.die("worker-1")
    world.run(1200)
    times = [when for when, _ in world.started]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[0] < 5
    assert max(gaps[: QUICK_TRIES - 2]) < 20  # each of these starts failed quickly
    assert len(times) <= QUICK_TRIES + 20
    assert min(gaps[QUICK_TRIES + 1 :]) >= LAST_RESTART_S
    assert any("for the 3. time in a row" in line for line in world.told)
    world.fails_always = set()
    world.settle()
    assert world.roles() == {"worker-0": P, "worker-1": D}


def test_unreachable_worker_is_stopped_by_force_and_replaced():
    world = settled()
    world.hang("worker-1")
    world.run(UNREACHABLE_S - 2)
    assert world.states()["worker-1"] is WorkerState.SERVING
    world.settle()
    assert len(world.started) == 1
    assert world.machine.counters["workers unreachable"] == 1


def test_worker_that_reconnects_in_time_stays():
    world = settled()
    world.hang("worker-1")
    world.run(5)
    world.processes["worker-1"].is_deaf = False
    world.connect("worker-1")
    world.run(100)
    assert world.started == []
    assert world.machine.is_settled


def test_flip_deadline_restarts_after_a_reconnect():
    world = settled(Pools(2, 1))
    world.processes["worker-0"].is_mute = True
    world.feed(Flip(WorkerId("worker-0"), D))
    world.hang("worker-0")
    world.run(FLIP_TIMEOUT_S + 5)
    world.processes["worker-0"].is_mute = world.processes["worker-0"].is_deaf = False
    world.connect("worker-0")
    world.feed(PoolTick())
    world.settle()
    assert world.roles()["worker-0"] is D
    assert not world.machine.counters["flips failed"]


def test_worker_that_returns_in_another_role_gets_its_order_again_a_few_times():
    world = settled(Pools(1, 2))
    process, address = world.processes["worker-1"], world.addresses["worker-1"]
    process.is_mute, process.role = True, P
    world.feed(Disconnected(WorkerId("worker-1"), address, "cut off"))
    world.connect("worker-1")
    assert not world.machine.is_settled
    assert world.machine.counters["flips"] == 1
    world.run(FLIP_TIMEOUT_S + 2)
    assert world.machine.counters["flips failed"] == 1
    process.is_mute = False
    world.settle()
    assert sorted(world.roles().values()) == [D, D, P]


def test_found_but_unreachable_workers_are_replaced():
    world = settled()
    for process in world.processes.values():
        process.is_deaf = True
    world.replace_controller(intent_of(Pools(1, 1)))
    world.run(UNREACHABLE_S + 5)
    world.settle()
    assert world.roles() == {"worker-0": P, "worker-1": D}
    assert len(world.started) == 2


def test_events_of_an_earlier_start_are_ignored():
    world = settled()
    old = world.addresses["worker-1"]
    world.die("worker-1")
    world.run(2)
    world.settle()
    before = repr(world.machine.workers)
    world.feed(Disconnected(WorkerId("worker-1"), old, "late"))
    world.feed(RoleSeen(WorkerId("worker-1"), old, P))
    world.feed(WorkerStarted(WorkerId("worker-1"), 1, old))
    world.feed(WorkerStartFailed(WorkerId("worker-1"), 1, "late"))
    world.feed(WorkerStopped(WorkerId("worker-1")))
    assert repr(world.machine.workers) == before


def test_the_reason_of_a_failed_start_is_a_trouble_until_the_worker_runs():
    world = settled(Pools(2, 1))
    full = "no space is left on the disk of /cache: free some, or use another folder"
    world.fails += [full] * 3
    world.die("worker-0")
    world.run(1)
    assert not world.machine.troubles()
    world.run(4)
    assert world.machine.troubles() == (f"worker-0 (prefill) did not start: {full}",)
    assert world.machine.restarts.why(WorkerId("worker-0")) == f"did not start: {full}"
    assert any(full in line for line in world.told)
    world.settle()
    assert not world.machine.troubles()

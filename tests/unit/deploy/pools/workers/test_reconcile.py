"""Workers start, change role and drain until the pools have their target size."""

import pytest

from deploy.pools.events import LoadSeen, PoolTick
from deploy.pools.orders import Flip, SetPools, Stop
from deploy.pools.workers.record import WorkerState
from deploy.pools.workers.sightings import FLIP_TIMEOUT_S
from engine.control import Pools
from engine.messages import LoadReport, Role, WorkerId
from tests.kits.pools import APART, PoolWorld, settled

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def test_growing_starts_workers_and_shrinking_drains_before_stopping():
    world = settled(Pools(1, 1))
    world.feed(SetPools(Pools(2, 2)))
    world.settle()
    assert len(world.processes) == 4
    world.told.clear()
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert world.roles() == {"worker-1": D, "worker-2": P, "worker-3": D}
    assert [line.split(",")[0] for line in world.told[1:]] == [
        "worker-0 is drained of its work: too many prefill workers",
        "worker-0 is drained",
        "worker-0 was stopped",
    ]


def test_surplus_worker_is_flipped_into_the_pool_that_lacks_one():
    world = settled(Pools(3, 1))
    world.feed(SetPools(Pools(1, 3)))
    world.settle()
    assert world.started == []
    assert sorted(world.roles().values()) == [D, D, D, P]


def test_least_loaded_worker_is_flipped():
    world = settled(Pools(2, 1))
    busy = LoadReport(8, 0, 0, 0, 0, 3, 1, 0, prompt_tokens=900)
    world.feed(LoadSeen(WorkerId("worker-0"), world.addresses["worker-0"], busy))
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert world.roles() == {"worker-0": P, "worker-1": D, "worker-2": D}


def test_workers_of_another_kv_format_are_replaced_not_flipped():
    world = settled(Pools(2, 1), config=APART)
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert len(world.started) == 1
    assert sorted(world.roles().values()) == [D, D, P]


def test_pool_is_not_emptied_before_another_serves():
    world = settled(Pools(0, 0, 1), max_workers=2)
    world.feed(SetPools(Pools(1, 1, 0)))
    world.settle()
    assert sorted(world.roles().values()) == [D, P]
    assert len(world.started) == 1


def test_starting_worker_is_awaited_and_flipped():
    world = settled(Pools(1, 1))
    world.feed(SetPools(Pools(2, 1)))
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert len(world.started) == 1
    assert sorted(world.roles().values()) == [D, D, P]


def test_refused_flip_is_replaced_by_another_move():
    world = settled(Pools(2, 1))
    for process in world.processes.values():
        process.refuses = {D}
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert len(world.started) == 1
    assert sorted(world.roles().values()) == [D, D, P]
    assert world.machine.counters["flips failed"] == 2


def test_flip_without_an_answer_is_given_up():
    world = settled(Pools(2, 1))
    world.processes["worker-0"].is_mute = True
    world.feed(Flip(WorkerId("worker-0"), D))
    world.run(FLIP_TIMEOUT_S + 2)
    assert world.machine.counters["flips failed"] == 1
    world.settle()
    assert sum(role is D for role in world.roles().values()) == 2


def test_flip_settles_once_decoding_sequences_have_moved():
    world = settled(Pools(1, 2))
    world.processes["worker-1"].num_decoding = 5
    world.feed(Flip(WorkerId("worker-1"), P))
    world.run(5)
    worker = world.machine.workers[WorkerId("worker-1")]
    assert worker.state is WorkerState.SERVING
    assert worker.prefills()
    assert worker.num_leaving_seqs == 5
    assert not world.machine.is_settled
    world.processes["worker-1"].num_decoding = 0
    world.settle()
    assert [line.split(",")[0] for line in world.told] == [
        "worker-1 is flipped from decode to prefill: ordered",
        "worker-1 is prefill now",
        "worker-1 has stopped decoding",
    ]


def test_flip_back_cancels_the_moves():
    world = settled(Pools(1, 2))
    world.processes["worker-1"].num_decoding = 5
    world.feed(Flip(WorkerId("worker-1"), P))
    world.run(5)
    world.feed(Flip(WorkerId("worker-1"), D))
    world.settle()
    assert world.machine.workers[WorkerId("worker-1")].num_leaving_seqs == 0


def test_worker_is_stopped_after_the_drain_deadline():
    world = settled(Pools(2, 1))
    for process in world.processes.values():
        process.is_stuck = True
    world.feed(SetPools(Pools(1, 1)))
    world.run(10)
    assert len(world.processes) == 3
    world.run(20)
    assert len(world.processes) == 2
    assert world.machine.counters["drains timed out"] == 1
    assert any("is stopped anyway" in line for line in world.told)


def serving(world: PoolWorld) -> dict[str, Role]:
    """Returns the roles of all serving workers."""
    states = world.states()
    return {n: role for n, role in world.roles().items() if states[n] is WorkerState.SERVING}


def test_worker_stands_in_for_a_pool_that_died_and_then_gets_its_role_back():
    world = settled(Pools(2, 2))
    world.start_s = 20
    world.die("worker-2")
    world.run(2)
    assert world.machine.counters["stand-ins"] == 0  # another worker decodes
    world.die("worker-3")
    world.run(2)
    assert serving(world) == {"worker-0": M, "worker-1": P}
    world.settle()
    assert world.roles() == {"worker-0": P, "worker-1": P, "worker-2": D, "worker-3": D}
    assert [name for _, name in world.started] == ["worker-2", "worker-3"]
    assert world.machine.counters["stand-ins"] == 1


@pytest.mark.parametrize(("dead", "role"), [("worker-1", D), ("worker-0", P)])
def test_last_worker_of_a_pair_does_both(dead: str, role: Role):
    world = settled(Pools(1, 1))
    world.start_s = 20
    world.die(dead)
    world.run(2)
    assert [*serving(world).values()] == [M]
    assert f"no {role} worker is left until one has started again" in "".join(world.told)
    world.settle()
    assert world.roles() == {"worker-0": P, "worker-1": D}


def test_nobody_stands_in_for_workers_that_start_for_the_first_time_or_may_still_serve():
    world = PoolWorld(Pools(1, 1))
    world.has_no_place.add("worker-1")
    world.feed(PoolTick())
    world.run(5)
    assert world.machine.counters["stand-ins"] == 0
    world = settled(Pools(1, 1))
    world.hang("worker-1")
    world.run(5)
    assert world.machine.counters["stand-ins"] == 0


def test_another_worker_stands_in_if_the_first_refuses():
    world = settled(Pools(2, 1))
    world.processes["worker-0"].refuses = {M}
    world.start_s = 20
    world.die("worker-2")
    world.run(5)
    assert serving(world) == {"worker-0": P, "worker-1": M}


def spares(world: PoolWorld) -> list[str]:
    return [w.worker_id for w in world.machine.workers.values() if w.is_ready_spare]


def test_spare_takes_the_place_of_a_dead_worker_which_becomes_the_spare():
    world = settled(Pools(1, 1), num_spares=1)
    world.run(5)
    world.settle()
    [spare] = spares(world)
    world.start_s = 20
    world.die("worker-1")
    world.run(3)
    assert serving(world) == {"worker-0": P, spare: D}
    assert world.machine.counters["spares taken"] == 1
    assert world.machine.counters["stand-ins"] == 0
    world.settle()
    assert spares(world) == ["worker-1"]
    assert world.machine.intent.drained == ()


def test_spares_fill_a_pool_that_grows():
    world = settled(Pools(1, 1), num_spares=2)
    world.run(5)
    world.settle()
    assert len(spares(world)) == 2
    world.feed(SetPools(Pools(1, 2)))
    world.run(3)
    assert sorted(serving(world).values()) == [D, D, P]
    world.settle()
    world.run(5)
    world.settle()
    assert len(spares(world)) == 2


def test_spare_gives_its_room_to_a_worker_that_it_cannot_replace():
    world = settled(Pools(1, 1), max_workers=3, config=APART, num_spares=1)
    world.run(5)
    world.settle()
    assert len(spares(world)) == 1  # the spare worker has the KV format of decode workers
    world.feed(SetPools(Pools(2, 1)))
    world.settle()
    assert spares(world) == []
    assert sorted(serving(world).values()) == [D, P, P]
    world.feed(SetPools(Pools(1, 1)))
    world.settle()
    world.run(5)
    world.settle()
    assert len(spares(world)) == 1


def test_dead_or_stopped_spare_is_replaced():
    world = settled(Pools(1, 1), num_spares=1)
    world.run(5)
    world.settle()
    [spare] = spares(world)
    world.die(spare)
    world.run(1)
    world.settle()
    [spare] = spares(world)
    world.feed(Stop(WorkerId(spare)))
    world.settle()
    world.run(5)
    world.settle()
    assert len(spares(world)) == 1


def test_next_controller_knows_the_spare_and_keeps_it():
    world = settled(Pools(1, 1), num_spares=1)
    world.run(5)
    world.settle()
    before = spares(world)
    world.replace_controller(world.machine.intent)
    world.connect()
    world.run(5)
    world.settle()
    assert spares(world) == before

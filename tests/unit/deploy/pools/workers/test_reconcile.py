"""Workers start, change role and drain until the pools have their wanted size."""

from deploy.pools.events import (
    LoadSeen,
)
from deploy.pools.orders import Flip, SetPools
from deploy.pools.workers.record import WorkerState
from deploy.pools.workers.sightings import FLIP_TIMEOUT_S
from engine.control import Pools
from engine.messages import LoadReport, Role, WorkerId
from tests.kits.pools import APART, settled

P, D = Role.PREFILL, Role.DECODE


def test_growing_starts_workers_and_shrinking_drains_before_stopping():
    world = settled(Pools(1, 1))
    world.feed(SetPools(Pools(2, 2)))
    world.settle()
    assert len(world.processes) == 4
    world.told.clear()
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert world.roles() == {"decode-0": D, "decode-1": D, "prefill-1": P}
    assert [line.split(",")[0] for line in world.told[1:]] == [
        "prefill-0 is drained of its work: too many prefill workers",
        "prefill-0 is drained",
        "prefill-0 was stopped",
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
    world.feed(LoadSeen(WorkerId("prefill-0"), world.addresses["prefill-0"], busy))
    world.feed(SetPools(Pools(1, 2)))
    world.settle()
    assert world.roles() == {"decode-0": D, "prefill-0": P, "prefill-1": D}


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
    world.processes["prefill-0"].is_mute = True
    world.feed(Flip(WorkerId("prefill-0"), D))
    world.run(FLIP_TIMEOUT_S + 2)
    assert world.machine.counters["flips failed"] == 1
    world.settle()
    assert sum(role is D for role in world.roles().values()) == 2


def test_flip_settles_once_decoding_sequences_have_moved():
    world = settled(Pools(1, 2))
    world.processes["decode-0"].num_decoding = 5
    world.feed(Flip(WorkerId("decode-0"), P))
    world.run(5)
    worker = world.machine.workers[WorkerId("decode-0")]
    assert worker.state is WorkerState.SERVING
    assert worker.prefills()
    assert worker.num_leaving_seqs == 5
    assert not world.machine.is_settled
    world.processes["decode-0"].num_decoding = 0
    world.settle()
    assert [line.split(",")[0] for line in world.told] == [
        "decode-0 is flipped from decode to prefill: ordered",
        "decode-0 is prefill now",
        "decode-0 has stopped decoding",
    ]


def test_flip_back_cancels_the_moves():
    world = settled(Pools(1, 2))
    world.processes["decode-0"].num_decoding = 5
    world.feed(Flip(WorkerId("decode-0"), P))
    world.run(5)
    world.feed(Flip(WorkerId("decode-0"), D))
    world.settle()
    assert world.machine.workers[WorkerId("decode-0")].num_leaving_seqs == 0


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

"""Pools whose workers have all died, with equal and with different KV formats."""

import msgspec
import pytest

from deploy.pools.workers.record import WorkerState
from engine.config import WorkerConfig
from engine.control import Pools
from engine.layout import KVFormat
from engine.messages import Role
from tests.kits.pools import APART, PoolWorld

INT8 = WorkerConfig(kv_dtype=KVFormat.INT8)


def settled(pools: Pools, config: WorkerConfig) -> PoolWorld:
    world = PoolWorld(pools, config=config)
    world.settle()
    world.run(100)  # after this time a failure counts as the first
    world.started.clear()
    return world


def kill(world: PoolWorld, role: str) -> list[str]:
    names = [name for name, its in world.roles().items() if its == role]
    for name in names:
        world.die(name)
    return names


def serving(world: PoolWorld) -> dict[str, Role]:
    states = world.states()
    return {n: role for n, role in world.roles().items() if states[n] is WorkerState.SERVING}


def test_a_quantised_pool_of_one_format_has_a_stand_in_at_once():
    world = settled(Pools(2, 2), INT8)
    world.start_s = 20
    kill(world, "decode")
    world.run(3)
    assert sorted(serving(world).values()) == [Role.MIXED, Role.PREFILL]
    [told] = world.machine.troubles()
    assert told == "worker-0 stands in for all decode workers"
    world.settle()
    assert world.machine.troubles() == ()
    assert world.machine.counters["hurried starts"] == 0


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_workers_of_a_format_of_their_own_are_started_again_at_once_and_told(role):
    world = settled(Pools(2, 2), APART)
    names = kill(world, role)
    died_s = world.now_s
    world.run(3)
    assert world.machine.counters["hurried starts"] == 2
    assert world.machine.counters["stand-ins"] == 0
    assert any("none can stand in" in line for line in world.told)
    world.settle()
    assert set(names) == {name for _, name in world.started}
    assert max(at_s for at_s, _ in world.started) - died_s < 3.0


def test_troubles_name_the_formats_that_keep_others_from_standing_in():
    world = settled(Pools(2, 1), APART)
    world.start_s = 20
    kill(world, "decode")
    world.run(2)
    [told] = world.machine.troubles()
    assert "no decode worker of" in told
    assert "no other worker has its KV format: int8" in told


def test_after_a_while_a_worker_of_another_format_stands_in_and_that_is_reported():
    world = settled(Pools(2, 1), APART)
    world.start_s = 30
    kill(world, "decode")
    world.run(4)
    assert world.machine.counters["stand-ins"] == 0
    world.run(6)
    assert sorted(serving(world).values()) == [Role.MIXED, Role.PREFILL]
    [told] = world.machine.troubles()
    assert told.endswith("for int8: tokens may differ")
    world.settle()
    assert world.roles() == {"worker-2": Role.DECODE} | dict.fromkeys(
        ("worker-0", "worker-1"), Role.PREFILL
    )
    assert world.machine.troubles() == ()


def test_no_decode_worker_of_another_format_can_prefill():
    world = settled(Pools(1, 2), APART)
    world.start_s = 30
    kill(world, "prefill")
    world.run(20)
    assert world.machine.counters["stand-ins"] == 0
    [told] = world.machine.troubles()
    assert told.startswith("no prefill worker of")
    world.settle()


def test_a_second_failure_in_a_row_waits_again():
    world = settled(Pools(2, 1), APART)
    world.fails = ["no memory", "no memory", "no memory"]
    kill(world, "decode")
    world.run(12)
    assert world.machine.counters["hurried starts"] == 1
    world.settle()


def test_a_single_pair_of_one_format_that_dies_together_starts_again_at_once():
    world = settled(Pools(1, 1), msgspec.structs.replace(INT8))
    for name in list(world.processes):
        world.die(name)
    world.run(3)
    assert world.machine.counters["hurried starts"] == 2
    world.settle()

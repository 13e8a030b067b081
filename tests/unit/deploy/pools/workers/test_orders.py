"""Orders for single workers and for pool sizes, and refused orders."""

import pytest

from deploy.pools.events import RoomSeen
from deploy.pools.orders import Drain, Flip, OrderRefused, SetPools, Stop
from deploy.pools.workers.record import WorkerState
from engine.control import Pools
from engine.messages import Role, WorkerId
from tests.kits.pools import APART, check_refused, intent_of, settled

P, D = Role.PREFILL, Role.DECODE


def test_drained_worker_stays_until_flipped_back():
    world = settled(Pools(2, 1))
    world.feed(Drain(WorkerId("worker-0")))
    world.settle()
    world.run(100)
    assert world.states()["worker-0"] is WorkerState.DRAINED
    assert world.machine.intent == intent_of(Pools(1, 1), drained=(WorkerId("worker-0"),))
    world.feed(Flip(WorkerId("worker-0"), D))
    world.settle()
    assert world.machine.intent == intent_of(Pools(1, 2))
    assert world.started == []


def test_stopped_worker_is_not_replaced():
    world = settled(Pools(2, 1))
    world.feed(Stop(WorkerId("worker-1")))
    world.settle()
    world.run(100)
    assert list(world.processes) == ["worker-0", "worker-2"]
    assert world.machine.intent.pools == Pools(1, 1)


def test_worker_can_be_stopped_while_starting_or_waiting():
    world = settled()
    world.feed(SetPools(Pools(2, 1)))
    world.feed(Stop(WorkerId("worker-2")))
    world.settle()
    world.fails_always = {D}
    world.feed(SetPools(Pools(1, 2)))
    world.run(2)
    while world.states()["worker-2"] is not WorkerState.WAITING:
        world.run(1)
    world.feed(Stop(WorkerId("worker-2")))
    world.settle()
    assert sorted(world.processes) == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("order", "reason", "status"),
    [
        (SetPools(Pools(0, 1)), "need a prefill and a decode worker", 400),
        (SetPools(Pools(-1, 1, 1)), "fewer than 0", 400),
        (SetPools(Pools(4, 3)), "7 workers are more than the 6 there can be", 409),
        (Flip(WorkerId("worker-0"), D), "need a prefill and a decode|last worker that pre", 409),
        (Flip(WorkerId("worker-1"), D), "decode already", 409),
        (Flip(WorkerId("worker-1"), Role.DRAINED), "order a drain", 400),
        (
            Flip(WorkerId("worker-8"), D),
            r"no worker is called worker-8; there are: worker-0 \(pref",
            404,
        ),
        (Drain(WorkerId("worker-0")), "the last worker that prefills", 409),
        (Stop(WorkerId("worker-0")), "the last worker that prefills", 409),
        (Drain(WorkerId("x")), "no worker is called x", 404),
        (Stop(WorkerId("x")), "no worker is called x", 404),
    ],
)
def test_impossible_order_is_refused_with_the_reason(order, reason, status):
    world = settled(Pools(1, 2), max_workers=6)
    check_refused(world, order, reason=reason, status=status)


def test_flip_between_formats_and_order_above_the_room_are_refused():
    world = settled(Pools(2, 2), max_workers=4, config=APART)
    with pytest.raises(OrderRefused, match="holds KV as fp32, decode workers as int8"):
        world.feed(Flip(WorkerId("worker-0"), D))
    world.feed(Drain(WorkerId("worker-0")))
    with pytest.raises(OrderRefused, match="4 workers beside worker-0, drained, are more than"):
        world.feed(SetPools(Pools(2, 2)))


def test_pools_above_the_room_may_change_but_not_grow():
    world = settled(Pools(2, 2), max_workers=5)
    world.feed(Drain(WorkerId("worker-2")))
    world.feed(SetPools(Pools(2, 2)))
    world.settle()
    world.feed(RoomSeen(3, "one node is gone"))
    world.feed(SetPools(Pools(3, 1)))
    world.settle()
    # worker-2 was drained, so the number of workers stays the same
    world.feed(Flip(WorkerId("worker-2"), D))
    world.settle()
    assert world.machine.intent.pools == Pools(3, 2)
    with pytest.raises(OrderRefused, match=r"6 workers are more than the 3 .*: one node is gone"):
        world.feed(SetPools(Pools(3, 3)))
    world.feed(SetPools(Pools(2, 2)))
    world.settle()
    assert sorted(world.roles().values()) == [D, D, P, P]

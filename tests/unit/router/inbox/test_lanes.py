"""Bodies that wait to be parsed are bounded, in all and for each tenant."""

import asyncio
import threading

import pytest

from router.inbox.api_errors import ApiError
from router.inbox.lanes import NUM_THREADS, THREADS_OF_TENANT, WIDE_BODY_BYTES, Lane, Lanes


class Work:
    """A parse that lasts until the test releases it."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(10)
        return "parsed"


async def begin(lane: Lane | Lanes, tenant: str, num_bytes: int) -> tuple[Work, asyncio.Task[str]]:
    work = Work()
    task = asyncio.create_task(lane.run(tenant, num_bytes, work))
    await asyncio.sleep(0)
    return work, task


async def refused(lane: Lane, tenant: str, num_bytes: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await lane.run(tenant, num_bytes, lambda: "")
    return caught.value


async def test_a_full_lane_refuses_and_takes_again_when_it_has_room():
    lane = Lane("test", 100)
    work, task = await begin(lane, "a", 50)
    other, waiting = await begin(lane, "b", 50)
    error = await refused(lane, "c", 1)
    assert (error.status, error.code) == (503, "overloaded")
    for each in (work, other):
        each.go_on.set()
    assert await asyncio.gather(task, waiting) == ["parsed", "parsed"]
    assert lane.num_bytes == 0
    assert await lane.run("c", 1, lambda: "soon") == "soon"


async def test_one_tenant_gets_half_of_a_lane():
    lane = Lane("test", 100)
    work, task = await begin(lane, "a", 40)
    await refused(lane, "a", 20)
    other, waiting = await begin(lane, "b", 20)
    for each in (work, other):
        each.go_on.set()
    await asyncio.gather(task, waiting)


def test_into_an_empty_lane_any_body_fits():
    assert asyncio.run(Lane("test", 100).run("a", 1000, lambda: "large")) == "large"


async def test_a_client_that_leaves_takes_its_waiting_body_along():
    lane = Lane("test", 100)
    running = [await begin(lane, str(i), 10) for i in range(NUM_THREADS)]
    work, waiting = await begin(lane, "b", 10)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert lane.num_bytes == 10 * NUM_THREADS
    for each, task in running:
        each.go_on.set()
        await task
    assert not work.begun.is_set()


async def test_a_short_body_does_not_wait_behind_long_ones():
    lanes = Lanes()
    running = [await begin(lanes, "a", WIDE_BODY_BYTES + 1) for _ in range(NUM_THREADS + 2)]
    assert await lanes.run("b", WIDE_BODY_BYTES, lambda: "short") == "short"
    for each, _ in running:
        each.go_on.set()
    await asyncio.gather(*(task for _, task in running))


async def test_beside_a_flood_another_tenant_has_a_thread_at_once():
    lane = Lane("test", 1000)
    flood = [await begin(lane, "a", 10) for _ in range(20)]
    assert await lane.run("b", 300, lambda: "parsed") == "parsed"
    assert sum(work.begun.is_set() for work, _ in flood) <= THREADS_OF_TENANT
    for work, _ in flood:
        work.go_on.set()
    assert await asyncio.gather(*(task for _, task in flood)) == ["parsed"] * 20
    assert (lane.num_bytes, lane._running.total()) == (0, 0)


async def test_tenants_that_wait_share_a_lane_by_bytes():
    lane, order = Lane("test", 1000), []
    running = [await begin(lane, str(i), 1) for i in range(NUM_THREADS)]
    sizes = {"a": 60, "b": 20}
    waiting = [
        asyncio.create_task(lane.run(tenant, sizes[tenant], lambda t=tenant: order.append(t)))
        for tenant in "aaabbbbb"
    ]
    await asyncio.sleep(0)
    running[0][0].go_on.set()  # from now on there is one thread
    await asyncio.gather(*waiting)
    assert order[:5] == ["a", "b", "b", "b", "a"]
    for work, task in running:
        work.go_on.set()
        await task


async def test_a_client_that_leaves_as_its_turn_comes_gives_the_thread_back():
    lane = Lane("test", 1000)
    running = [await begin(lane, str(i), 1) for i in range(NUM_THREADS)]
    for _ in range(20):
        leaving = asyncio.create_task(lane.run("b", 1, lambda: "never"))
        await asyncio.sleep(0)
        running[0][0].go_on.set()
        leaving.cancel()
        await asyncio.wait([leaving])
    for work, task in running:
        work.go_on.set()
        await task
    assert await lane.run("c", 1, lambda: "parsed") == "parsed"
    assert (lane.num_bytes, lane._running.total()) == (0, 0)


async def test_memory_of_long_bodies_is_given_back_once_after_a_while():
    freed = threading.Event()
    lanes = Lanes(freed.set, free_after_s=3600.0)
    await lanes.run("a", WIDE_BODY_BYTES, lambda: "short")
    assert lanes._freeing is None
    await lanes.run("a", WIDE_BODY_BYTES + 1, lambda: "long")
    timer = lanes._freeing
    await lanes.run("b", WIDE_BODY_BYTES + 1, lambda: "long")
    assert timer is not None
    assert lanes._freeing is timer
    timer.cancel()
    lanes._free_memory()  # as the timer does
    assert await asyncio.to_thread(freed.wait, 10)
    assert lanes._freeing is None

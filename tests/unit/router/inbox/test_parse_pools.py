"""Bodies that wait for parsing are bounded, in total and for each tenant."""

import asyncio
import threading

import pytest

from router.inbox.api_errors import ApiError
from router.inbox.parse_pools import (
    NUM_THREADS,
    THREADS_OF_TENANT,
    WIDE_BODY_BYTES,
    ParsePool,
    ParsePools,
)


class Work:
    """A parse that lasts until the test releases it."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(10)
        return "parsed"


async def begin(
    pool: ParsePool | ParsePools, tenant: str, num_bytes: int
) -> tuple[Work, asyncio.Task[str]]:
    work = Work()
    task = asyncio.create_task(pool.run(tenant, num_bytes, work))
    await asyncio.sleep(0)
    return work, task


async def refused(pool: ParsePool, tenant: str, num_bytes: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await pool.run(tenant, num_bytes, lambda: "")
    return caught.value


async def test_a_full_lane_refuses_and_takes_again_when_it_has_room():
    pool = ParsePool("test", 100)
    work, task = await begin(pool, "a", 50)
    other, waiting = await begin(pool, "b", 50)
    error = await refused(pool, "c", 1)
    assert (error.status, error.code) == (503, "overloaded")
    for each in (work, other):
        each.go_on.set()
    assert await asyncio.gather(task, waiting) == ["parsed", "parsed"]
    assert pool.num_bytes == 0
    assert await pool.run("c", 1, lambda: "soon") == "soon"


async def test_one_tenant_gets_half_of_a_lane():
    pool = ParsePool("test", 100)
    work, task = await begin(pool, "a", 40)
    await refused(pool, "a", 20)
    other, waiting = await begin(pool, "b", 20)
    for each in (work, other):
        each.go_on.set()
    await asyncio.gather(task, waiting)


def test_into_an_empty_lane_any_body_fits():
    assert asyncio.run(ParsePool("test", 100).run("a", 1000, lambda: "large")) == "large"


async def test_a_client_that_leaves_takes_its_waiting_body_along():
    pool = ParsePool("test", 100)
    running = [await begin(pool, str(i), 10) for i in range(NUM_THREADS)]
    work, waiting = await begin(pool, "b", 10)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert pool.num_bytes == 10 * NUM_THREADS
    for each, task in running:
        each.go_on.set()
        await task
    assert not work.begun.is_set()


async def test_a_short_body_does_not_wait_behind_long_ones():
    pools = ParsePools()
    running = [await begin(pools, "a", WIDE_BODY_BYTES + 1) for _ in range(NUM_THREADS + 2)]
    assert await pools.run("b", WIDE_BODY_BYTES, lambda: "short") == "short"
    for each, _ in running:
        each.go_on.set()
    await asyncio.gather(*(task for _, task in running))


async def test_beside_a_flood_another_tenant_has_a_thread_at_once():
    pool = ParsePool("test", 1000)
    flood = [await begin(pool, "a", 10) for _ in range(20)]
    assert await pool.run("b", 300, lambda: "parsed") == "parsed"
    assert sum(work.begun.is_set() for work, _ in flood) <= THREADS_OF_TENANT
    for work, _ in flood:
        work.go_on.set()
    assert await asyncio.gather(*(task for _, task in flood)) == ["parsed"] * 20
    assert (pool.num_bytes, pool._running.total()) == (0, 0)


async def test_tenants_that_wait_share_a_lane_by_bytes():
    pool, order = ParsePool("test", 1000), []
    running = [await begin(pool, str(i), 1) for i in range(NUM_THREADS)]
    sizes = {"a": 60, "b": 20}
    waiting = [
        asyncio.create_task(pool.run(tenant, sizes[tenant], lambda t=tenant: order.append(t)))
        for tenant in "aaabbbbb"
    ]
    await asyncio.sleep(0)
    running[0][0].go_on.set()  # from this point one thread is free
    await asyncio.gather(*waiting)
    assert order[:5] == ["a", "b", "b", "b", "a"]
    for work, task in running:
        work.go_on.set()
        await task


async def test_a_client_that_leaves_as_its_turn_comes_gives_the_thread_back():
    pool = ParsePool("test", 1000)
    running = [await begin(pool, str(i), 1) for i in range(NUM_THREADS)]
    for _ in range(20):
        leaving = asyncio.create_task(pool.run("b", 1, lambda: "never"))
        await asyncio.sleep(0)
        running[0][0].go_on.set()
        leaving.cancel()
        await asyncio.wait([leaving])
    for work, task in running:
        work.go_on.set()
        await task
    assert await pool.run("c", 1, lambda: "parsed") == "parsed"
    assert (pool.num_bytes, pool._running.total()) == (0, 0)


async def test_memory_of_long_bodies_is_given_back_once_after_a_while():
    freed = threading.Event()
    pools = ParsePools(freed.set, free_after_s=3600.0)
    await pools.run("a", WIDE_BODY_BYTES, lambda: "short")
    assert pools._freeing is None
    await pools.run("a", WIDE_BODY_BYTES + 1, lambda: "long")
    timer = pools._freeing
    await pools.run("b", WIDE_BODY_BYTES + 1, lambda: "long")
    assert timer is not None
    assert pools._freeing is timer
    timer.cancel()
    pools._free_memory()  # called directly instead of by the timer
    assert await asyncio.to_thread(freed.wait, 10)
    assert pools._freeing is None

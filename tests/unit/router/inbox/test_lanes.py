"""Bodies that wait to be parsed are bounded, in all and for each tenant."""

import asyncio
import threading

import pytest

from router.inbox.api_errors import ApiError
from router.inbox.lanes import NUM_THREADS, WIDE_BODY_BYTES, Lane, Lanes


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

"""Waiting tenants get equal shares of threads and event loop, whatever work they submit."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from router.inbox.fair_queue import MAX_IDLE_TENANTS, LoopQueue, TenantQueue

PUTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=60)


def drained(queue: TenantQueue) -> list:
    found = []
    while (item := queue.pop()) is not None:
        found.append(item)
    return found


def filled(puts) -> TenantQueue:
    queue: TenantQueue = TenantQueue()
    for number, (tenant, weight) in enumerate(puts):
        queue.put(tenant, (tenant, weight, number), weight)
    return queue


@given(PUTS)
def test_each_item_is_taken_once_and_in_the_order_of_its_tenant(puts):
    taken = drained(filled(puts))
    assert sorted(item[2] for item in taken) == list(range(len(puts)))
    for tenant in "abc":
        numbers = [number for name, _, number in taken if name == tenant]
        assert numbers == sorted(numbers)


@given(PUTS)
def test_while_two_tenants_wait_neither_gets_an_item_more_than_the_other(puts):
    queue, left = filled(puts), [tenant for tenant, _ in puts]
    got = dict.fromkeys("abc", 0)
    while left:
        tenant, weight, _ = queue.pop()
        left.remove(tenant)
        got[tenant] += weight
        waiting = [got[each] for each in "abc" if each in left]
        if waiting:
            assert max(waiting) - min(waiting) <= 50


def test_equal_items_are_taken_by_turns():
    queue = filled([("a", 1), ("a", 1), ("a", 1), ("b", 1), ("b", 1)])
    assert [item[0] for item in drained(queue)] == ["a", "b", "a", "b", "a"]


def test_a_tenant_that_comes_later_does_not_wait_behind_a_flood_and_is_owed_nothing():
    queue = filled([("a", 10)] * 50)
    for _ in range(20):
        queue.pop()
    for number in range(5):
        queue.put("b", ("b", 10, number), 10)
    first = [queue.pop()[0] for _ in range(8)]
    assert first.count("b") == 4


def test_a_tenant_that_may_have_nothing_now_keeps_its_place():
    queue = filled([("a", 1), ("b", 1)])
    assert queue.pop(lambda tenant: tenant == "b")[0] == "b"
    assert queue.pop(lambda tenant: tenant == "b") is None
    assert queue.pop()[0] == "a"


def test_tenants_that_are_gone_are_forgotten():
    queue = filled([("a", 1)] * 1000)
    for number in range(5 * MAX_IDLE_TENANTS):
        queue.put(number, number)
        queue.pop()
    assert len(queue._got) <= 2 * (len(queue._queues) + MAX_IDLE_TENANTS) + 1
    drained(queue)
    assert not queue._got


async def working(queue: LoopQueue, tenant: str, num_pieces: int, done: list[str]) -> None:
    for _ in range(num_pieces):
        await queue.wait(tenant)
        done.append(tenant)


async def passes(done: list[str], num: int) -> list[int]:
    """Returns the pieces that each pass of the event loop completed."""
    counts = []
    for _ in range(num):
        before = len(done)
        await asyncio.sleep(0)
        counts.append(len(done) - before)
    return counts


async def test_one_piece_is_done_in_a_pass_however_many_wait():
    queue, done = LoopQueue(), []
    tasks = [asyncio.create_task(working(queue, "a", 5, done)) for _ in range(20)]
    counts = await passes(done, 150)
    await asyncio.gather(*tasks)
    assert max(counts) == 1
    assert len(done) == 100


async def test_a_tenant_with_one_task_gets_every_other_turn_beside_a_flood():
    queue, done = LoopQueue(), []
    flood = [asyncio.create_task(working(queue, "a", 20, done)) for _ in range(50)]
    await passes(done, 20)
    begin = len(done)
    await working(queue, "b", 10, done)
    assert len(done) - begin <= 25
    await asyncio.gather(*flood)


async def test_a_client_that_leaves_delays_no_other():
    queue, done = LoopQueue(), []
    leaving = [asyncio.create_task(working(queue, "a", 3, done)) for _ in range(5)]
    await passes(done, 2)
    for task in leaving:
        task.cancel()
    await working(queue, "b", 3, done)
    assert done[-3:] == ["b"] * 3
    assert not queue._is_running or await passes(done, 3) == [0, 0, 0]

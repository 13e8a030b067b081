"""Between two pieces of long work the loop does everything else, and tenants take turns."""

import asyncio

from router.inbox.loop_turns import LoopTurns


async def working(turns: LoopTurns, tenant: str, num_pieces: int, done: list[str]) -> None:
    for _ in range(num_pieces):
        await turns.take(tenant)
        done.append(tenant)


async def passes(done: list[str], num: int) -> list[int]:
    """The pieces that were done in each pass of the loop."""
    counts = []
    for _ in range(num):
        before = len(done)
        await asyncio.sleep(0)
        counts.append(len(done) - before)
    return counts


async def test_one_piece_is_done_in_a_pass_however_many_wait():
    turns, done = LoopTurns(), []
    tasks = [asyncio.create_task(working(turns, "a", 5, done)) for _ in range(20)]
    counts = await passes(done, 150)
    await asyncio.gather(*tasks)
    assert max(counts) == 1
    assert len(done) == 100


async def test_a_tenant_with_one_task_gets_every_other_turn_beside_a_flood():
    turns, done = LoopTurns(), []
    flood = [asyncio.create_task(working(turns, "a", 20, done)) for _ in range(50)]
    await passes(done, 20)
    begin = len(done)
    await working(turns, "b", 10, done)
    assert len(done) - begin <= 25
    await asyncio.gather(*flood)


async def test_a_client_that_leaves_delays_no_other():
    turns, done = LoopTurns(), []
    leaving = [asyncio.create_task(working(turns, "a", 3, done)) for _ in range(5)]
    await passes(done, 2)
    for task in leaving:
        task.cancel()
    await working(turns, "b", 3, done)
    assert done[-3:] == ["b"] * 3
    assert not turns._is_going or await passes(done, 3) == [0, 0, 0]

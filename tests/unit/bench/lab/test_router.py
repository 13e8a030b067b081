"""`baton bench router`: its plan, its results, and the peer with which it is compared."""

import random

import pytest

from bench.common.command import say_nothing
from bench.lab.router.routers import (
    BLOCK_SIZE,
    COSTS,
    PROMPT_BLOCKS,
    BitmaskRouter,
    RouterCase,
    World,
)
from bench.lab.router.study import PEER, RouterMeasured, RouterStudy, results

MAIN = RouterMeasured(
    RouterCase(1000, 10**6),
    ours=[(4e-6,) * 100, (5e-6,) * 100, (8e-6,) * 99 + (60e-6,)],
    requests=[(20e-6,) * 100] * 3,
    peer=[(10e-6,) * 100] * 3,
    bytes_per_block=34.0,
    background=[0.0, 0.01],
)
OTHER = RouterMeasured(
    RouterCase(10_000, 10**7), ours=[(8e-6,) * 10], requests=[(9e-6,) * 10], bytes_per_block=40.0
)
GOALS = RouterStudy.GOALS
INGEST = ((4e6, 6e6, 5e6), (1e6,))


def by_name():
    return {result.name: result for result in results([MAIN, OTHER], INGEST)}


def test_decisions_have_a_peer_and_a_goal():
    found = by_name()["decisions/1000"]
    assert (found.value, found.unit) == (pytest.approx(200e3), "1/s")
    assert found.peers[PEER].ratio == pytest.approx(2)
    assert GOALS.is_met(found)
    assert by_name()["decisions/10000/1e7"].peers == {}
    assert GOALS.is_met(by_name()["decisions/10000/1e7"]) is None


def test_prompts_are_as_long_as_planned_and_begin_with_a_chain():
    world = World(RouterCase(10, 240), random.Random(0))
    chains = {h for number in range(10) for h in world.chain(number)}
    for prompt in world.prompts(20):
        hashes = prompt.hashes()
        assert len(hashes) == PROMPT_BLOCKS
        assert (prompt.num_tokens - 1) // BLOCK_SIZE == PROMPT_BLOCKS
        cached = [h in chains for h in hashes]
        assert cached == sorted(cached, reverse=True)


def test_small_run_measures_the_fleet_and_its_peer():
    study, case = RouterStudy(decisions=20, repeat=2), RouterCase(16, 480)
    measured = study.measure_case(case, say_nothing)
    assert [len(run) for run in (*measured.ours, *measured.peer)] == [20] * 4
    assert measured.bytes_per_block > 16
    ours, theirs = study.measure_ingest(case)
    assert len(ours) == len(theirs) == 2
    assert min(*ours, *theirs) > 0


def test_peer_prefers_holders_until_another_worker_is_sooner():
    peer = BitmaskRouter([True, True, False, False], 1000, COSTS)
    blocks = World(RouterCase(10, 240), random.Random(0)).chain(0)[:PROMPT_BLOCKS]
    peer.stored(1, blocks)
    ask = {"num_tokens": PROMPT_BLOCKS * BLOCK_SIZE + 1, "end_tokens": 7000}
    placed = [peer.decide(i, blocks, now_s=0.0, **ask) for i in range(40)]
    assert {decode for _, decode in placed[:2]} == {2, 3}
    assert placed[0][0] == 1
    assert {prefill for prefill, _ in placed} == {0, 1}


def test_peer_refuses_when_no_decode_worker_has_room():
    peer = BitmaskRouter([True, False], 2, COSTS)
    ask = {"num_tokens": 600, "end_tokens": 1000, "now_s": 0.0}
    assert peer.decide(1, [], **ask) == (0, 1)
    assert peer.decide(2, [], **ask) is None
    peer.release(1)
    assert peer.decide(2, [], **ask) == (0, 1)

"""The study: sessions of a trace, hits, hints and the policies' order on a small drawn load."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from bench.common.progress import say_nothing
from bench.common.report import result_of
from bench.eviction.classics import CLASSICS, BlockLru
from bench.eviction.play import Played, PlayPlan, Says, Writes, belady_percent, play, play_classic
from bench.eviction.study import StudyPlan, halfway_lines, study
from bench.eviction.turns import ChatTurn, drawn_turns, num_accesses, turns_of
from bench.simulator.traces import Trace, TraceRequest
from engine.worker.blocks import BlockHash
from kvtransfer.store.eviction.leaf_lru import LeafLru
from kvtransfer.store.eviction.leaf_worth import LeafWorth

SIZE = 150
DRAWN = drawn_turns(150, 1.0, Random(5))


def asked(arrived_s: float, *block_ids: int) -> TraceRequest:
    return TraceRequest(arrived_s, 512 * len(block_ids), 1, block_ids)


def turn(arrived_s: float, letters: str) -> ChatTurn:
    return ChatTurn(arrived_s, tuple(BlockHash(each.encode()) for each in letters), 0)


@cache
def played(plan: PlayPlan) -> Played:
    """The policy that learns, on the drawn load."""
    return play(LeafWorth(SIZE), DRAWN, plan)


def hits(plan: PlayPlan) -> float:
    return played(plan).hit_percent


def test_a_prompt_that_extends_another_is_its_sessions_next_turn():
    trace = Trace("t", 512, (asked(0.0, 0, 1, 2), asked(1.0, 0, 3), asked(5.0, 0, 1, 4)))
    found = turns_of(trace)
    assert [each.session for each in found] == [0, 1, 0]
    assert [each.returns_after_s for each in found] == [5.0, None, None]


def test_a_second_prompt_after_the_same_one_begins_a_session():
    trace = Trace("t", 512, (asked(0.0, 0, 1), asked(1.0, 0, 1, 2), asked(2.0, 0, 1, 3)))
    assert [each.session for each in turns_of(trace)] == [0, 0, 0]
    trace = Trace("t", 512, (asked(0.0, 0, 1), asked(1.0, 0, 1, 2), asked(2.0, 0, 1, 2, 3)))
    assert [each.returns_after_s for each in turns_of(trace)] == [1.0, 1.0, None]


def test_hits_are_the_leading_run_of_cached_blocks():
    turns = [turn(0.0, "abc"), turn(1.0, "abd"), turn(2.0, "xbc")]
    assert play_classic(BlockLru(9), turns) == pytest.approx(100 * 2 / 9)
    assert play(LeafLru(), turns, PlayPlan(9)).hit_percent == pytest.approx(100 * 2 / 9)


def test_belady_keeps_the_block_that_is_used_next():
    turns = [turn(float(n), letter) for n, letter in enumerate("abcab")]
    assert belady_percent(turns, 2) == pytest.approx(100 * 2 / 5)
    assert belady_percent(turns, 1) == pytest.approx(100 * 1 / 5)


def test_a_seed_always_draws_the_same_turns():
    assert drawn_turns(20, 1.0, Random(3)) == drawn_turns(20, 1.0, Random(3))
    assert drawn_turns(20, 1.0, Random(3)) != drawn_turns(20, 1.0, Random(4))
    arrivals = [each.arrived_s for each in DRAWN]
    assert arrivals == sorted(arrivals)


def test_a_sessions_prompts_grow_and_come_when_it_said():
    last: dict[int, ChatTurn] = {}
    for each in DRAWN:
        before = last.get(each.session)
        if before is not None:
            assert each.blocks[: len(before.blocks)] == before.blocks
            assert each.arrived_s == pytest.approx(before.arrived_s + before.returns_after_s)
        last[each.session] = each
    assert all(each.returns_after_s is None for each in last.values())


def test_what_is_learned_beats_lru_and_hints_beat_both():
    plan = PlayPlan(SIZE)
    lru = play(LeafLru(), DRAWN, plan).hit_percent
    learned, ids = hits(plan), hits(replace(plan, says=Says.IDS))
    noisy = hits(replace(plan, says=Says.NOISY))
    limit = belady_percent(DRAWN, SIZE)
    assert lru + 1 < learned
    assert learned + 3 < ids < noisy < limit
    best = max(play_classic(make(SIZE), DRAWN) for make in CLASSICS.values())
    assert noisy > (best + limit) / 2


def test_half_of_the_clients_gain_a_part_of_what_all_gain():
    plan = PlayPlan(SIZE, says=Says.NOISY)
    assert hits(PlayPlan(SIZE)) + 1 < hits(replace(plan, share=0.5)) < hits(plan) - 1


def test_storing_less_writes_less():
    plan = PlayPlan(SIZE)
    everything, twice = played(plan), played(replace(plan, writes=Writes.TWICE))
    idle = played(replace(plan, writes=Writes.IDLE, writes_per_s=5.0))
    assert twice.written_percent < everything.written_percent
    assert idle.written_percent < everything.written_percent
    seconds = DRAWN[-1].arrived_s
    assert idle.written_percent * num_accesses(DRAWN) / 100 <= 5.0 * seconds + 1


def test_the_study_has_each_result_once_and_sets_it_beside_the_classics():
    turns = drawn_turns(10, 1.0, Random(1))
    results = study(StudyPlan({"drawn": turns}, {"drawn": (20, 40)}, 1), say_nothing)
    names = [result.name for result in results]
    assert len(set(names)) == len(names)
    [worth] = [result for result in results if result.name == "drawn/20/worth"]
    assert worth.peers.keys() == CLASSICS.keys()
    assert worth.limit == belady_percent(turns, 20)


def test_a_missed_goal_is_told():
    result = result_of("load/10/noisy", [19.0], "%").limited(30.0).beside({"lru": 10.0})
    assert halfway_lines([result]) == ["load/10/noisy is 19.0 %, below half way: 20.0"]
    assert halfway_lines([replace(result, value=20.0)]) == []

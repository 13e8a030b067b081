"""The figures that `bench moves` computes from streams."""

import pytest

from bench.client.answers import Answer
from bench.lab.streams import StreamAsk
from bench.moves.plan import QUICK_REPEATS, MovesPlan, check, config_of, quick
from bench.moves.results import MovesRun, figures_of, moved_of
from engine.errors import ConfigError
from tests.kits.answers import answer_at

PLAN = MovesPlan("tiny", StreamAsk(16, 100, 100))


def stream(*, gap_s: float, pull_s: float | None = 0.01) -> Answer:
    """A chunk every 20 ms from 0 s to 2 s, with one gap after 1.1 s."""
    times_s = [0.02 * i for i in range(56)]
    times_s += [times_s[-1] + gap_s + 0.02 * i for i in range(45)]
    timeline = {"kv_transfer": 0.1} | ({} if pull_s is None else {"move_pull": pull_s})
    return answer_at(times_s, timeline_s=timeline)


def run(*streams: Answer) -> MovesRun:
    return MovesRun(streams, ordered_s=1.0, emptied_s=1.6)


def test_the_gap_of_a_move_is_held_against_three_usual_ones_and_the_pull():
    [moved] = moved_of(run(stream(gap_s=0.14)))
    assert moved.itl_s == pytest.approx(0.02)
    assert moved.calm_gap_s == pytest.approx(0.02)
    assert moved.gap_s == pytest.approx(0.14)
    assert moved.of_limit == pytest.approx(0.14 / 0.07)


def test_a_gap_that_goes_on_when_the_order_comes_counts_as_one_of_its_own():
    [moved] = moved_of(MovesRun((stream(gap_s=0.3),), ordered_s=1.2, emptied_s=1.6))
    assert moved.gap_s == pytest.approx(0.3)
    assert moved.calm_gap_s == pytest.approx(0.02)


def test_streams_that_stayed_or_ended_first_are_told_apart():
    figures = figures_of(run(stream(gap_s=0.1), stream(gap_s=0.02, pull_s=None)))
    assert (figures["moved"].value, figures["not_moved"].value) == (1, 1)
    assert figures["ended_first"].value == 0
    assert figures["gap/max"].value == pytest.approx(100)
    figures = figures_of(run(stream(gap_s=0.02, pull_s=None)))
    assert "gap/max" not in figures
    assert figures["flip"].value == pytest.approx(0.6)


def test_streams_that_ended_before_their_turn_did_not_fail_to_move():
    stayed = (stream(gap_s=0.02, pull_s=None),)  # until 2 s
    kinds = ("ended_first", "not_moved")
    figures = figures_of(MovesRun(stayed, ordered_s=1.0, emptied_s=2.5))
    assert [figures[kind].value for kind in kinds] == [1, 0]
    figures = figures_of(MovesRun(stayed, ordered_s=-1.0, emptied_s=2.5))  # it had the time to move
    assert [figures[kind].value for kind in kinds] == [0, 1]


def test_streams_that_others_came_to_are_held_against_three_usual_gaps_alone():
    beside = stream(gap_s=0.09, pull_s=None)
    figures = figures_of(MovesRun((stream(gap_s=0.1),), 1.0, 1.6, (beside,)))
    assert figures["moved"].value == 1
    assert figures["beside_gap/max"].value == pytest.approx(90)
    assert figures["beside_of_limit/max"].value == pytest.approx(0.09 / 0.06)


def test_a_quick_plan_moves_once_in_each_direction():
    assert quick(PLAN).num_repeats == QUICK_REPEATS
    assert config_of(PLAN)["streams"] == 16


def test_what_does_not_fit_the_model_is_refused():
    with pytest.raises(ConfigError, match="room for"):
        check(MovesPlan("tiny", StreamAsk(1, 5000, 1)))
    assert check(PLAN) is PLAN

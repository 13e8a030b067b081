"""The results that `bench moves` and `bench moves --join` compute from streams."""

from dataclasses import replace

import pytest

from bench.client.answers import Answer
from bench.lab.moves import JoinRun, MovesRun, figures_of, join_figures_of, moved_of
from tests.kits.answers import answer_at


def stream(*, gap_s: float, pull_s: float | None = 0.01) -> Answer:
    """Returns a stream with a chunk every 20 ms from 0 s to 2 s, and one longer gap after 1.1 s."""
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


def test_streams_that_stayed_are_distinguished_from_streams_that_ended_first():
    figures = figures_of(run(stream(gap_s=0.1), stream(gap_s=0.02, pull_s=None)))
    assert (figures["moved"].value, figures["not_moved"].value) == (1, 1)
    assert figures["ended_first"].value == 0
    assert figures["gap/max"].value == pytest.approx(100)
    figures = figures_of(run(stream(gap_s=0.02, pull_s=None)))
    assert "gap/max" not in figures
    assert figures["flip"].value == pytest.approx(0.6)


def test_streams_that_others_came_to_are_held_against_three_usual_gaps_alone():
    beside = stream(gap_s=0.09, pull_s=None)
    figures = figures_of(MovesRun((stream(gap_s=0.1),), 1.0, 1.6, (beside,)))
    assert figures["moved"].value == 1
    assert figures["beside_gap/max"].value == pytest.approx(90)
    assert figures["beside_of_limit/max"].value == pytest.approx(0.09 / 0.06)


# ---------------------------------------------------------------- workers that join


def joined_stream(*, every_s: float = 0.02, gap_s: float = 0.02, moved: bool = False) -> Answer:
    times_s = [every_s * i for i in range(50)]
    times_s += [times_s[-1] + gap_s + every_s / 2 * i for i in range(50)]
    return answer_at(times_s, timeline_s={"move_pull": 0.01} if moved else {})


SAMPLES = ((1.0, (8, 0)), (1.1, (7, 1)), (1.2, (5, 4)), (6.0, (4, 4)))


def join_figures(*streams: Answer, samples=SAMPLES) -> dict[str, float]:
    alone = tuple(joined_stream() for _ in streams)
    found = join_figures_of(JoinRun(alone, streams, joined_s=1.0, samples=samples))
    return {name: figure.value for name, figure in found.items()}


def test_the_longest_gap_counts_from_the_join_on():
    found = join_figures(joined_stream(gap_s=0.5), joined_stream())
    assert found["stall"] == pytest.approx(500)
    assert found["calm_stall"] == pytest.approx(20)
    assert found["itl/before"] == pytest.approx(20)
    assert found["itl/after"] == pytest.approx(10)


def test_a_text_that_differs_is_counted():
    assert join_figures(joined_stream())["changed"] == 0
    assert join_figures(replace(joined_stream(), said="other"))["changed"] == 1

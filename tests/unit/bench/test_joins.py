"""The figures of `bench moves --join`."""

from dataclasses import replace

import pytest

from bench.client.answers import Answer
from bench.moves.joining import JoinRun, join_figures_of
from tests.kits.answers import answer_at


def stream(*, every_s: float = 0.02, gap_s: float = 0.02, moved: bool = False) -> Answer:
    times_s = [every_s * i for i in range(50)]
    times_s += [times_s[-1] + gap_s + every_s / 2 * i for i in range(50)]
    return answer_at(times_s, timeline_s={"move_pull": 0.01} if moved else {})


SAMPLES = ((1.0, (8, 0)), (1.1, (7, 1)), (1.2, (5, 4)), (6.0, (4, 4)))


def figures(*streams: Answer, samples=SAMPLES) -> dict[str, float]:
    alone = tuple(stream() for _ in streams)
    found = join_figures_of(JoinRun(alone, streams, joined_s=1.0, samples=samples))
    return {name: figure.value for name, figure in found.items()}


def test_ratios_are_those_of_the_join_and_five_seconds_later():
    found = figures(stream(moved=True), stream())
    assert (found["ratio/before"], found["ratio/after"]) == (8, 1)
    assert found["balance"] == pytest.approx(0.2)
    assert found["moved"] == 1


def test_the_longest_gap_counts_from_the_join_on():
    found = figures(stream(gap_s=0.5), stream())
    assert found["stall"] == pytest.approx(500)
    assert found["calm_stall"] == pytest.approx(20)
    assert found["itl/before"] == pytest.approx(20)
    assert found["itl/after"] == pytest.approx(10)


def test_a_text_that_differs_is_counted():
    assert figures(stream())["changed"] == 0
    assert figures(replace(stream(), said="other"))["changed"] == 1


def test_pools_that_were_never_even_have_no_time_of_it():
    assert "balance" not in figures(stream(), samples=((1.0, (8, 0)),))

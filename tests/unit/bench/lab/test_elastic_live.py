"""`bench elastic-live`: its load, its arms, and its results."""

import pytest

from bench.client.answers import Failure
from bench.client.load import LoadRun, RequestOutcome
from bench.lab.elastic_live import (
    LOAD,
    READING,
    WRITING,
    ElasticLiveStudy,
    LiveRun,
    MeasuredPace,
    results,
)
from tests.kits.answers import answer_at

STUDY = ElasticLiveStudy(workers=3, phases=4, phase_s=10.0, repeat=2)
PACE = MeasuredPace(2, one={READING: 2.0, WRITING: 4.0}, most={READING: 8.0, WRITING: 8.0})
REFUSED = Failure("http_429", "later")


def answer(ttft_s):
    return answer_at((ttft_s, ttft_s + 0.01))


def run(arm, repeat, *found, num_flips=0):
    outcomes = tuple(RequestOutcome(0.0, None, result) for result in found)
    return LiveRun(arm, repeat, LoadRun(1.0, outcomes), num_flips)


def test_load_alternates_below_the_measured_rate():
    load = list(STUDY.load_of(PACE, 0))
    for phase, mix in enumerate((READING, WRITING, READING, WRITING)):
        due = [(s, one) for s, one in load if phase * 10.0 <= s < (phase + 1) * 10.0]
        assert {one for _, one in due} == {mix}
        assert len(due) == pytest.approx(10 * PACE.rate_per_s(mix), rel=0.5)
    assert PACE.rate_per_s(READING) == PACE.rate_per_s(WRITING) == pytest.approx(LOAD * 8.0)
    assert load == sorted(load, key=lambda each: each[0])


def test_ratio_is_to_the_best_split_of_its_repetition():
    good, late = answer(0.5), answer(1.5)
    runs = [
        run("fixed_1+2", 0, good, late, REFUSED, good),
        run("fixed_2+1", 0, good, late, late, late),
        run("planner", 0, good, good, good, late, num_flips=3),
        run("fixed_1+2", 1, good, late),
        run("fixed_2+1", 1, good, good),
        run("planner", 1, good, Failure("truncated", ""), num_flips=1),
    ]
    found = {result.name: result for result in results(STUDY, PACE, runs)}
    assert found["ratio"].runs == (1.5, 0.5)
    assert found["goodput/best_fixed"].runs == (2 / 40, 2 / 40)
    assert found["attainment/planner"].runs == (0.75, 0.5)
    assert found["flips"].runs == (3, 1)
    assert (found["scaling/reading"].value, found["scaling/writing"].value) == (4.0, 2.0)
    assert (found["refused"].runs, found["lost"].runs) == ((1, 0), (0, 1))

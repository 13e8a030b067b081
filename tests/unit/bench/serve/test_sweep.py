from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.load import LoadRun, RequestOutcome, SloBounds
from bench.serve.cli import swept
from bench.serve.lengths import fixed
from bench.serve.plan import ServeAsk, ServeLoad, ServePlan, ServeTarget
from bench.serve.records import MOST_TRIALS, RateSearch, SweepGoal, wilson
from engine.errors import ConfigError
from tests.kits.answers import answer_at

FEW = settings(max_examples=30)
GOAL = SweepGoal(attainment=0.9, precision=0.1)


def searched(first, share_at, num_sent=400):
    search = RateSearch(first, GOAL)
    while (rate := search.next_per_s) is not None:
        search.record(round(num_sent * share_at(rate)), num_sent)
    return search


@FEW
@given(st.floats(0.01, 100), st.floats(0.05, 15))
def test_the_search_finds_a_sharp_limit(limit, ratio):
    search = searched(limit * ratio, lambda rate: 1.0 if rate <= limit else 0.0)
    assert limit / 1.1 <= search.found_per_s <= limit
    assert search.is_bounded
    assert len(search.steps) < 20


@FEW
@given(st.floats(0, 1), st.integers(0, 9))
def test_every_search_ends(share, seed):
    rng = Random(seed)
    search = searched(1.0, lambda rate: min(1.0, max(0.0, rng.gauss(share, 0.2))), num_sent=10)
    assert len(search.steps) < 60


def test_a_server_without_limit_is_not_bounded():
    search = searched(1.0, lambda rate: 1.0)
    assert not search.is_bounded


def test_a_share_near_the_goal_is_tried_again_and_then_marked():
    search = RateSearch(1.0, GOAL)
    steps = [search.record(9, 10) for _ in range(MOST_TRIALS)]
    assert [step.passed for step in steps] == [None, None, True]
    assert not steps[-1].is_sure
    assert steps[-1].num_sent == 30


@FEW
@given(st.integers(0, 500), st.integers(0, 500))
def test_the_interval_holds_the_share(met, missed):
    low, high = wilson(met, met + missed)
    share = met / (met + missed) if met + missed else 0.5
    assert 0 <= low <= share + 1e-9
    assert share - 1e-9 <= high <= 1


PLAN = ServePlan(
    ServeTarget("http://h"),
    ServeLoad(rate_per_s=2.0, num_requests=50),
    ServeAsk(fixed(4), fixed(4)),
    slo=SloBounds(ttft_s=1.0),
)


def server_with_limit(limit_per_s, seeds):
    def measure(plan):
        seeds.append(plan.seed)
        ttft_s = 0.5 if plan.load.rate_per_s <= limit_per_s else 5.0
        outcome = RequestOutcome(0.0, None, answer_at([ttft_s, ttft_s + 0.1]))
        return SimpleNamespace(runs=(LoadRun(1.0, (outcome,) * plan.load.num_requests),))

    return measure


def test_a_sweep_keeps_the_measurement_of_the_best_rate_and_new_prompts_for_each_trial():
    seeds = []
    plan, measured, figures = swept(PLAN, GOAL, server_with_limit(7.0, seeds))
    assert 7.0 / 1.1 <= plan.load.rate_per_s <= 7.0
    assert figures["sweep/highest_rate"].value == plan.load.rate_per_s
    assert len(measured.runs[0].outcomes) == plan.load.num_requests
    assert len(set(seeds)) == len(seeds)


def test_a_sweep_without_bounds_or_hope_is_an_error():
    with pytest.raises(ConfigError, match="--slo-ttft-ms"):
        swept(ServePlan(PLAN.target, PLAN.load, PLAN.ask), GOAL, server_with_limit(1.0, []))
    with pytest.raises(ConfigError, match="no rate keeps the bounds"):
        swept(PLAN, GOAL, server_with_limit(0.0, []))

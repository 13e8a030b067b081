import math
import statistics
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.arrivals import arrival_times_s

FEW = settings(max_examples=20)  # a unit test may take 50 ms


def gaps_s(rate_per_s, burstiness):
    times_s = arrival_times_s(rate_per_s, 4000, burstiness=burstiness, rng=Random(7))
    return [later - earlier for earlier, later in pairwise(times_s)]


@FEW
@given(st.floats(0.01, 1e4), st.integers(1, 40), st.floats(0.1, 10), st.integers())
def test_arrivals_start_at_zero_never_go_back_and_follow_the_seed(rate, count, burstiness, seed):
    times_s = arrival_times_s(rate, count, burstiness=burstiness, rng=Random(seed))
    assert len(times_s) == count
    assert times_s[0] == 0
    assert times_s == sorted(times_s)
    assert times_s == arrival_times_s(rate, count, burstiness=burstiness, rng=Random(seed))


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    gaps = gaps_s(20.0, burstiness)
    mean_s = statistics.fmean(gaps)
    assert mean_s == pytest.approx(1 / 20, rel=0.08)
    assert statistics.pstdev(gaps) / mean_s == pytest.approx(1 / math.sqrt(burstiness), rel=0.08)


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0)])
def test_a_rate_or_burstiness_without_meaning_raises(rate, burstiness):
    with pytest.raises(ValueError, match="above 0"):
        arrival_times_s(rate, 3, burstiness=burstiness, rng=Random(0))

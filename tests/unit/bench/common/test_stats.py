import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.common.stats import percentile, summarize

FEW = settings(max_examples=20)  # a unit test may take 50 ms

finite = st.floats(min_value=-1e6, max_value=1e6)
samples = st.lists(finite, min_size=2, max_size=60)


@FEW
@given(samples, st.integers(1, 99))
def test_percentiles_agree_with_the_standard_library(values, q):
    expected = statistics.quantiles(values, n=100, method="inclusive")[q - 1]
    assert percentile(values, q) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_that_is_not_defined_raises(values, q):
    with pytest.raises(ValueError, match="not defined"):
        percentile(values, q)


def test_an_empty_sample_has_no_summary():
    assert summarize([]) is None


@FEW
@given(samples)
def test_a_summary_holds_the_mean_and_the_percentiles(values):
    summary = summarize(values)
    assert summary is not None
    assert summary.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert (summary.p50, summary.p99) == (percentile(values, 50), percentile(values, 99))

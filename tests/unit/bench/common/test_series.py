import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.common.plots import RequestSpan, TimeBins, in_flight, panels_of

FEW = settings(max_examples=20)
SPANS = st.lists(
    st.builds(
        lambda due, wait, length, tokens: RequestSpan(due, due + wait, due + wait + length, tokens),
        st.floats(0, 50),
        st.floats(0, 5),
        st.floats(0, 20),
        st.integers(1, 200),
    ),
    min_size=1,
    max_size=20,
)


@FEW
@given(SPANS)
def test_rates_hold_every_token_and_every_request(spans):
    bins = TimeBins.over(spans)
    tokens = sum(bins.token_rate(spans)) * bins.width_s
    assert tokens == pytest.approx(sum(span.num_tokens for span in spans), rel=1e-6)
    requests = sum(bins.per_second([span.due_s for span in spans])) * bins.width_s
    assert requests == pytest.approx(len(spans))


def test_requests_in_flight_are_due_and_not_ended():
    spans = [RequestSpan(0, 1, 4, 2), RequestSpan(2, 3, 6, 2)]
    assert in_flight(spans, [1, 3, 5, 7]) == [1, 2, 1, 0]


def test_failed_requests_have_a_line_but_no_latency():
    panels = panels_of([RequestSpan(0, 1, 2, 3), RequestSpan(1, None, 1, 0)], bound_ttft_ms=5)
    by_title = {panel.title: panel for panel in panels}
    assert "failed" in by_title["requests/s"].lines
    assert by_title["TTFT from due time (ms)"].points == ([0], [1000])
    assert by_title["TTFT from due time (ms)"].bound == 5

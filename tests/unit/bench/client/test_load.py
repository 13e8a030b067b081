import pytest

from bench.client.answers import Failure
from bench.client.load import (
    LoadRun,
    RequestOutcome,
    SloBounds,
    figures_of_runs,
    meets,
    meets_by_longest_gaps,
    warnings,
)
from tests.kits.answers import answer_at


def answer(*times_s, num_tokens=None, num_prompt=10, num_cached=None, **timeline_s):
    counts = {"num_tokens": num_tokens, "num_prompt": num_prompt, "num_cached": num_cached}
    return answer_at(times_s, **counts, timeline_s=timeline_s)


def run(*results, duration_s=4.0, send_lag_s=0.0, slot_wait_s=None):
    outcomes = tuple(RequestOutcome(send_lag_s, slot_wait_s, result) for result in results)
    return LoadRun(duration_s, outcomes)


def values(*runs, slo=None):
    return [
        {name: figure.value for name, figure in figures.items()}
        for figures in figures_of_runs(runs, slo)
    ]


TIMEOUT = Failure("timeout", "no response")


def test_latencies_are_in_milliseconds_and_gaps_are_pooled_over_answers():
    [figures] = values(run(answer(0.1, 0.2, 0.3), answer(0.3, 0.7)))
    assert figures["ttft/mean"] == pytest.approx(200)
    assert figures["itl/p50"] == pytest.approx(100)
    assert figures["itl/mean"] == pytest.approx(200)
    assert figures["e2e/p50"] == pytest.approx(500)
    assert figures["tpot/mean"] == pytest.approx(250)


def test_throughput_counts_the_tokens_of_complete_answers_over_the_whole_run():
    [figures] = values(run(answer(0.1, 0.2, num_tokens=6), TIMEOUT))
    assert figures["throughput/requests"] == 0.25
    assert figures["throughput/output_tokens"] == 1.5
    assert figures["throughput/total_tokens"] == 4.0
    assert figures["tokens/per_chunk"] == 3.0


def test_failures_are_counted_by_kind_and_are_zero_in_runs_without_them():
    first, second = values(run(answer(1.0), TIMEOUT, TIMEOUT), run(answer(1.0)))
    assert (first["requests/sent"], first["requests/failed"]) == (3, 2)
    assert (first["errors/timeout"], second["errors/timeout"]) == (2, 0)


def test_failed_requests_count_as_misses_of_the_slo():
    [figures] = values(run(answer(0.1), answer(2.0), TIMEOUT, TIMEOUT), slo=SloBounds(ttft_s=1.0))
    assert figures["goodput/attainment"] == 0.25
    assert figures["goodput/effective_capacity"] == 0.25
    assert figures["goodput/requests"] == 0.25


def test_waits_for_a_slot_are_reported_under_a_limit_only():
    limited, free = values(run(answer(0.1), slot_wait_s=0.5), run(answer(0.1)))
    assert limited["slot_wait/p50"] == 500
    assert "slot_wait/p50" not in free


def test_one_long_gap_fails_the_longest_tenth_but_not_the_mean():
    stalled = answer(0.0, *(1.0 + i / 100 for i in range(9)))
    slo = SloBounds(ttft_s=1.0, tpot_s=0.2)
    assert meets(stalled, slo)
    assert not meets_by_longest_gaps(stalled, slo)


def test_stages_are_averaged_over_the_requests_that_report_them():
    [figures] = values(run(answer(1.0, queue=0.1), answer(1.0, queue=0.3, kv_wait=1.0), answer(1)))
    assert figures["timeline/queue"] == pytest.approx(200)
    assert figures["timeline/kv_wait"] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (run(answer(1.0, 2.0), send_lag_s=0.5), "late: send lag p99 500.0 ms"),
        (run(answer(1.0, 2.0), slot_wait_s=0.5), "waited for a slot, p99 500.0 ms"),
        (run(answer(1.0, 2.0, num_prompt=40)), "10 prompt tokens were asked for, 40.0 were"),
        (run(answer(1.0)), "2 output tokens were asked for, 1.0 were"),
        (run(answer(1.0, 2.0, num_prompt=None)), "1 answers came without usage"),
        (run(answer(1.0, 2.0, num_cached=9)), "90% of prompt tokens cached"),
    ],
)
def test_run_that_differs_from_its_plan_has_a_warning(odd, said):
    [line] = warnings([odd], input_len=10, output_len=2)
    assert said in line

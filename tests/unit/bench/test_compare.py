import pytest

from bench.common.report import Hardware, Report, result_of
from bench.compare import changes_of
from engine.errors import ConfigError

HERE = Hardware("cpu", 2, None, (), "3.11")


def report(bench="serve", seed=0, asked=1.0, **runs):
    units = {"ttft": "ms", "rate": "req/s", "tokens": "tok"}
    results = tuple(result_of(name, values, units[name]) for name, values in runs.items())
    return Report(bench, "c", "d", None, HERE, seed, {"rate": asked}, results)


def verdicts(first, second):
    return {change.name: change.verdict for change in changes_of(first, second)}


def test_ranges_that_overlap_are_no_change():
    assert verdicts(report(ttft=[10, 20, 30]), report(ttft=[25, 28, 40])) == {"ttft": ""}


def test_latencies_want_to_fall_and_rates_to_rise():
    before = report(ttft=[10.0], rate=[10.0], tokens=[10.0])
    after = report(ttft=[20.0], rate=[20.0], tokens=[20.0])
    assert verdicts(before, after) == {"ttft": "worse", "rate": "better", "tokens": "differs"}
    assert verdicts(after, before) == {"ttft": "better", "rate": "worse", "tokens": "differs"}


def test_small_differences_are_noise_and_zeros_have_no_ratio():
    assert verdicts(report(ttft=[100.0]), report(ttft=[104.0])) == {"ttft": ""}
    [change] = changes_of(report(ttft=[0.0]), report(ttft=[1.0]))
    assert (change.ratio, change.verdict) == (None, "worse")


def test_failures_are_worse_and_the_clients_own_figures_only_differ():
    def of(value):
        units = {"requests/failed": "req", "client/cpu_per_event": "µs", "send_lag/p99": "ms"}
        results = tuple(result_of(name, [value], unit) for name, unit in units.items())
        return Report("serve", "c", "d", None, HERE, 0, {}, results)

    assert [*verdicts(of(1.0), of(9.0)).values()] == ["worse", "differs", "differs"]


@pytest.mark.parametrize("other", [report(bench="kv", ttft=[1.0]), report(rate=[1.0])])
def test_reports_without_common_figures_are_refused(other):
    with pytest.raises(ConfigError):
        changes_of(report(ttft=[1.0]), other)

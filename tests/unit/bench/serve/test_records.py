import csv
import io
from dataclasses import replace

import pytest

from bench.client.answers import Failure
from bench.client.load import ClientCost, LoadRun, RequestOutcome, SloBounds, figures_of_runs
from bench.common.report import Hardware, Report, results_of
from bench.serve.html import page_of
from bench.serve.lengths import fixed
from bench.serve.plan import ServeAsk, ServeLoad, ServePlan, ServeTarget
from bench.serve.processes import share_of
from bench.serve.records import COLUMNS, csv_of
from bench.serve.run import ENDED, NUM_COUNTS, Tally, told
from tests.kits.answers import answer_at
from tests.kits.bench.explained import unexplained

SLO = SloBounds(ttft_s=1.0)
LATE = RequestOutcome(0.2, 0.9, answer_at([0.1, 0.3]), due_s=2.0, session=1)
QUICK = RequestOutcome(0.0, None, answer_at([0.1, 0.2]), due_s=1.0)
FAILED = RequestOutcome(0.0, None, Failure("timeout", "<b>"), due_s=3.0, session=2)
RUN = LoadRun(4.0, (QUICK, LATE, FAILED), ClientCost(0.2, 2))


def test_every_request_has_a_row_with_all_columns():
    rows = [*csv.DictReader(io.StringIO(csv_of([RUN], SLO)))]
    assert [tuple(row) for row in rows] == [COLUMNS] * 3
    assert [row["within_slo"] for row in rows] == ["yes", "no", "no"]
    assert (rows[1]["ttft_ms"], rows[1]["ttft_due_ms"]) == ("100.000", "1200.000")
    assert rows[2]["error"] == "timeout"


def test_latencies_from_the_due_time_hold_delays_and_goodput_counts_them():
    [figures] = figures_of_runs([RUN], SLO)
    assert figures["ttft/p99"].value == pytest.approx(100)
    assert figures["ttft_due/p99"].value == pytest.approx(1189)
    assert figures["goodput/attainment"].value == pytest.approx(1 / 3)


def test_the_clients_cost_is_of_the_machine_a_request_and_an_event():
    [figures] = figures_of_runs([RUN], None)
    assert figures["client/cpu"].value == pytest.approx(2.5)
    assert figures["client/cpu_per_request"].value == pytest.approx(0.2e6 / 3)
    assert figures["client/cpu_per_event"].value == pytest.approx(0.05e6)


def test_clients_and_slots_are_divided_among_processes():
    load = ServeLoad(1.0, 9, clients=8, num_processes=3)
    plan = ServePlan(ServeTarget("http://h"), load, ServeAsk(fixed(1), fixed(1)))
    assert [share_of(plan, place).load.clients for place in range(3)] == [3, 3, 2]
    assert share_of(plan, 0).load.concurrency_limit is None


def test_a_tally_counts_requests_in_flight():
    counts = [0.0] * NUM_COUNTS
    tally = Tally(counts, SLO)
    for outcome in (QUICK, FAILED):
        tally.submitted()
        tally.ended(outcome)
    tally.submitted()
    assert counts[ENDED] == 2
    assert told(counts) == "1 in flight · 1 failed · TTFT 100 ms · 2 tokens"
    assert "TTFT 100 ms · 50% in bounds · 2 tokens" in told(counts, SLO)


def test_the_page_is_whole_and_escapes_what_others_said():
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    results = results_of(figures_of_runs([RUN], SLO))
    here = Hardware("cpu", 2, None, (), "3.11")
    report = Report("serve", "baton <x>", "d", None, here, 0, {"model": "<m>"}, results)
    page = page_of(report, [RUN], SLO, title="<t>", warnings=["<w>"])
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert not any(bad in page for bad in ("<x>", "<m>", "<t>", "<w>"))
    assert page.count("<svg") == 4  # charts: one over time, one of distributions, two bar charts
    assert "#010203" not in page
    assert not any(f'{name}="http' in page for name in ("src", "href"))


def test_every_figure_is_explained():
    told = {"route": 0.1, "kv_transfer": 0.2, "kv_exposed": 0.1, "move_pull": 0.1}
    told |= dict.fromkeys(("queue", "prefill_queue", "prefill_compute", "kv_wait"), 0.1)
    answer = replace(answer_at([0.1, 0.2]), timeline_s=told, num_prompt_tokens=3)
    waited = RequestOutcome(0.0, 0.5, answer)
    run = LoadRun(4.0, (waited, FAILED), ClientCost(0.2, 2))
    [figures] = figures_of_runs([run], SLO)
    assert {name.partition("/")[0] for name in figures} >= {"slot_wait", "timeline", "kv", "errors"}
    assert unexplained(figures, "load.md") == []

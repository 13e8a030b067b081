import json
from pathlib import Path

import pytest

from bench.clients.aiperf import aiperf_command, told_by_aiperf
from bench.clients.cost import CpuSample, share_within
from bench.clients.guidellm import guidellm_command, told_by_guidellm
from bench.clients.plan import ClientLoop, ClientsPlan, our_command
from bench.clients.results import (
    OURS,
    ClientFailed,
    disagreements,
    results_of_clients,
    told_by_us,
    with_cost,
)
from bench.common.background import Reading
from bench.common.report import Hardware, Report, result_of

PLAN = ClientsPlan(num_requests=2)
HERE = Hardware("cpu", 2, None, (), "3.11")
WHERE = {"url": "http://h", "folder": Path("out"), "tokenizer": Path("t")}


def guide(start_s):
    return {
        "request_start_time": start_s,
        "request_end_time": start_s + 0.4,
        "request_latency": 0.4,
        "time_to_first_token_ms": 50.0,
        "inter_token_latency_ms": 10.0,
        "output_tokens": 32,
    }


def guide_report(*requests):
    return json.dumps({"benchmarks": [{"requests": {"successful": [*requests]}}]}).encode()


def perf_report(**changed):
    spreads = ("time_to_first_token", "inter_token_latency", "request_latency")
    totals = ("request_throughput", "output_token_throughput", "request_count")
    found = {name: {"unit": "ms", "avg": 3.0, "p50": 2.0, "p99": 9.0} for name in spreads}
    found |= {name: {"unit": "n", "avg": 2.0} for name in totals}
    return json.dumps({"schema_version": "1.4", **found, **changed}).encode()


def told(**changed):
    found = told_by_guidellm(guide_report(guide(1.0), guide(1.6)))
    return {**with_cost(found, cpu_s=0.5, share=0.02), **changed}


def test_guidellms_requests_become_figures():
    found = told()
    assert (found["ttft_p50"], found["e2e_p50"]) == (50.0, 400.0)
    assert found["requests"] == pytest.approx(2)
    assert found["output_tokens"] == pytest.approx(64)
    assert (found["cpu_all"], found["cpu_load"]) == (250, 2)


def test_aiperfs_summary_becomes_the_same_figures():
    found = told_by_aiperf(perf_report())
    assert (found["ttft_p50"], found["itl_mean"], found["requests"]) == (2, 3, 2)
    assert {*with_cost(found, cpu_s=1.0, share=0.1)} == {*told()}


@pytest.mark.parametrize("data", [b"", b"{}", guide_report(), b'{"benchmarks": []}'])
def test_a_report_of_guidellm_without_answers_is_an_error(data):
    with pytest.raises(ClientFailed):
        told_by_guidellm(data)


@pytest.mark.parametrize("data", [b"", b"{}", perf_report(request_latency=None)])
def test_a_report_of_aiperf_without_answers_is_an_error(data):
    with pytest.raises(ClientFailed):
        told_by_aiperf(data)


def test_our_report_becomes_the_same_figures():
    names = ("ttft/p50", "ttft/mean", "tpot/p50", "tpot/mean", "e2e/p50", "requests/completed")
    names += ("throughput/requests", "throughput/output_tokens")
    results = tuple(result_of(name, [4.0], "ms") for name in names)
    report = Report("serve", "c", "d", None, HERE, 0, {}, results)
    assert told_by_us(report) == dict.fromkeys(told_by_aiperf(perf_report()), 4.0)
    with pytest.raises(ClientFailed):
        told_by_us(Report("serve", "c", "d", None, HERE, 0, {}, results[:3]))


def test_the_cost_of_a_load_leaves_out_the_start_and_the_end():
    counters = [(0, 0), (100, 50), (200, 52), (300, 54), (400, 90)]
    samples = [
        CpuSample(float(at_s), Reading(total, total, own))
        for at_s, (total, own) in enumerate(counters)
    ]
    assert share_within(samples, 0.5, 3.5) == pytest.approx(4 / 200)
    with pytest.raises(ClientFailed, match="too short"):
        share_within(samples, 0.5, 1.5)


def test_harnesses_that_differ_are_named_and_the_server_is_the_limit():
    ours = {ClientLoop.CLOSED: [told()]}
    theirs = {ClientLoop.CLOSED: [told(ttft_p50=60.0, itl_p50=10.2, cpu_load=99.0)]}
    results = results_of_clients(PLAN, {OURS: ours, "guidellm": theirs, "aiperf": ours})
    by_name = {result.name: result for result in results}
    assert by_name["closed/e2e_p50"].limit == 360
    assert by_name["closed/requests"].limit == pytest.approx(4 / 0.36)
    assert by_name["closed/cpu_load"].limit == 5
    assert {*by_name["closed/ttft_p50"].peers} == {"guidellm", "aiperf"}
    assert disagreements(results) == ["closed/ttft_p50 differs from guidellm's by 16.7%"]


@pytest.mark.parametrize("loop", [*ClientLoop])
def test_all_harnesses_get_the_same_load(loop):
    ours = our_command(PLAN, loop, url="http://h", python="/p/python", path=Path("out"))
    guides = guidellm_command(PLAN, loop, **WHERE, program=Path("/p/guidellm"))
    perfs = aiperf_command(PLAN, loop, **WHERE, program=Path("/p/aiperf"))
    mine, guide_says, perf_says = {
        ClientLoop.CLOSED: ("--clients 4", "streams=4", "--concurrency 4"),
        ClientLoop.OPEN: ("--rate 10.0", "rate=10", "--request-rate 10 --request-rate-mode const"),
    }[loop]
    assert mine in " ".join(ours)
    assert guide_says in " ".join(guides)
    assert perf_says in " ".join(perfs)
    assert "count=2" in " ".join(guides)
    assert "--request-count 2" in " ".join(perfs)
    assert (guides[:2], perfs[:2]) == (["/p/guidellm", "run"], ["/p/aiperf", "profile"])

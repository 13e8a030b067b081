import json
from io import StringIO

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from bench.common.report import (
    Figure,
    Goals,
    Hardware,
    Peer,
    Report,
    Result,
    results_of,
    to_json,
)
from bench.common.tables import print_head, print_results

FEW = settings(max_examples=20)  # a unit test may take 50 ms

HARDWARE = Hardware(cpu="a cpu", num_cores=2, memory_bytes=1 << 30, gpus=("a gpu",), python="3.11")


def report(*results):
    return Report(
        bench="serve",
        command="baton bench serve --rate inf",
        date="2026-01-31T12:00:00+00:00",
        commit="abc-dirty",
        hardware=HARDWARE,
        seed=3,
        config={"rate_per_s": "inf"},
        results=results,
    )


RESULT = Result(
    name="ttft/p50",
    value=2.0,
    unit="ms",
    runs=(1.0, 2.0, 3.0),
    limit=1.0,
    of_limit=0.5,
    peers={"vllm": Peer(value=4.0, ratio=0.5)},
)


def test_json_of_a_report_has_the_documented_shape():
    assert json.loads(to_json(report(RESULT))) == {
        "bench": "serve",
        "command": "baton bench serve --rate inf",
        "date": "2026-01-31T12:00:00+00:00",
        "commit": "abc-dirty",
        "hardware": {
            "cpu": "a cpu",
            "num_cores": 2,
            "memory_bytes": 1 << 30,
            "gpus": ["a gpu"],
            "python": "3.11",
        },
        "seed": 3,
        "config": {"rate_per_s": "inf"},
        "results": [
            {
                "name": "ttft/p50",
                "value": 2.0,
                "unit": "ms",
                "runs": [1.0, 2.0, 3.0],
                "limit": 1.0,
                "of_limit": 0.5,
                "peers": {"vllm": {"value": 4.0, "ratio": 0.5}},
            }
        ],
    }


@FEW
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=9))
def test_the_value_of_a_result_is_the_median_of_its_runs(values):
    [result] = results_of([{"x": Figure(value, "ms")} for value in values])
    assert result.runs == tuple(values)
    assert min(values) <= result.value <= max(values)
    assert sum(v < result.value for v in values) <= len(values) / 2
    assert sum(v > result.value for v in values) <= len(values) / 2


def test_printed_tables_hold_every_result_also_in_a_narrow_terminal():
    results = [
        RESULT,
        Result("throughput/requests", 12.5, "req/s", (12.5,), limit=25.0, of_limit=0.5),
        Result("timeline/queue", 7.5, "ms", (7.0, 7.5, 8.0), peers={"vllm": Peer(15.0, 0.5)}),
    ]
    console = Console(width=40, file=StringIO())
    goals = Goals({"timeline/*": 7.0}, at_most=("*queue",))
    print_head(console, report(*results), title="a title")
    print_results(console, report(*results), goals)
    printed = console.file.getvalue()
    for shown in (
        "a title",
        "abc-dirty",
        "ttft, ms",
        "1 … 3",
        "12.50",
        "50%",
        "7 … 8",
        "vllm",
        "no",
    ):
        assert shown in printed


def test_goals_are_bounds_of_results_whose_names_match():
    goals = Goals({"latency/*": 2.0, "speed/1": 2.0}, at_most=("latency*",))
    met = [
        goals.is_met(Result(name, value, "", (value,)))
        for name in ("latency/1", "speed/1", "speed/2")
        for value in (1.0, 2.0, 3.0)
    ]
    assert met == [True, True, False, False, True, True, None, None, None]
    assert goals.bound("latency/9") == 2.0

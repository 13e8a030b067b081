"""The figures of `bench interference` from runs that were never made."""

import pytest

from bench.lab.interference import (
    APART,
    IDLE,
    TOGETHER,
    figures_of,
    loaded_share,
    promises,
    results,
    warnings,
)
from bench.lab.streams import BesideRun
from tests.kits.answers import answer_at


def stream(gap_s, *, num=101):
    return answer_at([i * gap_s for i in range(num)])


def run(arm, gap_s, repeat=0, **rest):
    """Two streams of a hundred even gaps; where there is a load, one prompt after the other."""
    end_s = 100 * gap_s
    prompts = [] if arm == IDLE else [(i * end_s / 4, (i + 1) * end_s / 4) for i in range(4)]
    figures = {
        "streams": (stream(gap_s), stream(gap_s)),
        "others": tuple(answer_at([end_s], sent_s=sent_s) for sent_s, end_s in prompts),
        "wall_s": 2 * end_s,
        "gateway_cpu_s": 0.1 * end_s,
        "client_cpu_s": 0.2 * end_s,
        "others_share": 0.01,
    }
    return BesideRun(arm, repeat=repeat, **{**figures, **rest})


RUNS = [
    run(arm, gap_s * (1 + repeat), repeat)
    for repeat in range(3)
    for arm, gap_s in {IDLE: 0.010, APART: 0.012, TOGETHER: 0.120}.items()
]


def test_each_p99_has_its_peer():
    found = {result.name: result for result in results(RUNS)}
    assert found["itl_p99/idle"].value == pytest.approx(20)
    assert found["itl_p99/idle"].runs == pytest.approx((10, 20, 30))
    assert not found["itl_p99/idle"].peers
    assert found["itl_p99/disaggregated"].peers["idle"].ratio == pytest.approx(1.2)
    assert not found["itl_p50/colocated"].peers
    assert promises(results(RUNS)) == [
        "p99 of gaps, disaggregated: 1.20 × idle (promised: at most 1.3)",
        "p99 of gaps, colocated: 10.00 × disaggregated (promised: at least 2)",
    ]


def test_prompts_and_cpu_are_reported_for_each_arm():
    idle, apart = figures_of(run(IDLE, 0.01)), figures_of(run(APART, 0.01))
    assert "ttft" not in idle
    values = {
        (idle["prompts_per_s"], 0),
        (apart["prompts_per_s"], 4.04),
        (apart["ttft"], 250),
        (idle["cpu_gateway"], 5),
        (idle["cpu_client"], 10),
        (idle["cpu_others"], 1),
    }
    assert all(figure.value == pytest.approx(value, rel=0.01) for figure, value in values)


def test_a_load_with_pauses_warns():
    assert warnings(RUNS) == []
    [line] = warnings([run(APART, 0.01, others=(answer_at([0.5], sent_s=0),))])
    assert line == "prompts were under way for only 49% of a run"


def test_overlapping_prompts_count_once():
    times = ((0.0, 0.6), (0.2, 0.4), (0.5, 0.8))
    loaded = run(APART, 0.01, others=tuple(answer_at([e], sent_s=s) for s, e in times))
    begin_s, end_s = loaded.window_s
    assert loaded_share(loaded) == pytest.approx((0.8 - begin_s) / (end_s - begin_s))

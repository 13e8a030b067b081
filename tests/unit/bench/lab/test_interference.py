"""The results of `bench interference`, computed from made-up runs."""

import pytest

from bench.lab.interference import (
    APART,
    IDLE,
    TOGETHER,
    promises,
    results,
    warnings,
)
from bench.lab.streams import BesideRun
from tests.kits.answers import answer_at


def stream(gap_s, *, num=101):
    return answer_at([i * gap_s for i in range(num)])


def run(arm, gap_s, repeat=0, **rest):
    """Returns two streams of a hundred equal gaps; under load, prompts run one after another."""
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


def test_a_load_with_pauses_warns():
    assert warnings(RUNS) == []
    [line] = warnings([run(APART, 0.01, others=(answer_at([0.5], sent_s=0),))])
    assert line == "prompts were under way for only 49% of a run"

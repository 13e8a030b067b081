"""The results and warnings that `bench gateway` computes from measured streams."""

import sys

import pytest

from bench.lab.gateway.study import (
    BARE,
    OURS,
    WRITES,
    GatewayMeasured,
    GatewayRun,
    GatewayStudy,
    results,
)

STUDY = GatewayStudy(
    prompt_words=3, tokens=100, repeat=2, peer=[f"fastapi={sys.executable}"], seed=1
)
LOADS = (STUDY.serial, *STUDY.loads)
CPU_S = {OURS: 2.0, BARE: 1.0, WRITES: 0.5, "fastapi": 4.0}
TTFT_S = {OURS: 0.0005, BARE: 0.0001, WRITES: 0.0001, "fastapi": 0.0009}


def run(server, load, repeat=0, **rest):
    ttft_s = TTFT_S[server] + 0.0001 * repeat
    figures = {
        "cpu_s": CPU_S[server],
        "client_cpu_s": 0.1,
        "wall_s": 10.0,
        "num_events": load.total_tokens,
        "ttft_s": (ttft_s,) * 3,
        "gaps_s": (load.pace_s,) * 3,
    }
    return GatewayRun(server, load, repeat, **{**figures, **rest})


def measured(**rest):
    runs = [run(s, load, i) for s in STUDY.servers for load in LOADS for i in range(2)]
    return GatewayMeasured(tuple(runs), **rest)


def by_name(of):
    return {result.name: result for result in results(STUDY, of)}


def test_tokens_per_cpu_second_have_writes_as_limit_and_peers():
    speed = by_name(measured())["gateway/tok_per_cpu_s"]
    assert speed.value == 2 * 64 * 100 / 2.0
    assert speed.of_limit == 0.25
    assert {name: peer.ratio for name, peer in speed.peers.items()} == {BARE: 0.5, "fastapi": 2.0}


def test_added_ttft_subtracts_the_bare_server_of_the_same_repetition():
    added = by_name(measured())["gateway/added_ttft_ms"]
    assert added.runs == pytest.approx((0.4, 0.4))
    assert added.peers["fastapi"].ratio == pytest.approx(0.5)
    assert BARE not in added.peers


def test_request_holds_the_pace_for_workers_and_peers():
    body = STUDY.body_of(STUDY.loads[1])
    assert (body["user"], body["top_k"], body["max_tokens"]) == ("0.05", 5, 25)
    assert body["messages"][0]["content"].split() == ["word"] * 3

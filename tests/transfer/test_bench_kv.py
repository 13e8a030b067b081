"""`bench kv` with real transports and pools of a few blocks."""

import importlib.util
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from bench.common.command import say_nothing
from bench.common.report import report_here, to_json
from bench.lab.kv.cases import KIB, Mover, WrongBytes, mover_of
from bench.lab.kv.contest import PHASES, TRANSFER, KvMeasured, results, warnings
from bench.lab.kv.study import KvStudy
from bench.processes.deployment import ServerFailed, serving

pytestmark = pytest.mark.long

STUDY = KvStudy(backends="shm,zmq", block_sizes="16,64", repeat=2, total_bytes=1024 * KIB)
PULLS = STUDY.pulls
HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))


def test_a_run_verifies_every_case_and_reports_in_the_shape_of_all_benchmarks(monkeypatch):
    verified = []
    verify = Mover.verify

    def watched(mover, way, case, pull):
        verify(mover, way, case, pull)
        verified.append((mover.name, way, case))

    monkeypatch.setattr(Mover, "verify", watched)
    measured = STUDY.run(say_nothing)
    assert measured.missing == ()
    assert set(verified) == {(key.mover, key.way, key.case) for key in measured.seconds}
    assert {mover for mover, _, _ in verified} == {"shm", "zmq", "memcpy", "tcp"}
    found = results(measured, movers=STUDY.movers)
    report = report_here("kv", seed=0, config={}, results=found)
    decoded = {one["name"]: one for one in json.loads(to_json(report))["results"]}
    assert {"shm/16KiB", "shm/16KiB/16", "zmq/64KiB", "memcpy/64KiB"} < set(decoded)
    for name in ("shm/64KiB", "zmq/16KiB"):
        one = decoded[name]
        assert set(one) == {"name", "value", "unit", "runs", "limit", "of_limit", "peers"}
        assert len(one["runs"]) == 2
        assert 0 < one["of_limit"] == pytest.approx(one["value"] / one["limit"])
    assert decoded["zmq/64KiB/latency"]["unit"] == "µs"


@contextmanager
def opened(name):
    mover = mover_of(name)
    try:
        mover.start()
        yield mover, mover.open(PULLS)["ways"]
    finally:
        mover.close()


@pytest.mark.parametrize("name", ["shm", "zmq", "memcpy", "tcp"])
def test_wrong_blocks_are_noticed(name, monkeypatch):
    case = PULLS.cases[-1]
    pull = PULLS.of(case, 0)[0]
    move = Mover.move

    def move_others(mover, way, case, pulls):
        return move(mover, way, case, [replace(p, source_blocks=p.blocks) for p in pulls])

    with opened(name) as (mover, ways):
        mover.verify(ways[0], case, pull)
        monkeypatch.setattr(Mover, "move", move_others)
        with pytest.raises(WrongBytes, match=f"{name}.* moved wrong bytes at 64KiB"):
            mover.verify(ways[0], case, pull)


@pytest.mark.parametrize("name", replace(STUDY, shards="2").ours[len(STUDY.chosen) :])
def test_half_of_the_heads_is_moved_in_pieces(name):
    with opened(name) as (mover, [way]):
        for case in PULLS.cases:
            mover.verify(way, case, PULLS.of(case, 0)[0])


@pytest.mark.skipif(not HAS_NIXL, reason="neither nixl_cu12 nor nixl_cu13 is installed")
def test_bare_nixl_moves_the_requested_blocks():
    with opened("bare_nixl") as (mover, ways):
        for way in ways:
            for case in PULLS.cases:
                mover.verify(way, case, PULLS.of(case, 0)[0])


@pytest.mark.torch
def test_a_handoff_is_reported_by_phase():
    handoffs = KvStudy(shape="tiny", prompt_len=200).quick().hand_over("shm")
    [timelines] = handoffs.repetitions
    assert len(timelines) == 2
    assert handoffs.num_failed == 0
    for timeline in timelines:
        assert {*PHASES, *TRANSFER} <= set(timeline)
        assert 0 <= timeline["kv_exposed"] <= timeline["kv_transfer"]
    assert warnings(KvMeasured({}), [handoffs]) == []


@pytest.mark.torch
def test_a_server_that_does_not_start_gives_its_reason(tmp_path):
    with (
        pytest.raises(ServerFailed, match=r"config\.json"),
        serving(tmp_path, {"--kv-transport": "shm"}),
    ):
        pass

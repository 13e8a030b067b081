"""The comparison with a peer: its input, and the reading of its figures."""

import sys

import pytest
from typer.testing import CliRunner

from bench.common.report import from_json
from bench.comparison.peer import Dynamo, PeerDeployment, PeerError, tables
from bench.comparison.plan import ComparisonPlan
from bench.comparison.run import play
from bench.simulator.hardware import hardware_named
from bench.simulator.traces import Trace, TraceRequest, write_trace
from deploy.commands.main import app
from engine.config import RouterPolicy

HARDWARE = hardware_named("h200-qwen3-32b-tp2-linear")
TRACE = Trace("t", 512, tuple(TraceRequest(i / 2, 700, 3, (1, i + 2)) for i in range(4)))
FAKE = """#!{python}
import json, sys
options = dict(zip(sys.argv[4::2], sys.argv[5::2]))
engine = json.loads(options["--prefill-engine-args"])
assert engine["worker_type"] == "prefill" and engine["num_gpu_blocks"] > 0
number = len(open(sys.argv[3]).readlines())
speed = float(options["--arrival-speedup-ratio"])
figures = dict(mean_ttft_ms=500, p90_ttft_ms=2000 * speed, p90_tpot_ms=20, wall_time_ms=4,
               prefix_cache_reused_ratio=0.1, completed_requests=number + ({lacking}))
json.dump(figures, open(options["--report-json"], "w"))
"""


def fake(tmp_path, lacking=0):
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable, lacking=lacking))
    path.chmod(0o755)
    return path


def test_peer_tables_hold_our_costs():
    costs = tables(HARDWARE)
    assert dict(zip(costs["prefill_isl"], costs["prefill_ttft_ms"], strict=True))[8192] == (
        pytest.approx(473.798)
    )
    kv, mean = costs["decode_active_kv_tokens"][4], costs["decode_context_length"][1]
    assert (kv, mean) == (8192, 2048)
    assert costs["decode_itl"][4][1] == pytest.approx(1000 * HARDWARE.decode.seconds(4, 8192))


def test_early_refusal_misses_both_bounds():
    plan = ComparisonPlan(TRACE, HARDWARE, [(1, 1)], 4, ttft_s=1e-3)
    all_requests, some_requests = (
        play(plan, TRACE, PeerDeployment(1, 1), RouterPolicy.SLO, keeps_bounds=keeps)
        for keeps in (False, True)
    )
    assert all_requests.keeps(ttft_s=5.0, tpot_s=0.025)
    assert not some_requests.keeps(ttft_s=5.0, tpot_s=0.025)


def test_peer_report_is_read_unless_requests_are_missing(tmp_path):
    with Dynamo(fake(tmp_path), TRACE, HARDWARE) as peer:
        played = peer.play(PeerDeployment(1, 1, 2.0), "kv_router")
        assert (played.ttft_mean_s, played.ttft_p90_s, played.hits) == (0.5, 4.0, 0.1)
    with (
        Dynamo(fake(tmp_path, lacking=-1), TRACE, HARDWARE) as peer,
        pytest.raises(PeerError, match="3 requests only"),
    ):
        peer.play(PeerDeployment(1, 1), "kv_router")


def test_missing_or_silent_peer_is_an_error(tmp_path):
    with (
        Dynamo(tmp_path / "none", TRACE, HARDWARE) as peer,
        pytest.raises(PeerError, match="no su"),
    ):
        peer.play(PeerDeployment(1, 1), "kv_router")
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho broken >&2\n")
    silent.chmod(0o755)
    with Dynamo(silent, TRACE, HARDWARE) as peer, pytest.raises(PeerError, match="broken"):
        peer.play(PeerDeployment(1, 1), "kv_router")


def test_command_reports_our_figures_beside_the_peer(tmp_path):
    write_trace(TRACE, tmp_path / "t.jsonl")
    command = ["bench", "simulator", "--trace", str(tmp_path / "t.jsonl"), "--splits", "2+1"]
    command += ["--goodput-requests", "2", "--peer", f"dynamo={fake(tmp_path)}"]
    result = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    report = from_json((tmp_path / "r.json").read_bytes())
    named = {figure.name: figure for figure in report.results}
    assert named["sim/ttft_x1"].peers["dynamo"].value == 0.5
    assert named["sim/goodput"].peers["dynamo"].value == pytest.approx(2.5, rel=0.05)
    assert {"sim/ttft_x2", "sim/hit_ratio", "sim/goodput_ratio", "sim/wall_s"} <= set(named)

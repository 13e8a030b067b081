"""`bench.gpu --peer`: its options, the peer's jobs, and results from the peer's answers."""

import io
import sys

import pytest

from bench.common.options import PeerProgram
from bench.common.report import result_of
from bench.engine.jobs import GPU_SHAPES
from bench.gpu.peers import PeerFigures, jobs_of, measure_peers
from bench.gpu.session import GpuSession, line_of
from engine.clock import MonotonicClock

TINY = GPU_SHAPES["tiny"]
ANSWERS = f"""#!{sys.executable}
import json, sys
assert sys.argv[2] == "vllm" and "bf16-dummy" in sys.argv, sys.argv
print(json.dumps({{"ready": {{"version": "9"}}}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "generate":
        assert [len(prompt) for prompt in asked["prompts"]] == [64]
        answer = {{"prefill_s": 0.5}}
    else:
        answer = PLACE
    print(json.dumps(answer), flush=True)
"""
DECODES = '{"decode_s": 0.25}'


def measured(tmp_path, program, *, budget_s=1000.0):
    """Measures a peer whose Python interpreter is this program. Returns the results."""
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o755)
    session, figures = GpuSession(MonotonicClock(), budget_s, io.StringIO()), PeerFigures()
    measure_peers(session, TINY, [PeerProgram("vllm", python)], figures)
    assert not session.failures
    return session, figures


def test_a_peer_has_the_jobs_of_the_shape_that_it_can_do_in_time():
    names = [job.name for job in jobs_of(GPU_SHAPES["8b"])]
    assert names == [
        "prefill_8192",
        *(f"decode_b{rows}_ctx{n}" for rows, n in [(1, 1024), (1, 4096), (8, 1024), (8, 4096)]),
        *(f"decode_b64_ctx{n}" for n in (1024, 4096)),
    ]


def test_answers_become_ratios_of_our_figures_in_the_same_formats(tmp_path):
    _, figures = measured(tmp_path, ANSWERS.replace("PLACE", DECODES))
    assert figures.versions == {"vllm": "9"}
    assert figures.speeds["vllm"]["prefill_64"] == 64 / 0.5
    assert figures.speeds["vllm"]["decode_b3_ctx40"] == 3 * TINY.num_steps / 0.25
    ours = [result_of(f"decode_b3_ctx40/{formats}", [12.0], "") for formats in ("bf16-bf16", "fp8")]
    bf16, fp8 = figures.beside(ours)
    assert (bf16.peers["vllm"].value, bf16.peers["vllm"].ratio) == (24.0, 0.5)
    assert line_of(bf16).endswith("0.50 x vllm")
    assert fp8.peers == {}


@pytest.mark.parametrize(
    ("decodes", "reason"),
    [
        ('{"error": "no memory"}', "no memory"),
        ('{"decode_s": 0}', "took 0 seconds"),
        ('{"decode_s": "fast"}', "took 'fast' seconds"),
        ("{}", "took None seconds"),
        ("sys.exit(3)", "ended with status 3"),
    ],
)
def test_a_peer_that_fails_is_skipped_and_keeps_its_earlier_figures(tmp_path, decodes, reason):
    session, figures = measured(tmp_path, ANSWERS.replace("PLACE", decodes))
    assert list(figures.speeds["vllm"]) == ["prefill_64"]
    [skipped] = session.skipped
    assert skipped.startswith("peer vllm: ")
    assert reason in skipped


def test_a_peer_without_time_is_skipped(tmp_path):
    session, figures = measured(tmp_path, "", budget_s=5)
    assert session.skipped == ["peer vllm: no time"]
    assert figures.speeds == {}

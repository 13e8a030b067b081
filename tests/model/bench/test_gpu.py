"""`bench.gpu` runs all its sections on a CPU, where its figures mean nothing."""

import io
import sys
from functools import partial

import pytest
import torch

from bench.common.report import from_json
from bench.common.roofline import ModelMemory, decode_work, prefill_work
from bench.engine.jobs import GPU_SHAPES
from bench.gpu import __main__ as gpu
from bench.gpu import kernels as gpu_kernels
from bench.gpu import models as gpu_models
from bench.gpu import run as gpu_run
from bench.gpu.kernels import AttentionCase, check_attention
from bench.gpu.models import check_sampling
from bench.gpu.run import GpuBench
from bench.gpu.session import GpuSession
from bench.gpu.speeds import GpuCeilings
from engine.config import WeightFormat
from engine.layout import KVFormat
from engine.model.attention import plain as torch_attention
from engine.model.fp8 import one_by_one, reference_matmul
from engine.model.sampling import choosing

pytestmark = pytest.mark.torch

ON_A_CPU = ("--device", "cpu", "--shape", "tiny", "--quick")
TINY = GPU_SHAPES["tiny"]


class Hands:
    """A clock that advances only when the test sets it."""

    def __init__(self):
        self.seconds = 0.0

    def now_s(self):
        return self.seconds


def session(budget_s=100.0):
    return GpuSession(Hands(), budget_s, io.StringIO())


# ------------------------------------------------------------ the command


@pytest.mark.long
def test_everything_runs_on_a_cpu_and_is_reported(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert gpu.main([*ON_A_CPU, "--json", str(path)]) == 0
    report = from_json(path.read_bytes())
    assert (report.bench, report.config["failures"], report.config["skipped"]) == ("gpu", "", "")
    for name in (
        "ceiling/copy",
        "attention_b3_ctx40/int8",
        "prefill_64_compute/bf16-bf16",
        "decode_b1_ctx8_bandwidth/fp8-bf16",
        "decode_b3_ctx40_queued/bf16-bf16",
    ):
        assert report.value(name) > 0
    printed = capsys.readouterr().out
    assert "0 failures" in printed
    assert "goals" not in printed  # the speed of a CPU does not matter


def test_sections_without_time_are_listed_as_skipped(capsys):
    assert gpu.main([*ON_A_CPU, "--budget-s", "0"]) == 0
    assert "skipped ceilings: no time" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_reported_in_one_line(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "bench.gpu: no CUDA device here; --device cpu --shape tiny tries out the bench itself"
    ]


@pytest.mark.gpu
def test_gpu_run_has_no_failures():
    assert gpu.main(["--shape", "tiny", "--quick"]) == 0


# ------------------------------------------------------------ what fails


def wrong(query, key, value, cache, layer, batch, scoring):
    """Computes attention whose windows are one token too long."""
    scoring = scoring._replace(window=scoring.window and scoring.window + 1)
    return torch_attention.attend(query, key, value, cache, layer, batch, scoring)


def careless(query, key, value, cache, layer, batch, scoring):
    """Computes the right attention, but overwrites a value of another token."""
    out = torch_attention.attend(query, key, value, cache, layer, batch, scoring)
    cache.values[layer][-1, 0, 0, 0] = 1
    return out


@pytest.mark.parametrize(
    ("attend", "complaint"), [(wrong, "error"), (careless, "bytes of other tokens")]
)
def test_wrong_kernel_is_detected(monkeypatch, attend, complaint):
    case = AttentionCase(KVFormat.INT8, 128, num_heads=2, num_kv_heads=1)
    assert check_attention(case, "cpu") == []
    monkeypatch.setattr(gpu_kernels, "_attend_of", lambda device: attend)
    assert any(complaint in line for line in check_attention(case, "cpu"))


def test_wrong_model_is_detected(monkeypatch):
    bf16 = (WeightFormat.BF16, KVFormat.BF16, "cpu")
    assert gpu_models.check_model(*bf16) == []
    compute = gpu_models.CudaForward._compute
    monkeypatch.setattr(
        gpu_models.CudaForward, "_compute", lambda *arguments: compute(*arguments).roll(1, -1)
    )
    assert gpu_models.check_model(*bf16)


def test_complaint_fails_the_run_and_other_sections_continue(monkeypatch, capsys):
    monkeypatch.setattr(gpu_run, "check_matmul", lambda device: ["that product is wrong"])
    monkeypatch.setattr(gpu_run, "measure_attention", lambda *_: 1 / 0)
    monkeypatch.setattr(gpu_run, "attention_cases", lambda *, is_quick: [])
    assert gpu.main(ON_A_CPU) == 1
    printed = capsys.readouterr().out
    assert "FAILED that product is wrong" in printed
    assert "FAILED attention: ZeroDivisionError" in printed
    assert "Traceback" in printed
    assert "decode_b3_ctx40/fp8-bf16" in printed


@pytest.mark.long
def test_check_in_its_own_process_reports_complaints(monkeypatch):
    bench = GpuBench(session(), TINY, "cpu", is_quick=True)
    case = AttentionCase(KVFormat.INT8, 64)
    assert bench._check_apart(case, end_s=60.0) == []
    assert bench._check_apart(case, end_s=0.0) is None
    monkeypatch.setattr(gpu_run, "arguments_of", lambda case, device: ["int8", "64", "half", "no"])
    [line] = bench._check_apart(case, end_s=60.0)
    assert line.startswith(f"{case.name}: ended with 1: ")


def test_tokens_other_than_the_definitions_are_complained_about():
    assert check_sampling("cpu", choosing.sample, vocabs=(300,)) == []
    first = check_sampling("cpu", lambda logits, _: logits.argmax(-1), vocabs=(300,))[0]
    assert first.startswith("sampling from 300 fp32 logits: rows [")
    assert " 0," not in first  # 0 belongs to a greedy row


def test_products_of_groups_are_checked(monkeypatch):
    right = partial(one_by_one, reference_matmul)
    monkeypatch.setattr(gpu_kernels, "grouped_matmul", right)
    assert gpu_kernels.check_groups("cpu") == []
    monkeypatch.setattr(gpu_kernels, "grouped_matmul", lambda *x: 1.2 * right(*x))
    assert gpu_kernels.check_groups("cpu")[0].startswith("fp8 product of groups, 1 rows: error 0.2")


# ------------------------------------------------------------ what it adds up to


def test_goals_are_judged_by_medians_and_fail_nothing():
    found = session()
    found.add("fast", [1.0, 80.0, 100.0], "GB/s", limit=100.0, goal=0.8)
    found.add("slow", [79.0], "GB/s", limit=100.0, goal=0.8)
    found.add("plain", [1.0], "s")
    found.conclude(judges_goals=True)
    lines = found.out.getvalue().splitlines()
    assert any(line.startswith("   met    fast") for line in lines)
    assert any(line.startswith("   MISSED slow") for line in lines)
    assert not found.failures
    assert [result.of_limit for result in found.results] == [0.8, 0.79, None]


def test_section_without_time_left_is_skipped():
    found = session(budget_s=10.0)
    done = []
    found.section("first", lambda: done.append(1), needs_s=9.0)
    found.clock.seconds = 5.0
    found.section("second", lambda: done.append(2), needs_s=6.0)
    found.section("third", lambda: done.append(3), needs_s=4.0)
    assert done == [1, 3]
    assert found.skipped == ["second: no time"]


def test_limits_are_bytes_for_decoding_and_products_for_prompts():
    ceilings = GpuCeilings(bytes_per_s=4e12, bf16_flops_per_s=800e12, fp8_flops_per_s=1600e12)
    size = GPU_SHAPES["8b"].model.size
    memory = ModelMemory(weights_bytes=15e9, kv_token_bytes=131072)
    step = decode_work(size, memory, [1000])
    assert ceilings.least_time_s(step, WeightFormat.BF16) == pytest.approx(15.13e9 / 4e12, rel=1e-3)
    prompt = prefill_work(size, memory, [8192])
    in_bf16 = ceilings.least_time_s(prompt, WeightFormat.BF16)
    assert in_bf16 == pytest.approx(prompt.flops / 800e12)
    matrices_s = prompt.matrix_flops / 1600e12
    assert in_bf16 - ceilings.least_time_s(prompt, WeightFormat.FP8) == pytest.approx(matrices_s)


def test_the_command_itself_imports_nothing_heavy():
    source = sys.modules["bench.gpu.__main__"].__file__
    with open(source) as file:
        before_main = file.read().partition("def main")[0]
    assert "import torch" not in before_main
    assert "from engine" not in before_main

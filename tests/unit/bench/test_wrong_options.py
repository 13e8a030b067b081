"""Options that the benchmark commands refuse."""

import shlex

import pytest
from typer.testing import CliRunner

from deploy.commands.main import app

PLAN = (
    "plan --model qwen3-8b --rps 30 --input 2000 --output 20 --slo-ttft 1000 --slo-tpot 25"
    " --formula-only"
)
SIMULATE = "simulate --trace synthetic --requests 3"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bench engine --weights fp64", "fp64"),
        ("bench engine --weights fp8", "--weights must be out of fp32, bf16, int8: fp8"),
        ("bench engine --peer sglang=/x", "NAME=PYTHON"),
        ("bench engine --contexts 12,x", "--contexts: '12,x' is not a list of numbers"),
        ("bench engine --contexts 0", "--contexts must be positive"),
        ("bench engine --shape 9b", "9b"),
        ("bench gateway --peer nginx=/x", "NAME=PYTHON"),
        ("bench kv --backends rdma", "--backends must be out of shm, zmq, nixl: rdma"),
        ("bench kv --block-sizes 16,x", "--block-sizes: '16,x' is not a list of numbers"),
        ("bench kv --shape 9b", "9b"),
        ("bench router --cases many", "--cases"),
        ("bench serve --rate 0", "--rate must be above 0, not 0.0"),
        ("bench store --parts all", "--parts: 'all' is not a list of ttft,memory"),
        ("bench store --peer lmcache=/x", "a NAME of vllm"),
        ("bench store --shape 9b", "9b"),
        ("bench speculate --setups all", "--setups must be out of bundled, shape, bad: all"),
        ("bench speculate --shape 9b", "9b"),
        ("bench speculate --batches 1,0", "--batches must be positive"),
        ("bench speculate --weights fp8", "--weights must be fp32, bf16 or int8, not fp8"),
        (f"{PLAN} --slo-tpot 0.1", "no number of workers"),
        (f"{PLAN} --weights fp32", "--weights must be"),
        (f"{PLAN} --model qwen4", "neither a directory nor one of"),
        (f"{PLAN} --hardware h300", "h200"),
        (f"{PLAN} --hardware h200-qwen3-32b-tp2", "profile h200-qwen3-32b-tp2"),
        (f"{PLAN} --accepted 5", "--drafted"),
        (f"{SIMULATE} --trace /nowhere.jsonl", "No such file"),
        (f"{SIMULATE} --hardware h300", "h200-qwen3-8b"),
        (f"{SIMULATE} --prefill 0", "workers that prefill"),
        (f"{SIMULATE} --speed-up 0", "sped up"),
        (f"{SIMULATE} --shorten 7", "does not divide"),
    ],
)
def test_wrong_option_is_reported_in_one_line(command, said):
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1

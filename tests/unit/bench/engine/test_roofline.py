"""The minimum time that a machine needs for a prefill or a decode step."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.common.roofline import (
    Ceilings,
    ModelMemory,
    ModelSize,
    Work,
    decode_work,
    least_time_s,
    model_size,
    prefill_work,
)
from bench.common.shapes import SHAPES, make_checkpoint
from engine.errors import CheckpointError

SIZE = ModelSize(num_layers=2, attention_size=16, layer_weights=1000, head_weights=100)
MEMORY = ModelMemory(weights_bytes=1100.0, kv_token_bytes=10.0)
CEILINGS = Ceilings(read_bytes_per_s=1e6, fp32_flops_per_s=1e7, int8_flops_per_s=4e7)


def test_a_step_reads_all_weights_and_all_contexts():
    work = decode_work(SIZE, MEMORY, [5, 7])
    assert work == Work(
        matrix_flops=2 * 1100 * 2, attention_flops=4 * 2 * 16 * 12, read_bytes=1100 + 120
    )


def test_a_prefill_multiplies_the_output_matrix_once_a_prompt():
    work = prefill_work(SIZE, MEMORY, [3, 1])
    assert work.matrix_flops == 2 * (1000 * 4 + 100 * 2)
    assert work.attention_flops == 4 * 2 * 16 * (1 + 2 + 3 + 1)
    assert work.read_bytes == 1100 + 40


@given(st.integers(1, 50))
def test_a_prefill_does_the_attention_of_its_tokens_one_by_one(length):
    together = prefill_work(SIZE, MEMORY, [length])
    one_by_one = [decode_work(SIZE, MEMORY, [n]) for n in range(1, length + 1)]
    assert together.attention_flops == sum(work.attention_flops for work in one_by_one)


def test_least_time_is_the_bottleneck_s_time():
    by_memory = Work(matrix_flops=1e6, attention_flops=1e6, read_bytes=1e6)
    by_compute = replace(by_memory, matrix_flops=1e8)
    assert least_time_s(by_memory, CEILINGS, "fp32") == 1.0
    assert least_time_s(by_compute, CEILINGS, "fp32") == pytest.approx(10.1)


def test_int8_speeds_up_matrices_but_not_attention():
    work = Work(matrix_flops=4e8, attention_flops=1e8, read_bytes=0)
    assert least_time_s(work, CEILINGS, "fp32") == pytest.approx(50)
    assert least_time_s(work, CEILINGS, "int8") == pytest.approx(20)
    assert least_time_s(work, CEILINGS, "bf16") == pytest.approx(50)  # the computation is in fp32


def test_the_size_of_a_model_comes_from_its_files(tmp_path):
    shape = SHAPES["tiny"]
    make_checkpoint(tmp_path / "model", shape, seed=0)
    assert model_size(tmp_path / "model") == shape.size


def test_a_config_without_layers_is_refused(tmp_path):
    make_checkpoint(tmp_path / "model", SHAPES["tiny"], seed=0)
    rewrite_config(tmp_path / "model", num_hidden_layers=None)
    with pytest.raises(CheckpointError, match="num_hidden_layers is missing"):
        model_size(tmp_path / "model")


def rewrite_config(path, **changes):
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

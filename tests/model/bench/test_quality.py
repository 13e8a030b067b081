"""`bench quality` computes the measures that it names, on small models."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import bench.quality.run as quality
from bench.quality import corpus
from bench.quality.run import (
    EXACT,
    SETTINGS,
    attention_errors,
    capacities,
    held_out_windows,
    measure,
    score,
)
from engine.layout import KVFormat, KVLayout
from tests.kits.checkpoints import tiny_checkpoint

pytestmark = [pytest.mark.torch, pytest.mark.long]


@pytest.fixture
def checkpoint(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory, "llama")


@pytest.fixture
def windows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (3, 40), generator=generator).tolist()


def test_perplexity_equals_the_model_s_own(checkpoint, windows):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor(windows)
    with torch.inference_mode():
        logits = model(ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    found = score(checkpoint, EXACT, windows, threads=1)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    assert torch.equal(found.choices, logits.argmax(-1).flatten())


def test_a_coarser_format_errs_more(checkpoint, windows):
    errors = attention_errors(checkpoint, windows)
    order = (KVFormat.BF16, KVFormat.INT8, KVFormat.FP8_E4M3, KVFormat.INT4)
    values = [errors[f"attention_error/kv_{form}"].value for form in order]
    assert values == sorted(values)
    assert 0 < values[0] < 1 < values[-1] < 50
    assert len(errors) == len(order)


def test_the_attention_error_is_the_error_of_the_outputs(checkpoint, windows, monkeypatch):
    """If outputs over every cache but fp32 are 1.25 times too large, the reported error is 25 %."""
    real = quality.torch_attention.attend
    exact = []

    def attend(query, key, value, cache, *rest):
        if cache.kv_format is KVFormat.FP32:  # the first of each pair
            exact.append(real(query, key, value, cache, *rest))
            return exact[-1]
        return 1.25 * exact[-1]

    monkeypatch.setattr(quality.torch_attention, "attend", attend)
    for figure in attention_errors(checkpoint, windows).values():
        assert figure.value == pytest.approx(25)


def test_capacity_counts_whole_blocks(checkpoint):
    sections = quality.load(checkpoint, kv_format=KVFormat.FP32, block_size=16).layout.sections
    for form in KVFormat:
        block_bytes = KVLayout(16, form, sections).block_bytes
        expected = 2**30 // block_bytes * 16
        assert capacities(checkpoint)[f"capacity/kv_{form}"].value == expected


def test_the_whole_measurement_has_a_figure_for_each_setting(checkpoint, windows):
    names = {result.name for result in measure(checkpoint, windows[:1], threads=1)}
    for setting in SETTINGS:
        for thing in ("perplexity", "perplexity_change", "top1_agreement"):
            assert f"{thing}/{setting.name}" in names


def test_windows_are_held_out_text_and_a_function_of_the_seed(tmp_path, monkeypatch):
    from tests.kits.checkpoints import save_tokenizer

    save_tokenizer(tmp_path)
    documents = [
        corpus.Document("kept " * 40, held_out=True, is_test_code=False, is_dialogue=False),
        corpus.Document("trained" * 40, held_out=False, is_test_code=False, is_dialogue=False),
        corpus.Document("dialogue" * 40, held_out=True, is_test_code=False, is_dialogue=True),
    ]
    monkeypatch.setattr(corpus, "documents", lambda root: iter(documents))
    file = tmp_path / "tokenizer.json"
    drawn = [held_out_windows(file, num_windows=5, window_len=10, seed=s) for s in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert [len(window) for window in drawn[0]] == [10] * 5
    stream = list(b"kept " * 40)
    assert all(bytes(window).decode() in bytes(stream).decode() for window in drawn[0])
    many = held_out_windows(file, num_windows=99, window_len=10, seed=0)
    assert len(many) == 20  # the number of all windows

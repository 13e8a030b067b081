"""The benchmark's driver of Baton's engine computes the answers that it is timed for."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.common.shapes import SHAPES, make_checkpoint
from bench.engine.ceilings import CeilingProbe
from bench.engine.ours import OurEngine
from bench.peers.driver import options_of

pytestmark = [pytest.mark.torch, pytest.mark.long]

NUM_STEPS = 6
PROMPTS = [[5, 9, 300, 17] * n for n in (2, 70, 33)]  # the second prompt takes two chunks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("shapes") / "tiny"
    make_checkpoint(path, SHAPES["tiny"], seed=0)
    return path


@pytest.fixture(scope="module")
def ours(checkpoint):
    return open_engine(checkpoint, "fp32", "fp32")


def open_engine(checkpoint, weights, kv_format):
    fixed = ["ours", "--checkpoint", str(checkpoint), "--variant", weights, "--threads", "1"]
    limits = ["--max-sequences", "4", "--max-len", "300", "--max-tokens", "800"]
    return OurEngine(options_of(fixed + limits), weights, kv_format)


def test_answers_equal_transformers_answers(ours, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = ours.generate(PROMPTS, NUM_STEPS)
    for prompt, answer in zip(PROMPTS, found["answers"], strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_STEPS + 1,
            min_new_tokens=NUM_STEPS + 1,
            do_sample=False,
            pad_token_id=0,
        )
        assert answer == expected[0, len(prompt) :].tolist()


def test_prefill_and_decode_are_timed_apart(ours):
    prefill_only = ours.generate(PROMPTS, 0)
    assert prefill_only["decode_s"] == 0
    assert [len(answer) for answer in prefill_only["answers"]] == [1, 1, 1]
    both = ours.generate(PROMPTS, NUM_STEPS)
    assert both["prefill_s"] > 0
    assert 0 < both["outside_forward_s"] < both["decode_s"]


def test_copied_contexts_decode_like_computed_ones(ours):
    prompt = PROMPTS[2]  # this prompt ends inside a block
    copied = ours.decode_at(prompt=prompt, num_sequences=3, num_steps=NUM_STEPS)
    computed = ours.generate([prompt] * 3, NUM_STEPS)
    assert copied["answers"] == computed["answers"]
    assert copied["decode_s"] > 0


def test_ceilings_are_measured_and_plausible():
    found = CeilingProbe(threads=1).measure(read_bytes=2**24)
    assert found["read_bytes_per_s"] > 1e8
    assert found["fp32_flops_per_s"] > 1e8
    assert found["int8_flops_per_s"] > 1e8

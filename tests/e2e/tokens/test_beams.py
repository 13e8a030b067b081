"""Beam search over a real worker equals a search over transformers' logits."""

import asyncio
import json
from typing import Any

import pytest

from engine.clock import MonotonicClock
from engine.config import WeightFormat, WorkerConfig
from engine.messages import Role
from router.gateway.versions import ServedVersion, Versions
from router.text.tokenizer import load_text_model
from tests.kits.checkpoints import CONTEXT_LEN, tiny_checkpoint
from tests.kits.router.beams import reference_beams
from tests.kits.router.gateway import fetch, make_app_of
from tests.kits.services.cluster import prompts, router, workers

pytestmark = pytest.mark.torch

NUM_BEAMS = 3
NUM_TOKENS = 20  # more tokens than a block
PROMPTS = prompts(5, vocab_size=64, seed=5)[3:]  # lengths: one block and one token; two blocks


def transformers_model(path):
    """Returns a function for the next token's log-probabilities, by transformers in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def after(token_ids):
        with torch.inference_mode():
            logits = model(torch.tensor([list(token_ids)])).logits[0, -1]
        return logits.float().log_softmax(dim=-1).tolist()

    return after


async def asked(running, text, fields: dict[str, Any]) -> Any:
    """Sends a request to a gateway in this process, whose router is connected to the workers."""
    async with router(running) as port:
        versions = Versions(ServedVersion("v1", port, text, ("tiny",), CONTEXT_LEN))
        app = make_app_of(versions, MonotonicClock())
        reply = await fetch(app, "POST", "/v1/completions", json.dumps(fields).encode())
    assert reply.status == 200, reply.body
    return reply.json()


def test_a_beam_search_equals_one_over_transformers(tmp_path_factory):
    path = tiny_checkpoint(tmp_path_factory, "llama")
    text = load_text_model(path)
    fields = {
        "prompt": PROMPTS,
        "use_beam_search": True,
        "n": NUM_BEAMS,
        "max_tokens": NUM_TOKENS,
        "return_token_ids": True,
        "logprobs": 0,
    }
    config = WorkerConfig(weights=WeightFormat.FP32, kv_mib=16)
    with workers([Role.MIXED], model=path, config=config) as running:
        body = asyncio.run(asked(running, text, fields))
    model = transformers_model(path)
    expected = [
        answer
        for prompt in PROMPTS
        for answer in reference_beams(
            model, prompt, width=NUM_BEAMS, max_tokens=NUM_TOKENS, end_ids=text.eos_token_ids
        )
    ]
    assert [c["token_ids"] for c in body["choices"]] == [tokens for tokens, _ in expected]
    sums = [sum(c["logprobs"]["token_logprobs"]) for c in body["choices"]]
    assert sums == pytest.approx([total for _, total in expected], abs=1e-2)

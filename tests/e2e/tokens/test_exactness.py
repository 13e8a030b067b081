"""The same request gives the same tokens on every kind of deployment."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import WeightFormat, WorkerConfig
from engine.messages import Role, Sampling
from tests.kits.checkpoints import tiny_checkpoint
from tests.kits.services.cluster import (
    TRANSPORTS,
    Workers,
    ask_all,
    prompts,
    request,
    router,
    workers,
)

pytestmark = pytest.mark.torch

PAIR = (Role.PREFILL, Role.DECODE)
NEW_TOKENS = 24
GREEDY = Sampling(temperature=0.0)
PROMPTS = prompts(20, vocab_size=4096, seed=1)
SAMPLINGS = [
    Sampling(
        temperature=0.3 + 0.1 * (i % 8), top_p=(1.0, 0.9)[i % 2], top_k=(0, 50)[i % 3 > 0], seed=i
    )
    for i in range(20)
]


def generate(model: Path, inputs: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Returns transformers' own greedy answers in fp32, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for prompt in inputs:
        output = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def serve(
    running: Workers,
    inputs: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    at_once: int,
    num_tokens: int = NEW_TOKENS,
) -> list[list[int]]:
    async def run() -> list[list[int]]:
        async with router(running) as r:
            pairs = zip(inputs, samplings, strict=True)
            requests = [
                request(f"r{i}", prompt, max_tokens=num_tokens, sampling=sampling)
                for i, (prompt, sampling) in enumerate(pairs)
            ]
            return await ask_all(r, requests, at_once)

    return asyncio.run(run())


def fp32_config(**settings):
    """Keeps weights in fp32 like transformers; by default, a worker would choose int8."""
    return WorkerConfig(weights=WeightFormat.FP32, **settings)


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request):
    config = fp32_config(kv_mib=64, kv_transport=request.param, chunk_tokens=48)
    with workers(PAIR, config=config) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generate(BUNDLED_MODEL, PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def colocated() -> list[list[int]]:
    """Returns sampled tokens of a worker that does both prefill and decode."""
    with workers([Role.MIXED], config=fp32_config(kv_mib=64)) as mixed:
        alone = serve(mixed, PROMPTS, SAMPLINGS, at_once=1)
        assert serve(mixed, PROMPTS, SAMPLINGS, at_once=16) == alone
    return alone


@pytest.mark.parametrize("at_once", [1, 16])
def test_greedy_tokens_after_a_handoff_equal_generate(pair, expected, at_once):
    assert serve(pair, PROMPTS, [GREEDY] * 20, at_once) == expected


@pytest.mark.parametrize("at_once", [1, 16])
def test_sampled_tokens_are_the_same_colocated_and_disaggregated(pair, colocated, at_once):
    assert serve(pair, PROMPTS, SAMPLINGS, at_once) == colocated


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        pytest.param("qwen3", marks=pytest.mark.long),
        pytest.param("mistral", marks=pytest.mark.long),
        "gemma",
    ],
)
def test_other_architectures_equal_generate(kind, tmp_path_factory):
    model = tiny_checkpoint(tmp_path_factory, kind)
    inputs = prompts(8, vocab_size=64, seed=2, longest=60)
    with workers(PAIR, model=model, config=fp32_config(kv_mib=16, chunk_tokens=16)) as pair:
        served = serve(pair, inputs, [GREEDY] * 8, at_once=8, num_tokens=12)
    assert served == generate(model, inputs, 12)

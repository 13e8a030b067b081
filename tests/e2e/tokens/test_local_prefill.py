"""A decode worker computes a prompt itself when the router predicts that this is faster.

`tests/model/tokens/test_same_tokens.py` tests exactness for all kinds of requests.
"""

import asyncio

import pytest

from engine.config import RouterConfig, WeightFormat, WorkerConfig
from engine.demand import DecodeCost
from engine.messages import Role, Sampling
from engine.worker.costs import PrefillCost, WorkerCosts
from router.cluster.estimates import Estimates
from tests.kits.services.alone import answers_alone
from tests.kits.services.cluster import ask, prompts, request, router, take_turns, workers

pytestmark = pytest.mark.torch

PATIENT = RouterConfig(prefill_backlog_s=9.0)  # predictions are inaccurate in this test
CONFIG = WorkerConfig(kv_mib=64, chunk_tokens=48, weights=WeightFormat.FP32)
GREEDY = Sampling(temperature=0.0)
NUM_TOKENS = 16
PROMPT = prompts(8, vocab_size=4096, seed=21)[0]
LONG_PROMPT = prompts(7, vocab_size=4096, seed=22, shortest=480, longest=480)[-1]


def test_short_prompts_go_to_the_decode_worker_while_prefill_is_busy():
    """The router predicts from given costs, in C++ if the extension is built."""
    told = Estimates(WorkerCosts(PrefillCost(0.0, 1e-2), DecodeCost(5.0, 0.0, 0.0)))

    async def run() -> list[int]:
        async with router(running, PATIENT, estimates=told, natively=True) as r:
            long = request("long", LONG_PROMPT, max_tokens=1, sampling=GREEDY)
            short = request("short", PROMPT, max_tokens=NUM_TOKENS, sampling=GREEDY)
            first = asyncio.create_task(ask(r, long))
            await take_turns()
            quick = await ask(r, short)
            busy = await first
            assert busy.timeline.prefill_worker == "prefill-0"
            both = quick.timeline.prefill_worker, quick.timeline.decode_worker
            assert both == ("decode-1", "decode-1")
            return quick.token_ids

    with workers((Role.PREFILL, Role.DECODE), config=CONFIG, locally=True) as running:
        token_ids = asyncio.run(run())
    assert [token_ids] == answers_alone([PROMPT], [GREEDY], num_tokens=NUM_TOKENS)

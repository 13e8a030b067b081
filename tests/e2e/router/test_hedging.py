"""A slow prefill worker does not delay requests: a second worker computes the same prompt."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.config import RouterConfig, WorkerConfig
from engine.messages import Role, Sampling
from engine.worker.costs import DecodeCost, PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.machine.requests import Finished
from tests.kits.services.cluster import ask, prompts, request, router, workers

pytestmark = pytest.mark.torch

SMALL = WorkerConfig(kv_mib=24, chunk_tokens=16, max_batch_tokens=32, max_running=8)
# seconds of running and of being stopped; delays in the test prolong the running
RUNS_S, STANDS_S = 0.005, 2.0
COSTS = WorkerCosts(PrefillCost(0.0, 1e-4), DecodeCost(0.01, 0.0, 0.0), PullCost(0.0, 0.0, 1e9))


@asynccontextmanager
async def slowed(pid: int) -> AsyncIterator[None]:
    """Lets a process run so briefly that it can do little more than send heartbeats."""

    async def stop_and_go() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STANDS_S)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(RUNS_S)

    os.kill(pid, signal.SIGSTOP)
    slowing = asyncio.create_task(stop_and_go())
    try:
        yield
    finally:
        slowing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await slowing
        os.kill(pid, signal.SIGCONT)


def test_prompt_of_a_slow_worker_is_computed_by_another():
    [prompt] = prompts(7, vocab_size=4096, seed=1, shortest=400, longest=400)[-1:]
    sampling = Sampling(temperature=0.7, seed=3)

    async def run() -> None:
        config = RouterConfig(silence_s=15.0)  # a busy test machine must not look silent
        async with router(running, config, estimates=Estimates(COSTS), natively=True) as r:
            first = await ask(r, request("first", prompt, max_tokens=1, sampling=sampling))
            assert first.timeline is not None
            # the prefix cache attracts the next such prompt to the same worker
            cached_at = first.timeline.prefill_worker
            assert cached_at is not None
            async with slowed(running.ready[cached_at].pid):
                slow = await ask(r, request("slow", prompt, max_tokens=20, sampling=sampling))
            counters = r.counters()
            assert isinstance(slow.outcome, Finished)
            assert slow.timeline is not None
            assert {cached_at, slow.timeline.prefill_worker} == {"prefill-0", "prefill-1"}
            assert slow.timeline.attempts == 1
            assert (counters["hedge", "begun"], counters["hedge", "won"]) == (1, 1)
            assert not any(name in ("worker lost", "retried") for name, _ in counters)
            again = await ask(r, request("again", prompt, max_tokens=20, sampling=sampling))
            assert again.token_ids == slow.token_ids

    with workers([Role.PREFILL, Role.PREFILL, Role.DECODE], config=SMALL) as running:
        asyncio.run(run())

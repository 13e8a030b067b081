"""Workers that are stopped and continued: clients wait only seconds, and no block leaks."""

import asyncio
import os
import signal
from itertools import pairwise

import pytest

from engine.clock import MonotonicClock
from engine.config import RouterConfig, WorkerConfig
from engine.messages import Role, Sampling
from router.machine.requests import Finished
from tests.kits.services.cluster import ask, prompts, request, router, until, workers

pytestmark = pytest.mark.torch

SMALL = WorkerConfig(kv_mib=24, chunk_tokens=64, max_batch_tokens=128, max_running=16)
SILENCE_S = 2.0
NOTICED_WITHIN_S = 6.0  # seconds after the stop or, later, after the last message
LONGEST_STALL_S = 15.0  # seconds: silence, another prefill, and load of other tests
NUM_TOKENS = 60


@pytest.mark.parametrize("victim", ["decode-2", pytest.param("prefill-0", marks=pytest.mark.long)])
def test_stopped_worker_costs_seconds_and_no_token_and_serves_again(victim):
    """After all answers the worker is continued, and serves again."""
    requests = [
        request(f"r{i}", prompt, max_tokens=NUM_TOKENS, sampling=Sampling(temperature=0.7, seed=i))
        for i, prompt in enumerate(prompts(6, vocab_size=4096, seed=5, longest=200))
    ]
    clock = MonotonicClock()
    stopped: list[int] = []
    stopped_s: list[float] = []
    news_s: dict[int, list[float]] = {i: [] for i in range(len(requests))}

    def stop_once(i: int, num_tokens: int) -> None:
        news_s[i].append(clock.now_s())
        if num_tokens >= 5 and not stopped:
            stopped.append(running.ready[victim].pid)
            os.kill(stopped[0], signal.SIGSTOP)
            stopped_s.append(clock.now_s())

    async def run() -> None:
        async with router(running, RouterConfig(silence_s=SILENCE_S)) as r:
            undisturbed = [(await ask(r, req)).token_ids for req in requests]
            again = [
                request(f"again-{i}", req.token_ids, max_tokens=NUM_TOKENS, sampling=req.sampling)
                for i, req in enumerate(requests)
            ]
            begun_s = clock.now_s()

            async def notice() -> float:
                await until(lambda: stopped and victim not in r.workers(), "it is noticed")
                return clock.now_s() - stopped_s[0]

            noticed_s, *answers = await asyncio.gather(
                notice(),
                *(ask(r, req, lambda n, i=i: stop_once(i, n)) for i, req in enumerate(again)),
            )
            assert noticed_s < NOTICED_WITHIN_S
            assert all(isinstance(a.outcome, Finished) for a in answers)
            assert [a.token_ids for a in answers] == undisturbed
            for times_s in news_s.values():
                told_s = [begun_s, *times_s]
                gaps = [after - before for before, after in pairwise(told_s)]
                assert max(gaps) < LONGEST_STALL_S
            assert r.counters()["worker lost", "PeerSilent"] == 1
            os.kill(stopped[0], signal.SIGCONT)
            await until(lambda: victim in r.workers(), "it is back")

    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    with workers(roles, config=SMALL) as running:
        try:
            asyncio.run(run())
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

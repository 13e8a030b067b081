"""Cancelled requests and killed workers: no token is lost or changed, and no block leaks."""

import asyncio
import random

import pytest

from engine.config import WorkerConfig
from engine.messages import Role, Sampling
from router.machine.requests import Finished
from router.service import Router
from tests.kits.router.scripted_workers import updates_of
from tests.kits.services.cluster import TRANSPORTS, ask, prompts, request, router, until, workers

pytestmark = pytest.mark.torch

NUM_REQUESTS = 200
SMALL = WorkerConfig(kv_mib=24, chunk_tokens=64, max_batch_tokens=128, max_running=16)


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS[2:])  # NIXL has the most resources that can leak
def test_a_storm_of_requests_and_cancels_leaves_nothing_behind(transport):
    rng = random.Random(3)
    inputs = prompts(NUM_REQUESTS, vocab_size=4096, seed=4, longest=300)
    config = WorkerConfig(
        kv_mib=24, chunk_tokens=64, max_batch_tokens=128, max_running=16, kv_transport=transport
    )

    async def one(r: Router, i: int) -> str:
        max_tokens = rng.randint(1, 24)
        sampling = Sampling(temperature=0.8, seed=i)
        req = request(f"r{i}", inputs[i], max_tokens=max_tokens, sampling=sampling)
        leave_after = rng.choice([None, None, 0, 1, 3])
        if leave_after is None:
            answer = await ask(r, req)
            assert isinstance(answer.outcome, Finished), answer.outcome
            assert len(answer.token_ids) == max_tokens
            return "finished"
        updates = updates_of(r, req)
        left = asyncio.create_task(_leave(updates, leave_after, rng.uniform(0, 0.5)))
        await left
        return "left"

    async def _leave(updates, after_tokens, patience_s):
        num = 0
        try:
            async with asyncio.timeout(None if after_tokens else patience_s):
                async for update in updates:
                    num += len(update.token_ids)
                    if after_tokens and num >= after_tokens:
                        break
        except TimeoutError:
            pass  # the client disconnects before its first token
        finally:
            await updates.aclose()

    async def run() -> list[str]:
        async with router(running) as r:
            ends = await asyncio.gather(*(one(r, i) for i in range(NUM_REQUESTS)))
            return ends

    with workers([Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE], config=config) as running:
        ends = asyncio.run(run())
    assert len(ends) == NUM_REQUESTS
    assert ends.count("finished") > 50
    assert ends.count("left") > 50


def decoder_of_the_youngest(r: Router) -> str | None:
    """Returns the worker that decodes the answer with the fewest tokens, or None if none is
    decoding."""
    running = [
        (len(flight.tokens), flight.attempt.decode)
        for flight in r.machine.state.flights.values()
        if flight.attempt and flight.attempt.is_decoding
    ]
    return min(running)[1] if running else None


@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_killed_worker_changes_no_token(victim):
    inputs = prompts(8, vocab_size=4096, seed=5, longest=200)
    requests = [
        request(f"r{i}", prompt, max_tokens=120, sampling=Sampling(temperature=0.7, seed=i))
        for i, prompt in enumerate(inputs)
    ]
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]

    async def run() -> tuple[list[list[int]], list[list[int]], int]:
        async with router(running) as r:
            undisturbed = [(await ask(r, req)).token_ids for req in requests]
            killed = False

            def kill_once(num_tokens: int) -> None:
                nonlocal killed
                name = "prefill-0" if victim == "prefill" else decoder_of_the_youngest(r)
                if num_tokens >= 1 and not killed and name is not None:
                    killed = True
                    running.kill(name)

            again = [
                request(f"again-{i}", req.token_ids, max_tokens=120, sampling=req.sampling)
                for i, req in enumerate(requests)
            ]
            answers = await asyncio.gather(*(ask(r, req, kill_once) for req in again))
            assert all(isinstance(a.outcome, Finished) for a in answers)
            retried = max(a.timeline.attempts for a in answers if a.timeline)
            await until(lambda: len(r.workers()) == 3, "the dead worker is noticed")
            return undisturbed, [a.token_ids for a in answers], retried

    with workers(roles, config=SMALL) as running:
        undisturbed, disturbed, attempts = asyncio.run(run())
    assert disturbed == undisturbed
    if victim == "decode":
        assert attempts > 1  # a request was running on the killed worker

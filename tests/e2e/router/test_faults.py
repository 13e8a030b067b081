"""Cancelled requests and killed workers: nothing is lost, changed or leaked."""

import asyncio
import random
from itertools import count

import pytest

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import RouterConfig, Transport, WorkerConfig
from engine.messages import Role, Sampling
from router.gateway.metrics.meters import GatewayMetrics
from router.gateway.versions import ServedVersion, Versions
from router.machine.requests import Failed, Finished, Rejected
from router.service import Router
from router.text.tokenizer import load_text_model
from tests.kits.services.cluster import (
    DEADLINE_S,
    TRANSPORTS,
    ask,
    counted,
    prompts,
    request,
    router,
    until,
    workers,
)

pytestmark = pytest.mark.torch

NUM_REQUESTS = 200
SMALL = WorkerConfig(kv_mib=24, chunk_tokens=64, max_batch_tokens=128, max_running=16)


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS[2:])  # NIXL has most to leak
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
        updates = r.submit(req)
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
            pass  # the client left before its first token
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


def test_transfers_are_counted_and_failures_have_a_reason():
    own = {
        Role.PREFILL: WorkerConfig(kv_mib=64, kv_transport=Transport.ZMQ),
        Role.DECODE: WorkerConfig(kv_mib=64),  # prefers shared memory
    }
    source, sink = 'role="prefill",worker="prefill-0"', 'role="decode",worker="decode-1"'
    rng = random.Random(6)

    async def leave_in_the_middle_of_a_pull(r: Router, name: str) -> None:
        """The client leaves during prefill, when the pull has begun."""
        prompt = [rng.randrange(5, 4096) for _ in range(3900)]
        updates = r.submit(request(name, prompt, max_tokens=9, sampling=Sampling()))
        try:
            async with asyncio.timeout(0.3):
                async for _ in updates:
                    pass
        except TimeoutError:
            pass
        finally:
            await updates.aclose()

    async def run() -> None:
        async with router(running) as r:
            answer = await ask(r, request("r", [7] * 100, max_tokens=5, sampling=Sampling()))
            assert isinstance(answer.outcome, Finished)
            served = ServedVersion("v1", r, load_text_model(BUNDLED_MODEL), ("m",), context_len=256)
            page = GatewayMetrics(Versions(served), version="1")
            async with asyncio.timeout(DEADLINE_S):
                for i in count():
                    await leave_in_the_middle_of_a_pull(r, f"left-{i}")
                    if counted(r, "pulls_failed:aborted")["decode-1"]:
                        break
            await until(lambda: counted(r, "leases_ended:released")["prefill-0"] > 0, "released")
            samples = dict(
                line.rsplit(maxsplit=1) for line in page.exposition().decode().splitlines()
            )
            for name in (
                f"pulled_bytes_total{{{sink}}}",
                f"transfer_seconds_total{{{sink}}}",
                f'pulls_failed_total{{reason="aborted",{sink}}}',
                f'fallbacks_total{{reason="shm_not_offered",{sink}}}',
                f'leases_ended_total{{reason="released",{source}}}',
            ):
                assert float(samples[f"baton_worker_{name}"]) > 0

    with workers([Role.PREFILL, Role.DECODE], config=own) as running:
        asyncio.run(run())


def decoder_of_the_youngest(r: Router) -> str | None:
    """The worker with the running answer that is furthest from its end; None if none runs."""
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
                if num_tokens >= 5 and not killed and name is not None:
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
        assert attempts > 1  # the kill hit a running request


def test_the_last_decode_worker_dies_and_the_client_gets_a_clear_error():
    async def run() -> None:
        async with router(running, RouterConfig(queue_timeout_s=1.0)) as r:
            # Long, so that it still runs when the kill has come on a busy machine.
            req = request("r", [7] * 40, max_tokens=1000, sampling=Sampling(seed=1))
            killed: list[int] = []

            def kill_once(num_tokens: int) -> None:
                if num_tokens >= 5 and not killed:  # several may come at once
                    killed.append(num_tokens)
                    running.kill("decode-1")

            answer = await ask(r, req, kill_once)
            assert answer.outcome == Failed("no decode worker came in time")
            late = await ask(r, request("late", [7], max_tokens=5, sampling=Sampling()))
            assert isinstance(late.outcome, Rejected)
            assert late.outcome.message == "no decode worker came in time"
            assert r.readiness() == "no decode worker is connected"

    with workers([Role.PREFILL, Role.DECODE], config=SMALL) as running:
        asyncio.run(run())


def test_full_queue_refuses_and_accepted_requests_finish():
    async def run() -> None:
        async with router(running, RouterConfig(max_queue=4)) as r:
            requests = [
                request(f"r{i}", [9] * 700, max_tokens=4, sampling=Sampling(seed=i))
                for i in range(16)
            ]
            answers = await asyncio.gather(*(ask(r, req) for req in requests))
            kinds = [type(a.outcome) for a in answers]
            assert set(kinds) == {Finished, Rejected}

    with workers([Role.PREFILL, Role.DECODE], config=SMALL) as running:
        asyncio.run(run())


def test_a_request_larger_than_the_kv_memory_fails_with_the_reason():
    async def run() -> None:
        async with router(running) as r:
            answer = await ask(r, request("r", [9] * 4000, max_tokens=90, sampling=Sampling()))
            assert isinstance(answer.outcome, Failed)
            assert "KV memory" in answer.outcome.message

    config = WorkerConfig(kv_mib=8, chunk_tokens=64)
    with workers([Role.PREFILL, Role.DECODE], config=config) as running:
        asyncio.run(run())

"""A prefix that another worker holds is pulled, and no token changes.

The gateway pulls where it predicts that a pull is faster than computing. The test gives the gateway
costs that favour a pull, because real costs depend on the machine and its load.
"""

import asyncio
import random
from collections.abc import Sequence

import pytest

from engine.config import RouterConfig, Transport, WeightFormat, WorkerConfig
from engine.layout import KVFormat
from engine.messages import Role, Sampling, WorkerId
from engine.worker.blocks import hash_blocks
from engine.worker.costs import PrefillCost, PullCost, WorkerCosts
from router.cluster.estimates import Estimates
from router.machine.requests import Finished
from router.service import Router
from tests.kits.services.alone import Formats, answers_alone
from tests.kits.services.cluster import (
    Answer,
    ask,
    counted,
    request,
    router,
    take_turns,
    until,
    workers,
)

pytestmark = pytest.mark.torch

ROLES = (Role.PREFILL, Role.PREFILL, Role.DECODE)
PATIENT = RouterConfig(offer_timeout_s=30.0)  # a timeout for busy test machines
PULLING_IS_QUICKER = WorkerCosts(
    prefill=PrefillCost(fixed_s=0.0, token_s=0.01),
    pull=PullCost(fixed_s=0.0, block_s=0.0, bytes_per_s=1e9),
)
BLOCK_SIZE = 16  # tokens per block
NUM_TOKENS = 24
SAMPLING = Sampling(temperature=0.7, seed=3)
ALIKE = Formats()
DECODE_IS_WIDER = Formats(prefill=KVFormat.BF16)  # only prefill workers offer prefixes


def config(transport: Transport, formats: Formats) -> WorkerConfig:
    return WorkerConfig(
        kv_mib=64,
        weights=WeightFormat.FP32,
        kv_dtype=formats.prefill,
        decode_kv_dtype=formats.decode,
        kv_transport=transport,
    )


def some_tokens(num: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 4096) for _ in range(num)]


NUM_BLOCKS = 50
PREFIX = some_tokens(NUM_BLOCKS * BLOCK_SIZE, seed=2)
FILLER = some_tokens(900, seed=3)
NEXT_TURN = some_tokens(40, seed=4)


async def ask_for(
    r: Router, name: str, prompt: Sequence[int], num_tokens: int = NUM_TOKENS
) -> Answer:
    answer = await ask(r, request(name, prompt, max_tokens=num_tokens, sampling=SAMPLING))
    assert isinstance(answer.outcome, Finished), answer.outcome
    return answer


async def ask_while_the_first_is_busy(r: Router, prompt: Sequence[int]) -> Answer:
    """Keeps prefill-0 busy with another prompt, so that this prompt is placed on prefill-1."""
    filler = asyncio.create_task(ask_for(r, "filler", FILLER, num_tokens=1))
    await take_turns()
    assert "filler" in r.machine.state.flights
    answer = await ask_for(r, "prompt", prompt)
    await filler
    assert answer.timeline is not None
    assert answer.timeline.prefill_worker == "prefill-1"
    return answer


def answer_alone(prompt: Sequence[int], formats: Formats) -> list[int]:
    [answer] = answers_alone([prompt], [SAMPLING], num_tokens=NUM_TOKENS, formats=formats)
    return answer


async def reported(r: Router, name: str, by_worker: dict[str, int]) -> None:
    """Waits until these workers report these values of a counter, and all others report 0."""
    expected = {worker_id: by_worker.get(worker_id, 0) for worker_id in r.workers()}
    await until(lambda: counted(r, name) == expected, lambda: f"{name}: {counted(r, name)}")


async def told(r: Router, worker_id: str, token_ids: Sequence[int]) -> None:
    """Waits until block events have reported all blocks of these tokens to the gateway."""
    hashes = hash_blocks(token_ids, BLOCK_SIZE)

    def num_known() -> int:
        return r.machine.prefixes.longest(hashes).get(WorkerId(worker_id), 0)

    await until(lambda: num_known() == len(hashes), lambda: f"{num_known()} blocks are known")


def pace_s(r: Router, worker_id: str) -> float | None:
    """Returns a worker's predicted seconds per token, from its reported steps."""
    return r.workers()[WorkerId(worker_id)].forecast.tpot_s


def test_prefix_at_another_prefill_worker_is_pulled_and_not_computed():
    prompt = PREFIX + NEXT_TURN

    async def run() -> list[int]:
        async with router(running, PATIENT, estimates=Estimates(PULLING_IS_QUICKER)) as r:
            # one token, so no worker decodes
            held = await ask_for(r, "prefix", [*PREFIX, 7], num_tokens=1)
            assert held.timeline.prefill_worker == "prefill-0"
            await told(r, "prefill-0", PREFIX)
            answer = await ask_while_the_first_is_busy(r, prompt)
            assert answer.timeline.num_cached_tokens == len(PREFIX)
            assert r.counters()["prefix offer", "asked"] == 1
            assert not [reason for event, reason in r.counters() if event == "fallback"]
            await reported(r, "prefix_offers:held", {"prefill-0": 1})
            await reported(r, "pulled_prefix_blocks", {"prefill-1": NUM_BLOCKS})
            return answer.token_ids

    with workers(ROLES, config=config(Transport.ZMQ, DECODE_IS_WIDER)) as running:
        token_ids = asyncio.run(run())
    assert token_ids == answer_alone(prompt, DECODE_IS_WIDER)


def test_conversation_pulls_its_prefix_from_the_decode_worker():
    async def run() -> tuple[list[int], Answer]:
        async with router(running, PATIENT, estimates=Estimates(PULLING_IS_QUICKER)) as r:
            first = await ask_for(r, "first", PREFIX, num_tokens=2 * BLOCK_SIZE + 1)
            prompt = PREFIX + first.token_ids + NEXT_TURN
            await told(r, "decode-2", prompt[: (NUM_BLOCKS + 2) * BLOCK_SIZE])
            answer = await ask_while_the_first_is_busy(r, prompt)
            await reported(r, "prefix_offers:held", {"decode-2": 1})
            await reported(r, "pulled_prefix_blocks", {"prefill-1": NUM_BLOCKS + 2})
            await until(lambda: pace_s(r, "decode-2") is not None, "it has told of its steps")
            assert 0 < pace_s(r, "decode-2") < 1
            return prompt, answer

    with workers(ROLES, config=config(Transport.AUTO, ALIKE)) as running:
        prompt, answer = asyncio.run(run())
    assert answer.timeline.num_cached_tokens == len(PREFIX) + 2 * BLOCK_SIZE
    assert answer.token_ids == answer_alone(prompt, ALIKE)

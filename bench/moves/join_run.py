"""Runs `bench moves --join`: streams fill the only decode worker, then another one is started."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from random import Random

import uvloop

from bench.client.answers import Answer
from bench.client.load import whole
from bench.common.progress import Say, say_nothing
from bench.common.prompts import plain_token_ids
from bench.common.waiting import holds_within, pause
from bench.lab.streams import bodies, linked_checkpoint
from bench.moves.joining import AFTER_S, JoinRun
from bench.moves.plan import CALM_S, MovesPlan
from bench.moves.run import ORDER_WITHIN_S, REQUEST_TIMEOUT_S, NotFlipped
from bench.processes.deployment import OperatedDeployment, operated
from bench.serve.plan import ServeTarget
from bench.serve.run import ServeClient
from engine.clock import MonotonicClock
from engine.messages import Role

OPTIONS = {"--prefill": 1, "--decode": 1, "--threads": 1}
LOOK_EVERY_S = 0.1


def measure_joins(plan: MovesPlan, say: Say = say_nothing) -> list[JoinRun]:
    """Carries out the plan. Raises ServerFailed, RequestsFailed, NotFlipped, OrderFailed."""
    with linked_checkpoint(plan.shape, seed=plan.seed) as checkpoint:
        say("starting 1 + 1 workers")
        with operated(checkpoint, OPTIONS) as deployment:
            vocab = plain_token_ids(checkpoint)
            runs: list[JoinRun] = uvloop.run(_measure(plan, deployment, vocab, say))
    return runs


async def _measure(
    plan: MovesPlan, deployment: OperatedDeployment, vocab: Sequence[int], say: Say
) -> list[JoinRun]:
    clock = MonotonicClock()
    async with deployment.connected(REQUEST_TIMEOUT_S) as session:
        target = ServeTarget(deployment.url)
        client = ServeClient(session, target, clock, keeps_text=True)
        model = await client.first_model()
        prompts = bodies(plan.streams, vocab, model=model, rng=Random(f"{plan.seed}/prompts"))
        runs = []
        for repeat in range(plan.num_repeats):
            say(f"join {repeat + 1} of {plan.num_repeats}")
            asked = list(islice(prompts, plan.streams.at_once))
            runs.append(await _Join(client, deployment, asked).run())
        return runs


class _Join:
    """One join under streams, and the same streams without it."""

    def __init__(
        self, client: ServeClient, deployment: OperatedDeployment, asked: Sequence[bytes]
    ) -> None:
        self._client = client
        self._deployment = deployment
        self._asked = asked
        self._clock = MonotonicClock()

    async def run(self) -> JoinRun:
        alone = await self._streams()
        streams = asyncio.create_task(self._streams())
        try:
            await self._until(lambda nums: sum(nums) == len(self._asked), "all streams run")
            await pause(CALM_S)
            await self._deployment.set_pools(1, 2)
            await self._until(lambda nums: len(nums) == 2, "another decode worker serves")
            joined_s = self._clock.now_s()
            samples = []
            while self._clock.now_s() < joined_s + AFTER_S and not streams.done():
                samples.append((self._clock.now_s(), await self._decoding()))
                await pause(LOOK_EVERY_S)
            answers = await streams
        finally:
            streams.cancel()
        await self._deployment.set_pools(1, 1)
        await self._until(lambda nums: len(nums) == 1, "one decode worker is left")
        return JoinRun(alone, answers, joined_s, tuple(samples))

    async def _streams(self) -> tuple[Answer, ...]:
        return whole(await asyncio.gather(*map(self._client.send, self._asked)))

    async def _decoding(self) -> tuple[int, ...]:
        """Returns the streams of each decode worker that serves."""
        seen = await self._deployment.look()
        return tuple(w.running_seqs for w in seen.workers if w.works and w.role is Role.DECODE)

    async def _until(self, holds: Callable[[tuple[int, ...]], bool], what: str) -> None:
        async def has_come() -> bool:
            return holds(await self._decoding())

        if not await holds_within(has_come, ORDER_WITHIN_S, self._clock):
            raise NotFlipped(f"not within {ORDER_WITHIN_S:g} s: {what}")

"""Runs `bench moves`: a real deployment, streams through its gateway, and an operator."""

import asyncio
from collections.abc import Collection, Sequence
from itertools import islice
from random import Random

import uvloop

from bench.client.load import whole
from bench.common.progress import Say, say_nothing
from bench.common.prompts import plain_token_ids
from bench.common.waiting import holds_within, pause
from bench.lab.streams import bodies, linked_checkpoint
from bench.moves.plan import CALM_S, OPTIONS, STAYS, MovesPlan
from bench.moves.results import MovesRun
from bench.processes.deployment import OperatedDeployment, operated
from bench.serve.plan import ServeTarget
from bench.serve.run import ServeClient
from engine.clock import Clock, MonotonicClock
from engine.errors import BatonError
from engine.messages import Role

REQUEST_TIMEOUT_S = 120.0
ORDER_WITHIN_S = 30.0
DECODERS = ("worker-1", "worker-2")  # of one prefill and two decode workers


class NotFlipped(BatonError):
    """A worker did not take the ordered role."""


def measure(plan: MovesPlan, say: Say = say_nothing) -> list[MovesRun]:
    """Carries out the plan. Raises ServerFailed, RequestsFailed, NotFlipped, OrderFailed."""
    with linked_checkpoint(plan.shape, seed=plan.seed) as checkpoint:
        say("starting 1 + 2 workers")
        with operated(checkpoint, OPTIONS, STAYS) as deployment:
            vocab = plain_token_ids(checkpoint)
            runs: list[MovesRun] = uvloop.run(_measure(plan, deployment, vocab, say))
    return runs


async def _measure(
    plan: MovesPlan, deployment: OperatedDeployment, vocab: Sequence[int], say: Say
) -> list[MovesRun]:
    clock = MonotonicClock()
    async with deployment.connected(REQUEST_TIMEOUT_S) as session:
        client = ServeClient(session, ServeTarget(deployment.url), clock)
        model = await client.first_model()
        operator = _Operator(deployment, clock)
        prompts = bodies(plan.streams, vocab, model=model, rng=Random(f"{plan.seed}/prompts"))
        runs = []
        await operator.flip(DECODERS[1], Role.PREFILL)
        for repeat in range(-2, plan.num_repeats):  # two that only warm up: once in each direction
            source, target = DECODERS[repeat % 2], DECODERS[1 - repeat % 2]
            say(f"{source} to {target}" + (": warming up" if repeat < 0 else ""))
            asked = list(islice(prompts, plan.streams.at_once))
            beside = list(islice(prompts, plan.num_beside))
            run = await _flipped(client, operator, asked, beside, source=source, target=target)
            if repeat >= 0:
                runs.append(run)
    return runs


class _Operator:
    """Gives orders, and waits until they are carried out."""

    def __init__(self, deployment: OperatedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock

    async def flip(self, worker: str, role: Role) -> tuple[float, float]:
        """Flips a worker; returns when that was ordered, and when it was carried out.

        A worker that leaves decoding must have no sequence left by then. Raises NotFlipped and
        OrderFailed.
        """
        ordered_s = self._clock.now_s()
        await self._deployment.flip(worker, role)

        async def has_flipped() -> bool:
            seen = (await self._deployment.look()).by_name.get(worker)
            if seen is None or not seen.works or seen.role is not role:
                return False
            return role.decodes or seen.num_seqs == 0

        if not await holds_within(has_flipped, ORDER_WITHIN_S, self._clock):
            raise NotFlipped(f"{worker} is no {role} worker after {ORDER_WITHIN_S:g} s")
        return ordered_s, self._clock.now_s()

    async def running(self, workers: Collection[str]) -> int:
        """Sequences that these workers decode."""
        by_name = (await self._deployment.look()).by_name
        return sum(seen.running_seqs for name, seen in by_name.items() if name in workers)


async def _flipped(
    client: ServeClient,
    operator: _Operator,
    asked: Sequence[bytes],
    beside: Sequence[bytes],
    *,
    source: str,
    target: str,
) -> MovesRun:
    """Starts streams in `source`, brings `target` back, and flips `source`; returns the streams."""
    clock = MonotonicClock()

    async def wait_for(num_streams: int, *workers: str) -> None:
        async def all_run() -> bool:
            return await operator.running(workers) == num_streams

        if not await holds_within(all_run, ORDER_WITHIN_S, clock):
            raise NotFlipped(f"not all streams run in {' and '.join(workers)}")

    try:
        async with asyncio.TaskGroup() as group:
            first = [group.create_task(client.send(body)) for body in asked]
            await wait_for(len(asked), source)
            await operator.flip(target, Role.DECODE)
            others = [group.create_task(client.send(body)) for body in beside]
            # Nearly all of these are in `target`.
            await wait_for(len(asked) + len(beside), source, target)
            await pause(CALM_S)
            ordered_s, emptied_s = await operator.flip(source, Role.PREFILL)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors  # the one that ended the others
    streams, stayed = (whole([task.result() for task in tasks]) for tasks in (first, others))
    return MovesRun(streams, ordered_s=ordered_s, emptied_s=emptied_s, beside=stayed)

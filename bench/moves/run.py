"""Runs `bench moves`: a real deployment, streams through its gateway, and an operator."""

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp
import uvloop

from bench.chaos.deployment import DisturbedDeployment, Mark
from bench.client.answers import Answer, Failure
from bench.client.load import RequestsFailed
from bench.common.progress import Say, say_nothing
from bench.common.prompts import plain_token_ids
from bench.common.waiting import holds_within, pause
from bench.interference.plan import bodies
from bench.interference.run import link_checkpoint
from bench.moves.plan import CALM_S, OPTIONS, MovesPlan
from bench.moves.results import MovesRun
from bench.processes.serving import serving
from bench.serve.plan import ServeTarget
from bench.serve.run import ServeClient
from engine.clock import Clock, MonotonicClock
from engine.errors import BatonError
from engine.messages import Role

REQUEST_TIMEOUT_S = 120.0
ORDER_WITHIN_S = 30.0
DECODERS = ("decode-0", "decode-1")


class NotFlipped(BatonError):
    """A worker did not take the ordered role."""


def measure(plan: MovesPlan, say: Say = say_nothing) -> list[MovesRun]:
    """Carries out the plan. Raises ServerFailed, RequestsFailed, NotFlipped, OrderFailed."""
    with TemporaryDirectory(prefix="baton-") as folder:
        checkpoint, run_dir = Path(folder, "model"), Path(folder, "run")
        checkpoint.mkdir()
        run_dir.mkdir()
        link_checkpoint(plan.shape, checkpoint, seed=plan.seed)
        vocab = plain_token_ids(checkpoint)
        mark = Mark(secrets.token_hex(8), run_dir)
        say("starting 1 + 2 workers")
        with serving(checkpoint, OPTIONS, mark.environment) as served:
            runs: list[MovesRun] = uvloop.run(
                _measure(
                    plan, lambda session: DisturbedDeployment(served, session, mark), vocab, say
                )
            )
    return runs


async def _measure(
    plan: MovesPlan,
    deployed: Callable[[aiohttp.ClientSession], DisturbedDeployment],
    vocab: Sequence[int],
    say: Say,
) -> list[MovesRun]:
    clock = MonotonicClock()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        headers={"Content-Type": "application/json", "X-Baton-Timeline": "1"},
    ) as session:
        deployment = deployed(session)
        deployment.open()
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

    def __init__(self, deployment: DisturbedDeployment, clock: Clock) -> None:
        self._deployment = deployment
        self._clock = clock

    async def flip(self, worker: str, role: Role) -> tuple[float, float]:
        """When it was ordered, and when the worker said that it was that, with nothing to decode if
        it is not there for that.

        Raises NotFlipped, OrderFailed.
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
        """Sequences that they decode."""
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
    """Streams that all run in `source` when it is flipped, with `target` come back before, and so
    busy.
    """
    clock = MonotonicClock()

    async def send(body: bytes) -> Answer | Failure:
        return await client.send(body)

    async def wait_for(num_streams: int, *workers: str) -> None:
        async def all_run() -> bool:
            return await operator.running(workers) == num_streams

        if not await holds_within(all_run, ORDER_WITHIN_S, clock):
            raise NotFlipped(f"not all streams run in {' and '.join(workers)}")

    try:
        async with asyncio.TaskGroup() as group:
            first = [group.create_task(send(body)) for body in asked]
            await wait_for(len(asked), source)
            await operator.flip(target, Role.DECODE)
            others = [group.create_task(send(body)) for body in beside]
            # Nearly all of these are in `target`.
            await wait_for(len(asked) + len(beside), source, target)
            await pause(CALM_S)
            ordered_s, emptied_s = await operator.flip(source, Role.PREFILL)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors  # the one that ended the others
    streams, stayed = (_whole([task.result() for task in tasks]) for tasks in (first, others))
    return MovesRun(streams, ordered_s=ordered_s, emptied_s=emptied_s, beside=stayed)


def _whole(answers: Sequence[Answer | Failure]) -> tuple[Answer, ...]:
    failures = [one for one in answers if isinstance(one, Failure)]
    if failures:
        raise RequestsFailed(f"{len(failures)} of {len(answers)} streams", failures)
    return tuple(one for one in answers if isinstance(one, Answer))

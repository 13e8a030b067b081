"""Runs `bench interference`: real deployments, streams through their gateways, and a load.

Times are taken at the client. It shares the cores with what it measures, and so do the gateways, so
the CPU time of both is reported. Each worker has one compute thread.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import process_time

import uvloop

from bench.client.answers import Answer, Failure
from bench.client.http import http_session
from bench.client.load import RequestsFailed, whole
from bench.common import background
from bench.common.progress import Say, say_nothing
from bench.common.prompts import plain_token_ids
from bench.common.shapes import cached_checkpoint, shape_named
from bench.interference.plan import (
    DEPLOYMENT,
    POOLS,
    InterferencePlan,
    PoolSetting,
    ascii_tokenizer,
    bodies,
    order_of,
)
from bench.interference.results import InterferenceRun
from bench.processes.serving import ServedDeployment, serving
from bench.serve.plan import ServeTarget
from bench.serve.run import Send, ServeClient
from engine.clock import MonotonicClock
from engine.errors import BatonError

REQUEST_TIMEOUT_S = 120.0
FAILED_PAUSE_S = 1.0
TOKENIZER = "tokenizer.json"
WARM_UP_TOKENS = 16  # of each stream; its length does not change what gets warm


class StreamsApart(BatonError):
    """The streams of a run never decoded all at once."""


@dataclass(frozen=True, slots=True)
class _Server:
    """A deployment and its client."""

    served: ServedDeployment
    send: Send
    model: str

    def gateway_cpu_s(self) -> float:
        return sum(map(background.session_seconds, self.served.services("gateway")))

    def sessions(self) -> list[int]:
        return [self.served.pid, *self.served.sessions()]


def measure(plan: InterferencePlan, say: Say = say_nothing) -> list[InterferenceRun]:
    """Carries out the plan. Raises ServerFailed, RequestsFailed, StreamsApart and
    ServerUnreachable.
    """
    with ExitStack() as stack:
        checkpoint = stack.enter_context(linked_checkpoint(plan.shape, seed=plan.seed))
        vocab = plain_token_ids(checkpoint)
        served = {}
        for deployment, pools in POOLS.items():
            say(f"starting: {deployment}")
            options = {**pools, "--threads": 1}
            served[deployment] = stack.enter_context(serving(checkpoint, options))
        runs: list[InterferenceRun] = uvloop.run(_measure(plan, served, vocab, say))
    return runs


@contextmanager
def linked_checkpoint(shape: str, *, seed: int) -> Iterator[Path]:
    """A folder with the weights of that shape and an `ascii_tokenizer`."""
    with TemporaryDirectory(prefix="baton-") as folder:
        path = Path(folder)
        for file in cached_checkpoint(shape, seed).iterdir():
            if file.name != TOKENIZER:
                (path / file.name).symlink_to(file)
        ascii_tokenizer(shape_named(shape).vocab_size).save(str(path / TOKENIZER))
        yield path


async def _measure(
    plan: InterferencePlan,
    served: Mapping[PoolSetting, ServedDeployment],
    vocab: Sequence[int],
    say: Say,
) -> list[InterferenceRun]:
    async with http_session(REQUEST_TIMEOUT_S) as session:
        servers = {}
        for deployment, one in served.items():
            client = ServeClient(session, ServeTarget(one.url), MonotonicClock())
            servers[deployment] = _Server(one, client.send, await client.first_model())
            say(f"warming up: {deployment}")
            brief = replace(plan, streams=replace(plan.streams, output_len=WARM_UP_TOKENS))
            await _run(brief, deployment, servers, vocab, name="warm-up")
        runs = []
        for repeat in range(plan.num_repeats):
            for setting in order_of(plan, repeat):
                say(f"repetition {repeat + 1} of {plan.num_repeats}: {setting}")
                run = await _run(plan, setting, servers, vocab, name=str(repeat))
                begun_s, ended_s = run.window_s
                if begun_s >= ended_s:
                    raise StreamsApart(f"{setting}: the streams did not run at the same time")
                runs.append(run)
        return runs


async def _run(
    plan: InterferencePlan,
    setting: PoolSetting,
    servers: Mapping[PoolSetting, _Server],
    vocab: Sequence[int],
    *,
    name: str,
) -> InterferenceRun:
    """Runs one setting once; `name` keeps its prompts apart from those of other runs."""
    server, clock = servers[DEPLOYMENT[setting]], MonotonicClock()
    rng = Random(f"{plan.seed}/{setting}/{name}")
    streams, load = (
        bodies(ask, vocab, model=server.model, rng=rng) for ask in (plan.streams, plan.load)
    )
    num_loaders = 0 if setting is PoolSetting.IDLE else plan.load.at_once
    sessions = [os.getsid(0), *(s for one in servers.values() for s in one.sessions())]
    before, cpu_s = background.read(sessions), (server.gateway_cpu_s(), process_time())
    begin_s = clock.now_s()
    answers, others = await run_beside(
        server.send, [*islice(streams, plan.streams.at_once)], load, num_loaders=num_loaders
    )
    end_s = clock.now_s()
    prompts = tuple(result for result in others if isinstance(result, Answer))
    failures = tuple(result for result in others if isinstance(result, Failure))
    if num_loaders and not prompts:
        raise RequestsFailed("all prompts", failures)
    return InterferenceRun(
        setting=setting,
        streams=answers,
        prompts=prompts,
        wall_s=end_s - begin_s,
        gateway_cpu_s=server.gateway_cpu_s() - cpu_s[0],
        client_cpu_s=process_time() - cpu_s[1],
        others_share=background.share_of_others(before, background.read(sessions)),
        failures=failures,
    )


async def run_beside(
    send: Send, streams: Sequence[bytes], load: Iterator[bytes], *, num_loaders: int
) -> tuple[tuple[Answer, ...], list[Answer | Failure]]:
    """Runs all streams, and loaders that send one request after the other until all streams end.

    Raises RequestsFailed if a stream fails.
    """
    others: list[Answer | Failure] = []
    ended = asyncio.Event()

    async def loader() -> None:
        while not ended.is_set():
            others.append(result := await send(next(load)))
            if isinstance(result, Failure):  # or a refused loader would repeat without a pause
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), FAILED_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(send(body)) for body in streams]
        for _ in range(num_loaders):
            group.create_task(loader())
        results = await asyncio.gather(*running)
        ended.set()
    return whole(results), others

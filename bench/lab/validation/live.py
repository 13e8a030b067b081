"""Plays a trace on a real deployment, which has worker processes and a router in this process.

There is no HTTP and no text. Requests are passed to the router as a gateway does, and all events
and effects of the router are recorded. So the measured system has the same parts as the simulated
system, and clients use little of the workers' CPU time. The tokens of a block are computed from the
block's id in the trace, so prompts share the trace's prefixes.
"""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from time import process_time

from msgspec.structs import replace

from bench.lab.validation.recordings import RecordedRun, read_run
from bench.processes.driven import launched, listening
from bench.simulator.cluster import SimulatedPools
from bench.simulator.traces import Trace, TraceRequest
from engine.clock import MonotonicClock
from engine.config import RouterConfig
from engine.devices.settings import WorkerSettings
from engine.errors import BatonError
from engine.messages import Limits, RequestId, Role, Sampling
from engine.net.trust import Secret
from router.machine.requests import Finished, Outcome, Request
from router.port import ask
from router.recording.records import records_of
from router.service import Router

START_TIMEOUT_S = 120.0  # seconds in which a worker must load its model
READY_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 600.0  # seconds between the last arrival and the last answer
JOIN_POLL_S = 0.02
# range of ids in prompts for the bundled model; smaller ids are special tokens
MIN_TOKEN, MAX_TOKEN = 5, 4096


class DeploymentFailed(BatonError):
    """Workers did not join, or a request was not answered."""


@dataclass(frozen=True, slots=True)
class Live:
    """Running workers of a deployment."""

    addresses: Sequence[str]
    token: str


@contextmanager
def deployment(pools: SimulatedPools, config: WorkerSettings, model: Path) -> Iterator[Live]:
    """Starts workers with one thread each, and ends them at the end of the context. Raises
    DrivenFailed.
    """
    token = secrets.token_hex(16)
    numbers = {Role.PREFILL: pools.prefill, Role.DECODE: pools.decode, Role.MIXED: pools.mixed}
    roles = [role for role, number in numbers.items() for _ in range(number)]
    specs = [
        {  # a `deploy.base.spec.WorkerSpec` as JSON
            "worker_id": f"worker-{i}",
            "role": role,
            "model": str(model),
            "config": config,
            "token": token,
            "threads": 1,
        }
        for i, role in enumerate(roles)
    ]
    with ExitStack() as stack:
        services = [launched("worker", stack) for _ in specs]
        with ThreadPoolExecutor(len(specs)) as threads:
            starting = [
                threads.submit(listening, service, spec, timeout_s=START_TIMEOUT_S)
                for service, spec in zip(services, specs, strict=True)
            ]
        addresses = [answer.result()["address"] for answer in starting]
        yield Live(addresses, token)


def play(live: Live, trace: Trace, config: RouterConfig, record_dir: Path) -> RecordedRun:
    """Plays the trace on an idle deployment and returns the recording.

    Raises DeploymentFailed unless all requests are answered completely.
    """
    return asyncio.run(_play(live, trace, config, record_dir))


async def _play(live: Live, trace: Trace, config: RouterConfig, record_dir: Path) -> RecordedRun:
    clock = MonotonicClock()
    router = Router(
        list(live.addresses),
        config=config,
        secret=Secret(live.token),
        clock=clock,
        record_dir=record_dir,
    )
    requests = [
        _request(f"{index}", asked, trace.block_tokens)
        for index, asked in enumerate(trace.requests)
    ]
    await router.open()
    try:
        await _all_joined(router, len(live.addresses), clock)
        began_s = process_time()
        outcomes = await _ask_all(router, requests, trace, clock)
        cpu_s = process_time() - began_s
    finally:
        await router.close()
    failed = [outcome for outcome in outcomes if not isinstance(outcome, Finished)]
    if failed:
        raise DeploymentFailed(f"{len(failed)} requests were not answered: {failed[0]}")
    told = read_run(records_of(record_dir / f"{router.gateway_id}.msgpack"))
    told.gateway_cpu_s = cpu_s
    return told


async def _ask_all(
    router: Router, requests: Sequence[Request], trace: Trace, clock: MonotonicClock
) -> list[Outcome | None]:
    """Sends each request at its due time. When the context ends, no request is open."""
    start_s = clock.now_s()
    limit_s = trace.duration_s + ANSWER_TIMEOUT_S
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            asking = [
                group.create_task(_ask_at(router, request, start_s + asked.arrived_s))
                for request, asked in zip(requests, trace.requests, strict=True)
            ]
    except TimeoutError as error:
        raise DeploymentFailed(f"not all requests were answered in {limit_s:g} s") from error
    return [task.result() for task in asking]


async def _all_joined(router: Router, num_workers: int, clock: MonotonicClock) -> None:
    end_s = clock.now_s() + READY_TIMEOUT_S
    while len(router.workers()) < num_workers:
        if clock.now_s() > end_s:
            raise DeploymentFailed(f"only {len(router.workers())} of {num_workers} workers joined")
        await asyncio.sleep(JOIN_POLL_S)  # noqa: TID251 (a poll, with a deadline)


async def _ask_at(router: Router, request: Request, due_s: float) -> Outcome | None:
    """Sends a request at its due time and waits for its end."""
    clock = MonotonicClock()
    delay_s = max(due_s - clock.now_s(), 0.0)
    await asyncio.sleep(delay_s)  # noqa: TID251 (an arrival is an event of the clock)
    return (await ask(router, replace(request, received_s=clock.now_s()))).outcome


def _request(name: str, asked: TraceRequest, block_tokens: int) -> Request:
    token_ids = tuple(islice(_tokens(asked.block_ids, block_tokens), asked.input_len))
    return Request(
        request_id=RequestId(name),
        token_ids=token_ids,
        sampling=Sampling(temperature=0.0),
        limits=Limits(max_len=asked.input_len + asked.output_len, prompt_len=asked.input_len),
        received_s=0.0,
    )


def _tokens(block_ids: Sequence[int], block_tokens: int) -> Iterator[int]:
    for block_id in block_ids:
        rng = Random(block_id)
        for _ in range(block_tokens):
            yield rng.randrange(MIN_TOKEN, MAX_TOKEN)

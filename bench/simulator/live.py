"""A real deployment that plays a trace: worker processes, and a router in this process.

No HTTP and no text: requests go to the router as it gets them from the gateway, and all that the
router is told and does is recorded. So what is measured is what is simulated, and clients cost
little of what the workers compute with. Prompts are tokens: those of a block are a function of its
id in the trace, so prompts share what they share in the trace.
"""

import asyncio
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

import msgspec

from bench.simulator.cluster import Pools
from bench.simulator.recordings import Told, told_by
from bench.simulator.traces import Trace, TraceRequest
from engine.clock import MonotonicClock
from engine.config import RouterConfig, WorkerConfig
from engine.errors import BatonError
from engine.messages import Limits, RequestId, Role, Sampling
from router.recording import lines_of
from router.requests import Finished, Outcome, Request
from router.service import Router

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 600.0  # after the last request came: all are answered by then
JOIN_POLL_S = 0.02
MIN_TOKEN, MAX_TOKEN = 5, 4096  # of the bundled model's; those before are special


class DeploymentFailed(BatonError):
    """A worker that did not start, or a request that was not answered."""


@dataclass(frozen=True, slots=True)
class Live:
    """Running workers."""

    addresses: Sequence[str]
    token: str


@contextmanager
def deployment(pools: Pools, config: WorkerConfig, model: Path) -> Iterator[Live]:
    """Starts workers of one thread each; on leaving they are gone. Raises DeploymentFailed."""
    token = secrets.token_hex(16)
    numbers = {Role.PREFILL: pools.prefill, Role.DECODE: pools.decode, Role.MIXED: pools.mixed}
    specs = [
        {  # a `deploy.processes.WorkerSpec`
            "worker_id": f"{role}-{i}",
            "role": role,
            "model": str(model),
            "config": config,
            "token": token,
            "threads": 1,
        }
        for role, number in numbers.items()
        for i in range(number)
    ]
    with ExitStack() as stack:
        processes = [_process(stack) for _ in specs]
        with ThreadPoolExecutor(len(specs)) as threads:
            addresses = list(threads.map(_start, processes, specs))
        yield Live(addresses, token)


def play(live: Live, trace: Trace, config: RouterConfig, record_dir: Path) -> Told:
    """Has the trace come upon a deployment that is idle; what its recording tells.

    Raises DeploymentFailed unless all requests are answered in full.
    """
    return asyncio.run(_play(live, trace, config, record_dir))


async def _play(live: Live, trace: Trace, config: RouterConfig, record_dir: Path) -> Told:
    clock = MonotonicClock()
    router = Router(
        list(live.addresses), config=config, token=live.token, clock=clock, record_dir=record_dir
    )
    requests = [
        _request(f"{index}", asked, trace.block_tokens)
        for index, asked in enumerate(trace.requests)
    ]
    await router.open()
    try:
        await _all_joined(router, len(live.addresses), clock)
        outcomes = await _ask_all(router, requests, trace, clock)
    finally:
        await router.close()
    failed = [outcome for outcome in outcomes if not isinstance(outcome, Finished)]
    if failed:
        raise DeploymentFailed(f"{len(failed)} requests were not answered: {failed[0]}")
    return told_by(lines_of(record_dir / f"{router.gateway_id}.jsonl"))


async def _ask_all(
    router: Router, requests: Sequence[Request], trace: Trace, clock: MonotonicClock
) -> list[Outcome | None]:
    """Sends each request when it is due; on leaving, none is under way."""
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
        await _pause(JOIN_POLL_S)


async def _ask_at(router: Router, request: Request, due_s: float) -> Outcome | None:
    """Sends a request when it is due and follows it to its end."""
    clock = MonotonicClock()
    await _pause(due_s - clock.now_s())
    outcome = None
    async for update in router.submit(replace(request, received_s=clock.now_s())):
        outcome = update.outcome
    return outcome


async def _pause(seconds: float) -> None:
    """Lets others run for so long. Not negative times, which cost a turn of the loop too."""
    done = asyncio.get_running_loop().create_future()
    handle = asyncio.get_running_loop().call_later(max(seconds, 0.0), done.set_result, None)
    try:
        await done
    finally:
        handle.cancel()


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


# ---------------------------------------------------------------- processes


def _process(stack: ExitStack) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.process_main", "worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    stack.callback(_end, process)
    return process


def _start(process: "subprocess.Popen[bytes]", spec: Mapping[str, object]) -> str:
    """Tells a worker what it is; its address, when it listens."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(msgspec.json.encode(spec) + b"\n")
    process.stdin.flush()
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    line = process.stdout.readline()
    watchdog.cancel()
    answer = msgspec.json.decode(line) if line else {"error": "it ended while starting"}
    if "error" in answer:
        raise DeploymentFailed(f"{spec['worker_id']}: {answer['error']}")
    return str(answer["address"])


def _end(process: "subprocess.Popen[bytes]") -> None:
    """A worker ends when its input does; one that does not is made to."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()

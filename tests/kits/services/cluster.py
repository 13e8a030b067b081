"""Real workers as processes, and a router in the test's process that sees tokens, not text."""

import asyncio
import atexit
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from deploy.base.defaults import BUNDLED_MODEL
from deploy.base.spec import WorkerReady, WorkerSpec
from deploy.local.launcher import ProcessLauncher
from deploy.local.nursery import Nursery
from deploy.pools.formats import config_of
from engine.clock import MonotonicClock
from engine.config import DeviceKind, PoolsConfig, RouterConfig, Transport, WorkerConfig
from engine.devices.settings import resolve
from engine.messages import Limits, LoadReport, RequestId, Role, Sampling, WorkerId
from engine.net.trust import Secret
from kvtransfer.transports.nixl_agent import PACKAGES
from router.cluster.estimates import Estimates
from router.cluster.view import WorkerView
from router.machine.requests import Finished, Outcome, Request, Timeline
from router.service import Router
from tests.kits.router.scripted_workers import updates_of


class FirstByName(random.Random):
    """Chooses the first worker by name among equals, so that a test knows the chosen worker."""

    def choice(self, seq):
        return seq[0]


NURSERY = Nursery()  # shared by all tests of a session, so that torch is imported once
atexit.register(NURSERY.close)
TOKEN = "internal-token-of-the-tests"
SECRET = Secret(TOKEN)
DEADLINE_S = 120.0
TRANSPORTS = (
    Transport.SHM,
    Transport.ZMQ,
    pytest.param(
        Transport.NIXL,
        marks=pytest.mark.skipif(
            not any(map(find_spec, PACKAGES)),
            reason=f"neither {' nor '.join(PACKAGES)} is installed",
        ),
    ),
)


@dataclass(slots=True)
class Answer:
    """Everything that the router reported about one request."""

    token_ids: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    timeline: Timeline | None = None


@dataclass(slots=True)
class Workers:
    """Running worker processes."""

    launcher: ProcessLauncher
    ready: dict[WorkerId, WorkerReady]

    @property
    def addresses(self) -> list[str]:
        return [ready.address for ready in self.ready.values()]

    @property
    def live(self) -> set[WorkerId]:
        """Returns the workers whose process is alive."""
        processes = self.launcher.processes
        return {WorkerId(p.name) for p in processes if p.is_running()}

    def kill(self, worker_id: str) -> None:
        """Kills one worker that this test started, with SIGKILL."""
        os.kill(self.ready[WorkerId(worker_id)].pid, signal.SIGKILL)


@contextmanager
def workers(
    roles: Sequence[Role],
    *,
    model: Path = BUNDLED_MODEL,
    config: WorkerConfig | Mapping[Role, WorkerConfig] | None = None,
    locally: bool = False,
) -> Iterator[Workers]:
    """Starts one process per role; at the end, all processes are gone.

    `config` is the configuration of all workers, or one per role. Workers are not fluid unless
    `locally`: tests need hand-overs whatever times the router predicts.
    """
    launcher = ProcessLauncher(NURSERY)
    config = config or WorkerConfig(kv_mib=64)
    if isinstance(config, WorkerConfig):
        config = {role: config_of(role, config, DeviceKind.CPU) for role in roles}
    settings = {role: resolve(own, DeviceKind.CPU) for role, own in config.items()}
    configs = {
        role: msgspec.structs.replace(own, stretch=PoolsConfig().stretch if locally else None)
        for role, own in settings.items()
    }
    specs = [
        WorkerSpec(WorkerId(f"{role}-{i}"), role, str(model), configs[role], TOKEN, threads=1)
        for i, role in enumerate(roles)
    ]
    try:
        with ThreadPoolExecutor(len(specs)) as threads:
            ready = list(threads.map(launcher.start, specs))
        pids = [r.pid for r in ready]
        yield Workers(launcher, {s.worker_id: r for s, r in zip(specs, ready, strict=True)})
    finally:
        launcher.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@asynccontextmanager
async def router(
    running: Workers,
    config: RouterConfig | None = None,
    *,
    estimates: Estimates | None = None,
    natively: bool = False,
) -> AsyncIterator[Router]:
    """Opens a router that all workers have joined. At the end the workers hold no blocks.

    Equal workers are chosen by name, unless `natively`: C++ uses its own random generator.
    """
    async with _linked(running.addresses, config or RouterConfig(), estimates) as r:
        if not natively:
            r.machine.state.rng = FirstByName()
            r.machine.state.workers.fleet = None
        await until(lambda: len(r.workers()) == len(running.addresses), "all workers joined")
        yield r
        assert r.machine.num_flights == 0
        r.machine.validate()
        # before the router leaves, since workers then free everything for it
        await conserved(running)


async def conserved(running: Workers) -> None:
    """Waits until live workers report that every block is free or cached, and none is missing.

    Workers report to a new gateway, so earlier reports do not count.
    """
    addresses = [running.ready[worker_id].address for worker_id in running.live]
    async with _linked(addresses, RouterConfig()) as r:
        view = r.machine.view.workers

        def odd() -> dict[WorkerId, LoadReport | None]:
            return {
                worker_id: view[worker_id].load if worker_id in view else None
                for worker_id in running.live
                if worker_id not in view or not balances(view[worker_id])
            }

        await until(lambda: not odd(), lambda: f"blocks are free or cached, not so at {odd()}")


@asynccontextmanager
async def _linked(
    addresses: Sequence[str], config: RouterConfig, estimates: Estimates | None = None
) -> AsyncIterator[Router]:
    r = Router(
        list(addresses), config=config, secret=SECRET, clock=MonotonicClock(), estimates=estimates
    )
    await r.open()
    try:
        yield r
    finally:
        await r.close()


async def take_turns() -> None:
    """Yields to the event loop a few times. Requests of one pass are placed shortest first."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until(
    holds: Callable[[], bool], what: str | Callable[[], str], deadline_s: float = DEADLINE_S
) -> None:
    """Polls until `holds` is true; `what` describes the failure."""
    clock = MonotonicClock()
    end_s = clock.now_s() + deadline_s
    while not holds():
        late = clock.now_s() >= end_s
        assert not late, f"not in {deadline_s} s: {what if isinstance(what, str) else what()}"
        await asyncio.sleep(0.02)


def request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[int] = (),
) -> Request:
    """Returns a request with fixed token limits."""
    limits = Limits(max_len=len(prompt) + max_tokens, stop_token_ids=tuple(stop))
    now_s = MonotonicClock().now_s()
    return Request(RequestId(name), tuple(prompt), sampling, limits, now_s)


async def ask(r: Router, req: Request, on_tokens: Callable[[int], None] = lambda _: None) -> Answer:
    """Follows a request to its outcome. Calls `on_tokens` with the number of received tokens."""
    answer = Answer()
    async with asyncio.timeout(DEADLINE_S):
        async for update in updates_of(r, req):
            answer.token_ids += update.token_ids
            answer.outcome = update.outcome
            answer.timeline = update.timeline or answer.timeline
            on_tokens(len(answer.token_ids))
    return answer


async def ask_all(r: Router, requests: Sequence[Request], at_once: int) -> list[list[int]]:
    """Returns the tokens of all requests, `at_once` of them in parallel.

    Every request must finish.
    """
    gate = asyncio.Semaphore(at_once)

    async def one(req: Request) -> list[int]:
        async with gate:
            answer = await ask(r, req)
        assert isinstance(answer.outcome, Finished), answer.outcome
        return answer.token_ids

    return list(await asyncio.gather(*(one(req) for req in requests)))


def prompts(
    num: int, *, vocab_size: int, seed: int, shortest: int = 1, longest: int = 200
) -> list[list[int]]:
    """Returns random prompts. Lengths include 1, exact multiples of a block, and one token more."""
    rng = random.Random(seed)
    lengths = [1, 15, 16, 17, 32, 33] + [rng.randint(shortest, longest) for _ in range(num)]
    return [[rng.randrange(5, vocab_size) for _ in range(n)] for n in lengths[:num]]


def is_clean(load: LoadReport | None) -> bool:
    """Returns True if a worker holds no blocks, sequences or leases; cached blocks may remain."""
    return load is not None and not (
        load.owned_blocks
        or load.leased_blocks
        or load.in_flight_blocks
        or load.waiting_seqs
        or load.running_seqs
        or load.open_leases
    )


def balances(worker: WorkerView) -> bool:
    """Returns True if a worker is clean and no block of its pool is missing."""
    load = worker.load
    return is_clean(load) and load.free_blocks + load.cached_blocks == worker.info.num_blocks


def counted(r: Router, name: str) -> dict[str, float]:
    """Returns a counter by worker, as last reported; 0 for workers that do not report it."""
    loads = {worker_id: status.load for worker_id, status in r.workers().items()}
    return {i: load.counters.get(name, 0) if load is not None else 0 for i, load in loads.items()}

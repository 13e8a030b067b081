"""Real workers as processes, and a router inside the test that sees tokens instead of text."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deploy.cluster import BUNDLED_MODEL
from deploy.launcher import ProcessLauncher
from deploy.processes import WorkerReady, WorkerSpec
from engine.clock import MonotonicClock
from engine.config import RouterConfig, WorkerConfig
from engine.messages import Limits, LoadReport, RequestId, Role, Sampling, WorkerId
from router.requests import Finished, Outcome, Request, Timeline
from router.service import Router

TOKEN = "internal-token-of-the-tests"
DEADLINE_S = 60.0


@dataclass(slots=True)
class Answer:
    """Everything that the router said about one request."""

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

    def kill(self, worker_id: str) -> None:
        """kill -9 of one worker that this test started."""
        os.kill(self.ready[WorkerId(worker_id)].pid, signal.SIGKILL)


@contextmanager
def workers(
    roles: Sequence[Role], *, model: Path = BUNDLED_MODEL, config: WorkerConfig | None = None
) -> Iterator[Workers]:
    """Starts one process per role; on leaving, every one of them is gone."""
    launcher = ProcessLauncher()
    config = config or WorkerConfig(kv_mib=64)
    specs = [
        WorkerSpec(WorkerId(f"{role}-{i}"), role, str(model), config, TOKEN, threads=1)
        for i, role in enumerate(roles)
    ]
    try:
        with ThreadPoolExecutor(len(specs)) as threads:
            ready = list(threads.map(launcher.start_worker, specs))
        pids = [r.pid for r in ready]
        yield Workers(launcher, {s.worker_id: r for s, r in zip(specs, ready, strict=True)})
    finally:
        launcher.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@asynccontextmanager
async def router(running: Workers, config: RouterConfig | None = None) -> AsyncIterator[Router]:
    """A router that all workers have joined."""
    r = Router(
        running.addresses, config=config or RouterConfig(), token=TOKEN, clock=MonotonicClock()
    )
    await r.open()
    try:
        await until(lambda: len(r.workers()) == len(running.addresses), "all workers joined")
        yield r
    finally:
        await r.close()


async def until(holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Polls until `holds`."""
    clock = MonotonicClock()
    end_s = clock.now_s() + deadline_s
    while not holds():
        assert clock.now_s() < end_s, f"did not happen in {deadline_s} s: {what}"
        await asyncio.sleep(0.02)


def request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: Sequence[int] = (),
) -> Request:
    """A request with absolute limits."""
    limits = Limits(max_len=len(prompt) + max_tokens, stop_token_ids=tuple(stop))
    now_s = MonotonicClock().now_s()
    return Request(RequestId(name), tuple(prompt), sampling, limits, now_s)


async def ask(r: Router, req: Request, on_tokens: Callable[[int], None] = lambda _: None) -> Answer:
    """Follows a request to its end; `on_tokens` sees how many tokens have come."""
    answer = Answer()
    async with asyncio.timeout(DEADLINE_S):
        async for update in r.submit(req):
            answer.token_ids += update.token_ids
            answer.outcome = update.outcome
            answer.timeline = update.timeline or answer.timeline
            on_tokens(len(answer.token_ids))
    return answer


async def ask_all(r: Router, requests: Sequence[Request], at_once: int) -> list[list[int]]:
    """Tokens of all requests, `at_once` of them at a time; each must finish."""
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
    """Random prompts; lengths include one token, exact multiples of a block, and one over."""
    rng = random.Random(seed)
    lengths = [1, 15, 16, 17, 32, 33] + [rng.randint(shortest, longest) for _ in range(num)]
    return [[rng.randrange(5, vocab_size) for _ in range(n)] for n in lengths[:num]]


def is_clean(load: LoadReport | None) -> bool:
    """Whether a worker holds nothing for anybody; cached blocks have no holder."""
    return load is not None and not (
        load.owned_blocks
        or load.leased_blocks
        or load.in_flight_blocks
        or load.waiting_seqs
        or load.running_seqs
        or load.open_leases
    )

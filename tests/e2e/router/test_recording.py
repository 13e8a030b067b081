"""The recording of a live router, replayed in another process, gives the same effects."""

import asyncio
import os
import random
import stat
import subprocess
import sys
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import msgpack
import pytest
from msgspec.structs import replace

from bench.lab.validation.recordings import read_run
from bench.simulator.traces import read_trace
from engine.clock import MonotonicClock
from engine.config import RouterConfig, WorkerConfig
from engine.messages import Role, Sampling, WorkerId
from router.machine.requests import Finished
from router.recording.records import records_of
from router.service import Router
from tests.kits.router.scripted_workers import updates_of
from tests.kits.services.cluster import (
    DEADLINE_S,
    SECRET,
    Workers,
    ask,
    prompts,
    request,
    until,
    workers,
)

pytestmark = pytest.mark.torch

REPLAY = """
import sys
from pathlib import Path
from router.recording.records import records_of, replay
from tests.kits.router.scripted_workers import updates_of
for mismatch in replay(records_of(Path(sys.argv[1]))):
    sys.exit(str(mismatch))
"""
PROMPTS = prompts(20, vocab_size=4096, seed=5, shortest=40, longest=400)
NUM_FINISHED = 18
NUM_LONGEST = 400  # tokens: a worker is killed before its sequences finish, even on a slow machine
SMALL = WorkerConfig(kv_mib=24)  # so little KV that cached blocks are evicted, which sends events


async def finished(r: Router, name: str, prompt: list[int], max_tokens: int) -> None:
    req = request(name, prompt, max_tokens=max_tokens, sampling=Sampling(seed=len(name)))
    assert isinstance((await ask(r, req)).outcome, Finished)


async def group(r: Router) -> None:
    """Submits three choices of one prompt."""
    leader, *others = [
        request(f"g{i}", PROMPTS[9], max_tokens=9, sampling=Sampling(seed=i)) for i in range(3)
    ]
    followers = [replace(other, leader=leader.request_id) for other in others]
    answers = await asyncio.gather(*(ask(r, one) for one in (leader, *followers)))
    assert all(isinstance(answer.outcome, Finished) for answer in answers)


async def leave(r: Router) -> None:
    """Starts a request and cancels it before its end."""
    req = request("left", PROMPTS[10], max_tokens=400, sampling=Sampling())
    async with asyncio.timeout(DEADLINE_S), aclosing(updates_of(r, req)) as updates:
        num = 0
        async for update in updates:
            num += len(update.token_ids)
            if num >= 3:
                return


async def lose_a_decode_worker(r: Router, running: Workers) -> None:
    """Kills a worker while it decodes; its sequences continue on another worker."""
    begun = asyncio.Event()

    async def one(i: int) -> None:
        req = request(f"k{i}", PROMPTS[i], max_tokens=NUM_LONGEST, sampling=Sampling(seed=i))
        answer = await ask(r, req, lambda num: begun.set() if num > 3 else None)
        assert isinstance(answer.outcome, Finished)

    asked = [asyncio.create_task(one(i)) for i in range(11, 17)]
    async with asyncio.timeout(DEADLINE_S):
        await begun.wait()
    victim = WorkerId("decode-1")
    await until(lambda: bool(r.machine.view.workers[victim].decodes), "it has something to lose")
    running.kill(victim)
    await asyncio.gather(*asked)
    await until(lambda: len(r.workers()) == 2, "the worker is lost")


async def live(running: Workers, folder: Path) -> tuple[Path, Counter]:
    """Runs requests and faults of each kind. Returns the recording and the machine's counters."""
    config = RouterConfig(prefill_backlog_tokens=300)  # the seed is the gateway's own name
    clock = MonotonicClock()
    r = Router(running.addresses, config=config, secret=SECRET, clock=clock, record_dir=folder)
    await r.open()
    try:
        await until(lambda: len(r.workers()) == 3, "all workers joined")
        await finished(r, "first", PROMPTS[8], 5)
        many = (finished(r, f"r{i}", PROMPTS[i], 4 + i) for i in range(8))
        await asyncio.gather(*many, group(r), leave(r))
        await lose_a_decode_worker(r, running)
        counters = Counter(r.machine.counters)
    finally:
        await r.close()
    return folder / f"{r.gateway_id}.msgpack", counters


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    roles = [Role.PREFILL, Role.DECODE, Role.DECODE]
    with workers(roles, config=SMALL) as running:
        return asyncio.run(live(running, folder))


def test_fresh_machine_in_another_process_replays_the_effects(recording):
    path, _ = recording
    # Another hash seed would expose any dependence on the order of sets.
    environment = {**os.environ, "PYTHONHASHSEED": str(random.randrange(1, 2**31))}
    command = [sys.executable, "-c", REPLAY, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_recording_has_all_kinds_of_events(recording):
    path, counters = recording
    head, *records = map(msgpack.unpackb, records_of(path))
    assert head["config"]["seed"] is not None
    kinds = Counter(record["kind"] for record in records)
    assert kinds["WorkerJoined"] == 3
    assert kinds["Arrived"] == NUM_FINISHED + 1
    assert kinds["ClientGone"] == 1  # the client of this request cancels it
    assert kinds["WorkerLost"] >= 1
    assert kinds["BlocksChanged"] > 10
    # two messages for each prefill, two for each hand-over
    assert kinds["FromWorker"] > 4 * NUM_FINISHED
    assert kinds["Stepped"] > NUM_LONGEST
    assert counters["retried", "worker lost"] >= 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_recording_has_the_steps_of_decode_workers(recording):
    path, _ = recording
    told = read_run(records_of(path))
    steps = told.steps["decode-2"]  # the decode worker that was not killed
    assert any(len(step.rows) > 1 for step in steps)
    assert sum(len(step.finished) for own in told.steps.values() for step in own) >= NUM_FINISHED


def test_a_recording_is_a_trace_for_the_simulator(recording):
    path, _ = recording
    trace = read_trace(path)
    assert len(trace.requests) == NUM_FINISHED + 1
    assert trace.block_tokens == SMALL.block_size
    first = trace.requests[0]
    assert (first.input_len, first.output_len) == (len(PROMPTS[8]), 5)
    groups = [r for r in trace.requests if r.input_len == len(PROMPTS[9])]
    assert len({r.block_ids for r in groups}) == 1

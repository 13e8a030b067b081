"""Live workers change their roles while answers are streamed: nobody can tell but by the clock.

Prints how long a flip took, and the longest gap of any stream from then on.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import pytest

from engine.clock import MonotonicClock
from engine.config import RouterConfig, WorkerConfig
from engine.messages import (
    PROTOCOL_VERSION,
    GatewayId,
    Hello,
    LoadReport,
    Role,
    RoleChanged,
    Sampling,
    SetRole,
    Welcome,
    WorkerId,
    decode_to_gateway,
    encode_frame,
)
from engine.rpc import SessionClient
from router.moving import DRAINED
from router.requests import Finished, Request
from router.service import Router
from tests.e2e.cluster import TOKEN, Workers, prompts, request, router, until, workers

pytestmark = pytest.mark.torch

NUM_STREAMS = 16
NUM_TOKENS = 600  # so many that none has ended when the last has begun, whatever else runs
FLIP_S = 30.0  # it comes to an end; how long it takes is printed, and `bench moves` measures gaps
DECODERS = WorkerId("decode-2"), WorkerId("decode-3")
SAMPLINGS = [Sampling(temperature=0.9 if i % 2 else 0.0, seed=i) for i in range(NUM_STREAMS)]
PROMPTS = prompts(NUM_STREAMS, vocab_size=4096, seed=5, longest=120)


class Control:
    """A session of who sets a worker's role."""

    def __init__(self, address: str) -> None:
        self._client = SessionClient(address)
        self.role: Role | None = None
        self.load: LoadReport | None = None  # since the role was set last

    async def open(self) -> None:
        await self._client.open()
        hello = Hello(PROTOCOL_VERSION, GatewayId(secrets.token_hex(4)), TOKEN)
        await self._client.send(encode_frame([hello]))
        self._reader = asyncio.create_task(self._read())
        await until(lambda: self.role is not None, "the worker answers")

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._client.close()

    async def set_role(self, role: Role) -> float:
        """Until it says that it decodes nothing, if it is there for that no more; in seconds."""
        clock = MonotonicClock()
        began_s, self.load = clock.now_s(), None
        self._client.post(encode_frame([SetRole(role)]))
        await until(lambda: self.role is role, f"it is a {role} worker")
        if not role.decodes:
            await until(lambda: self.load and self.load.decode_seqs == 0, "it decodes nothing")
        return clock.now_s() - began_s

    async def _read(self) -> None:
        while (frame := await self._client.receive()) is not None:
            for message in decode_to_gateway(frame):
                if isinstance(message, Welcome | RoleChanged):
                    self.role, self.load = message.role, None
                elif isinstance(message, LoadReport):
                    self.load = message


@dataclass(slots=True)
class Stream:
    """One answer, and when its tokens came."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def gaps_s(self, since_s: float = 0.0) -> list[float]:
        return [b - a for a, b in pairwise(self.times_s) if b >= since_s]


@pytest.fixture(scope="module")
def running() -> Iterator[Workers]:
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    with workers(roles, config=WorkerConfig(kv_mib=64)) as started:
        yield started


@asynccontextmanager
async def controls(running: Workers) -> AsyncIterator[dict[WorkerId, Control]]:
    """Of all workers, each of which is afterwards what it was."""
    found = {worker_id: Control(ready.address) for worker_id, ready in running.ready.items()}
    for control in found.values():
        await control.open()
    roles = {worker_id: control.role for worker_id, control in found.items()}
    try:
        yield found
    finally:
        for worker_id, control in found.items():
            await control.set_role(roles[worker_id])
            await control.close()


async def _stream(r: Router, asked: Request, stream: Stream) -> None:
    clock = MonotonicClock()
    async for update in r.submit(asked):
        stream.token_ids += update.token_ids
        stream.times_s += [clock.now_s()] * bool(update.token_ids)
        if update.outcome is not None:
            assert isinstance(update.outcome, Finished), update.outcome


async def all_answers(
    r: Router, name: str, disturb: Callable[[], Awaitable[None]] | None = None
) -> list[Stream]:
    """Streams every answer at once; what disturbs them comes when all have begun."""
    asked = [
        request(f"{name}-{i}", prompt, max_tokens=NUM_TOKENS, sampling=sampling)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    streams = [Stream() for _ in asked]
    tasks = [asyncio.create_task(_stream(r, a, s)) for a, s in zip(asked, streams, strict=True)]
    await until(lambda: all(len(s.token_ids) >= 10 for s in streams), "all have begun")
    if disturb is not None:
        await disturb()
    await asyncio.gather(*tasks)
    return streams


@dataclass(slots=True)
class Flip:
    """When it was asked for, and how long it took: to move all, and until the worker said so."""

    began_s: float = 0.0
    moved_s: float = 0.0
    told_s: float = 0.0


def told(what: str, flip: Flip, streams: list[Stream], quiet: list[Stream]) -> str:
    usual_s = median(gap_s for stream in quiet for gap_s in stream.gaps_s())
    longest_s = max(gap_s for stream in streams for gap_s in stream.gaps_s(flip.began_s))
    begun_s = [stream.times_s[10] for stream in quiet]
    quiet_s = max(gap_s for stream in quiet for gap_s in stream.gaps_s(max(begun_s)))
    return (
        f"{what}: all moved after {1e3 * flip.moved_s:.0f} ms, told after {flip.told_s:.2f} s; "
        f"longest gap {1e3 * longest_s:.0f} ms, undisturbed {1e3 * quiet_s:.0f} ms, "
        f"median {1e3 * usual_s:.1f} ms"
    )


def decoding_at(r: Router, worker_id: WorkerId) -> int:
    return len(r.machine.view.workers[worker_id].decodes)


def test_running_answers_move_when_their_worker_changes_its_role(running, capsys):
    async def run() -> list[str]:
        lines = []
        config = RouterConfig(prefill_backlog_s=9.0)
        async with router(running, config, natively=True) as r, controls(running) as control:
            quiet = await all_answers(r, "quiet")

            async def empty(worker_id: WorkerId, role: Role) -> None:
                clock = MonotonicClock()
                flip.began_s = clock.now_s()
                told = asyncio.create_task(control[worker_id].set_role(role))
                await until(lambda: not decoding_at(r, worker_id), "all have moved")
                flip.moved_s = clock.now_s() - flip.began_s
                flip.told_s = await told

            flipped: list[WorkerId] = []

            async def some() -> None:  # where most are: where costs are unequal it may be all
                flipped.append(max(DECODERS, key=lambda worker_id: decoding_at(r, worker_id)))
                await empty(flipped[0], Role.PREFILL)

            async def all_of_them() -> None:
                [other] = set(DECODERS) - set(flipped)
                assert decoding_at(r, other) == NUM_STREAMS
                await control[flipped[0]].set_role(Role.DECODE)
                await empty(other, Role.DRAINED)

            for what, disturb in (("flip", some), ("drain", all_of_them)):
                flip = Flip()
                streams = await all_answers(r, what, disturb)
                assert [s.token_ids for s in streams] == [s.token_ids for s in quiet]
                assert flip.told_s < FLIP_S
                lines.append(told(what, flip, streams, quiet))
            counters = r.machine.counters
            assert counters["moved", DRAINED] == NUM_STREAMS
            assert counters["moved", "role changed"] > 0
            retried = {reason: n for (name, reason), n in counters.items() if name == "retried"}
            assert not retried
        return lines

    lines = asyncio.run(run())
    with capsys.disabled():
        sys.stdout.write("\n".join(["", *lines, ""]))

"""Live workers change roles while they stream answers: clients see the same tokens.

`baton bench moves` measures how long a move takes, and the gaps that clients see.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest

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
from engine.net.sessions import SessionClient
from router.machine.moves.reasons import DRAINED
from router.machine.requests import Finished, Request
from router.service import Router
from tests.kits.services.cluster import (
    SECRET,
    Workers,
    prompts,
    request,
    router,
    until,
    workers,
)

pytestmark = pytest.mark.torch

NUM_STREAMS = 16
BEGUN_TOKENS = 10
ON_TOKENS = 30  # tokens that each stream still gets afterwards
MAX_TOKENS = 1500  # enough that no stream ends during the test
DECODERS = WorkerId("decode-2"), WorkerId("decode-3")
SAMPLINGS = [Sampling(temperature=0.9 if i % 2 else 0.0, seed=i) for i in range(NUM_STREAMS)]
PROMPTS = prompts(NUM_STREAMS, vocab_size=4096, seed=5, longest=120)


class Control:
    """A session that sets a worker's role."""

    def __init__(self, address: str) -> None:
        self._client = SessionClient(address, SECRET)
        self.role: Role | None = None
        self.load: LoadReport | None = None  # the latest one since the role was set

    async def open(self) -> None:
        await self._client.open()
        hello = Hello(PROTOCOL_VERSION, GatewayId(secrets.token_hex(4)))
        await self._client.send(encode_frame([hello]))
        self._reader = asyncio.create_task(self._read())
        await until(lambda: self.role is not None, "the worker answers")

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._client.close()

    async def set_role(self, role: Role) -> None:
        """Sets the role and waits until the worker has it, and decodes only if it may."""
        self.load = None
        self._client.post(encode_frame([SetRole(role)]))
        await until(lambda: self.role is role, f"it is a {role} worker")
        if not role.decodes:
            await until(lambda: self.load and self.load.decode_seqs == 0, "it decodes nothing")

    async def _read(self) -> None:
        while (frame := await self._client.receive()) is not None:
            for message in decode_to_gateway(frame):
                if isinstance(message, Welcome | RoleChanged):
                    self.role, self.load = message.role, None
                elif isinstance(message, LoadReport):
                    self.load = message


Stream = list[int]  # the tokens of one answer so far


@pytest.fixture(scope="module")
def running() -> Iterator[Workers]:
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    config = WorkerConfig(kv_mib=192)  # one worker has room for all streams
    with workers(roles, config=config) as started:
        yield started


@asynccontextmanager
async def controls(running: Workers) -> AsyncIterator[dict[WorkerId, Control]]:
    """Yields sessions with all workers, and restores their roles afterwards."""
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
    async for update in r.submit(asked):
        stream += update.token_ids
        if update.outcome is not None:
            assert isinstance(update.outcome, Finished), update.outcome


def _begin(
    r: Router, name: str, lengths: Sequence[int]
) -> tuple[list[Stream], list[asyncio.Task[None]]]:
    streams: list[Stream] = [[] for _ in lengths]
    asked = [
        request(f"{name}-{i}", prompt, max_tokens=max_tokens, sampling=sampling)
        for i, (prompt, sampling, max_tokens) in enumerate(
            zip(PROMPTS, SAMPLINGS, lengths, strict=True)
        )
    ]
    return streams, [
        asyncio.create_task(_stream(r, *each)) for each in zip(asked, streams, strict=True)
    ]


async def all_answers(r: Router, name: str, lengths: Sequence[int]) -> list[Stream]:
    """Streams all answers at the same time, to their ends."""
    streams, tasks = _begin(r, name, lengths)
    await asyncio.gather(*tasks)
    return streams


async def disturbed_answers(
    r: Router, name: str, disturb: Callable[[], Awaitable[None]]
) -> list[Stream]:
    """Streams all answers at the same time, and disturbs them once all have begun.

    Clients leave when each stream has gone on afterwards. So no stream ends early, on any machine.
    """
    streams, tasks = _begin(r, name, [MAX_TOKENS] * NUM_STREAMS)
    await _grown(streams, [BEGUN_TOKENS] * NUM_STREAMS, "all have begun")
    await disturb()
    await _grown(streams, [len(stream) + ON_TOKENS for stream in streams], "all go on")
    for task in tasks:
        assert task.cancel(), "an answer has ended, or failed, before its client left"
    await asyncio.wait(tasks)
    return streams


async def _grown(streams: list[Stream], lengths: list[int], what: str) -> None:
    def grown() -> bool:
        return all(len(each) >= n for each, n in zip(streams, lengths, strict=True))

    await until(grown, what)


def decoding_at(r: Router, worker_id: WorkerId) -> int:
    return len(r.machine.view.workers[worker_id].decodes)


def test_running_answers_move_when_their_worker_is_flipped(running):
    async def run() -> None:
        config = RouterConfig(prefill_backlog_s=9.0)
        async with router(running, config, natively=True) as r, controls(running) as control:
            num_decoding: list[int] = []  # at the worker that is flipped, then drained
            reported: list[asyncio.Task[None]] = []  # of each: reports come once a second

            async def empty(worker_id: WorkerId, role: Role) -> None:
                num_decoding.append(decoding_at(r, worker_id))
                reported.append(asyncio.create_task(control[worker_id].set_role(role)))
                await until(lambda: not decoding_at(r, worker_id), "all have moved")

            flipped: list[WorkerId] = []

            async def some() -> None:
                """Flips the worker with most streams; with unequal costs it may have all."""
                flipped.append(max(DECODERS, key=lambda worker_id: decoding_at(r, worker_id)))
                await empty(flipped[0], Role.PREFILL)

            async def all_of_them() -> None:
                [other] = set(DECODERS) - set(flipped)
                assert decoding_at(r, other) == NUM_STREAMS
                await control[flipped[0]].set_role(Role.DECODE)
                await empty(other, Role.DRAINED)

            disturbed: dict[str, list[Stream]] = {}
            for what, disturb in (("flip", some), ("drain", all_of_them)):
                disturbed[what] = await disturbed_answers(r, what, disturb)
                await reported[-1]
            of_both = zip(*disturbed.values(), strict=True)
            quiet = await all_answers(r, "quiet", [max(map(len, both)) for both in of_both])
            for what, streams in disturbed.items():
                for stream, whole in zip(streams, quiet, strict=True):
                    assert stream == whole[: len(stream)], what
            counters = r.machine.counters
            assert counters["moved", "role changed"] == num_decoding[0] > 0
            assert counters["moved", DRAINED] == num_decoding[1] == NUM_STREAMS
            retried = {reason: n for (name, reason), n in counters.items() if name == "retried"}
            assert not retried

    asyncio.run(run())

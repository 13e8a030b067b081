"""Scripted workers behind a real session server, and a router that serves with them.

A scripted worker computes each token from all earlier tokens. So an answer that moves to another
worker is right only if no token was lost, repeated or changed.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.clock import MonotonicClock
from engine.config import RouterConfig
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import (
    PROTOCOL_VERSION,
    Decode,
    DecodeStarted,
    FirstToken,
    Generate,
    Hello,
    KvReady,
    LeaseRef,
    Limits,
    Prefill,
    PrefillDone,
    PrefillStarted,
    RequestId,
    Role,
    Sampling,
    ToGateway,
    Tokens,
    ToWorker,
    TransferAddress,
    Welcome,
    decode_to_worker,
    encode_frame,
)
from engine.net.sessions import Line, SessionServer
from engine.net.trust import Secret
from router.machine.requests import Request, Update
from router.port import RequestPort
from router.service import Router

SECRET = Secret("internal token")
LAYOUT = KVLayout(block_size=4, kv_format=KVFormat.FP32, sections=(KVSection(1, 1, 4),))
DEADLINE_S = 120.0
LEASE = LeaseRef("lease", TransferAddress("p0", "life", "tcp://nowhere"), 1)


def next_token(token_ids: list[int]) -> int:
    return (31 * len(token_ids) + sum(token_ids)) % 101


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass
class Session:
    """One gateway's session with a scripted worker."""

    line: Line
    received: list[ToWorker] = field(default_factory=list)
    ended: bool = False
    broken: asyncio.Event = field(default_factory=asyncio.Event)

    async def say(self, *messages: ToGateway) -> None:
        await self.line.send(encode_frame(messages))


class ScriptedWorker:
    """Accepts gateways and generates `patience` tokens of an answer, then pauses it."""

    def __init__(self, name: str = "m0", role: Role = Role.MIXED, **welcome: Any) -> None:
        self.welcome = Welcome(
            version=PROTOCOL_VERSION,
            worker_id=name,
            incarnation="life",
            role=role,
            fingerprint="model",
            layout=LAYOUT,
            num_blocks=100,
            max_running=8,
        )
        self.welcome = msgspec.structs.replace(self.welcome, **welcome)
        self.patience = 1000
        self.greeting: list[ToGateway] | None = None  # None: the normal welcome; []: no message
        self.hellos: list[Hello] = []
        self.sessions: list[Session] = []
        self.tasks: list[asyncio.Task[None]] = []  # tasks that tests started
        self.refused: list[str] = []  # reasons why sessions were refused
        self._server = SessionServer(self._session, SECRET, on_refused=self.refused.append)

    async def open(self) -> str:
        return await self._server.open()

    async def close(self) -> None:
        await self._server.close()

    @property
    def session(self) -> Session:
        """Returns the latest session."""
        return self.sessions[-1]

    @property
    def received(self) -> list[ToWorker]:
        return self.session.received

    async def _session(self, line: Line) -> None:
        (hello,) = decode_to_worker(await anext(line))
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        session = Session(line)
        # This must run first, because a test continues as soon as the router has joined.
        self.sessions.append(session)
        greeting = [self.welcome] if self.greeting is None else self.greeting
        if greeting:
            await session.say(*greeting)
        reader = asyncio.create_task(self._read(session))
        broken = asyncio.create_task(session.broken.wait())
        try:
            await asyncio.wait([reader, broken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reader.cancel()
            broken.cancel()
            session.ended = True

    async def _read(self, session: Session) -> None:
        async for frame in session.line:
            for message in decode_to_worker(frame):
                session.received.append(message)
                await self._serve(session, message)

    async def _serve(self, session: Session, message: ToWorker) -> None:
        match message:
            case Prefill(seq_id, token_ids, _, limits):
                token = next_token(token_ids)
                finish = limits.finish_reason(len(token_ids) + 1, token)
                await session.say(PrefillStarted(seq_id, 0, None if finish else LEASE))
                await session.say(PrefillDone(seq_id, token, finish))
            case Generate(seq_id, token_ids, _, limits):
                token = next_token(token_ids)
                finish = limits.finish_reason(len(token_ids) + 1, token)
                done = PrefillDone(seq_id, token, finish)
                await session.say(PrefillStarted(seq_id, 0, None), done)
                if finish is None:
                    await self._generate(session, seq_id, [*token_ids, token], limits)
            case Decode(seq_id):
                await session.say(KvReady(seq_id, 1, 0, "fake"))
            case FirstToken(seq_id, token):
                [decode] = [
                    m for m in session.received if isinstance(m, Decode) and m.seq_id == seq_id
                ]
                await session.say(DecodeStarted(seq_id))
                token_ids = [*decode.token_ids, token]
                await self._generate(session, seq_id, token_ids, decode.limits)

    async def _generate(
        self, session: Session, seq_id: str, token_ids: list[int], limits: Limits
    ) -> None:
        for _ in range(self.patience):
            token = next_token(token_ids)
            token_ids.append(token)
            finish = limits.finish_reason(len(token_ids), token)
            await session.say(Tokens(seq_id, [token], finish))
            if finish is not None:
                return


# ---------------------------------------------------------------- router of a test


@asynccontextmanager
async def serving(
    *workers: ScriptedWorker, secret: Secret = SECRET, joined: int | None = None, **config: Any
) -> AsyncIterator[Router]:
    """Opens a router and waits until the `joined` workers have joined it, by default all
    workers."""
    addresses = [await worker.open() for worker in workers]
    router = Router(addresses, config=RouterConfig(**config), secret=secret, clock=MonotonicClock())
    await router.open()
    try:
        num_joined = len(workers) if joined is None else joined
        await until(lambda: len(router.workers()) == num_joined, "the workers joined")
        yield router
        router.machine.validate()
    finally:
        await router.close()
        for worker in workers:
            await worker.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    end_s = MonotonicClock().now_s() + DEADLINE_S
    while not holds():
        assert MonotonicClock().now_s() < end_s, f"not in time: {what}"
        await asyncio.sleep(0.005)


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 6) -> Request:
    limits = Limits(max_len=len(prompt) + max_tokens)
    return Request(RequestId(name), prompt, Sampling(), limits, MonotonicClock().now_s())


class Reader:
    """A sink that puts all received items into a queue."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Update | Exception] = asyncio.Queue()

    def tokens(self, token_ids: Sequence[int], now_s: float) -> None:
        self.queue.put_nowait(Update(tuple(token_ids)))

    def update(self, update: Update) -> None:
        self.queue.put_nowait(update)

    def fail(self, error: Exception) -> None:
        self.queue.put_nowait(error)


async def updates_of(port: RequestPort, request: Request) -> AsyncGenerator[Update, None]:
    """Submits a request and yields its updates. Closing the iterator early cancels the request."""
    reader = Reader()
    handle = port.submit(request, reader)
    try:
        while True:
            update = await reader.queue.get()
            if isinstance(update, Exception):
                raise update
            yield update
            if update.outcome is not None:
                return
    finally:
        handle.cancel()


async def follow(router: Router, req: Request) -> tuple[list[int], list[Update]]:
    token_ids: list[int] = []
    updates: list[Update] = []
    async with asyncio.timeout(DEADLINE_S):
        async for update in updates_of(router, req):
            updates.append(update)
            token_ids += update.token_ids
    return token_ids, updates


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)

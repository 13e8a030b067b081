"""The router's shell: streams to the workers, and the machine between them and the clients.

One asyncio thread. Every event is handled and its effects performed before the next one, so the
machine needs no lock. A link per worker address keeps one session open; when it breaks the worker
counts as lost, and the link goes on trying, so that a worker that was only cut off comes back.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import msgspec

from engine.clock import Clock
from engine.config import RouterConfig
from engine.errors import LayoutMismatch, ProtocolError
from engine.layout import KVLayout
from engine.messages import (
    PROTOCOL_VERSION,
    GatewayId,
    Hello,
    Refused,
    RequestId,
    Role,
    ToWorker,
    Welcome,
    WorkerId,
    decode_to_gateway,
    encode_frame,
)
from engine.rpc import SessionClient
from router.machine import (
    Arrived,
    ClientGone,
    Deliver,
    End,
    FromWorker,
    RouterEffect,
    RouterEvent,
    RouterMachine,
    SendTo,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from router.requests import Request, Update, WorkerStatus

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
RETRY_EVERY_S = 1.0
TICK_EVERY_S = 0.25
CLOSE_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Link:
    """A session with one worker. Messages of one event go out as one frame."""

    outbox: "asyncio.Queue[bytes]"


class Router:
    """Implements `RouterPort` on a `RouterMachine` and gRPC sessions."""

    def __init__(
        self, addresses: list[str], *, config: RouterConfig, token: str, clock: Clock
    ) -> None:
        self._addresses = addresses
        self._token = token
        self._clock = clock
        self.gateway_id = GatewayId(f"gateway-{secrets.token_hex(6)}")
        self.machine = RouterMachine(config)
        self._links: dict[WorkerId, _Link] = {}
        self._clients: dict[RequestId, asyncio.Queue[Update]] = {}
        self._fingerprint = ""
        self._layouts: dict[Role, KVLayout] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._crash: BaseException | None = None
        self._joined = asyncio.Event()  # set when a worker joins

    async def open(self) -> None:
        """Begins to connect to the workers."""
        self._closing = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._keep_linked(a)) for a in self._addresses]
        self._tasks.append(asyncio.create_task(self._tick()))
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    async def close(self) -> None:
        """Ends the sessions; the workers free what this gateway's requests held."""
        self._closing.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        """None of them returns: one that ends before `close` died of a bug."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a router task died: %r", error, exc_info=error)
            self._crash = error

    # ------------------------------------------------------------ RouterPort

    async def submit(self, request: Request) -> AsyncGenerator[Update, None]:
        """Starts a request. Closing the iterator before its last update cancels the request."""
        updates: asyncio.Queue[Update] = asyncio.Queue()
        self._clients[request.request_id] = updates
        self._handle(Arrived(request))
        try:
            while True:
                update = await updates.get()
                while not updates.empty():  # a client that reads slowly gets larger pieces
                    update = _merged(update, updates.get_nowait())
                yield update
                if update.outcome is not None:
                    return
        finally:
            del self._clients[request.request_id]
            self._handle(ClientGone(request.request_id))

    def readiness(self) -> str | None:
        """None when requests can be served, else what is missing."""
        if self._crash is not None:
            return f"a router task died: {self._crash!r}"
        roles = [worker.info.role for worker in self.machine.view.workers.values()]
        if not any(role.prefills for role in roles):
            return "no prefill worker is connected"
        if not any(role.decodes for role in roles):
            return "no decode worker is connected"
        return None

    async def wait_until_ready(self, timeout_s: float) -> str | None:
        """Waits until requests can be served, or so long; returns what is missing then."""
        end_s = self._clock.now_s() + timeout_s
        while (missing := self.readiness()) is not None:
            self._joined.clear()
            try:
                await asyncio.wait_for(self._joined.wait(), end_s - self._clock.now_s())
            except TimeoutError:
                return missing
        return None

    def fingerprint(self) -> str:
        """Identifies model and configuration in answers; empty until a worker is known."""
        return _fingerprint_of_answers(self._fingerprint, self._layouts)

    def workers(self) -> Mapping[WorkerId, WorkerStatus]:
        """All live workers."""
        return {
            worker_id: WorkerStatus(
                worker.info.role, worker.load, worker.reserved_blocks, worker.reserved_tokens
            )
            for worker_id, worker in self.machine.view.workers.items()
        }

    def queue_len(self) -> int:
        """Requests that wait for a worker."""
        return self.machine.queue_len

    def counters(self) -> Mapping[tuple[str, str], int]:
        """Events since the start by (name, reason)."""
        return self.machine.counters

    # ------------------------------------------------------------ the machine

    def _handle(self, *events: RouterEvent) -> None:
        """Feeds events and performs what follows, one frame to each worker concerned."""
        now_s = self._clock.now_s()
        frames: dict[WorkerId, list[ToWorker]] = {}
        for event in events:
            for effect in self.machine.handle(event, now_s):
                self._perform(effect, frames)
        for worker_id, messages in frames.items():
            link = self._links.get(worker_id)
            if link is not None:
                link.outbox.put_nowait(encode_frame(messages))

    def _perform(self, effect: RouterEffect, frames: dict[WorkerId, list[ToWorker]]) -> None:
        match effect:
            case SendTo(worker_id, message):
                frames.setdefault(worker_id, []).append(message)
            case Deliver(request_id):
                update = Update(
                    token_ids=effect.token_ids,
                    timeline=effect.timeline,
                    logprobs=effect.logprobs,
                    prompt_logprobs=effect.prompt_logprobs,
                )
                self._update(request_id, update)
            case End(request_id, outcome, timeline):
                self._update(request_id, Update(outcome=outcome, timeline=timeline))

    def _update(self, request_id: RequestId, update: Update) -> None:
        client = self._clients.get(request_id)
        if client is not None:
            client.put_nowait(update)

    async def _tick(self) -> None:
        """Deadlines are seconds long: looking at them a few times a second is enough."""
        while True:
            await asyncio.wait([self._closing], timeout=TICK_EVERY_S)
            due_s = self.machine.next_wake_s()
            if due_s is not None and due_s <= self._clock.now_s():
                self._handle(Tick())

    # ------------------------------------------------------------ workers

    async def _keep_linked(self, address: str) -> None:
        last_reason = ""
        while True:
            client = SessionClient(address)
            await client.open()
            try:
                await self._run_session(client)
            except (ConnectionError, TimeoutError, ProtocolError, LayoutMismatch) as error:
                reason = str(error) or type(error).__name__
                level = logging.WARNING if reason != last_reason else logging.DEBUG
                log.log(level, "worker at %s: %s; trying again", address, reason)
                last_reason = reason
            finally:
                await client.close()
            await asyncio.wait([self._closing], timeout=RETRY_EVERY_S)

    async def _run_session(self, client: SessionClient) -> None:
        hello = Hello(PROTOCOL_VERSION, self.gateway_id, self._token)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await client.send(encode_frame([hello]))
            info = _welcome(await client.receive())
        self._check_identity(info)
        link = _Link(asyncio.Queue())
        self._links[info.worker_id] = link
        log.info("%s worker %s joined", info.role, info.worker_id)
        self._handle(WorkerJoined(info))
        self._joined.set()
        sender = asyncio.create_task(_send_all(link, client))
        reason = "session ended"
        try:
            while (frame := await client.receive()) is not None:
                messages = decode_to_gateway(frame)
                self._handle(*(FromWorker(info.worker_id, m) for m in messages))
        except (ConnectionError, ProtocolError) as error:
            reason = type(error).__name__
            raise
        finally:
            sender.cancel()
            del self._links[info.worker_id]
            log.warning("worker %s is lost", info.worker_id)
            self._handle(WorkerLost(info.worker_id, reason))

    def _check_identity(self, info: Welcome) -> None:
        """All workers of a gateway serve one model, each pool in one KV layout.

        Layouts of two pools may differ in the format.
        """
        if info.worker_id in self._links:
            raise ProtocolError(f"two workers are called {info.worker_id}")
        if not self._fingerprint:
            self._fingerprint = info.fingerprint
        if info.fingerprint != self._fingerprint:
            raise LayoutMismatch("fingerprint", self._fingerprint, info.fingerprint)
        for role, ours in self._layouts.items():
            kv_format = info.layout.kv_format if role is info.role else ours.kv_format
            theirs = msgspec.structs.replace(info.layout, kv_format=kv_format)
            field = ours.difference(theirs)
            if field is not None:
                raise LayoutMismatch(
                    f"layout.{field}", getattr(ours, field), getattr(theirs, field)
                )
        self._layouts[info.role] = info.layout


def _fingerprint_of_answers(fingerprint: str, layouts: Mapping[Role, KVLayout]) -> str:
    """Model and weights, and the formats of KV: by role, if there are several."""
    if not layouts:
        return fingerprint
    formats = {role: layouts[role].kv_format for role in sorted(layouts)}
    if len(set(formats.values())) == 1:
        return f"{fingerprint}-{next(iter(formats.values()))}"
    return "-".join([fingerprint, *(f"{role}_{formats[role]}" for role in formats)])


def _merged(first: Update, second: Update) -> Update:
    return Update(
        token_ids=first.token_ids + second.token_ids,
        outcome=second.outcome,
        timeline=second.timeline or first.timeline,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
    )


def _welcome(frame: bytes | None) -> Welcome:
    match decode_to_gateway(frame) if frame is not None else []:
        case [Welcome(version=version) as info] if version == PROTOCOL_VERSION:
            return info
        case [Welcome(version=version)]:
            raise ProtocolError(f"protocol version differs: {PROTOCOL_VERSION} and {version}")
        case [Refused(reason)]:
            raise ProtocolError(f"refused this gateway: {reason}")
        case _:
            raise ProtocolError("did not answer with a Welcome")


async def _send_all(link: _Link, client: SessionClient) -> None:
    while True:
        frame = await link.outbox.get()
        try:
            await client.send(frame)
        except ConnectionError as error:
            log.warning("a frame was not sent: %s", error)  # the reader sees the broken stream
            return

"""The sessions of one router with its workers. A task keeps each session open.

A worker counts as lost if its session breaks, if it is silent for `router.silence_s`, or if its
step hangs. Its task then reconnects. If the worker was only paused or disconnected, it has
cancelled its work for this gateway when it joins again: it does so when it detects the end of the
session.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import zmq

from engine.clock import Clock
from engine.errors import LayoutMismatch, ProtocolError, StepStuck
from engine.layout import KVLayout
from engine.messages import (
    PROTOCOL_VERSION,
    GatewayId,
    Hello,
    LoadReport,
    Role,
    StillStepping,
    ToGateway,
    ToWorker,
    Welcome,
    WorkerId,
    decode_welcome,
    encode_frame,
)
from engine.net.sessions import SessionClient
from engine.net.trust import Secret
from router.block_feed import BlockFeed
from router.block_news import Apply, EventsMissed
from router.machine.events import (
    BlockEventsMissed,
    BlocksChanged,
    RouterEvent,
    WorkerJoined,
    WorkerLost,
)
from router.machine.machine import RouterMachine
from router.native.index import SEPARATOR

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
RETRY_EVERY_S = 1.0
CLOSE_TIMEOUT_S = 5.0
_LINK_ERRORS = (ConnectionError, TimeoutError, ProtocolError, LayoutMismatch, StepStuck)

# Handles a worker's frame, and returns the messages that were passed to the machine at once.
ReceiveFrame = Callable[[WorkerId, bytes], Sequence[ToGateway]]


class WorkerLinks:
    """The sessions with the workers at given addresses."""

    def __init__(  # noqa: PLR0913 - what a session is made of
        self,
        addresses: Collection[str],
        machine: RouterMachine,
        *,
        gateway_id: GatewayId,
        secret: Secret,
        clock: Clock,
        handle: Callable[[RouterEvent], None],
        receive_frame: ReceiveFrame,
    ) -> None:
        """`handle` passes an event to the machine. `receive_frame` handles a worker's frame."""
        self.addresses = set(addresses)  # addresses of all workers that should be connected
        self.joined = asyncio.Event()  # set when a worker joins
        self.fingerprint = ""  # shown in answers; empty until the first worker joins
        self.counters: Counter[tuple[str, str]] = Counter()  # numbers of losses of block events
        self.crash: BaseException | None = None  # the bug by which a task has ended
        self.stores: list[WorkerId] = []
        self._machine = machine
        self._gateway_id = gateway_id
        self._secret = secret
        self._clock = clock
        self._handle = handle
        self._receive_frame = receive_frame
        self._links: dict[WorkerId, SessionClient] = {}
        self._linked_to: dict[WorkerId, str] = {}  # address of each worker
        self._worker_fingerprint = ""
        self._layouts: dict[Role, KVLayout] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # task of each address
        self._linking: set[asyncio.Task[None]] = set()  # all tasks, including those that are ending
        self._leaving: dict[WorkerId, str] = {}  # addresses of removed workers in use

    def open(self) -> None:
        """Starts to connect to the workers."""
        self._closing = asyncio.get_running_loop().create_future()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Each worker needs two sockets. ZeroMQ allows 1,023 by default.
        self._zmq.set(zmq.MAX_SOCKETS, self._zmq.get(zmq.SOCKET_LIMIT))
        for address in self.addresses:
            self._link(address)

    async def close(self) -> None:
        """Ends the sessions. Workers then release the resources of this gateway's requests."""
        self._closing.cancel()
        tasks = set(self._linking)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        self._zmq.destroy(linger=0)

    def follow(self, addresses: Collection[str]) -> None:
        """Replaces the list of workers.

        The session with a removed worker ends after the last request on that worker.
        """
        self.addresses = set(addresses)
        for address in sorted(self.addresses - set(self._tasks)):
            self._link(address)
        self._leaving = {
            worker_id: address
            for worker_id, address in self._linked_to.items()
            if address not in self.addresses
        }
        for address in set(self._tasks) - self.addresses - set(self._leaving.values()):
            self._unlink(address)
        self.release_removed()

    def release_removed(self) -> None:
        """Ends the sessions with removed workers on which this gateway has no claim."""
        for worker_id, address in list(self._leaving.items()):
            worker = self._machine.view.workers.get(worker_id)
            if worker is None or not (worker.prefills or worker.decodes):
                del self._leaving[worker_id]
                self._unlink(address)

    def post(self, worker_id: WorkerId, messages: Sequence[ToWorker]) -> None:
        """Sends messages to a worker at once. Does nothing if the worker is lost."""
        if (link := self._links.get(worker_id)) is None:
            return
        try:
            link.post(encode_frame(messages))
        except ConnectionError as error:  # the task that reads this session ends by the same error
            log.warning("a frame to %s was not sent: %s", worker_id, error)

    def record_bug(self, error: BaseException) -> None:
        """Logs a bug. From then on, the gateway is not ready."""
        log.critical("a router task died: %r", error, exc_info=error)
        self.crash = error

    def _link(self, address: str) -> None:
        task = asyncio.create_task(self._keep_linked(address))
        task.add_done_callback(self._on_task_end)
        self._tasks[address] = task
        self._linking.add(task)

    def _unlink(self, address: str) -> None:
        if (task := self._tasks.pop(address, None)) is not None:  # else it is ending already
            task.cancel()

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        """Reports a bug if a task has ended by it. The gateway is then not ready."""
        self._linking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.record_bug(error)

    async def _keep_linked(self, address: str) -> None:
        last_reason = ""
        stuck_s: float | None = None
        while True:
            silence_s = self._machine.state.config.silence_s
            client = SessionClient(address, self._secret, silence_s=silence_s)
            try:
                await client.open()
                await self._run_session(client, address, stuck_s)
            except _LINK_ERRORS as error:
                stuck_s = error.seconds if isinstance(error, StepStuck) else None
                reason = str(error) or type(error).__name__
                level = logging.WARNING if reason != last_reason else logging.DEBUG
                log.log(level, "worker at %s: %s; trying again", address, reason)
                last_reason = reason
            else:
                stuck_s = None
            finally:
                await client.close()
            if address not in self.addresses:  # the worker was removed
                self._tasks.pop(address, None)
                return
            await asyncio.wait([self._closing], timeout=RETRY_EVERY_S)

    async def _run_session(
        self, client: SessionClient, address: str, stuck_s: float | None
    ) -> None:
        """Runs one session until it ends.

        If the worker was lost because a step had taken `stuck_s`, this step must end before the
        worker may join again.
        """
        hello = Hello(PROTOCOL_VERSION, self._gateway_id)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await client.send(encode_frame([hello]))
            info = decode_welcome(await client.receive())
        self._check_identity(info)
        if info.step is not None:
            if stuck_s is not None and info.step.seconds >= stuck_s:
                raise StepStuck(info.step.seconds)
            self._check_step(info.worker_id, info.step)
        self._links[info.worker_id] = client
        self._linked_to[info.worker_id] = address
        if info.role is Role.STORE:
            self.stores.append(info.worker_id)
        log.info("%s worker %s joined", info.role, info.worker_id)
        feed = None
        reason = "session ended"
        try:
            self._handle(WorkerJoined(info))
            self.joined.set()
            feed = self._follow(info)
            while (frame := await client.receive()) is not None:
                for message in self._receive_frame(info.worker_id, frame):
                    if isinstance(message, StillStepping):
                        self._check_step(info.worker_id, message)
                    elif isinstance(message, LoadReport) and feed is not None:
                        feed.counted(message.num_event_batches)
        except (ConnectionError, ProtocolError, StepStuck) as error:
            reason = type(error).__name__
            raise
        finally:
            if feed is not None:
                feed.close()
            del self._links[info.worker_id], self._linked_to[info.worker_id]
            if info.role is Role.STORE:
                self.stores.remove(info.worker_id)
            self._leaving.pop(info.worker_id, None)
            is_wanted = address in self.addresses and not self._closing.done()
            level = logging.WARNING if is_wanted else logging.INFO
            worker = self._machine.view.workers.get(info.worker_id)
            role = info.role if worker is None else worker.info.role  # the present role
            log.log(level, "%s worker %s is lost", role, info.worker_id)
            self._handle(WorkerLost(info.worker_id, reason))

    def _check_step(self, worker_id: WorkerId, step: StillStepping) -> None:
        """Raises StepStuck if a step hangs. The worker is then lost, although it still responds."""
        if step.seconds > self._machine.longest_step_s(worker_id, is_early=step.is_early):
            raise StepStuck(step.seconds)

    def _follow(self, info: Welcome) -> BlockFeed | None:
        """Passes a worker's block events to the machine.

        Returns None if the worker publishes no events, or if they cannot be received.
        """
        if info.events is None:
            self.counters["block events", "not offered"] += 1
            return None
        worker_id = info.worker_id

        def on_news(news: Apply | EventsMissed) -> None:
            try:
                match news:
                    case Apply(events):
                        self._handle(BlocksChanged(worker_id, events))
                    case EventsMissed(reason):
                        self._handle(BlockEventsMissed(worker_id, reason))
            except Exception as error:  # an error must not end the task of this session
                self.record_bug(error)
                raise

        def count(what: str) -> None:
            self.counters["block events", what] += 1

        feed = BlockFeed(
            info,
            info.events,
            secret=self._secret,
            clock=self._clock,
            on_news=on_news,
            count=count,
        )
        try:
            feed.open(self._zmq)
        except zmq.ZMQError as error:  # there is no free descriptor, or the address is invalid
            log.warning("cannot follow block events of %s: %s", worker_id, error)
            count("not followed")
            return None
        return feed

    def _check_identity(self, info: Welcome) -> None:
        """Raises an error if the worker does not match the other workers.

        All workers of a gateway serve one model, and all workers of a pool have one KV layout.
        Layouts of two pools may differ in the format. A store must match the workers. Workers need
        not match a store that joined earlier; then they do not use its blocks.
        """
        if SEPARATOR in info.worker_id:
            raise ProtocolError(f"no worker may be called {info.worker_id!r}")
        if info.worker_id in self._links:
            raise ProtocolError(f"two workers are called {info.worker_id}")
        if not self._worker_fingerprint:
            if info.role is Role.STORE:
                return
            self._worker_fingerprint = info.fingerprint
        if info.fingerprint != self._worker_fingerprint:
            raise LayoutMismatch("fingerprint", self._worker_fingerprint, info.fingerprint)
        for role, ours in self._layouts.items():
            kv_format = info.layout.kv_format if role is info.role else ours.kv_format
            theirs = msgspec.structs.replace(info.layout, kv_format=kv_format)
            field = ours.difference(theirs)
            if field is not None:
                raise LayoutMismatch(
                    f"layout.{field}", getattr(ours, field), getattr(theirs, field)
                )
        if info.role not in (Role.DRAINED, Role.STORE):  # workers of these roles compute no answers
            self._layouts[info.role] = info.layout
        self.fingerprint = _fingerprint_of_answers(self._worker_fingerprint, self._layouts)


def _fingerprint_of_answers(fingerprint: str, layouts: Mapping[Role, KVLayout]) -> str:
    """Returns a text that identifies model, weights and KV formats.

    The text has one part for each role if roles differ.
    """
    if not layouts:
        return fingerprint
    formats = {role: layouts[role].kv_format for role in sorted(layouts)}
    if len(set(formats.values())) == 1:
        return f"{fingerprint}-{next(iter(formats.values()))}"
    return "-".join([fingerprint, *(f"{role}_{formats[role]}" for role in formats)])

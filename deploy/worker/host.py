"""Runs a worker: the threads around a `WorkerCore`.

    asyncio thread   sessions of gateways and of the controller; subscribers of block events
    guides thread    compiles the grammars of sequences before the step thread gets them
    step thread      owns core, pool and runner: takes events, runs plans, performs effects
    transfer thread  the endpoint: leases and pulls

The step thread receives all events through one inbox. If a thread dies, the worker ends: its peers
must notice an end, not silence. The asyncio thread watches the step thread: it reports a long step
to all gateways, and ends the worker if a step does not end.
"""

import asyncio
import logging
import queue
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from decode.speculation import Speculator
from deploy.worker.block_publisher import BlockPublisher
from deploy.worker.core import WorkerCore
from deploy.worker.gateway_sessions import GatewaySessions, RequestIds, SessionInbox
from deploy.worker.process_facts import cpu_s, process_gauges
from engine.clock import Clock
from engine.devices.settings import WorkerSettings
from engine.grammar.guides import LlGuides
from engine.layout import WHOLE, KVFormat, KVLayout, Shard
from engine.messages import (
    PROTOCOL_VERSION,
    ROLES_OF_WORKERS,
    GatewayId,
    Incarnation,
    Role,
    RoleChanged,
    StillStepping,
    ToGateway,
    TransferAddress,
    Welcome,
    WorkerId,
    encode_frame,
)
from engine.native import build
from engine.net.trust import Secret
from engine.worker.batch import BatchPlan, LaunchedStep, Runner
from engine.worker.block_events import EventLog
from engine.worker.blocks import BlockPool
from engine.worker.events import Effect, Emit, EmitToAll, Event, GatewayLost, PullFailed
from engine.worker.intake import Intake
from engine.worker.steps import ModelSizes, StepEffort, StepWatch
from kvtransfer.endpoint import EndpointConfig, TransferEndpoint
from kvtransfer.group_endpoint import GroupEndpoint, RemoteEndpoint
from kvtransfer.lease.sink import ABORTED
from kvtransfer.memory import Pool
from kvtransfer.messages import Identity

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The name, role, fingerprint and secret by which a worker's peers identify it."""

    worker_id: WorkerId
    role: Role
    fingerprint: str
    secret: Secret
    host: str = "127.0.0.1"
    kernels: str = ""  # the kernels that compute, reported to gateways and controller


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about the model that the worker's host needs."""

    vocab_size: int
    context_len: int
    has_draft_model: bool
    guides: LlGuides
    sizes: ModelSizes | None = None  # None: the work of steps is not estimated
    layout: KVLayout | None = None  # layout of all ranks' blocks together; None: one rank
    shards: tuple[Shard, ...] = ()  # the part of these blocks that each rank has
    counters: Mapping[str, float] = field(default_factory=dict)  # counters of rank 0's opening


class OtherRanks(Protocol):
    """The ranks of a worker other than rank 0."""

    def endpoints_of(
        self, config: EndpointConfig, shards: Sequence[Shard]
    ) -> Sequence[RemoteEndpoint]:
        """Returns the transfer endpoints of this worker's other ranks. They are not open yet."""
        ...


class WorkerHost:
    """Runs a worker from `open` to `close`. `on_crash` must end the process."""

    def __init__(  # noqa: PLR0913 - the parts of a worker
        self,
        identity: WorkerIdentity,
        *,
        config: WorkerSettings,
        runner: Runner,
        model: ModelFacts,
        memory: Pool,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
        enter_thread: Callable[[], None] = lambda: None,
        ranks: OtherRanks | None = None,
    ) -> None:
        """`runner` and `memory` belong to rank 0. `ranks` are the other ranks, if there are any.

        The step thread calls `enter_thread` first.
        """
        self._ranks = ranks
        self._identity = identity
        self._config = config
        self._runner = runner
        self._model = model
        self._memory = memory
        self._clock = clock
        self._on_crash = on_crash
        self._enter_thread = enter_thread
        self._incarnation = Incarnation(secrets.token_hex(8))
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._sessions = GatewaySessions(
            identity.secret,
            identity.host,
            welcome=self._welcome,
            listen=self._listen,
            on_lost=lambda gateway_id: self._inbox.put(GatewayLost(gateway_id)),
        )
        self._role = identity.role
        self._possible = roles_of(identity.role, config)
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._stopping = False
        self._in_flight: deque[tuple[BatchPlan, LaunchedStep]] = deque()
        self._long_step: StillStepping | None = None  # the present step, if it is long
        self._effort = StepEffort(model.sizes)
        self._request_ids = RequestIds()
        self._is_checked = False  # True if validated since the last event
        self._loop_lag_s = 0.0  # asyncio thread's longest delay since the last report

    async def open(self) -> str:
        """Starts the threads. Returns the address at which sessions are opened."""
        self._loop = asyncio.get_running_loop()
        self._endpoint = self._make_endpoint()
        address = self._endpoint.open()
        self._core = self._open_core(address)
        self._publisher = BlockPublisher(
            EventLog(
                block_size=self._runner.layout.block_size,
                with_token_ids=self._config.publish_token_ids,
            ),
            worker_id=self._identity.worker_id,
            incarnation=self._incarnation,
            secret=self._identity.secret,
            clock=self._clock,
            host=self._identity.host,
        )
        self._events = self._publisher.open()
        self._watch = StepWatch(self._config.step_timeout_s, self._clock.now_s())
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()
        self._watching = asyncio.create_task(self._watch_steps())
        return await self._sessions.open()

    def _make_endpoint(self) -> TransferEndpoint | GroupEndpoint:
        shards = self._model.shards
        config = EndpointConfig(
            worker_id=self._identity.worker_id,
            incarnation=self._incarnation,
            identity=Identity(
                self._identity.fingerprint,
                self._model.layout or self._runner.layout,
                shard=shards[0] if shards else WHOLE,
                kv_wire_dtype=self._config.kv_wire_dtype,
                group=shards,
            ),
            secret=self._identity.secret,
            transport=self._config.kv_transport,
            host=self._identity.host,
        )
        make: Callable[..., TransferEndpoint | GroupEndpoint] = TransferEndpoint
        if self._ranks is not None:
            make = partial(GroupEndpoint, others=self._ranks.endpoints_of(config, shards))
        return make(
            config,
            pool=self._memory,
            clock=self._clock,
            on_event=self._on_transfer,
            on_crash=self._on_crash,
        )

    def _open_core(self, address: TransferAddress) -> WorkerCore:
        config, model = self._config, self._model
        self._pool = BlockPool(
            self._runner.num_blocks, keeps_events=True, with_tokens=config.publish_token_ids
        )
        speculator = Speculator(
            config.speculate,
            max_draft_tokens=config.max_draft_tokens,
            has_draft_model=model.has_draft_model,
        )
        intake = Intake(
            self._runner.layout.block_size, model.guides, model.vocab_size, model.context_len
        )
        return WorkerCore(
            self._pool,
            config,
            intake=intake,
            address=address,
            role=self._role,
            possible=self._possible,
            stretch=config.stretch,
            speculator=speculator,
        )

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports by which other workers can read this worker's KV."""
        return self._endpoint.transports

    async def close(self) -> None:
        """Ends sessions and threads."""
        self._watching.cancel()
        await self._sessions.close()
        self._stopping = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, 30)
        self._opener.shutdown(wait=False, cancel_futures=True)
        self._publisher.close()
        await asyncio.to_thread(self._endpoint.close)
        self._core.validate()

    # ------------------------------------------------------------ gateways (asyncio thread)

    def _listen(self, gateway_id: GatewayId) -> SessionInbox:
        return SessionInbox(
            gateway_id,
            self._model.guides,
            executor=self._opener,
            put=self._inbox.put,
            on_crash=self._on_crash,
            request_ids=self._request_ids,
            possible_roles=self._possible,
        )

    def _welcome(self) -> Welcome:
        return Welcome(
            version=PROTOCOL_VERSION,
            worker_id=self._identity.worker_id,
            incarnation=self._incarnation,
            role=self._role,
            fingerprint=served_as(self._identity.fingerprint, self._config.kv_wire_dtype),
            layout=self._model.layout or self._runner.layout,
            num_blocks=self._runner.num_blocks,
            max_running=self._config.max_running,
            kv_wire_dtype=self._config.kv_wire_dtype,
            events=self._events,
            stretch=self._config.stretch,
            step=self._long_step,
            kernels=self._identity.kernels,
        )

    async def _watch_steps(self) -> None:
        """Reports steps that take long to all gateways. Ends the worker if a step does not end."""
        never = self._loop.create_future()
        try:
            while True:
                due_s = self._clock.now_s() + REPORT_EVERY_S
                await asyncio.wait([never], timeout=REPORT_EVERY_S)
                self._loop_lag_s = max(self._loop_lag_s, self._clock.now_s() - due_s)
                self._long_step = self._watch.check(self._clock.now_s())
                if self._long_step is not None:
                    self._sessions.post_all(encode_frame([self._long_step]))
        except Exception as error:  # StepStuck or a bug; no other part would notice a stuck step
            self._on_crash(error)

    def _on_transfer(self, event: Event) -> None:
        """Passes an event of the transfer thread to the step thread; logs failures."""
        if isinstance(event, PullFailed) and event.reason != ABORTED:
            with self._request_ids.logged(event.seq_id):
                log.warning("a pull of KV failed: %s", event.reason)
        self._inbox.put(event)

    # ------------------------------------------------------------ steps (step thread)

    def _run(self) -> None:
        try:
            self._enter_thread()
            next_report_s = 0.0
            busy = False
            while not self._stopping:
                self._watch.tick()
                self._handle_events(None if busy else self._idle_s())
                now_s = self._clock.now_s()
                if now_s >= next_report_s:
                    next_report_s = now_s + REPORT_EVERY_S
                    self._report()
                busy = self._step()
                self._publish()
        except BaseException as error:
            self._on_crash(error)
            raise

    def _idle_s(self) -> float:
        """Returns how many seconds to wait for an event if no step was run."""
        held_until_s = self._core.held_until_s
        if held_until_s is None:
            return REPORT_EVERY_S
        return max(held_until_s - self._clock.now_s(), 0.0)

    def _handle_events(self, wait_s: float | None) -> None:
        """Handles all queued events. If `wait_s` is given, first waits for an event."""
        effects: list[Effect] = []
        try:
            event = self._inbox.get(block=wait_s is not None, timeout=wait_s)
        except queue.Empty:
            if wait_s is not None and self._core.held_until_s is None and not self._is_checked:
                self._core.validate()  # once while idle, because this takes a microsecond per block
                self._is_checked = True
            return
        self._is_checked = False
        try:
            while True:
                if event is not None:
                    effects += self._core.handle(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            pass
        self._perform(effects)

    def _step(self) -> bool:
        """Launches the next step, if there is one, and completes the oldest step in flight.

        With a runner that overlaps, the completed step is the previous one: the host plans and
        sends while the device computes. Returns false if no step was in flight.
        """
        plan, effects = self._core.plan(self._clock.now_s())
        self._perform(effects)
        if plan is not None:
            self._watch.start(plan)
            self._in_flight.append((plan, self._runner.launch(plan)))
            if self._runner.overlaps and len(self._in_flight) == 1:
                return True
        if not self._in_flight:
            return False
        plan, launched = self._in_flight.popleft()
        result = launched.result()
        self._effort.record(plan.rows, 0.0 if result.times is None else result.times.total_s)
        self._perform(self._core.finish(result, self._clock.now_s()))
        return True

    def _perform(self, effects: list[Effect]) -> None:
        frames: dict[GatewayId, list[ToGateway]] = {}
        for effect in effects:
            if isinstance(effect, Emit):
                frames.setdefault(effect.gateway_id, []).append(effect.message)
            elif isinstance(effect, EmitToAll):
                self._send(frames)  # sent first, to keep the order of messages
                frames = {}
                self._loop.call_soon_threadsafe(self._change_role, effect.message)
            else:
                self._endpoint.perform(effect)
        self._send(frames)

    def _send(self, frames: Mapping[GatewayId, list[ToGateway]]) -> None:
        for gateway_id, messages in frames.items():
            frame = encode_frame(messages)
            self._loop.call_soon_threadsafe(self._sessions.post, gateway_id, frame)

    def _publish(self) -> None:
        """Publishes the blocks that were added to or removed from the cache since the last step."""
        news = self._pool.pop_events()
        if news:
            self._loop.call_soon_threadsafe(self._publisher.publish, news)

    def _report(self) -> None:
        counters = Counter(self._endpoint.counters())
        for more in (
            self._model.counters,
            self._publisher.counters,
            build.counters,
            self._sessions.refused,
        ):
            counters.update(more)
        measured = {**counters, **self._effort.counters(), "cpu_seconds": cpu_s()}
        load = self._core.load(self._endpoint.source.num_leases, measured)
        lag_s, self._loop_lag_s = self._loop_lag_s, 0.0
        gauges = _gauges(lag_s, self._config)
        load = msgspec.structs.replace(
            load, num_event_batches=self._publisher.num_batches, gauges=gauges
        )
        frame = encode_frame([load])
        self._loop.call_soon_threadsafe(self._sessions.post_all, frame)

    def _change_role(self, message: RoleChanged) -> None:
        """Sends the new role to all gateways. Later gateways receive it with `Welcome`."""
        if message.role is not self._role:
            log.info("this worker is a %s worker now", message.role)
        self._role = message.role
        self._sessions.post_all(encode_frame([message]))


def _gauges(lag_s: float, config: WorkerSettings) -> dict[str, float]:
    found = {**process_gauges(), "loop_lag_seconds": max(lag_s, 0.0)}
    if config.peak_tflops is not None:
        found["peak_flops_per_second"] = config.peak_tflops * 1e12
    if config.peak_gb_per_s is not None:
        found["peak_bytes_per_second"] = config.peak_gb_per_s * 1e9
    return found


def roles_of(role: Role, config: WorkerSettings) -> frozenset[Role]:
    """Returns the roles that a worker may get after it started with `role`.

    If decode workers have another KV format than prefill workers, no worker can enter or leave the
    decode role, because a worker's block pool is made at its start.
    """
    if config.decode_kv_dtype is None:
        return ROLES_OF_WORKERS
    return frozenset(
        other
        for other in ROLES_OF_WORKERS
        if other is Role.DRAINED or (other is Role.DECODE) == (role is Role.DECODE)
    )


def served_as(fingerprint: str, kv_wire_dtype: KVFormat | None) -> str:
    """Returns the fingerprint for gateways.

    It includes KV's wire format, which changes answers too.
    """
    return fingerprint if kv_wire_dtype is None else f"{fingerprint}-wire_{kv_wire_dtype}"

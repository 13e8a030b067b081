"""The router's shell: the machine between workers (`router.links`) and clients (`router.clients`).

The router runs on one asyncio thread. Each event is handled and its effects are carried out before
the next event, so the machine needs no lock.
"""

import asyncio
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import Context
from hashlib import blake2b
from pathlib import Path
from typing import cast

import msgspec

from engine.clock import Clock
from engine.config import RouterConfig
from engine.messages import (
    GatewayId,
    RequestId,
    StoreHint,
    ToGateway,
    Tokens,
    ToWorker,
    WorkerId,
    decode_to_gateway,
)
from engine.net.trust import Secret
from router.clients import RouterClients
from router.cluster.estimates import Estimates
from router.cluster.learning import MovedKv
from router.links import WorkerLinks
from router.machine.events import FromWorker, RouterEffect, RouterEvent, SendTo, Stepped, Tick
from router.machine.flight import running_timeline
from router.machine.machine import RouterMachine
from router.machine.requests import Failed, Request, Timeline, Update
from router.port import Handle, Sink, WorkerStatus
from router.recording.file import RecordingFile

LEAST_SLEEP_S = 1e-3  # minimum delay in seconds; a loop's timers are not more precise
MAX_UNHANDLED = 16  # maximum number of frames whose tokens the machine has not received yet


class Router:
    """A `RouterMachine` with its sessions to workers. Implements `RouterPort`."""

    def __init__(
        self,
        addresses: list[str],
        *,
        config: RouterConfig,
        secret: Secret,
        clock: Clock,
        estimates: Estimates | None = None,
        record_dir: Path | None = None,
    ) -> None:
        """Creates a router without connections.

        `estimates` may contain costs measured in an earlier run. With `record_dir`, a recording is
        written there under the gateway's id; it does not contain these costs.
        """
        self._clock = clock
        self.gateway_id = GatewayId(f"gateway-{secrets.token_hex(6)}")
        seeded = _seeded(config, self.gateway_id)
        self.machine = RouterMachine(seeded, estimates=estimates)
        self._recording: RecordingFile | None = None
        if record_dir is not None:
            self._recording = RecordingFile(record_dir / f"{self.gateway_id}.msgpack", seeded)
        self._clients = RouterClients(self.machine.state, self._handle)
        self._links = WorkerLinks(
            addresses,
            self.machine,
            gateway_id=self.gateway_id,
            secret=secret,
            clock=clock,
            handle=self._handle,
            receive_frame=self._receive_frame,
        )
        # Frames whose tokens the frame taker has handled, and the positions of their other
        # messages.
        self._unhandled: list[tuple[WorkerId, bytes, Sequence[int], float]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # time at which the timer fires
        self._wake_s: float | None = None  # time of the machine's next tick, maybe after the timer
        self._is_closing = False

    async def open(self) -> None:
        """Starts to connect to the workers. Raises ConfigError if it cannot write a recording."""
        if self._recording is not None:
            self._recording.open()
        self._loop = asyncio.get_running_loop()
        self._links.open()

    async def close(self) -> None:
        """Ends the sessions. Workers then release the resources of this gateway's requests."""
        self._is_closing = True
        try:
            if self._timer is not None:
                self._timer.cancel()
            await self._links.close()
            self._clients.close()  # requests that wait for a worker will get none
        finally:
            if self._recording is not None:
                await asyncio.to_thread(self._recording.close)

    def follow(self, addresses: Collection[str]) -> None:
        """Replaces the list of workers.

        The session with a removed worker ends after the last request on that worker.
        """
        self._links.follow(addresses)

    def cut(self, end: Failed) -> int:
        """Ends all present and later requests with this outcome. Returns how many ended now."""
        return self._clients.cut(end)

    # ------------------------------------------------------------ RouterPort

    def submit(self, request: Request, sink: Sink) -> Handle:
        """Starts a request; its answer goes to `sink`."""
        return self._clients.submit(request, sink)

    def withdraw(self, request_ids: Collection[RequestId]) -> None:
        """Cancels requests before it returns. Each request gets a last update with that outcome."""
        self._clients.withdraw(request_ids)

    def readiness(self) -> str | None:
        """Returns what is missing to serve requests; None if nothing is."""
        if self._links.crash is not None:
            return f"a router task died: {self._links.crash!r}"
        missing = self.machine.view.missing()
        return None if missing is None else f"{missing} is connected"

    def capacity_tokens(self) -> int | None:
        """The length of the longest request that the workers could serve; None while unknown."""
        return self.machine.view.capacity_tokens

    def store_block_size(self) -> int | None:
        """Tokens per block of the stores; None if no store is connected. Thread-safe."""
        for worker_id in tuple(self._links.stores):
            store = self.machine.view.workers.get(worker_id)
            if store is not None:
                return store.info.layout.block_size
        return None

    def tell_stores(self, hint: StoreHint) -> None:
        """Sends a client's message to each connected store."""
        for worker_id in self._links.stores:
            self._links.post(worker_id, [hint])

    async def wait_until_ready(self, timeout_s: float) -> str | None:
        """Waits until requests can be served, up to `timeout_s`. Returns what is missing then."""
        end_s, joined = self._clock.now_s() + timeout_s, self._links.joined
        while self.readiness() is not None:
            joined.clear()
            try:
                await asyncio.wait_for(joined.wait(), end_s - self._clock.now_s())
            except TimeoutError:
                break
        return self.readiness()  # a role may have changed since a worker joined

    def fingerprint(self) -> str:
        """Returns a text that identifies model and configuration; empty until a worker is known."""
        return self._links.fingerprint

    def workers(self) -> Mapping[WorkerId, WorkerStatus]:
        """Returns all live workers."""
        self._catch_up()
        now_s = self._clock.now_s()
        return {
            worker_id: WorkerStatus(
                worker.info.role,
                worker.load,
                worker.reserved_blocks,
                worker.reserved_tokens,
                self.machine.forecast(worker, now_s),
                worker.info.max_running,
                worker.foreign.seqs + bool(worker.foreign.prompt_tokens),
                worker.info.kernels,
                worker.info.num_blocks,
            )
            for worker_id, worker in self.machine.view.workers.items()
        }

    def queue_len(self) -> int:
        """The number of requests that wait for a worker."""
        return self.machine.queue_len

    def queued_s(self) -> float:
        """The predicted seconds for one prefill worker to compute all waiting prompts."""
        return self.machine.state.waiting.queued_s

    def severed(self) -> Mapping[tuple[WorkerId, WorkerId], float]:
        """Pairs of a source and a sink without pulls now, with the seconds until the next try."""
        now_s = self._clock.now_s()
        pairs = self.machine.view.severed.items()
        return {pair: at_s - now_s for pair, at_s in pairs if at_s > now_s}

    def transfers(self) -> list[MovedKv]:
        """Returns the KV that was pulled since the start, by pair of workers."""
        return list(self.machine.state.transfers.pairs)

    def timelines(self, request_ids: Iterable[RequestId]) -> Mapping[RequestId, Timeline]:
        """Returns the stages so far of those given requests that this router has."""
        self._catch_up()
        now_s, flights = self._clock.now_s(), self.machine.state.flights
        return {
            each: running_timeline(flight, now_s)
            for each in request_ids
            if (flight := flights.get(each)) is not None
        }

    def counters(self) -> Mapping[tuple[str, str], int]:
        """Numbers of events since the start, by name and reason."""
        counted = {**self.machine.counters, **self._links.counters}
        if self._recording is not None and self._recording.failure is not None:
            counted["recording ended", self._recording.failure] = 1
        return counted

    # ------------------------------------------------------------ the machine

    def _receive_frame(self, worker_id: WorkerId, frame: bytes) -> Sequence[ToGateway]:
        """Handles a worker's frame. Returns the messages that the frame taker has not handled.

        The machine would only forward the handled tokens. So they are passed on later, for several
        frames at once, which takes a fraction of the time. The machine always gets them before any
        other event.

        Raises ProtocolError.
        """
        now_s, taker = self._clock.now_s(), self._clients.taker
        left = None if taker is None else taker.take_frame(frame, now_s)
        if left is None:
            messages = decode_to_gateway(frame)
        else:
            decoded = decode_to_gateway(frame) if left else []
            self._unhandled.append((worker_id, frame, left, now_s))
            if not left:
                if len(self._unhandled) >= MAX_UNHANDLED:
                    self._catch_up()
                return ()
            messages = [decoded[place] for place in left]
        self._handle(*_events(worker_id, messages))
        return messages

    def _catch_up(self) -> None:
        """Passes the tokens that the frame taker has handled to the machine."""
        if not self._unhandled:
            return
        unhandled, self._unhandled = self._unhandled, []
        for worker_id, frame, left, now_s in unhandled:
            messages = decode_to_gateway(frame)
            for place in reversed(left):
                del messages[place]
            self._effects(Stepped(worker_id, cast("list[Tokens]", messages)), now_s)

    def _effects(self, event: RouterEvent, now_s: float) -> Sequence[RouterEffect]:
        effects = self.machine.handle(event, now_s)
        if self._recording is not None:
            self._recording.record(event, now_s, effects)
        return effects

    def _handle(self, *events: RouterEvent) -> None:
        """Passes events to the machine, and carries out the effects. Each worker gets one frame.

        Updates are passed to clients last, because a client may cause further events.
        """
        self._catch_up()
        now_s = self._clock.now_s()
        frames: dict[WorkerId, list[ToWorker]] = {}
        updates: list[Update] = []
        for event in events:
            for effect in self._effects(event, now_s):
                if isinstance(effect, SendTo):
                    frames.setdefault(effect.worker_id, []).append(effect.message)
                else:
                    updates.append(effect)
        for worker_id, messages in frames.items():
            self._links.post(worker_id, messages)
        self._set_timer(self.machine.next_wake_s())
        self._links.release_removed()
        self._clients.deliver(updates, now_s)
        self._clients.close_left()

    def _set_timer(self, wake_s: float | None) -> None:
        """Sets the time of the machine's next tick.

        Most requests only move this time to later. Then the timer is not changed. When it fires, it
        is set again for the later time.
        """
        self._wake_s = wake_s
        if wake_s is None or self._is_closing:
            return
        if self._timer is not None:
            if self._timer_s <= wake_s:
                return
            self._timer.cancel()
        self._timer_s = wake_s
        sleep_s = max(wake_s - self._clock.now_s(), LEAST_SLEEP_S)
        self._timer = self._loop.call_later(sleep_s, self._on_time, context=Context())

    def _on_time(self) -> None:
        wake_s, self._timer = self._wake_s, None
        if wake_s is None or self._timer_s < wake_s:
            self._set_timer(wake_s)
            return
        try:
            self._handle(Tick())
        except Exception as error:  # no task ends by this error, so it is logged here
            self._links.record_bug(error)


def _seeded(config: RouterConfig, gateway_id: GatewayId) -> RouterConfig:
    """Returns the configuration with a seed; without one, the seed is derived from the gateway's
    id.

    With equal seeds, all gateways would break ties alike, and choose the same worker at once.
    """
    if config.seed is not None:
        return config
    digest = blake2b(gateway_id.encode(), digest_size=8).digest()
    return msgspec.structs.replace(config, seed=int.from_bytes(digest, "big"))


def _events(worker_id: WorkerId, messages: Sequence[ToGateway]) -> list[RouterEvent]:
    """Returns the events of a frame. All tokens of a step are one event."""
    events: list[RouterEvent] = []
    tokens: list[Tokens] = []  # tokens of the last event, if that is a `Stepped`
    for message in messages:
        if type(message) is Tokens:
            if not tokens:
                events.append(Stepped(worker_id, tokens))
            tokens.append(message)
        else:
            tokens = []
            events.append(FromWorker(worker_id, message))
    return events

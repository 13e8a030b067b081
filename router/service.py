"""The router's shell: sessions with workers, and the machine between them and the clients.

It runs on one asyncio thread. Each event is handled and its effects are performed before the next
one, so the machine needs no lock. A link for each worker address keeps one session open. The worker
counts as lost if the session breaks, if the worker is silent for `router.silence_s`, or if its step
hangs. The link then dials again. A worker that was only paused or cut off comes back without its
work for this gateway: it cancels that when it learns of the session's end.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextvars import Context
from hashlib import blake2b
from pathlib import Path
from typing import cast

import msgspec
import zmq

from engine.clock import Clock
from engine.config import RouterConfig
from engine.errors import LayoutMismatch, ProtocolError, StepStuck
from engine.layout import KVLayout
from engine.messages import (
    PROTOCOL_VERSION,
    GatewayId,
    Hello,
    LoadReport,
    RequestId,
    Role,
    SeqId,
    StillStepping,
    StoreHint,
    ToGateway,
    Tokens,
    ToWorker,
    Welcome,
    WorkerId,
    decode_to_gateway,
    decode_welcome,
    encode_frame,
)
from engine.net.sessions import SessionClient
from engine.net.trust import Secret
from router.block_feed import BlockFeed
from router.cluster.estimates import Estimates
from router.cluster.media import SEPARATOR
from router.cluster.transfers import MovedKv
from router.machine.events import BlockEventsMissed, BlocksChanged, Stepped
from router.machine.flight import running_timeline
from router.machine.machine import (
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
from router.machine.requests import Failed, Request, Timeline, Update, joined
from router.port import (
    OpenLane,
    StepTaker,
    TakeAtOnce,
    TakeTokens,
    WorkerStatus,
    open_no_lane,
    take_no_tokens,
    take_nothing,
)
from router.prefixes.news import Apply, EventsMissed
from router.recording.file import RecordingFile

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
RETRY_EVERY_S = 1.0
LEAST_SLEEP_S = 1e-3  # a loop's timers are no finer
CLOSE_TIMEOUT_S = 5.0
MAX_UNHEARD = 16  # frames
_LINK_ERRORS = (ConnectionError, TimeoutError, ProtocolError, LayoutMismatch, StepStuck)


class _Client:
    """Updates of one request on their way to its client. Unread updates are merged."""

    def __init__(
        self, take_at_once: TakeAtOnce, take_tokens: TakeTokens, open_lane: OpenLane
    ) -> None:
        self._take_at_once = take_at_once
        self._take_tokens = take_tokens
        self._open_lane = open_lane
        self.lane: SeqId | None = None  # the sequence of its lane, which may have closed by itself
        self._unread: list[Update] = []
        self._waiter: asyncio.Future[Update] | None = None

    def put(self, update: Update) -> None:
        """Adds an update."""
        waiter = self._waiter
        if waiter is None or waiter.done():  # a client that reads slowly gets larger pieces
            unread = self._unread
            if not unread or unread[-1].outcome is None:  # else `Router.cut` ended the request
                unread.append(update)
            return
        try:
            if not self._take_at_once(update):
                self._waiter = None
                waiter.set_result(update)
        except Exception as error:  # a bug of the receiver must not end other requests
            self.fail(error)

    def put_tokens(self, token_ids: tuple[int, ...], now_s: float) -> bool:
        """Adds an update of tokens alone. Returns True if they were taken at once."""
        if self._waiter is not None:
            try:
                if self._take_tokens(token_ids, now_s):
                    return True
            except Exception as error:  # as in `put`
                self.fail(error)
                return False
        self.put(Update(token_ids))
        return False

    def open_lane(self, seq_id: SeqId) -> StepTaker | None:
        """Opens a lane, if that is possible now. It must be closed before the next `put`."""
        steps = self._open_lane(seq_id)
        if steps is not None:
            self.lane = seq_id
        return steps

    def fail(self, error: Exception) -> None:
        """Raises an error where the next update is waited for."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # else its request was cancelled
            waiter.set_exception(error)

    async def next(self) -> Update:
        """Waits for an update. Returns all unread ones as one."""
        if not self._unread:
            self._waiter = asyncio.get_running_loop().create_future()
            return await self._waiter
        unread, self._unread = self._unread, []
        return joined(unread)


class Router:
    """Implements `RouterPort` on a `RouterMachine` and sessions with workers."""

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
        """Builds a router that is not open yet.

        `estimates` may hold costs that were measured before. A recording, written to `record_dir`
        under the gateway's id, does not contain these.
        """
        self._addresses = set(addresses)  # of all workers that are to be linked
        self._secret = secret
        self._clock = clock
        self.gateway_id = GatewayId(f"gateway-{secrets.token_hex(6)}")
        seeded = _seeded(config, self.gateway_id)
        self.machine = RouterMachine(seeded, estimates=estimates)
        self._recording: RecordingFile | None = None
        if record_dir is not None:
            self._recording = RecordingFile(record_dir / f"{self.gateway_id}.msgpack", seeded)
        self._links: dict[WorkerId, SessionClient] = {}
        self._linked_to: dict[WorkerId, str] = {}  # their addresses
        self._stores: list[WorkerId] = []  # those that are stores
        self._clients: dict[RequestId, _Client] = {}
        self._arrived: dict[RequestId, Request] = {}  # in this turn of the loop
        self._steps: StepTaker | None = None  # has all lanes; None: there was none yet
        self._lanes: dict[SeqId, _Client] = {}
        self._num_left_seqs = 0  # of the machine, when it was last looked at
        # Frames with tokens that went to lanes, and which of their messages did not.
        self._unheard: list[tuple[WorkerId, bytes, Sequence[int], float]] = []
        self._fingerprint = self._shown_fingerprint = ""
        self._layouts: dict[Role, KVLayout] = {}
        self._news_counters: Counter[tuple[str, str]] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by address
        self._linking: set[asyncio.Task[None]] = set()  # the same, with tasks that are ending
        self._leaving: dict[WorkerId, str] = {}  # addresses; sessions end with their requests
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # the time that the timer is set for
        self._wake_s: float | None = None  # of the machine's next tick; the timer may end before
        self._crash: BaseException | None = None
        self._end: Failed | None = None  # the outcome of all requests, after `cut`
        self._joined = asyncio.Event()  # set when a worker joins

    async def open(self) -> None:
        """Begins to connect to the workers. Raises ConfigError if it cannot record."""
        if self._recording is not None:
            self._recording.open()
        self._loop = asyncio.get_running_loop()
        self._closing = self._loop.create_future()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Each worker needs two sockets. ZeroMQ allows 1,023 by default.
        self._zmq.set(zmq.MAX_SOCKETS, self._zmq.get(zmq.SOCKET_LIMIT))
        for address in self._addresses:
            self._link(address)

    async def close(self) -> None:
        """Ends the sessions; the workers free what this gateway's requests held."""
        try:
            if self._timer is not None:
                self._timer.cancel()
            self._closing.cancel()
            tasks = set(self._linking)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            self._admit()
            for request_id in list(self._clients):  # no worker will join again
                self._handle(ClientGone(request_id))
            self._zmq.destroy(linger=0)
        finally:
            if self._recording is not None:
                await asyncio.to_thread(self._recording.close)

    def follow(self, addresses: Collection[str]) -> None:
        """Replaces the workers.

        The session with a removed worker ends after the last request on it.
        """
        self._addresses = set(addresses)
        for address in sorted(self._addresses - set(self._tasks)):
            self._link(address)
        self._leaving = {
            worker_id: address
            for worker_id, address in self._linked_to.items()
            if address not in self._addresses
        }
        for address in set(self._tasks) - self._addresses - set(self._leaving.values()):
            self._unlink(address)
        self._let_go()

    def cut(self, end: Failed) -> int:
        """Ends all requests with this outcome, later ones too. Returns their number now."""
        self._end = end
        clients = list(self._clients.values())
        for client in clients:
            self._close_lane(client)
            client.put(Update(outcome=end))
        return len(clients)

    def _let_go(self) -> None:
        """Ends sessions with removed workers that have no claim of this gateway left."""
        for worker_id, address in list(self._leaving.items()):
            worker = self.machine.view.workers.get(worker_id)
            if worker is None or not (worker.prefills or worker.decodes):
                del self._leaving[worker_id]
                self._unlink(address)

    def _link(self, address: str) -> None:
        task = asyncio.create_task(self._keep_linked(address))
        task.add_done_callback(self._on_task_end)
        self._tasks[address] = task
        self._linking.add(task)

    def _unlink(self, address: str) -> None:
        if (task := self._tasks.pop(address, None)) is not None:  # else it is ending already
            task.cancel()

    def _on_task_end(self, task: "asyncio.Task[None]") -> None:
        """Ends the router if a task died of a bug."""
        self._linking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._record_bug(error)

    def _record_bug(self, error: BaseException) -> None:
        """Logs a bug. The gateway is not ready from now on."""
        log.critical("a router task died: %r", error, exc_info=error)
        self._crash = error

    # ------------------------------------------------------------ RouterPort

    async def submit(
        self,
        request: Request,
        take_at_once: TakeAtOnce = take_nothing,
        take_tokens: TakeTokens = take_no_tokens,
        open_lane: OpenLane = open_no_lane,
    ) -> AsyncGenerator[Update, None]:
        """Starts a request. Closing the iterator before its last update cancels the request."""
        if self._end is not None:
            yield Update(outcome=self._end)
            return
        client = _Client(take_at_once, take_tokens, open_lane)
        self._clients[request.request_id] = client
        try:
            self._arrived[request.request_id] = request
            if len(self._arrived) == 1:
                self._loop.call_soon(self._admit, context=Context())
            while True:
                update = await client.next()
                yield update
                if update.outcome is not None:
                    return
        finally:
            self._close_lane(client)
            self._arrived.pop(request.request_id, None)
            del self._clients[request.request_id]
            if request.request_id in self.machine.state.flights:
                self._handle(ClientGone(request.request_id))

    def _admit(self) -> None:
        """Hands the machine all requests of a turn of the loop, so that it places them together."""
        requests, self._arrived = list(self._arrived.values()), {}
        if not requests:  # their clients left
            return
        *others, last = requests
        try:
            self._handle(*(Arrived(each, more_come=True) for each in others), Arrived(last))
        except Exception as error:  # a bug, which ends these requests and no others
            for request in requests:
                self._clients[request.request_id].fail(error)

    def withdraw(self, request_ids: Collection[RequestId]) -> None:
        """Cancels requests within this call; the last update of each says so."""
        self._admit()
        self._handle(*(ClientGone(request_id) for request_id in request_ids))

    def readiness(self) -> str | None:
        """Returns None if requests can be served, else what is missing."""
        if self._crash is not None:
            return f"a router task died: {self._crash!r}"
        missing = self.machine.view.missing()
        return None if missing is None else f"{missing} is connected"

    def capacity_tokens(self) -> int | None:
        """The length of the longest request that workers could hold; None until it is known."""
        return self.machine.view.capacity_tokens

    def store_block_size(self) -> int | None:
        """The tokens of a block in stores; None if no store is connected. Thread-safe."""
        for worker_id in tuple(self._stores):
            store = self.machine.view.workers.get(worker_id)
            if store is not None:
                return store.info.layout.block_size
        return None

    def tell_stores(self, hint: StoreHint) -> None:
        """Passes on what a client says to each store that is connected."""
        if self._stores:
            frame = encode_frame([hint])
            for worker_id in self._stores:
                _post(self._links[worker_id], worker_id, frame)

    async def wait_until_ready(self, timeout_s: float) -> str | None:
        """Waits until requests can be served, or for `timeout_s`. Returns what is missing then."""
        end_s = self._clock.now_s() + timeout_s
        while self.readiness() is not None:
            self._joined.clear()
            try:
                await asyncio.wait_for(self._joined.wait(), end_s - self._clock.now_s())
            except TimeoutError:
                break
        return self.readiness()  # a role may have changed meanwhile

    def fingerprint(self) -> str:
        """Identifies model and configuration in answers; empty until a worker is known."""
        return self._shown_fingerprint

    def workers(self) -> Mapping[WorkerId, WorkerStatus]:
        """All live workers."""
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
        """Requests that wait for a worker."""
        return self.machine.queue_len

    def queued_s(self) -> float:
        """Predicted seconds of one prefill worker to compute what waits."""
        return self.machine.state.waiting.queued_s

    def severed(self) -> Mapping[tuple[WorkerId, WorkerId], float]:
        """Pairs of a source and a sink that are not used now, and seconds until a new try."""
        now_s = self._clock.now_s()
        pairs = self.machine.view.severed.items()
        return {pair: at_s - now_s for pair, at_s in pairs if at_s > now_s}

    def transfers(self) -> list[MovedKv]:
        """KV that moved between workers, by pair."""
        return list(self.machine.state.transfers.pairs)

    def timelines(self, request_ids: Iterable[RequestId]) -> Mapping[RequestId, Timeline]:
        """The stages up to now of those requests that this router has."""
        self._catch_up()
        now_s, flights = self._clock.now_s(), self.machine.state.flights
        return {
            each: running_timeline(flight, now_s)
            for each in request_ids
            if (flight := flights.get(each)) is not None
        }

    def counters(self) -> Mapping[tuple[str, str], int]:
        """Events since the start by (name, reason)."""
        counted = {**self.machine.counters, **self._news_counters}
        if self._recording is not None and self._recording.failure is not None:
            counted["recording ended", self._recording.failure] = 1
        return counted

    # ------------------------------------------------------------ the machine

    def _take_frame(self, worker_id: WorkerId, frame: bytes) -> Sequence[ToGateway]:
        """Handles a worker's frame; returns its messages, but for tokens that went to lanes.

        Of these the machine would only say the same. It hears of them later: of several frames one
        right after the other, which takes it a fraction of the time, and in any case before
        anything else. Raises ProtocolError.
        """
        now_s = self._clock.now_s()
        left = None if self._steps is None else self._steps.take_frame(frame, now_s)
        if left is None:
            messages = decode_to_gateway(frame)
        else:
            decoded = decode_to_gateway(frame) if left else []
            self._unheard.append((worker_id, frame, left, now_s))
            if not left:
                if len(self._unheard) >= MAX_UNHEARD:
                    self._catch_up()
                return ()
            messages = [decoded[place] for place in left]
        self._handle(*_events(worker_id, messages))
        return messages

    def _catch_up(self) -> None:
        """Tells the machine of the tokens that went to lanes."""
        if not self._unheard:
            return
        unheard, self._unheard = self._unheard, []
        for worker_id, frame, left, now_s in unheard:
            messages = decode_to_gateway(frame)
            for place in reversed(left):
                del messages[place]
            event = Stepped(worker_id, cast("list[Tokens]", messages))
            effects = self.machine.handle(event, now_s)
            if self._recording is not None:
                self._recording.record(event, now_s, effects)

    def _open_lane(self, request_id: RequestId, client: _Client) -> None:
        """Lets the next tokens of an answer go to a lane, if that is possible now."""
        flight = self.machine.state.flights.get(request_id)
        if flight is None or flight.attempt is None:
            return
        seq_id = flight.attempt.seq_id
        if client.lane != seq_id:
            self._close_lane(client)
        steps = client.open_lane(seq_id)
        if steps is not None:
            self._steps = steps
            self._lanes[seq_id] = client

    def _close_lane(self, client: _Client) -> None:
        """Lets all that comes go through the machine again."""
        if (seq_id := client.lane) is not None:
            client.lane = None
            del self._lanes[seq_id]
            assert self._steps is not None
            self._steps.close_lane(seq_id)

    def _close_left_lanes(self) -> None:
        """Closes lanes of sequences that ended before their requests."""
        state = self.machine.state
        if state.num_left_seqs != self._num_left_seqs:
            self._num_left_seqs = state.num_left_seqs
            for seq_id in [each for each in self._lanes if each not in state.by_seq]:
                self._close_lane(self._lanes[seq_id])

    def _handle(self, *events: RouterEvent) -> None:
        """Feeds events and performs their effects: one frame a worker, one update a request.

        Updates of tokens alone, nearly all there are, take a shorter path. Updates come last, as
        their receivers may feed events too.
        """
        self._catch_up()
        now_s = self._clock.now_s()
        frames: dict[WorkerId, list[ToWorker]] = {}
        updates: dict[RequestId, Update] = {}
        tokens: list[Deliver] = []
        for event in events:
            effects = self.machine.handle(event, now_s)
            if self._recording is not None:
                self._recording.record(event, now_s, effects)
            # The last tokens of a request and its end are one update.
            ended = {e.request_id for e in effects if type(e) is End} if len(effects) > 1 else ()
            for effect in effects:
                if (
                    type(effect) is Deliver
                    and effect.timeline is None
                    and not (effect.logprobs or effect.prompt_logprobs or effect.embedding)
                    and effect.request_id not in updates
                    and effect.request_id not in ended
                ):
                    tokens.append(effect)
                else:
                    _perform(effect, frames, updates)
        for worker_id, messages in frames.items():
            if (link := self._links.get(worker_id)) is not None:
                _post(link, worker_id, encode_frame(messages))
        self._set_timer(self.machine.next_wake_s())
        if self._leaving:
            self._let_go()
        clients = self._clients
        for piece in tokens:
            client = clients.get(piece.request_id)
            if client is not None and client.put_tokens(piece.token_ids, now_s):
                self._open_lane(piece.request_id, client)
        for request_id, update in updates.items():
            client = clients.get(request_id)
            if client is not None:
                self._close_lane(client)
                client.put(update)
        self._close_left_lanes()

    def _set_timer(self, wake_s: float | None) -> None:
        """Sets the time of the machine's next tick.

        It moves to a later one with most requests. A timer that ends before is set anew then.
        """
        self._wake_s = wake_s
        if wake_s is None or self._closing.done():
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
        except Exception as error:  # no task ends by it, so it is noted here
            self._record_bug(error)

    # ------------------------------------------------------------ workers

    async def _keep_linked(self, address: str) -> None:
        last_reason = ""
        stuck_s: float | None = None
        while True:
            silence_s = self.machine.state.config.silence_s
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
            if address not in self._addresses:  # the worker was removed
                self._tasks.pop(address, None)
                return
            await asyncio.wait([self._closing], timeout=RETRY_EVERY_S)

    async def _run_session(
        self, client: SessionClient, address: str, stuck_s: float | None
    ) -> None:
        """Runs one session until it ends.

        If the worker was lost for a step that had lasted `stuck_s`, that step must end before the
        worker may join again.
        """
        hello = Hello(PROTOCOL_VERSION, self.gateway_id)
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
            self._stores.append(info.worker_id)
        log.info("%s worker %s joined", info.role, info.worker_id)
        feed = None
        reason = "session ended"
        try:
            self._handle(WorkerJoined(info))
            self._joined.set()
            feed = self._follow(info)
            while (frame := await client.receive()) is not None:
                messages = self._take_frame(info.worker_id, frame)
                if feed is not None:
                    _count_batches(feed, messages)
                match messages:
                    case [StillStepping() as step]:
                        self._check_step(info.worker_id, step)
        except (ConnectionError, ProtocolError, StepStuck) as error:
            reason = type(error).__name__
            raise
        finally:
            if feed is not None:
                feed.close()
            del self._links[info.worker_id], self._linked_to[info.worker_id]
            if info.role is Role.STORE:
                self._stores.remove(info.worker_id)
            self._leaving.pop(info.worker_id, None)
            is_wanted = address in self._addresses and not self._closing.done()
            level = logging.WARNING if is_wanted else logging.INFO
            worker = self.machine.view.workers.get(info.worker_id)
            role = info.role if worker is None else worker.info.role  # it may have been flipped
            log.log(level, "%s worker %s is lost", role, info.worker_id)
            self._handle(WorkerLost(info.worker_id, reason))

    def _check_step(self, worker_id: WorkerId, step: StillStepping) -> None:
        """Raises StepStuck if a step hangs: the worker is lost although it still answers."""
        if step.seconds > self.machine.longest_step_s(worker_id, is_early=step.is_early):
            raise StepStuck(step.seconds)

    def _follow(self, info: Welcome) -> BlockFeed | None:
        """Follows a worker's block events for the machine.

        None if the worker publishes none, or if they cannot be received.
        """
        if info.events is None:
            self._news_counters["block events", "not offered"] += 1
            return None
        worker_id = info.worker_id

        def on_news(news: Apply | EventsMissed) -> None:
            try:
                match news:
                    case Apply(events):
                        self._handle(BlocksChanged(worker_id, events))
                    case EventsMissed(reason):
                        self._handle(BlockEventsMissed(worker_id, reason))
            except Exception as error:  # no task of the router ends by it
                self._record_bug(error)
                raise

        def count(what: str) -> None:
            self._news_counters["block events", what] += 1

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
        except zmq.ZMQError as error:  # no descriptor is left, or the address is invalid
            log.warning("cannot follow block events of %s: %s", worker_id, error)
            count("not followed")
            return None
        return feed

    def _check_identity(self, info: Welcome) -> None:
        """Raises an error unless the worker fits the others.

        All workers of a gateway serve one model, each pool in one KV layout. Layouts of two pools
        may differ in the format. A store has to fit them, but they need not fit a store that came
        before them: its blocks are then left alone.
        """
        if SEPARATOR in info.worker_id:
            raise ProtocolError(f"no worker may be called {info.worker_id!r}")
        if info.worker_id in self._links:
            raise ProtocolError(f"two workers are called {info.worker_id}")
        if not self._fingerprint:
            if info.role is Role.STORE:
                return
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
        if info.role not in (Role.DRAINED, Role.STORE):  # these compute no answers
            self._layouts[info.role] = info.layout
        self._shown_fingerprint = _fingerprint_of_answers(self._fingerprint, self._layouts)


def _seeded(config: RouterConfig, gateway_id: GatewayId) -> RouterConfig:
    """Returns the configuration with a seed, by default one of this gateway.

    With equal seeds all gateways would break ties alike, and choose the same worker at once.
    """
    if config.seed is not None:
        return config
    digest = blake2b(gateway_id.encode(), digest_size=8).digest()
    return msgspec.structs.replace(config, seed=int.from_bytes(digest, "big"))


def _fingerprint_of_answers(fingerprint: str, layouts: Mapping[Role, KVLayout]) -> str:
    """Identifies model, weights and KV formats; formats by role, if there are several."""
    if not layouts:
        return fingerprint
    formats = {role: layouts[role].kv_format for role in sorted(layouts)}
    if len(set(formats.values())) == 1:
        return f"{fingerprint}-{next(iter(formats.values()))}"
    return "-".join([fingerprint, *(f"{role}_{formats[role]}" for role in formats)])


def _perform(
    effect: RouterEffect,
    frames: dict[WorkerId, list[ToWorker]],
    updates: dict[RequestId, Update],
) -> None:
    """Adds an effect to the frames of workers or to the updates of requests."""
    match effect:
        case Deliver(request_id):
            update = Update(
                token_ids=effect.token_ids,
                timeline=effect.timeline,
                logprobs=effect.logprobs,
                prompt_logprobs=effect.prompt_logprobs,
                embedding=effect.embedding,
            )
        case SendTo(worker_id, message):
            frames.setdefault(worker_id, []).append(message)
            return
        case End(request_id, outcome, timeline):
            update = Update(outcome=outcome, timeline=timeline)
    earlier = updates.get(request_id)
    updates[request_id] = update if earlier is None else joined((earlier, update))


def _events(worker_id: WorkerId, messages: Sequence[ToGateway]) -> list[RouterEvent]:
    """Returns the events of a frame. The tokens of a step, which are many, are one event."""
    events: list[RouterEvent] = []
    tokens: list[Tokens] = []  # of the last event, if it is a step
    for message in messages:
        if type(message) is Tokens:
            if not tokens:
                events.append(Stepped(worker_id, tokens))
            tokens.append(message)
        else:
            tokens = []
            events.append(FromWorker(worker_id, message))
    return events


def _count_batches(feed: BlockFeed, messages: Sequence[ToGateway]) -> None:
    """Tells a feed how many batches its worker has published."""
    for message in messages:
        if isinstance(message, LoadReport):
            feed.counted(message.num_event_batches)


def _post(link: SessionClient, worker_id: WorkerId, frame: bytes) -> None:
    """Sends a frame at once. A broken connection also ends the session's reader."""
    try:
        link.post(frame)
    except ConnectionError as error:
        log.warning("a frame to %s was not sent: %s", worker_id, error)

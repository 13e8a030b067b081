"""The dashboard of one gateway process: takes samples, and sends them to subscribers.

A task takes one sample per second. Changes are encoded only while there are subscribers, once for
all of them. A subscriber that leaves too many frames unread is disconnected. Its page subscribes
again and gets the whole state.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import msgspec

from engine.clock import Clock, unix_time_s
from engine.control import ClusterReport
from router.gateway.dashboard.health import HealthFacts, PoolHealth, health_of
from router.gateway.dashboard.recent import RecentRequests
from router.gateway.dashboard.snapshot import (
    DashboardState,
    OtherProcesses,
    ProcessPart,
    Seen,
    Severed,
    cards_of,
    counts_of,
    newer,
    running_of,
    seen_all,
    served_of,
)
from router.gateway.metrics.meters import GatewayMetrics
from router.gateway.metrics.pools import PoolBoard
from router.gateway.metrics.siblings import Siblings
from router.gateway.versions import Versions
from router.inbox.api_errors import ApiError

log = logging.getLogger(__name__)

SAMPLE_EVERY_S = 1.0
MAX_SUBSCRIBERS = 32  # maximum subscribers per process
MAX_UNREAD = 8  # unread frames after which a subscriber is disconnected

QUESTION = "dashboard"  # name of the query to other gateway processes

_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(ProcessPart).decode


class Feed:
    """A stream of frames and its subscribers."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._is_closed = False
        self.counters: Counter[str] = Counter()

    @property
    def num_subscribers(self) -> int:
        """The present number of subscribers."""
        return len(self._queues)

    def check(self) -> None:
        """Raises ApiError if there are too many subscribers, or if the feed is closed."""
        if self._is_closed or len(self._queues) >= MAX_SUBSCRIBERS:
            self.counters["refused"] += 1
            why = "the server is stopping" if self._is_closed else "too many dashboards are open"
            raise ApiError(why, code="not_ready", status=503)

    async def follow(self, first: Callable[[], bytes]) -> AsyncIterator[bytes]:
        """Subscribes. Yields `first()`, then each frame.

        Ends when the feed closes, or when the subscriber has left too many frames unread.

        `first` is called after the subscription, so no later frame is missed.
        """
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_UNREAD)
        self._queues.add(queue)
        try:
            yield first()
            while (frame := await queue.get()) is not None:
                yield frame
        finally:
            self._queues.discard(queue)

    def publish(self, frame: bytes) -> None:
        """Sends a frame to all subscribers, and disconnects slow subscribers."""
        for queue in list(self._queues):
            if queue.full():
                self.counters["cut off"] += 1
                self._end(queue)
            else:
                queue.put_nowait(frame)

    def close(self) -> None:
        """Ends the streams of all subscribers."""
        self._is_closed = True
        for queue in list(self._queues):
            self._end(queue)

    def _end(self, queue: "asyncio.Queue[bytes | None]") -> None:
        self._queues.discard(queue)
        if queue.full():
            queue.get_nowait()  # drops an old frame to make room for the end mark
        queue.put_nowait(None)


class Dashboard:
    """The state that the dashboard shows, and its stream; a `BackgroundPart`."""

    def __init__(  # noqa: PLR0913 - all that it looks at
        self,
        versions: Versions,
        recent: RecentRequests,
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        board: PoolBoard,
        baton: str,
        siblings: Siblings | None = None,
        takes_orders: bool = True,
    ) -> None:
        self._versions = versions
        self._recent = recent
        self._metrics = metrics
        self._clock = clock
        self._baton = baton
        self._siblings = siblings
        self._others = OtherProcesses()
        if siblings is not None:
            siblings.answers[QUESTION] = lambda: _pack(self._part())
        self._takes_orders = takes_orders
        self._epoch_s = unix_time_s() - clock.now_s()
        self._started_s = unix_time_s()
        self._seen = Seen()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._board = board
        self.feed = Feed()

    async def open(self) -> None:
        """Starts to take samples."""
        self._task = asyncio.create_task(self._watch())

    def stop_draining(self) -> None:
        """Ends the streams of all subscribers now."""
        self.feed.close()

    async def close(self, timeout_s: float) -> None:
        """Ends the streams of all subscribers, and stops sampling."""
        self.feed.close()
        self._closing.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)

    @property
    def news(self) -> ClusterReport | None:
        """The last report of the controller, even if the controller no longer runs."""
        return self._board.cluster

    def state(
        self, seen: Seen | None = None, others: Sequence[ProcessPart] | None = None
    ) -> DashboardState:
        """Returns the present state.

        If `seen` is given, only entries after `seen` are included; if `others`, only these parts.
        """
        versions, now_s = self._versions, self._clock.now_s()
        seen_or_none = seen or Seen()
        requests, samples = newer(self._recent, seen_or_none)
        statuses = versions.workers().values()
        loads = [status.load for status in statuses if status.load is not None]
        is_known = seen is not None and seen.news == self.news
        return DashboardState(
            epoch_s=self._epoch_s,
            now_s=now_s,
            baton=self._baton,
            process=None if self._siblings is None else self._siblings.process,
            started_s=self._started_s,
            health=self._health(),
            pools=self._board.pools,
            can_order=self._takes_orders and self.news is not None and bool(self.news.admin_url),
            has_controller=self._board.is_fresh,
            missing=versions.readiness(),
            bounds=self._recent.bounds,
            queue=versions.queue_len(),
            queue_s=versions.queued_s(),
            in_flight=versions.num_running.total(),
            totals=self._recent.totals,
            hits=self._recent.hits,
            workers=cards_of(versions),
            transfers=versions.transfers(),
            severed=[Severed(*pair, s) for pair, s in versions.severed().items()],
            versions=served_of(versions),
            counts=counts_of(versions.counters(), loads, self.news),
            running=running_of(self._recent, versions, now_s),
            requests=requests,
            samples=samples,
            others=self._others.whole if others is None else list(others),
            cluster=msgspec.UNSET if is_known else self.news,
        )

    def _health(self) -> PoolHealth:
        news, samples = self.news, self._recent.samples
        return health_of(
            HealthFacts(
                missing=self._versions.readiness(),
                pools=self._board.pools,
                has_controller=self._board.is_fresh,
                num_troubles=0 if news is None else len(news.troubles),
                is_settled=news is None or news.settled,
                num_stalled=samples[-1].num_stalled if samples else 0,
            )
        )

    async def encoded(self) -> bytes:
        """Returns the whole state as JSON."""
        await self._ask_others()
        return _encode(self.state())

    def first_frame(self) -> bytes:
        """Returns the first event of a stream, which has the whole state."""
        return _frame(b"state", _encode(self.state()))

    async def tick(self) -> None:
        """Takes a sample, and sends the changes of the state to all subscribers."""
        versions = self._versions
        self._recent.sample(
            self._clock.now_s(),
            queue=versions.queue_len(),
            in_flight=versions.num_running.total(),
            answer_tokens=self._metrics.num_generation_tokens,
        )
        if self.feed.num_subscribers:
            others = await self._ask_others()
            self.feed.publish(_frame(b"tick", _encode(self.state(self._seen, others))))
        self._seen = seen_all(self._recent, self.news)

    async def _ask_others(self) -> list[ProcessPart]:
        """Queries the processes that share the port. Returns their parts with only new entries."""
        if self._siblings is None:
            return []
        parts = []
        for answer in await self._siblings.ask_for(QUESTION):
            try:
                parts.append(_unpack(answer))
            except msgspec.DecodeError as error:
                log.info("a gateway process sends no state: %s", error)
        return self._others.replace(parts)

    def _part(self) -> ProcessPart:
        """Returns the state of this process that the other processes include in their states."""
        assert self._siblings is not None
        versions, recent = self._versions, self._recent
        return ProcessPart(
            process=self._siblings.process,
            started_s=self._started_s,
            health=self._health(),
            queue=versions.queue_len(),
            queue_s=versions.queued_s(),
            in_flight=versions.num_running.total(),
            totals=recent.totals,
            hits=recent.hits,
            transfers=versions.transfers(),
            versions=served_of(versions),
            counts=counts_of(versions.counters(), [], None),
            running=running_of(recent, versions, self._clock.now_s()),
            requests=recent.shown(),
            samples=list(recent.samples),
        )

    async def _watch(self) -> None:
        is_over = partial(asyncio.wait_for, timeout=SAMPLE_EVERY_S)
        while True:
            try:
                await is_over(self._closing.wait())
            except TimeoutError:
                try:
                    await self.tick()
                except Exception:  # a bug in the dashboard must not stop the gateway
                    log.exception("the dashboard has no sample of this second")
                continue
            return


def _frame(event: bytes, data: bytes) -> bytes:
    return b"event: " + event + b"\ndata: " + data + b"\n\n"

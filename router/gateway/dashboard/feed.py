"""Sends the same frames to all subscribers of a stream; a slow subscriber delays no other.

Each frame is encoded once. A subscriber that leaves too many frames unread is disconnected: it
subscribes again and gets the whole state.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

from router.inbox.api_errors import ApiError

MAX_SUBSCRIBERS = 32  # per process
MAX_UNREAD = 8  # frames per subscriber


class Feed:
    """The subscribers of one stream."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._is_closed = False
        self.counters: Counter[str] = Counter()

    @property
    def num_subscribers(self) -> int:
        """The number of subscribers now."""
        return len(self._queues)

    def check(self) -> None:
        """Raises ApiError if there are too many subscribers."""
        if self._is_closed or len(self._queues) >= MAX_SUBSCRIBERS:
            self.counters["refused"] += 1
            why = "the server is stopping" if self._is_closed else "too many dashboards are open"
            raise ApiError(why, code="not_ready", status=503)

    async def follow(self, first: Callable[[], bytes]) -> AsyncIterator[bytes]:
        """Yields `first()`, then each frame, until the feed closes or the subscriber is
        disconnected.

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
        """Sends a frame to all subscribers."""
        for queue in list(self._queues):
            if queue.full():
                self.counters["cut off"] += 1
                self._end(queue)
            else:
                queue.put_nowait(frame)

    def close(self) -> None:
        """Ends all streams."""
        self._is_closed = True
        for queue in list(self._queues):
            self._end(queue)

    def _end(self, queue: "asyncio.Queue[bytes | None]") -> None:
        self._queues.discard(queue)
        if queue.full():
            queue.get_nowait()  # dropping an old frame makes room for the end
        queue.put_nowait(None)

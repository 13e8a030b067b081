"""Threads for bodies that take long to parse, with bounded queues.

There are two pools, so that a body of a few kilobytes never waits behind a body of a mebibyte. Each
pool limits the bytes of bodies that wait or are being parsed; one tenant may use half of this
limit. A body above the limit is refused; an empty pool accepts any body.

Tenants have equal shares of a pool's bytes (`router.inbox.fair_queue`). A tenant that uses a thread
never gets the last free thread. Parsing cannot be interrupted, so this thread is kept for the next
tenant.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import NamedTuple, TypeVar

from engine.devices.heap import return_freed_memory
from router.inbox.api_errors import ApiError
from router.inbox.fair_queue import TenantQueue

WIDE_BODY_BYTES = 65_536
NARROW_BYTES = 4 * 2**20
WIDE_BYTES = 16 * 2**20  # limit of the pool for large bodies, some 8 s of tokenising in one thread
FREE_AFTER_S = 5.0  # seconds; parsing 1 MiB takes 150 MB, which threads would otherwise keep
NUM_THREADS = 2  # number of threads per pool
THREADS_OF_TENANT = NUM_THREADS - 1

ResultT = TypeVar("ResultT")


class _QueuedBody(NamedTuple):
    """A body that waits or is being parsed. `start` is done when the body has a thread."""

    tenant: str
    num_bytes: int
    start: "Future[None]"


class ParsePool:
    """A few threads with a bounded queue of bodies."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=name)
        self._lock = Lock()  # protects the fields below, which threads change
        self._num_bytes = 0
        self._bytes_of: Counter[str] = Counter()
        self._running: Counter[str] = Counter()  # number of busy threads, by tenant
        self._waiting: TenantQueue[str, _QueuedBody] = TenantQueue()

    @property
    def num_bytes(self) -> int:
        """The number of bytes of bodies that wait or are being parsed."""
        return self._num_bytes

    async def run(self, tenant: str, num_bytes: int, parse: Callable[[], ResultT]) -> ResultT:
        """Runs `parse` in a thread and returns its result. Raises ApiError if the pool is full."""
        body = self._enter(tenant, num_bytes)
        try:
            if not body.start.done():
                await asyncio.wrap_future(body.start)
            future = self._threads.submit(parse)
        except BaseException:
            self._leave(body)
            raise
        future.add_done_callback(partial(self._leave, body))
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # its error has a traceback, which refers to this frame and the body

    def submit(self, work: Callable[[], None]) -> None:
        """Runs short work of the gateway itself in a thread."""
        self._threads.submit(work)

    def _enter(self, tenant: str, num_bytes: int) -> _QueuedBody:
        """Adds a body to the queue, and starts it if a thread is free. Raises ApiError."""
        body = _QueuedBody(tenant, num_bytes, Future())
        with self._lock:
            total, theirs = self._num_bytes, self._bytes_of[tenant]
            is_full = total > 0 and total + num_bytes > self._max_bytes
            has_enough = theirs > 0 and theirs + num_bytes > self._max_bytes // 2
            if is_full or has_enough:
                raise _overloaded()
            self._num_bytes += num_bytes
            self._bytes_of[tenant] += num_bytes
            self._waiting.put(tenant, body, num_bytes)
        self._start_waiting()
        return body

    def _leave(self, body: _QueuedBody, _: object = None) -> None:
        """Removes a body after it was parsed, or after its client has disconnected."""
        has_thread = not body.start.cancel()
        with self._lock:
            self._num_bytes -= body.num_bytes
            _subtract(self._bytes_of, body.tenant, body.num_bytes)
            if has_thread:
                _subtract(self._running, body.tenant, 1)
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Starts waiting bodies while threads are free."""
        while True:
            with self._lock:
                body = self._next()
            if body is None:
                return
            if not body.start.set_running_or_notify_cancel():
                self._return_thread(body)
                continue
            body.start.set_result(None)

    def _next(self) -> _QueuedBody | None:
        """Returns the next body that gets a free thread; None if there is no body or no thread."""
        if self._running.total() >= NUM_THREADS:
            return None
        body = self._waiting.pop(lambda tenant: self._running[tenant] < THREADS_OF_TENANT)
        if body is not None:
            self._running[body.tenant] += 1
        return body

    def _return_thread(self, body: _QueuedBody) -> None:
        with self._lock:
            _subtract(self._running, body.tenant, 1)


class ParsePools:
    """One pool for small bodies, and one for large bodies."""

    def __init__(
        self, free: Callable[[], None] = return_freed_memory, free_after_s: float = FREE_AFTER_S
    ) -> None:
        """Some seconds after a large body, a thread calls `free`. Needs no running event loop."""
        self.narrow = ParsePool("parse", NARROW_BYTES)
        self.wide = ParsePool("parse-long", WIDE_BYTES)
        self._free = free
        self._free_after_s = free_after_s
        self._freeing: asyncio.TimerHandle | None = None

    async def run(self, tenant: str, num_bytes: int, parse: Callable[[], ResultT]) -> ResultT:
        """Runs `parse` in the pool for bodies of this size. Raises ApiError if the pool is full."""
        if num_bytes <= WIDE_BODY_BYTES:
            return await self.narrow.run(tenant, num_bytes, parse)
        try:
            return await self.wide.run(tenant, num_bytes, parse)
        finally:
            if self._freeing is None:
                loop = asyncio.get_running_loop()
                self._freeing = loop.call_later(self._free_after_s, self._free_memory)

    def _free_memory(self) -> None:
        self._freeing = None
        self.wide.submit(self._free)


def _subtract(counts: Counter[str], tenant: str, number: int) -> None:
    counts[tenant] -= number
    if not counts[tenant]:
        del counts[tenant]


def _overloaded() -> ApiError:
    message = "too many long requests are being read: try again"
    return ApiError(message, code="overloaded", status=503)

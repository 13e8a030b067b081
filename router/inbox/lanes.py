"""Threads for bodies that take long to parse, with bounded queues.

There are two lanes, so that a body of a few kilobytes never waits behind one of a mebibyte. Each
lane bounds the bytes of bodies that wait or are being parsed. One tenant may hold half of them. A
body that does not fit is refused; an empty lane takes any body.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TypeVar

from router.inbox.api_errors import ApiError

WIDE_BODY_BYTES = 65_536
NARROW_BYTES = 4 * 2**20
WIDE_BYTES = 16 * 2**20  # some 8 s of tokenising in one thread
NUM_THREADS = 2  # of each lane

ResultT = TypeVar("ResultT")


class Lane:
    """A few threads, and a bounded queue in front of them."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=name)
        self._lock = Lock()  # guards the numbers below, which threads change
        self._num_bytes = 0
        self._bytes_of: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes of bodies that wait or are being parsed."""
        return self._num_bytes

    async def run(self, tenant: str, num_bytes: int, parse: Callable[[], ResultT]) -> ResultT:
        """Calls `parse` in a thread and returns its result. Raises ApiError if the lane is full."""
        self._enter(tenant, num_bytes)
        future = self._threads.submit(parse)
        future.add_done_callback(partial(self._leave, tenant, num_bytes))
        return await asyncio.wrap_future(future)

    def _enter(self, tenant: str, num_bytes: int) -> None:
        with self._lock:
            total, theirs = self._num_bytes, self._bytes_of[tenant]
            is_full = total > 0 and total + num_bytes > self._max_bytes
            has_enough = theirs > 0 and theirs + num_bytes > self._max_bytes // 2
            if is_full or has_enough:
                raise _overloaded()
            self._num_bytes += num_bytes
            self._bytes_of[tenant] += num_bytes

    def _leave(self, tenant: str, num_bytes: int, _: "Future[ResultT]") -> None:
        with self._lock:
            self._num_bytes -= num_bytes
            self._bytes_of[tenant] -= num_bytes
            if not self._bytes_of[tenant]:
                del self._bytes_of[tenant]


class Lanes:
    """One lane for each size of body."""

    def __init__(self) -> None:
        self.narrow = Lane("parse", NARROW_BYTES)
        self.wide = Lane("parse-long", WIDE_BYTES)

    async def run(self, tenant: str, num_bytes: int, parse: Callable[[], ResultT]) -> ResultT:
        """Does `Lane.run` in the lane for a body of this size."""
        lane = self.narrow if num_bytes <= WIDE_BODY_BYTES else self.wide
        return await lane.run(tenant, num_bytes, parse)


def _overloaded() -> ApiError:
    message = "too many long requests are being read: try again"
    return ApiError(message, code="overloaded", status=503)

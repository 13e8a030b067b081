"""Fair queues: each tenant gets an equal share of threads, and of the event loop.

`TenantQueue` is pure: no thread, no clock. Each item has a weight, such as its bytes. The next item
belongs to the tenant with the least weight served so far. When a tenant returns after it had no
items, it starts at the least weight of the waiting tenants. So idle time earns no credit. When no
work waits, all tenants are equal again.

`LoopQueue` is for work that would block the event loop for too long. Such work is cut into pieces
of a few milliseconds. Each iteration of the loop runs one waiting piece. So the loop serves all
connections between two pieces, however many answers are being encoded. Threads would not help: such
work holds the interpreter lock, and the loop would wait for this lock for longer than one piece
takes.

Source: Goyal, Vin and Cheng, Start-time Fair Queueing, SIGCOMM 1996.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from heapq import nlargest
from typing import Generic, TypeVar

MAX_IDLE_TENANTS = 512  # maximum number of remembered tenants without waiting work

TenantT = TypeVar("TenantT", bound=Hashable)
ItemT = TypeVar("ItemT")


class TenantQueue(Generic[TenantT, ItemT]):
    """Queued items by tenant, each tenant's items in the order in which they were added."""

    def __init__(self) -> None:
        self._queues: dict[TenantT, deque[tuple[ItemT, float]]] = {}
        self._got: dict[TenantT, float] = {}  # weight served so far, comparable among tenants

    def put(self, tenant: TenantT, item: ItemT, weight: float = 1.0) -> None:
        """Adds an item after the other items of its tenant."""
        if tenant not in self._queues:
            self._got[tenant] = max(self._least, self._got.get(tenant, 0.0))
            self._queues[tenant] = deque()
        self._queues[tenant].append((item, weight))

    def pop(self, may: Callable[[TenantT], bool] | None = None) -> ItemT | None:
        """Removes and returns the next item of a tenant that `may` be served; None without any."""
        waiting = [tenant for tenant in self._queues if may is None or may(tenant)]
        if not waiting:
            return None
        tenant = min(waiting, key=self._got.__getitem__)  # among equals, the first tenant
        queue = self._queues[tenant]
        item, weight = queue.popleft()
        self._got[tenant] += weight
        if not queue:
            del self._queues[tenant]
            self._remove()
        return item

    @property
    def _least(self) -> float:
        """The least weight served so far to any waiting tenant."""
        return min((self._got[tenant] for tenant in self._queues), default=0.0)

    def _remove(self) -> None:
        """Removes the weights of tenants without waiting work. Keeps only the largest ones."""
        if not self._queues:
            self._got.clear()
        elif len(self._got) > 2 * (len(self._queues) + MAX_IDLE_TENANTS):
            others = [tenant for tenant in self._got if tenant not in self._queues]
            kept = nlargest(MAX_IDLE_TENANTS, others, key=self._got.__getitem__)
            self._got = {tenant: self._got[tenant] for tenant in (*self._queues, *kept)}


Turn = Callable[[], Awaitable[None]]  # returns when the caller may run one piece of work


async def no_turn() -> None:
    """A `Turn` that never waits, for short work."""


class LoopQueue:
    """The pieces of work that wait for an event loop. The constructor needs no running loop."""

    def __init__(self) -> None:
        self._waiting: TenantQueue[str, asyncio.Future[None]] = TenantQueue()
        self._is_running = False

    async def wait(self, tenant: str) -> None:
        """Waits until a tenant may run one piece of work, in the current iteration of the loop."""
        loop = asyncio.get_running_loop()
        piece = loop.create_future()
        self._waiting.put(tenant, piece)
        if not self._is_running:
            self._is_running = True
            loop.call_soon(self._start_next)
        await piece

    def _start_next(self) -> None:
        """Lets the next piece run, and schedules itself for the next iteration of the loop."""
        while (piece := self._waiting.pop()) is not None:
            if not piece.done():  # otherwise its client has disconnected
                piece.set_result(None)
                asyncio.get_running_loop().call_soon(self._start_next)
                return
        self._is_running = False

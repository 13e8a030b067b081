"""Fair queueing of work of several tenants: each tenant gets an equal share.

Pure: no thread, no clock. Each item has a weight, such as its bytes. The next item belongs to the
tenant with the least weight served so far. A tenant that returns starts at the least weight of the
waiting tenants, so idle time earns no credit. When no work waits, all tenants are equal again.

Source: Goyal, Vin and Cheng, Start-time Fair Queueing, SIGCOMM 1996.
"""

from collections import deque
from collections.abc import Callable, Hashable
from heapq import nlargest
from typing import Generic, TypeVar

MAX_REMEMBERED = 512  # tenants without waiting work

TenantT = TypeVar("TenantT", bound=Hashable)
ItemT = TypeVar("ItemT")


class TenantTurns(Generic[TenantT, ItemT]):
    """Items by tenant, in the order in which each tenant added them."""

    def __init__(self) -> None:
        self._queues: dict[TenantT, deque[tuple[ItemT, float]]] = {}
        self._got: dict[TenantT, float] = {}  # weight served so far, with one origin for all

    def put(self, tenant: TenantT, item: ItemT, weight: float = 1.0) -> None:
        """Adds an item after the other items of its tenant."""
        if tenant not in self._queues:
            self._got[tenant] = max(self._least, self._got.get(tenant, 0.0))
            self._queues[tenant] = deque()
        self._queues[tenant].append((item, weight))

    def take(self, may: Callable[[TenantT], bool] | None = None) -> ItemT | None:
        """Removes and returns the next item of a tenant that `may` be served; None without any."""
        waiting = [tenant for tenant in self._queues if may is None or may(tenant)]
        if not waiting:
            return None
        tenant = min(waiting, key=self._got.__getitem__)  # ties: the first
        queue = self._queues[tenant]
        item, weight = queue.popleft()
        self._got[tenant] += weight
        if not queue:
            del self._queues[tenant]
            self._remove()
        return item

    @property
    def _least(self) -> float:
        """The least weight served so far to a waiting tenant."""
        return min((self._got[tenant] for tenant in self._queues), default=0.0)

    def _remove(self) -> None:
        """Removes the weights of tenants without waiting work, except the largest weights."""
        if not self._queues:
            self._got.clear()
        elif len(self._got) > 2 * (len(self._queues) + MAX_REMEMBERED):
            others = [tenant for tenant in self._got if tenant not in self._queues]
            kept = nlargest(MAX_REMEMBERED, others, key=self._got.__getitem__)
            self._got = {tenant: self._got[tenant] for tenant in (*self._queues, *kept)}

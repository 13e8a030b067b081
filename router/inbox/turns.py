"""Waiting work of several tenants, of which each gets an equal share.

Pure: no thread, no clock. Each item has a weight, such as its bytes. The next item is that of the
tenant which got least. A tenant that comes begins with what the next one has got, so it is not owed
for a rest. Once nothing waits, all are equal again.

Source: Goyal, Vin and Cheng, Start-time Fair Queueing, SIGCOMM 1996.
"""

from collections import deque
from collections.abc import Callable, Hashable
from heapq import nlargest
from typing import Generic, TypeVar

MAX_REMEMBERED = 512  # tenants that do not wait

TenantT = TypeVar("TenantT", bound=Hashable)
ItemT = TypeVar("ItemT")


class TenantTurns(Generic[TenantT, ItemT]):
    """Items by tenant, each tenant's in the order in which they came."""

    def __init__(self) -> None:
        self._queues: dict[TenantT, deque[tuple[ItemT, float]]] = {}
        self._got: dict[TenantT, float] = {}  # weights, counted from a common begin

    def put(self, tenant: TenantT, item: ItemT, weight: float = 1.0) -> None:
        """Adds an item behind the others of its tenant."""
        if tenant not in self._queues:
            self._got[tenant] = max(self._least, self._got.get(tenant, 0.0))
            self._queues[tenant] = deque()
        self._queues[tenant].append((item, weight))

    def take(self, may: Callable[[TenantT], bool] | None = None) -> ItemT | None:
        """Removes and returns the next item of the tenants that `may` have one; None without."""
        waiting = [tenant for tenant in self._queues if may is None or may(tenant)]
        if not waiting:
            return None
        tenant = min(waiting, key=self._got.__getitem__)  # of equal ones the first
        queue = self._queues[tenant]
        item, weight = queue.popleft()
        self._got[tenant] += weight
        if not queue:
            del self._queues[tenant]
            self._forget()
        return item

    @property
    def _least(self) -> float:
        """What the tenant got that is next."""
        return min((self._got[tenant] for tenant in self._queues), default=0.0)

    def _forget(self) -> None:
        """Drops what tenants got that do not wait, but for those that got most."""
        if not self._queues:
            self._got.clear()
        elif len(self._got) > 2 * (len(self._queues) + MAX_REMEMBERED):
            others = [tenant for tenant in self._got if tenant not in self._queues]
            kept = nlargest(MAX_REMEMBERED, others, key=self._got.__getitem__)
            self._got = {tenant: self._got[tenant] for tenant in (*self._queues, *kept)}

"""The next deadline of all requests, found at once.

Each message about a request moves its deadline to a later time, but the heap is not updated. The
time in the heap is a lower bound: no deadline of the request is due before it. When that time
comes, the true deadline is computed and pushed. So a request costs one heap entry at each stage of
its life, and one more for each full timeout that passes.
"""

from collections.abc import Container, Mapping
from heapq import heapify, heappop, heappush

from engine.config import RouterConfig
from engine.messages import RequestId
from router.machine.flight import Flight

# The heap is rebuilt when it has more than this many entries per request, plus `LEAST_STALE`.
MAX_STALE = 4
LEAST_STALE = 64


class Deadlines:
    """A lower bound of the deadline of each request."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._noted: dict[RequestId, float] = {}
        self._heap: list[tuple[float, RequestId]] = []  # may hold outdated entries

    def record(self, request_id: RequestId, due_s: float) -> None:
        """Sets the lower bound of a request's deadline; replaces an earlier bound."""
        if self._noted.get(request_id) != due_s:
            self._noted[request_id] = due_s
            heappush(self._heap, (due_s, request_id))
            if len(self._heap) > MAX_STALE * len(self._noted) + LEAST_STALE:
                self._heap = [(at_s, i) for i, at_s in self._noted.items()]
                heapify(self._heap)

    def remove(self, request_id: RequestId) -> None:
        """Removes a request."""
        self._noted.pop(request_id, None)

    def soonest_s(self) -> float | None:
        """Returns the least of all lower bounds; None without requests."""
        heap = self._heap
        while heap and self._noted.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now_s: float) -> set[RequestId]:
        """Removes and returns the requests whose lower bound has passed.

        The caller must `watch` each of them again that has not finished.
        """
        due: set[RequestId] = set()
        while (soonest_s := self.soonest_s()) is not None and soonest_s <= now_s:
            _, request_id = heappop(self._heap)
            del self._noted[request_id]
            due.add(request_id)
        return due

    # ------------------------------------------------------------ the deadlines of a request

    def watch(self, flight: Flight) -> None:
        """Records the next deadline of a request. Call it when the deadline may be sooner now."""
        self.record(flight.request.request_id, self.due_s(flight))

    def due_s(self, flight: Flight) -> float:
        """Returns the time of a request's next deadline. A follower held back has no deadline."""
        attempt = flight.attempt
        due_s = self.deadline_s(flight)
        if attempt is not None:
            if attempt.offer_due_s is not None:
                due_s = min(due_s, attempt.offer_due_s)
            if attempt.hedge_due_s is not None:
                due_s = min(due_s, attempt.hedge_due_s)
            if attempt.move is not None and attempt.move.copy_due_s is not None:
                due_s = min(due_s, attempt.move.copy_due_s)
            if attempt.move is not None and attempt.move.gather_until_s is not None:
                due_s = min(due_s, attempt.move.gather_until_s)
        return due_s

    def deadline_s(self, flight: Flight) -> float:
        """Returns until when a request may wait for a worker, or for its worker's next message."""
        config = self._config
        if flight.attempt is None:
            overdue_s = flight.last_news_s + config.queue_timeout_s
            if flight.tokens or flight.request.deadline_s is None:
                return overdue_s
            return min(overdue_s, flight.request.deadline_s)
        timeout_s = config.progress_timeout_s
        if not flight.attempt.prefilled:
            timeout_s += flight.attempt.base_len / config.slowest_prefill_tokens_per_s
        return flight.last_news_s + timeout_s

    def validate(self, flights: Mapping[RequestId, Flight], held: Container[RequestId]) -> None:
        """Asserts that each request has a lower bound that is not after its deadline.

        Followers held back have no entry.
        """
        assert {(due_s, i) for i, due_s in self._noted.items()} <= set(self._heap)
        assert self._noted.keys() == {i for i in flights if i not in held}
        assert all(due_s <= self.due_s(flights[i]) for i, due_s in self._noted.items())

"""The next deadline of all requests, found at once.

Each message about a request moves its deadline to a later time. That is not noted here. What is
noted is a time before which nothing of the request is due. At that time the true deadline is looked
up and noted anew. So a request costs something at each stage of its life, and then once in the time
that it may be without news.
"""

from collections.abc import Container, Mapping
from heapq import heapify, heappop, heappush

from engine.config import RouterConfig
from engine.messages import RequestId
from router.machine.flight import Flight

MAX_STALE = 4  # entries for each request, and some
LEAST_STALE = 64


class Deadlines:
    """For each request a time before which nothing of it is due."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._noted: dict[RequestId, float] = {}
        self._heap: list[tuple[float, RequestId]] = []  # what is not noted any more stays for now

    def note(self, request_id: RequestId, due_s: float) -> None:
        """Nothing of it falls due before, whatever was noted."""
        if self._noted.get(request_id) != due_s:
            self._noted[request_id] = due_s
            heappush(self._heap, (due_s, request_id))
            if len(self._heap) > MAX_STALE * len(self._noted) + LEAST_STALE:
                self._heap = [(at_s, i) for i, at_s in self._noted.items()]
                heapify(self._heap)

    def forget(self, request_id: RequestId) -> None:
        """Nothing of it falls due any more."""
        self._noted.pop(request_id, None)

    def soonest_s(self) -> float | None:
        """Nothing falls due before. None: nothing falls due at all."""
        heap = self._heap
        while heap and self._noted.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now_s: float) -> set[RequestId]:
        """Requests of which something may have fallen due. They have to be noted again."""
        due: set[RequestId] = set()
        while (soonest_s := self.soonest_s()) is not None and soonest_s <= now_s:
            _, request_id = heappop(self._heap)
            del self._noted[request_id]
            due.add(request_id)
        return due

    # ------------------------------------------------------------ the deadlines of a request

    def watch(self, flight: Flight) -> None:
        """Notes the next deadline of a request. To be called if that may be sooner than before."""
        self.note(flight.request.request_id, self.due_s(flight))

    def due_s(self, flight: Flight) -> float:
        """When the next deadline of a request falls due. A follower held back has none."""
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
        """When the wait ends for a worker, or for the next message about a placed request."""
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
        """Asserts that each request is noted in time, and is found when it is due.

        Followers held back are not noted.
        """
        assert {(due_s, i) for i, due_s in self._noted.items()} <= set(self._heap)
        assert self._noted.keys() == {i for i in flights if i not in held}
        assert all(due_s <= self.due_s(flights[i]) for i, due_s in self._noted.items())

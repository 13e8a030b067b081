"""The next deadline of all requests, found at once.

Each message about a request moves its deadline to a later time. That is not noted here. What is
noted is a time before which nothing of the request is due. At that time the true deadline is looked
up and noted anew. So a request costs something at each stage of its life, and then once in the time
that it may be without news.
"""

from heapq import heapify, heappop, heappush

from engine.messages import RequestId

MAX_STALE = 4  # entries for each request, and some
LEAST_STALE = 64


class Deadlines:
    """For each request a time before which nothing of it is due."""

    def __init__(self) -> None:
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

    def noted_s(self, request_id: RequestId) -> float | None:
        """Returns the noted time of a request."""
        return self._noted.get(request_id)

    def validate(self) -> None:
        """Asserts that what is noted is found."""
        assert {(due_s, i) for i, due_s in self._noted.items()} <= set(self._heap)

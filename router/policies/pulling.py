"""Workers from which a prompt's prefix could be pulled before another one computes the rest."""

from collections.abc import Hashable
from dataclasses import dataclass

from engine.messages import WorkerId
from router.cluster.view import WorkerView
from router.policies.base import Asked, Worker
from router.policies.candidates import predicted_ready_s


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that holds more of the prompt than the one that is to compute it."""

    worker_id: WorkerId
    num_tokens: int
    answers_s: float = 0.0  # seconds until it answers, beside those of any pull


@dataclass(frozen=True, slots=True)
class _Found:
    """Equally good holders."""

    num_tokens: int
    workers: list[WorkerId]
    answers_s: float


class Holders:
    """The workers that hold a prefix of a prompt, the longest first."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._found: dict[Hashable, _Found] = {}  # by kind of sink
        self.matched = dict(asked.known.matched_tokens())
        suspects = {source for source, _ in asked.view.severed}
        live = asked.view.workers
        self._ranked = sorted(
            (-num_tokens, worker_id)
            for worker_id, num_tokens in self.matched.items()
            if worker_id in live and worker_id not in suspects
        )

    def best_for(self, sink: Worker) -> Holder | None:
        """The one that holds most of what this worker lacks and can answer first; equals take
        turns by chance.
        """
        sink_id, worker = sink
        here = self.matched.get(sink_id, 0)
        if not self._asked.need.may_pull or not self._ranked or -self._ranked[0][0] <= here:
            return None
        # Workers of one kind, perhaps a thousand, can pull from the same holders: look up once.
        info = worker.info
        kind = (info.fingerprint, info.kv_wire_dtype, info.layout)
        if kind not in self._found:
            self._found[kind] = self._soonest(self._most_for(worker))
        found = self._found[kind]
        if found.num_tokens <= here:
            return None
        return Holder(self._asked.rng.choice(found.workers), found.num_tokens, found.answers_s)

    def _most_for(self, sink: WorkerView) -> tuple[int, list[WorkerId]]:
        """Returns the workers with the longest prefix that this sink can pull, and its tokens."""
        most: int = 0
        equals: list[WorkerId] = []
        for negative, worker_id in self._ranked:
            if -negative < most:
                break
            if sink.can_pull_from(self._asked.view.workers[worker_id]):
                most = -negative
                equals.append(worker_id)
        return most, equals

    def _soonest(self, holders: tuple[int, list[WorkerId]]) -> "_Found":
        """Returns the workers that can answer first: a worker handles no event during a step."""
        num_tokens, equals = holders
        waits_s = [self._answers_s(worker_id) for worker_id in equals]
        least_s = min(waits_s, default=0.0)
        pairs = zip(equals, waits_s, strict=True)
        return _Found(num_tokens, [i for i, wait_s in pairs if wait_s == least_s], least_s)

    def _answers_s(self, worker_id: WorkerId) -> float:
        asked = self._asked
        ready_s = predicted_ready_s(asked.view.workers[worker_id], asked.costs, asked.now_s)
        return min(ready_s or 0.0, asked.costs.offer_s())


@dataclass(frozen=True, slots=True)
class Bid:
    """The cost of having a worker compute a prompt, and the prefix that it pulls first, if any."""

    seconds: float
    source: Holder | None = None


def bid(asked: Asked, sink: Worker, num_cached: int, holder: Holder | None) -> Bid | None:
    """Returns the quicker of computing all and pulling first. None if no time is known."""
    worker, num_tokens = sink[1], asked.need.num_tokens
    compute_s = asked.costs.prefill_s(worker, num_tokens, num_cached)
    if compute_s is None:
        return None
    if holder is None or holder.num_tokens <= num_cached:
        return Bid(compute_s)
    pull_s = asked.costs.pull_s(worker, holder.num_tokens - num_cached)
    if pull_s is not None:
        pull_s += holder.answers_s
    rest_s = asked.costs.prefill_s(worker, num_tokens, holder.num_tokens)
    if pull_s is None or rest_s is None or pull_s + rest_s >= compute_s:
        return Bid(compute_s)
    return Bid(pull_s + rest_s, holder)

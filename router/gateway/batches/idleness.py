"""Computes how many requests of batches may run now. Pure.

The pools are idle if no client's request runs or waits here, and no worker reports work of other
gateways. A client's request that arrives has to wait for the running steps to end, so steps of
batches are kept short. A batch gets slots in the decode workers up to `max_running`, as long as a
step takes at most `STRETCH` times as long as a step of one sequence. Prompts of batches are sent to
the workers one by one. Several short prompts are sent together, if they take no longer than one
step of one sequence.

While other work runs, batches get `share` of these slots, by default none.

After other work has ended, the pools count as idle only after `idle_s` more seconds, because
requests arrive in bursts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, inf

from router.port import WorkerStatus

STRETCH = 1.25
LEAST_STEP_S = 0.002  # prompt time that a worker may always have queued


@dataclass(frozen=True, slots=True)
class PoolsLoad:
    """The load of a gateway's pools, and the number of requests at the gateway."""

    workers: tuple[WorkerStatus, ...]
    num_other: int  # requests of clients that run at this gateway now
    num_running: int  # requests of batches that workers have now
    is_ready: bool = True

    @property
    def is_busy(self) -> bool:
        """True if a client's request runs here, or a worker reports work of other gateways."""
        return self.num_other > 0 or any(worker.num_foreign > 0 for worker in self.workers)


def num_places(workers: Iterable[WorkerStatus], num_running: int) -> int:
    """Returns the number of sequences that idle decode workers can run with short steps.

    The result has at least one sequence per worker.

    The step time is known for the present number of sequences. Each sequence after the first is
    assumed to add the same time, so the result converges over several steps. A single running
    sequence gives no estimate of the added time. Then a second sequence is allowed, even if steps
    become too long.
    """
    decoders = [worker for worker in workers if worker.role.decodes]
    return sum(_places_of(worker, num_running / len(decoders)) for worker in decoders)


def _places_of(worker: WorkerStatus, num_running: float) -> int:
    step_s, alone_s = worker.forecast.tpot_s, worker.forecast.alone_s
    if step_s is None or alone_s is None:
        return worker.max_running
    if num_running <= 1:
        return min(2, worker.max_running)
    if step_s <= alone_s:
        return worker.max_running
    each_s = (step_s - alone_s) / (num_running - 1)
    return max(min(1 + floor((STRETCH - 1) * alone_s / each_s), worker.max_running), 1)


def has_time(workers: Iterable[WorkerStatus]) -> bool:
    """True if some worker could soon compute another prompt of a batch."""
    everyone = list(workers)
    prefillers = [worker for worker in everyone if worker.role.prefills]
    alone_s = max((worker.forecast.alone_s or 0.0 for worker in everyone), default=0.0)
    bound_s = max(alone_s, LEAST_STEP_S)
    return not prefillers or any(_left_s(worker) < bound_s for worker in prefillers)


def _left_s(worker: WorkerStatus) -> float:
    """Returns the predicted seconds until a worker has computed its prompts; infinite if
    unknown.
    """
    if not worker.reserved_tokens:
        return 0.0
    return inf if worker.forecast.wait_s is None else worker.forecast.wait_s


class Idleness:
    """Decides how many batch requests may run, and remembers when the pools were last busy."""

    def __init__(self, *, share: float, idle_s: float) -> None:
        self._share = share
        self._idle_s = idle_s
        self._busy_s = -inf  # time at which work other than batches was last seen

    def record_other(self, now_s: float) -> None:
        """Records that a request outside batches has arrived."""
        self._busy_s = max(self._busy_s, now_s)

    def num_beside(self, load: PoolsLoad) -> int:
        """Returns the number of batch requests that may run while other work runs."""
        if not (load.is_ready and self._share):
            return 0
        return floor(self._share * num_places(load.workers, load.num_running))

    def num_allowed(self, load: PoolsLoad, now_s: float) -> int:
        """Returns the number of batch requests that may run now."""
        if load.is_busy:
            self.record_other(now_s)
        if not load.is_ready:
            return 0
        if load.is_busy or now_s - self._busy_s < self._idle_s:
            return self.num_beside(load)
        return num_places(load.workers, load.num_running)

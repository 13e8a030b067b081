"""The records of all workers, and the state changes that orders, moves and deadlines have in
common.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count

from deploy.pools.events import PoolEffect, SetWorkerRole, StartWorker, StopWorker
from deploy.pools.state import PoolState
from deploy.pools.workers.record import PoolWorker, WorkerState
from engine.control import SERVING_ROLES, Member, by_number, with_role
from engine.messages import Role, WorkerId

NOT_STARTED = "did not start: "


class PoolWorkers:
    """Owns the record of each worker. A method that yields effects changes the record first."""

    def __init__(self, state: PoolState) -> None:
        self.by_id: dict[WorkerId, PoolWorker] = {}
        self.took_over = False  # True after an earlier controller: any serving workers suffice
        # True if workers wait for later nodes: any serving ones suffice.
        self.waits_for_nodes = False
        self.state = state
        self._num_starts = 0

    # ------------------------------------------------------------ questions

    def starting(self, worker_id: WorkerId, start: int) -> PoolWorker | None:
        """Returns the worker if `start` is its latest start and still under way; otherwise None."""
        worker = self.by_id.get(worker_id)
        if worker is None or worker.state is not WorkerState.STARTING or worker.start != start:
            return None
        return worker

    def at(self, worker_id: WorkerId, address: str) -> PoolWorker | None:
        """Returns the worker if it still runs at this address; otherwise None."""
        worker = self.by_id.get(worker_id)
        if worker is None or worker.address != address or not worker.runs:
            return None
        return worker

    def members(self) -> tuple[Member, ...]:
        """Returns the running workers as members, ordered by name."""
        return tuple(
            Member(worker.worker_id, worker.address, worker.version, worker.context_len)
            for worker in sorted(self.by_id.values(), key=lambda w: by_number(w.worker_id))
            if worker.runs and worker.address is not None
        )

    def listed(self) -> list[str]:
        """Returns a text with name and role for each worker, sorted for display."""
        workers = sorted(self.by_id.values(), key=PoolWorker.order)
        return [with_role(worker.worker_id, worker.shown_role) for worker in workers]

    def kept(self) -> list[WorkerId]:
        """Returns the workers that an operator has drained and that keep running."""
        return [worker.worker_id for worker in self.by_id.values() if self._is_kept(worker)]

    def room(self) -> int:
        """Returns how many workers can serve: the limit minus the drained workers that keep
        running.
        """
        return self.state.limits.max_workers - len(self.kept())

    def serve_enough(self) -> bool:
        """True if enough workers serve, so that gateways may start.

        At a first start, all wanted workers must serve.
        """
        workers = self.by_id.values()
        if self.took_over or self.waits_for_nodes:
            return any(w.prefills() for w in workers) and any(w.decodes() for w in workers)
        current = self.state.intent.current
        serving = Counter(w.target for w in workers if w.is_connected and w.version == current.name)
        return all(serving[role] >= current.pools.of(role) for role in SERVING_ROLES)

    def _is_kept(self, worker: PoolWorker) -> bool:
        if worker.target is None:
            return worker.worker_id in self.state.intent.drained
        return worker.target is Role.DRAINED and not worker.leaves and not worker.is_spare

    # ------------------------------------------------------------ starts

    def begin(self, version: str, role: Role, now_s: float) -> WorkerId:
        """Adds a worker that waits for its first start. Returns its name."""
        worker_id = self._free_name()
        self.state.restarts.remove(worker_id)
        self.by_id[worker_id] = PoolWorker(worker_id, role, now_s, version=version)
        return worker_id

    def start_due(self, now_s: float) -> Iterator[PoolEffect]:
        """Starts all waiting workers whose restart is due."""
        for worker in list(self.by_id.values()):
            is_due = self.state.restarts.is_due(worker.worker_id, now_s)
            version = self.state.intent.version(worker.version)
            if worker.state is WorkerState.WAITING and is_due and version is not None:
                self._num_starts += 1
                worker.start = self._num_starts
                self.enter(worker, WorkerState.STARTING, now_s)
                self.state.restarts.begun(worker.worker_id, now_s)
                assert worker.target is not None
                yield StartWorker(worker.worker_id, worker.target, worker.start, version)

    # ------------------------------------------------------------ changes of state

    def enter(self, worker: PoolWorker, state: WorkerState, now_s: float) -> None:
        """Sets a worker's state."""
        worker.state, worker.since_s = state, now_s

    def flip(self, worker: PoolWorker, role: Role, why: str, now_s: float) -> Iterator[PoolEffect]:
        """Gives a worker another role, and sends it this role."""
        self.state.counters["flips"] += 1
        what = f"is flipped from {worker.role} to {role}"
        yield self.state.record(now_s, worker.worker_id, what, why)
        worker.target, worker.is_spare = role, False
        self.enter(worker, WorkerState.FLIPPING, now_s)
        yield SetWorkerRole(worker.worker_id, role)

    def give_up_flip(self, worker: PoolWorker, why: str, now_s: float) -> Iterator[PoolEffect]:
        """Abandons a flip: the worker keeps its present role, and another worker may be flipped
        instead.
        """
        if worker.state is not WorkerState.FLIPPING:
            return
        assert worker.target is not None
        assert worker.role is not None
        self.state.counters["flips failed"] += 1
        yield self.state.record(now_s, worker.worker_id, f"did not become {worker.target}", why)
        worker.refuses.add(worker.target)
        worker.target = worker.role
        drained = worker.role is Role.DRAINED
        self.enter(worker, WorkerState.DRAINED if drained else WorkerState.SERVING, now_s)

    def drain(self, worker: PoolWorker, why: str, now_s: float) -> Iterator[PoolEffect]:
        """Orders a worker to finish or hand over its work, and to accept no new work."""
        self.state.counters["drains"] += 1
        yield self.state.record(now_s, worker.worker_id, "is drained of its work", why)
        worker.target = Role.DRAINED
        self.enter(worker, WorkerState.DRAINING, now_s)
        yield SetWorkerRole(worker.worker_id, Role.DRAINED)

    def end(self, worker: PoolWorker, now_s: float, *, by_force: bool = False) -> PoolEffect:
        """Stops a worker's process."""
        self.enter(worker, WorkerState.STOPPING, now_s)
        worker.is_connected, worker.lost_s, worker.load = False, None, None
        return StopWorker(worker.worker_id, by_force=by_force)

    def lose(self, worker: PoolWorker, how: str, now_s: float) -> Iterator[PoolEffect]:
        """Records that a wanted worker has ended. The worker then waits for its next start."""
        worker_id = worker.worker_id
        yield self.state.record_end(worker_id, now_s, how, role=worker.target)
        self.by_id[worker_id] = PoolWorker(
            worker_id,
            worker.target,
            now_s,
            version=worker.version,
            has_run=worker.has_run,
            is_spare=worker.is_spare,
            died_s=now_s if worker.died_s is None else worker.died_s,
            failures=self.state.restarts.num_failed(worker_id),
        )

    def restart_now(self, worker: PoolWorker, why: str, now_s: float) -> Iterator[PoolEffect]:
        """Makes the next start of a dead worker due now."""
        worker.restarts_now = True
        self.state.restarts.restart_now(worker.worker_id, now_s)
        self.state.counters["hurried starts"] += 1
        yield self.state.record(now_s, worker.worker_id, "is started again at once", why)

    def troubles(self) -> Iterator[str]:
        """Yields a sentence for each worker that does not run because it failed to start or keeps
        ending.

        A worker that died once runs again within seconds, so only the history's steps report this.
        """
        for worker_id, worker in self.by_id.items():
            why = self.state.restarts.why(worker_id)
            if why.startswith(NOT_STARTED) or (why and self.state.restarts.is_looping(worker_id)):
                what = why.removeprefix(f"{worker_id} ")
                yield f"{with_role(worker_id, worker.target)} {what}"

    def remove(self, worker: PoolWorker) -> None:
        """Removes a worker that has ended and is no longer wanted."""
        del self.by_id[worker.worker_id]
        self.state.restarts.remove(worker.worker_id)

    def validate(self) -> None:
        """Asserts the invariants of each worker."""
        for worker in self.by_id.values():
            runs = worker.runs
            assert worker.address is not None or not runs
            assert runs or not worker.is_connected
            assert worker.is_connected or worker.lost_s is not None or not runs
            unasked = (WorkerState.JOINING, WorkerState.STOPPING)
            assert worker.target is not None or worker.state in unasked
            going = (WorkerState.DRAINING, WorkerState.DRAINED)
            assert (worker.target is Role.DRAINED) >= (worker.state in going)
            assert (worker.leaves or worker.is_spare) <= (worker.target is Role.DRAINED)
            assert worker.moves_since_s is None or worker.role is Role.PREFILL

    def _free_name(self) -> WorkerId:
        """Returns an unused name.

        The name contains no role, because a flip would make the name wrong.
        """
        names = (WorkerId(f"worker-{number}") for number in count())
        return next(name for name in names if name not in self.by_id)

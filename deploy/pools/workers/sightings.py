"""Handles facts about workers (starts, ends, sessions, roles, loads), and their deadlines."""

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.pools.events import (
    Connected,
    Died,
    Disconnected,
    LoadSeen,
    PoolEffect,
    RoleSeen,
    SetWorkerRole,
    WorkerStarted,
    WorkerStartFailed,
    WorkerStopped,
)
from deploy.pools.state import PoolState
from deploy.pools.workers.record import PoolWorker, WorkerState
from deploy.pools.workers.registry import NOT_STARTED, PoolWorkers
from engine.control import Member
from engine.messages import Role, WorkerId

FLIP_TIMEOUT_S = 10.0  # longest wait for the answer to a flip; a worker answers between two steps
UNREACHABLE_S = 30.0  # a worker that has had no session for this time is killed


@dataclass(frozen=True, slots=True)
class WorkerSightings:
    """Handlers of events about workers. Each handler yields effects."""

    workers: PoolWorkers
    state: PoolState

    def on_found(self, member: Member, now_s: float) -> Iterator[PoolEffect]:
        """Adds a worker that an earlier controller started."""
        worker_id = member.worker_id
        worker = PoolWorker(worker_id, None, now_s, WorkerState.JOINING, member.version)
        worker.address, worker.lost_s = member.address, now_s
        worker.context_len, worker.has_run = member.context_len, True
        self.workers.by_id[worker_id] = worker
        yield self.state.record(now_s, worker_id, "was found running")

    def on_started(self, event: WorkerStarted, now_s: float) -> Iterator[PoolEffect]:
        """Records that a worker listens. From now on waits for a session with this worker."""
        worker = self.workers.starting(event.worker_id, event.start)
        if worker is None:
            return
        self.workers.enter(worker, WorkerState.JOINING, now_s)
        worker.address, worker.lost_s = event.address, now_s
        worker.context_len, worker.has_run = event.context_len, True
        yield self.state.record_start(worker.worker_id, now_s, role=worker.target)

    def on_start_failed(self, event: WorkerStartFailed, now_s: float) -> Iterator[PoolEffect]:
        """Schedules another start."""
        worker = self.workers.starting(event.worker_id, event.start)
        if worker is not None:
            self.workers.waits_for_nodes |= event.waits_for_node
            yield from self.workers.lose(worker, f"{NOT_STARTED}{event.reason}", now_s)

    def on_stopped(self, event: WorkerStopped, now_s: float) -> Iterator[PoolEffect]:
        """Schedules another start if the stopped worker is wanted. Otherwise removes the worker."""
        worker = self.workers.by_id.get(event.worker_id)
        if worker is None or worker.state is not WorkerState.STOPPING:
            return
        if worker.target is Role.DRAINED or worker.target is None:
            self.workers.remove(worker)
            yield self.state.record(now_s, worker.worker_id, "was stopped")
        else:
            yield from self.workers.lose(worker, "was stopped", now_s)

    def on_died(self, event: Died, now_s: float) -> Iterator[PoolEffect]:
        """Schedules another start if the worker is wanted. Otherwise removes the worker."""
        worker = self.workers.by_id.get(WorkerId(event.name))
        if worker is None or not worker.runs:
            return
        self.state.counters["workers died"] += 1
        if worker.target in (Role.DRAINED, None) and not worker.is_spare:
            self.workers.remove(worker)
            yield self.state.record(now_s, event.name, event.how, "it was not needed")
        else:
            yield from self.workers.lose(worker, event.how, now_s)

    def on_connected(self, event: Connected, now_s: float) -> Iterator[PoolEffect]:
        """Adds a worker to its pool.

        If the worker reports another role than the wanted one, sends the wanted role again.
        """
        worker = self.workers.at(event.worker_id, event.address)
        if worker is None:
            return
        worker.is_connected, worker.lost_s, worker.died_s = True, None, None
        worker.kv_format, worker.kernels = event.kv_format, event.kernels
        _record_role(worker, event.role, now_s)
        if worker.target is None:
            worker.target = event.role
            if event.role is Role.DRAINED and worker.worker_id not in self.state.intent.drained:
                num_spares = sum(each.is_spare for each in self.workers.by_id.values())
                worker.is_spare = num_spares < self.state.limits.pools.spares
                worker.leaves = not worker.is_spare
        if worker.state is WorkerState.JOINING:
            goes = worker.target is Role.DRAINED
            state = WorkerState.DRAINING if goes else WorkerState.SERVING
            self.workers.enter(worker, state, now_s)
        if worker.state is WorkerState.FLIPPING and worker.role is worker.target:
            self.workers.enter(worker, WorkerState.SERVING, now_s)
        if worker.role is worker.target:
            return
        assert worker.target is not None
        if worker.state is WorkerState.SERVING:
            why = f"it came back as {worker.role}"
            yield from self.workers.flip(worker, worker.target, why, now_s)
            return
        if worker.state is WorkerState.FLIPPING:  # it missed the order: wait again
            self.workers.enter(worker, WorkerState.FLIPPING, now_s)
        yield SetWorkerRole(worker.worker_id, worker.target)

    def on_disconnected(self, event: Disconnected, now_s: float) -> Iterator[PoolEffect]:
        """Records that a worker's session ended.

        From now on a deadline runs for the next session.
        """
        worker = self.workers.at(event.worker_id, event.address)
        if worker is None or not worker.is_connected:
            return
        worker.is_connected, worker.lost_s, worker.load = False, now_s, None
        yield self.state.record(
            now_s, worker.worker_id, "cannot be reached", event.reason, role=worker.role
        )

    def on_role(self, event: RoleSeen, now_s: float) -> Iterator[PoolEffect]:
        """Records a worker's role.

        Ends a flip if the worker confirms or refuses the wanted role.
        """
        worker = self.workers.at(event.worker_id, event.address)
        if worker is None:
            return
        before = worker.role
        _record_role(worker, event.role, now_s)
        worker.load = None  # the latest load report was for the previous role
        if event.role is worker.target:
            if worker.state is WorkerState.FLIPPING:
                took_s = now_s - worker.since_s
                self.workers.enter(worker, WorkerState.SERVING, now_s)
                what = f"is {event.role} now, {took_s:.1f} s"
                yield self.state.record(now_s, worker.worker_id, what)
        elif worker.state is WorkerState.SERVING:  # another program set the role
            worker.target = event.role
            if event.role is Role.DRAINED:
                self.workers.enter(worker, WorkerState.DRAINING, now_s)
            what = f"became {event.role}"
            yield self.state.record(now_s, worker.worker_id, what, "not by an order")
        elif event.role is before:
            yield from self.workers.give_up_flip(worker, "the worker refuses it", now_s)

    def on_load(self, event: LoadSeen, now_s: float) -> Iterator[PoolEffect]:
        """Records a worker's load.

        Ends a drain, or the moves after a flip, once no such work is left.
        """
        worker = self.workers.at(event.worker_id, event.address)
        if worker is None:
            return
        worker.load = event.load
        if worker.moves_since_s is not None and not worker.num_leaving_seqs:
            took_s = now_s - worker.moves_since_s
            worker.moves_since_s = None
            what = f"has stopped decoding, after {took_s:.1f} s"
            yield self.state.record(now_s, worker.worker_id, what)
        if worker.state is WorkerState.DRAINING and worker.role is Role.DRAINED and worker.is_idle:
            what = f"is drained, after {now_s - worker.since_s:.1f} s"
            yield self.state.record(now_s, worker.worker_id, what)
            self.workers.enter(worker, WorkerState.DRAINED, now_s)
        if worker.state is WorkerState.DRAINED and worker.leaves:
            yield self.workers.end(worker, now_s)

    # ------------------------------------------------------------ deadlines

    def sweep(self, now_s: float) -> Iterator[PoolEffect]:
        """Handles the deadlines of sessions, flips and drains that have passed."""
        for worker in list(self.workers.by_id.values()):
            yield from self._sweep(worker, now_s)

    def _sweep(self, worker: PoolWorker, now_s: float) -> Iterator[PoolEffect]:
        waited_s = now_s - worker.since_s
        if worker.runs and worker.lost_s is not None:
            if now_s - worker.lost_s >= UNREACHABLE_S:
                self.state.counters["workers unreachable"] += 1
                why = f"no session for {UNREACHABLE_S:g} s"
                yield self.state.record(now_s, worker.worker_id, "is stopped", why)
                yield self.workers.end(worker, now_s, by_force=True)
        elif worker.state is WorkerState.FLIPPING and waited_s >= FLIP_TIMEOUT_S:
            why = f"no answer in {FLIP_TIMEOUT_S:g} s"
            yield from self.workers.give_up_flip(worker, why, now_s)
        elif self._drains_too_long(worker, waited_s):
            self.state.counters["drains timed out"] += 1
            why = f"not drained in {waited_s:.0f} s, {worker.num_seqs} sequences are retried"
            yield self.state.record(now_s, worker.worker_id, "is stopped anyway", why)
            yield self.workers.end(worker, now_s)

    def _drains_too_long(self, worker: PoolWorker, waited_s: float) -> bool:
        """True if a drain exceeds its deadline.

        The drain of a worker that is kept afterwards has no deadline.
        """
        drains = worker.state is WorkerState.DRAINING and worker.leaves
        return drains and waited_s >= self.state.limits.pools.drain_timeout_s


def _record_role(worker: PoolWorker, role: Role, now_s: float) -> None:
    """Sets a worker's role. If the new role does not decode, sequences that decode on the worker
    must move away.

    A drained worker is an exception: the worker may finish its sequences.
    """
    before, worker.role = worker.role, role
    if before is role or before is None:
        return
    may_decode = before.decodes or worker.load is None or worker.load.decode_seqs > 0
    stays = role.decodes or role is Role.DRAINED
    worker.moves_since_s = now_s if may_decode and not stays else None

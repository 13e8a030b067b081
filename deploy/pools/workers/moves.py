"""Carries out the moves that `deploy.pools.workers.reconcile` chooses."""

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.pools.events import PoolEffect
from deploy.pools.state import PoolState
from deploy.pools.workers.reconcile import (
    Abandon,
    Begin,
    BeginSpare,
    Drop,
    FlipTo,
    PoolMove,
    RestartNow,
    Retire,
    StandIn,
    TakeSpare,
    next_move,
)
from deploy.pools.workers.record import PoolWorker, WorkerState
from deploy.pools.workers.registry import PoolWorkers
from engine.messages import Role


@dataclass(frozen=True, slots=True)
class WorkerMoves:
    """Makes moves until no further move is possible or needed for now."""

    workers: PoolWorkers
    state: PoolState

    def reconcile(self, now_s: float) -> Iterator[PoolEffect]:
        """Makes all moves that are possible now. Starts the workers whose start is due."""
        while (move := self._next_move(now_s)) is not None:
            yield from self._make(move, now_s)
        yield from self.workers.start_due(now_s)

    def _next_move(self, now_s: float) -> PoolMove | None:
        """Chooses a move. Workers of unknown versions stay until a gateway has reported its intent.

        The gateway's intent may contain these versions, and their workers may be the only ones that
        serve.
        """
        all_workers = workers = self.workers.by_id
        versions = self.state.intent.versions
        if self.state.is_unconfirmed:
            names = {version.name for version in versions}
            workers = {name: w for name, w in all_workers.items() if w.version in names}
        most = self.state.limits.max_workers - (len(all_workers) - len(workers))
        num_spares = self.state.limits.pools.spares
        if self.state.intent.rollout is not None:  # a rollout needs the room
            num_spares = min(num_spares, sum(w.is_spare for w in workers.values()))
        after_s = self.state.limits.pools.inexact_after_s
        long_dead = {
            name
            for name, worker in workers.items()
            if worker.died_s is not None and now_s - worker.died_s >= after_s
        }
        return next_move(workers, versions, most, num_spares, long_dead)

    def _make(self, move: PoolMove, now_s: float) -> Iterator[PoolEffect]:
        by_id = self.workers.by_id
        match move:
            case Drop(worker_id):
                self.workers.remove(by_id[worker_id])
                yield self.state.record(now_s, worker_id, "is not started", "too many")
            case TakeSpare(worker_id, dead_id):
                dead = by_id[dead_id]
                role, dead.target, dead.is_spare = dead.target, Role.DRAINED, True
                assert role is not None
                self.state.counters["spares taken"] += 1
                yield from self.workers.flip(by_id[worker_id], role, f"for {dead_id}", now_s)
            case BeginSpare(version):
                worker_id = self.workers.begin(version, Role.DRAINED, now_s)
                by_id[worker_id].is_spare = True
                yield self.state.record(now_s, worker_id, "is being started", "as a spare")
            case RestartNow(worker_id, role):
                why = f"no {role} worker is left, and none can stand in"
                yield from self.workers.restart_now(by_id[worker_id], why, now_s)
            case StandIn(worker_id, role, is_exact):
                self.state.counters["stand-ins"] += 1
                why = f"no {role} worker is left until one has started again"
                if not is_exact:
                    why += f"; its KV is in {by_id[worker_id].kv_format}, so tokens may differ"
                yield from self.workers.flip(by_id[worker_id], Role.MIXED, why, now_s)
            case FlipTo(worker_id, role):
                why = f"too many {by_id[worker_id].target} workers, too few {role}"
                yield from self.workers.flip(by_id[worker_id], role, why, now_s)
            case Begin(version, role):
                worker_id = self.workers.begin(version, role, now_s)
                why = self._lack(version, role)
                yield self.state.record(now_s, worker_id, "is being started", why)
            case Retire(worker_id):
                yield from self._retire(by_id[worker_id], now_s)
            case Abandon(worker_id):
                worker = by_id[worker_id]
                worker.target, worker.leaves = Role.DRAINED, True
                why = self._why_not_needed(worker.version)
                yield self.state.record(now_s, worker_id, "is stopped while it starts", why)
                yield self.workers.end(worker, now_s, by_force=True)

    def _retire(self, worker: PoolWorker, now_s: float) -> Iterator[PoolEffect]:
        worker.leaves = True
        version = self.state.intent.version(worker.version)
        if worker.state is WorkerState.DRAINED:
            yield self.workers.end(worker, now_s)
        elif worker.state is not WorkerState.DRAINING:
            why = f"too many {worker.target} workers"
            if version is None or not version.has_workers:
                why = self._why_not_needed(worker.version)
            yield from self.workers.drain(worker, why, now_s)

    def _why_not_needed(self, name: str) -> str:
        version = self.state.intent.version(name)
        return f"{name} {'sleeps' if version is not None and version.asleep else 'is over'}"

    def _lack(self, version: str, role: Role) -> str:
        several = f" of {version}" if len(self.state.intent.versions) > 1 else ""
        return f"too few {role} workers{several}"

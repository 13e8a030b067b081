"""Chooses the next move that brings the pools closer to what is wanted. Pure.

Moves in this order; each only if there is none of the kinds before it:

1. Drop a surplus worker that waits for its start.
2. Flip the least loaded worker of a pool that has too many into a role that has too few.
3. Start a worker, unless a surplus worker can be flipped soon: it may still be starting.
4. Retire a surplus worker: drain it, then stop it.

No move takes the last worker of a version that prefills, or the last that decodes. A pool that is
to be emptied waits until another pool serves. A worker that waits for its next start still counts
towards its pool. So a failure does not start another worker in its place.

Versions share nothing but the room. All workers of a version that is over go, whatever they do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploy.pools.formats import formats_of
from deploy.pools.workers.record import PoolWorker, WorkerState
from engine.control import SERVING_ROLES, Version
from engine.layout import KVFormat
from engine.messages import Role, WorkerId
from router.planning.planner import order_of_leaving

_COMING = (WorkerState.STARTING, WorkerState.JOINING, WorkerState.SERVING, WorkerState.FLIPPING)


@dataclass(frozen=True, slots=True)
class Drop:
    """Do not start a waiting worker."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class FlipTo:
    """Give a worker another role."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True)
class Begin:
    """Start a worker of this version and role."""

    version: str
    role: Role


@dataclass(frozen=True, slots=True)
class Retire:
    """Drain a worker, then stop it."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Abandon:
    """Stop a worker while it starts."""

    worker_id: WorkerId


PoolMove = Drop | FlipTo | Begin | Retire | Abandon


@dataclass(frozen=True, slots=True)
class _FleetRules:
    """The limits of moves. A worker keeps its KV format; each role needs its own."""

    formats: Mapping[Role, KVFormat]
    has_room: bool  # for one more worker

    def can_become(self, worker: PoolWorker, role: Role) -> bool:
        """True if a worker could be flipped to that role, now or later."""
        kv_format = worker.kv_format
        if kv_format is None and worker.target is not None:
            kv_format = self.formats.get(worker.target)
        return role not in worker.refuses and kv_format == self.formats[role]


def next_move(
    workers: Mapping[WorkerId, PoolWorker], versions: Sequence[Version], max_workers: int
) -> PoolMove | None:
    """Returns the next move; None if there is nothing to do now."""
    if any(worker.target is None for worker in workers.values()):
        return None  # a found worker tells its role soon: until then it may fill any pool
    there = {version.name for version in versions if not version.is_over}
    for worker in workers.values():
        if worker.version not in there and (move := _clear(worker)) is not None:
            return move
    has_room = len(workers) < max_workers
    for version in versions:
        if not version.is_over:
            own = {name: w for name, w in workers.items() if w.version == version.name}
            move = _Fleet(
                own, version, _FleetRules(formats_of(version.worker), has_room)
            ).next_move()
            if move is not None:
                return move
    return None


def _clear(worker: PoolWorker) -> PoolMove | None:
    """Chooses the next move for a worker of a version that is over; None while it goes."""
    match worker.state:
        case WorkerState.WAITING:
            return Drop(worker.worker_id)
        case WorkerState.STARTING:
            return Abandon(worker.worker_id)
        case WorkerState.SERVING | WorkerState.FLIPPING if worker.is_connected:
            return Retire(worker.worker_id)
        case WorkerState.DRAINING | WorkerState.DRAINED if not worker.leaves:
            return Retire(worker.worker_id)
    return None  # a joining worker is retired later; a lost worker is stopped by its deadline


class _Fleet:
    """Finds which pools of a version have too many workers, and which too few."""

    def __init__(
        self, workers: Mapping[WorkerId, PoolWorker], version: Version, rules: _FleetRules
    ) -> None:
        self._workers = workers
        self._version = version.name
        self._rules = rules
        pools = version.pools
        self._pool = {
            role: [w for w in workers.values() if w.target is role] for role in SERVING_ROLES
        }
        self._missing = {
            role: max(pools.of(role) - len(pool), 0) for role, pool in self._pool.items()
        }
        self._excess = {
            role: max(len(pool) - pools.of(role), 0) for role, pool in self._pool.items()
        }

    def next_move(self) -> PoolMove | None:
        return self._drop() or self._flip() or self._begin() or self._retire()

    def _drop(self) -> Drop | None:
        waiting = [w for w in self._surplus() if w.state is WorkerState.WAITING]
        return Drop(max(waiting, key=lambda w: w.worker_id).worker_id) if waiting else None

    def _flip(self) -> FlipTo | None:
        for role in self._lacking():
            found = self._least_loaded(
                worker
                for worker in self._surplus()
                if self._rules.can_become(worker, role)
                and not takes_last(worker, role, self._workers.values())
            )
            if found is not None:
                return FlipTo(found.worker_id, role)
        return None

    def _begin(self) -> Begin | None:
        num_missing = sum(self._missing.values())
        if not self._rules.has_room or num_missing <= self._num_to_be_flipped(self._lacking()):
            return None
        # Roles that a flip is least likely to fill come first.
        role = min(self._lacking(), key=lambda role: self._num_to_be_flipped([role]))
        return Begin(self._version, role)

    def _retire(self) -> Retire | None:
        kept = min(sum(self._missing.values()), self._num_to_be_flipped(self._lacking()))
        if sum(self._excess.values()) <= kept:
            return None
        found = self._least_loaded(
            worker
            for worker in self._surplus()
            if not takes_last(worker, Role.DRAINED, self._workers.values())
        )
        return None if found is None else Retire(found.worker_id)

    def _lacking(self) -> list[Role]:
        return [role for role, count in self._missing.items() if count]

    def _surplus(self) -> list[PoolWorker]:
        """Returns all workers of pools that have too many."""
        return [w for role, count in self._excess.items() if count for w in self._pool[role]]

    def _num_to_be_flipped(self, roles: Iterable[Role]) -> int:
        """Counts surplus workers that can take one of these roles, now or once they serve."""
        wanted = list(roles)
        total = 0
        for role, excess in self._excess.items():
            able = [
                worker
                for worker in self._pool[role]
                if worker.state in _COMING
                and any(self._rules.can_become(worker, other) for other in wanted)
            ]
            total += min(excess, len(able))
        return total

    def _least_loaded(self, workers: Iterable[PoolWorker]) -> PoolWorker | None:
        ready = [w for w in workers if w.state is WorkerState.SERVING and w.is_connected]
        return min(ready, key=lambda w: order_of_leaving(w.worker_id, w.work_tokens), default=None)


def takes_last(worker: PoolWorker, role: Role, workers: Iterable[PoolWorker]) -> bool:
    """True if its version could not prefill, or not decode, if the worker took that role."""
    return last_that(worker, role, workers) is not None


def last_that(worker: PoolWorker, role: Role, workers: Iterable[PoolWorker]) -> str | None:
    """Returns what its version could not do if the worker took that role: a verb, or None."""
    others = [
        other
        for other in workers
        if other.worker_id != worker.worker_id and other.version == worker.version
    ]
    checks: list[tuple[str, Callable[[PoolWorker], bool], bool]] = [
        ("prefills", PoolWorker.prefills, role.prefills),
        ("decodes", PoolWorker.decodes, role.decodes),
    ]
    for what, does, will in checks:
        if does(worker) and not will and not any(does(other) for other in others):
            return what
    return None

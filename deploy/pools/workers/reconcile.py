"""Chooses the next move that brings the pools closer to the wanted pools. Pure.

The move is the first possible one of this list:

0. Give a spare the role of a worker that has died. The dead worker becomes the spare.
1. If all workers that decode, or all workers that prefill, have died: make the least loaded worker
   mixed. The mixed worker stands in for the dead workers until one of them serves again; then move
   3 gives it its role back. If no worker can become mixed, start the dead workers at once
   (`stand_ins`).
2. Remove a surplus worker that waits for its start.
3. Flip a worker to a role that lacks workers: the least loaded worker of a pool with too many
   workers, or else a spare.
4. Start a missing worker, unless a surplus worker can be flipped soon (it may still be starting).
5. Retire a surplus worker: drain the worker, then stop it. Retire a spare if another worker needs
   its room.
6. Start a spare of the current version, once all workers of this version have run.

No move takes a version's last worker that prefills or its last worker that decodes. So a pool is
emptied only after another pool serves. A worker that waits for its next start still counts towards
its pool, so no other worker is started in its place after a failure.

Versions share only the room. When a version is over, all its workers are stopped, in any state.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploy.pools.formats import formats_of
from deploy.pools.workers.record import PoolWorker, WorkerState
from deploy.pools.workers.stand_ins import AWAY, dead_pools, is_exact, to_restart_now
from engine.control import SERVING_ROLES, Version, by_number
from engine.layout import KVFormat
from engine.messages import Role, WorkerId
from router.planning.planner import order_of_leaving

_COMING = (WorkerState.STARTING, WorkerState.JOINING, WorkerState.SERVING, WorkerState.FLIPPING)


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove a worker that waits for its start."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class TakeSpare:
    """Give a spare the role of a dead worker. The dead worker becomes the spare."""

    worker_id: WorkerId
    dead_id: WorkerId


@dataclass(frozen=True, slots=True)
class BeginSpare:
    """Start a spare worker, which will wait to replace another worker."""

    version: str


@dataclass(frozen=True, slots=True)
class StandIn:
    """Make a worker mixed: no other worker of its version does the work of `role`."""

    worker_id: WorkerId
    role: Role
    is_exact: bool = True  # True if the worker has the KV format of the role's workers


@dataclass(frozen=True, slots=True)
class RestartNow:
    """Start a dead worker at once: no worker can stand in for the workers of `role`."""

    worker_id: WorkerId
    role: Role


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
    """Stop a worker that is starting."""

    worker_id: WorkerId


PoolMove = TakeSpare | BeginSpare | StandIn | RestartNow | Drop | FlipTo | Begin | Retire | Abandon


@dataclass(frozen=True, slots=True)
class _FleetRules:
    """The limits of moves.

    A worker cannot change its KV format, and each role requires one format.
    """

    formats: Mapping[Role, KVFormat]
    has_room: bool  # True if one more worker fits
    num_spares: int  # wanted spares of this version
    # Dead workers for which a worker of another KV format may stand in.
    long_dead: Collection[WorkerId]

    def can_become(self, worker: PoolWorker, role: Role) -> bool:
        """True if a worker could be flipped to this role, now or later."""
        kv_format = worker.kv_format
        if kv_format is None and worker.target is not None:
            kv_format = self.formats.get(worker.target)
        return role not in worker.refuses and kv_format == self.formats[role]


def next_move(
    workers: Mapping[WorkerId, PoolWorker],
    versions: Sequence[Version],
    max_workers: int,
    num_spares: int = 0,
    long_dead: Collection[WorkerId] = (),
) -> PoolMove | None:
    """Returns the next move. None if no move is needed or possible now.

    `num_spares` is the wanted number of spares of the first version that stays. If all workers of
    a pool are in `long_dead`, a worker with another KV format may stand in for them.
    """
    if any(worker.target is None for worker in workers.values()):
        return None  # a found worker has not reported its role yet, so it may belong to any pool
    there = {version.name for version in versions if version.has_workers}
    for worker in workers.values():
        if worker.version not in there and (move := _clear(worker)) is not None:
            return move
    has_room = len(workers) < max_workers
    current = next((v.name for v in versions if not v.is_leaving), None)
    lacks_room = False
    for version in versions:
        if version.has_workers:
            own = {name: w for name, w in workers.items() if w.version == version.name}
            wanted = num_spares if version.name == current else 0
            rules = _FleetRules(formats_of(version), has_room, wanted, long_dead)
            fleet = _Fleet(own, version, rules)
            lacks_room |= fleet.lacks_room
            if (move := fleet.next_move()) is not None:
                return move
    spares = [w.worker_id for w in workers.values() if w.is_ready_spare]
    return Retire(max(spares, key=by_number)) if lacks_room and spares else None


def _clear(worker: PoolWorker) -> PoolMove | None:
    """Returns the next move for a worker that is no longer needed.

    None while the worker is leaving.
    """
    match worker.state:
        case WorkerState.WAITING:
            return Drop(worker.worker_id)
        case WorkerState.STARTING:
            return Abandon(worker.worker_id)
        case WorkerState.SERVING | WorkerState.FLIPPING if worker.is_connected:
            return Retire(worker.worker_id)
        case WorkerState.DRAINING | WorkerState.DRAINED if not worker.leaves:
            return Retire(worker.worker_id)
    return None  # a joining worker is retired later; a lost worker is stopped at its deadline


class _Fleet:
    """Compares a version's pools with the wanted pools, and chooses the next move."""

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

        self._spares = [w for w in workers.values() if w.is_spare]

    @property
    def lacks_room(self) -> bool:
        """True if a worker is missing, and only for lack of room."""
        num_flips = self._num_to_be_flipped(self._lacking())
        return not self._rules.has_room and sum(self._missing.values()) > num_flips

    def next_move(self) -> PoolMove | None:
        return (
            self._take_spare()
            or self._stand_in()
            or self._drop()
            or self._flip()
            or self._begin()
            or self._retire()
            or self._keep_spares()
        )

    def _take_spare(self) -> TakeSpare | None:
        """Finds a spare for a worker that has run and must be restarted.

        Decode workers come first.
        """
        for role in (Role.DECODE, Role.MIXED, Role.PREFILL):
            dead = [w for w in self._pool[role] if w.has_run and w.state in AWAY]
            if dead and (spare := self._ready_spare(role)) is not None:
                return TakeSpare(spare.worker_id, min(dead, key=_number).worker_id)
        return None

    def _ready_spare(self, role: Role) -> PoolWorker | None:
        able = [w for w in self._spares if w.is_ready_spare and self._rules.can_become(w, role)]
        return min(able, key=_number, default=None)

    def _keep_spares(self) -> PoolMove | None:
        """Starts a missing spare, or retires a surplus spare."""
        missing = self._rules.num_spares - len(self._spares)
        if missing > 0:
            calm = all(w.has_run and w.state not in AWAY for w in self._workers.values())
            return BeginSpare(self._version) if calm and self._rules.has_room else None
        if missing == 0:
            return None
        return _clear(max(self._spares, key=lambda w: (w.state in AWAY, _number(w))))

    def _stand_in(self) -> StandIn | RestartNow | None:
        """If all workers of a pool have died, finds a stand-in, or else a worker to restart now."""
        rules = self._rules
        for role, dead in dead_pools(self._workers.values()).items():
            exact, found = is_exact(role, rules.formats), None
            if exact or all(worker.worker_id in rules.long_dead for worker in dead):
                found = self._least_loaded(
                    w for w in self._workers.values() if rules.can_become(w, Role.MIXED)
                )
            if found is not None:
                return StandIn(found.worker_id, role, exact)
            if (waiting := to_restart_now(dead)) is not None:
                return RestartNow(waiting.worker_id, role)
        return None

    def _drop(self) -> Drop | None:
        waiting = [w for w in self._surplus() if w.state is WorkerState.WAITING]
        return Drop(max(waiting, key=_number).worker_id) if waiting else None

    def _flip(self) -> FlipTo | None:
        for role in self._lacking():
            found = self._least_loaded(
                worker
                for worker in self._surplus()
                if self._rules.can_become(worker, role)
                and not takes_last(worker, role, self._workers.values())
            )
            found = found or self._ready_spare(role)
            if found is not None:
                return FlipTo(found.worker_id, role)
        return None

    def _begin(self) -> Begin | None:
        num_missing = sum(self._missing.values())
        if not self._rules.has_room or num_missing <= self._num_to_be_flipped(self._lacking()):
            return None
        # Prefer the role for which the fewest workers could be flipped.
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
        """Returns all workers of the pools that have too many workers."""
        return [w for role, count in self._excess.items() if count for w in self._pool[role]]

    def _num_to_be_flipped(self, roles: Iterable[Role]) -> int:
        """Counts the surplus workers that can be flipped to one of these roles, now or later."""
        wanted = list(roles)
        total = 0
        for role, excess in self._excess.items():
            if not excess:
                continue
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


def _number(worker: PoolWorker) -> tuple[str, int, str]:
    return by_number(worker.worker_id)


def takes_last(worker: PoolWorker, role: Role, workers: Iterable[PoolWorker]) -> bool:
    """True if no worker of the version would prefill, or none would decode, after the change."""
    return last_that(worker, role, workers) is not None


def last_that(worker: PoolWorker, role: Role, workers: Iterable[PoolWorker]) -> str | None:
    """Returns the work that no worker would do after the role change, or None."""
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

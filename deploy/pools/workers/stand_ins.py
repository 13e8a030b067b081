"""Chooses the worker that replaces a pool whose workers have all died. Pure.

    KV formats are equal     the least loaded worker of another pool becomes mixed at once
    KV formats differ        each dead worker is restarted at once, but only after its first
                             failure. After `pools.inexact_after_s` a worker with another KV
                             format becomes mixed nevertheless, if it can. The mixed worker's
                             tokens may differ from the tokens of the dead workers
    no worker can be mixed   the dead workers are restarted at once

Once a worker of the dead pool serves again, the mixed worker returns to its former role.
`stand_in_troubles` describes the present case in a sentence.
"""

from collections.abc import Iterable, Mapping, Sequence

from deploy.pools.formats import formats_of
from deploy.pools.workers.record import PoolWorker, WorkerState
from engine.control import Version
from engine.layout import KVFormat
from engine.messages import Role

_AT_HAND = (WorkerState.JOINING, WorkerState.SERVING, WorkerState.FLIPPING)
AWAY = (WorkerState.WAITING, WorkerState.STARTING)
_DUTIES = (Role.DECODE, Role.PREFILL)


def dead_pools(workers: Iterable[PoolWorker]) -> dict[Role, list[PoolWorker]]:
    """Returns the dead workers by role, for each role whose work no other worker of the version
    does.

    Workers that have never run do not count as dead, because a deployment starts with such workers.
    """
    found = {}
    all_workers = list(workers)
    for role in _DUTIES:
        able = [w for w in all_workers if w.target is not None and _does(w.target, role)]
        dead = [w for w in able if w.has_run and w.state in AWAY]
        if dead and not any(w.state in _AT_HAND for w in able):
            found[role] = dead
    return found


def is_exact(role: Role, formats: Mapping[Role, KVFormat]) -> bool:
    """True if mixed workers have the same KV format as workers of this role."""
    return formats[role] == formats[Role.MIXED]


def to_restart_now(dead: Iterable[PoolWorker]) -> PoolWorker | None:
    """Returns a dead worker that waits for its first restart. None if there is no such worker."""
    waiting = (w for w in dead if w.state is WorkerState.WAITING and w.failures == 1)
    return next((w for w in waiting if not w.restarts_now), None)


def stand_in_troubles(
    workers: Iterable[PoolWorker], versions: Sequence[Version]
) -> tuple[str, ...]:
    """Returns a sentence for each pool whose workers have all died, and for each worker that stands
    in.
    """
    all_workers = list(workers)
    found = []
    for version in versions:
        own = [w for w in all_workers if w.version == version.name]
        formats = formats_of(version)
        found += [_dead(role, version, formats) for role in dead_pools(own)]
        found += _standing_in(own, version, formats)
    return tuple(found)


def _dead(role: Role, version: Version, formats: Mapping[Role, KVFormat]) -> str:
    why = "its workers are started again"
    if not is_exact(role, formats):
        ours, others = formats[role], formats[Role.MIXED]
        if role is Role.PREFILL:
            ours, others = formats[Role.MIXED], formats[Role.DECODE]
        why = f"no other worker has its KV format: {ours}, not {others}; {why}"
    return f"no {role} worker of {version.name} is left: {why}"


def _standing_in(
    workers: Sequence[PoolWorker], version: Version, formats: Mapping[Role, KVFormat]
) -> list[str]:
    if version.pools.mixed:
        return []
    found = []
    for worker in (w for w in workers if w.target is Role.MIXED and w.state in _AT_HAND):
        for role in _DUTIES:
            able = (w for w in workers if w.target is role and w.state in _AT_HAND)
            if version.pools.of(role) and not any(able):
                found.append(f"{worker.worker_id} stands in for all {role} workers")
                if not is_exact(role, formats):
                    theirs = formats[role]
                    found[-1] += f", with KV in {worker.kv_format} for {theirs}: tokens may differ"
    return found


def _does(role: Role, duty: Role) -> bool:
    return role.decodes if duty is Role.DECODE else role.prefills

"""Finds workers whose kernels differ, which may make tokens depend on the worker.

Different kernels sum in different orders, and such sums differ in their last bits. CPU features and
the kind of GPU decide on the kernels. So if two tokens are nearly equally likely, workers with
different kernels may choose different tokens.

The two pools may be split into ranks in different ways on purpose. Then all prompts are computed
with the prefill pool's split, and all answers with the decode pool's split. Workers that do the
same work must have the same split. Workers of the same split must have the same kernels.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from deploy.pools.workers.record import PoolWorker
from engine.messages import Role
from engine.worker.ranks import split_of

# Roles by kind of work.
DOERS = {"prefill": (Role.PREFILL, Role.MIXED), "decode": (Role.DECODE, Role.MIXED)}


def kernel_troubles(workers: Iterable[PoolWorker]) -> tuple[str, ...]:
    """Returns a sentence for each case in which a version's tokens may depend on the worker."""
    by_version: dict[str, list[PoolWorker]] = {}
    for worker in workers:
        if worker.is_connected and worker.kernels:
            by_version.setdefault(worker.version, []).append(worker)
    found: list[str] = []
    for version, there in by_version.items():
        by_split: dict[str, list[PoolWorker]] = {}
        for worker in there:
            by_split.setdefault(split_of(worker.kernels), []).append(worker)
        for alike in by_split.values():
            found += _difference(f"kernels of {version} differ", alike, lambda w: w.kernels)
        for work, roles in DOERS.items():
            doers = [worker for worker in there if worker.role in roles]
            found += _difference(
                f"workers of {version} that {work} are split in different ways", doers, _split
            )
    return tuple(found)


def _difference(
    what: str, workers: Sequence[PoolWorker], value_of: Callable[[PoolWorker], str]
) -> list[str]:
    """Returns a sentence that names the workers with other than the most common kernels, if any."""
    counts = Counter(map(value_of, workers))
    if len(counts) < 2:
        return []
    usual = min(counts, key=lambda value: (-counts[value], value))
    values = ((worker, value_of(worker)) for worker in workers)
    others = [f"{worker.worker_id} with {value}" for worker, value in values if value != usual]
    return [
        f"{what}: {', '.join(others)}, the others with {usual}; the tokens of"
        " an answer may depend on its worker"
    ]


def _split(worker: PoolWorker) -> str:
    return split_of(worker.kernels) or "one rank"

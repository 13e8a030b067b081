"""The kernels that workers compute with, and workers whose kernels differ from the others'.

The same sums in another order differ in their last bits. So a worker with other CPU features or
another kind of GPU may choose another token than the rest, if two are nearly equally likely.
"""

from collections import Counter
from collections.abc import Iterable

from deploy.pools.workers.record import PoolWorker


def kernel_troubles(workers: Iterable[PoolWorker]) -> tuple[str, ...]:
    """Returns a sentence for each version whose workers compute with different kernels."""
    by_version: dict[str, list[PoolWorker]] = {}
    for worker in workers:
        if worker.is_connected and worker.kernels:
            by_version.setdefault(worker.version, []).append(worker)
    return tuple(
        _sentence(version, found)
        for version, found in by_version.items()
        if len({worker.kernels for worker in found}) > 1
    )


def _sentence(version: str, workers: list[PoolWorker]) -> str:
    """Names the workers that are not of the most usual kind."""
    counts = Counter(worker.kernels for worker in workers)
    usual = min(counts, key=lambda kernels: (-counts[kernels], kernels))
    others = [f"{w.worker_id} with {w.kernels}" for w in workers if w.kernels != usual]
    return (
        f"kernels of {version} differ: {', '.join(others)}, the others with {usual}; the tokens of"
        " an answer may depend on its worker"
    )

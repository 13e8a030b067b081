"""Opens the runner of a worker, or of one of its ranks, and the memory of its KV."""

from pathlib import Path
from typing import TYPE_CHECKING

from deploy.services.spec import WorkerSpec
from deploy.worker import memory
from kvtransfer.memory import PrivatePool, SharedPool, host_pool

if TYPE_CHECKING:
    from engine.model.parallel.group import RankGroup
    from engine.model.parallel.steps import StepFeed
    from engine.model.runner import KVNeeds, SizeKV, TorchRunner


def runner_of(
    spec: WorkerSpec,
    directory: Path,
    *,
    group: "RankGroup | None" = None,
    feed: "StepFeed | None" = None,
) -> "TorchRunner":
    """The runner of the model in `directory`. It is not open yet."""
    from engine.model.runner import TorchRunner  # takes seconds to import

    config = spec.config
    return TorchRunner(
        directory,
        draft=config.draft_path,
        block_size=config.block_size,
        kv_format=config.kv_dtype,
        weights=config.weights,
        kv_bytes=_kv_bytes(spec),
        max_len=config.max_model_len,
        group=group,
        feed=feed,
    )


def open_runner(runner: "TorchRunner", spec: WorkerSpec) -> PrivatePool | SharedPool:
    """Opens the runner; returns the memory of its KV. Raises CheckpointError, ConfigError."""
    pools: list[PrivatePool | SharedPool] = []

    def allocate(num_bytes: int) -> memoryview:
        block_bytes = num_bytes // runner.num_blocks
        pool = host_pool(runner.num_blocks, block_bytes, spec.config.kv_transport)
        pool.open()
        pools.append(pool)
        return pool.blocks.reshape(-1).data

    runner.open(allocate)
    return pools[0]


def _kv_bytes(spec: WorkerSpec) -> "int | SizeKV":
    """Returns the configured size, or a function that sizes KV by the memory available now."""
    if spec.config.kv_mib is not None:
        return spec.config.kv_mib * 2**20
    here_bytes = max(memory.available_bytes() - spec.kept_bytes, 0)
    shared_bytes = here_bytes if spec.memory_bytes is None else spec.memory_bytes
    shared_bytes = max(shared_bytes - spec.kept_bytes, 0)

    def size(needs: "KVNeeds") -> int:
        # If less is available than this worker's share, other programs use it.
        return memory.kv_bytes(
            min(shared_bytes, here_bytes * spec.num_workers),
            num_workers=spec.num_workers,
            **needs._asdict(),
        )

    return size

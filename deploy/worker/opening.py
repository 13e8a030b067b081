"""Opens the runner of a worker, or of one of its ranks, and the pool of its KV."""

from pathlib import Path
from typing import TYPE_CHECKING

from deploy.base.spec import WorkerSpec
from deploy.worker import memory
from engine.config import DeviceKind
from engine.worker.ranks import RankPlace
from engine.worker.steps import FIRST_STEPS_FACTOR
from kvtransfer.device.blocks import DeviceBlocks, DevicePool
from kvtransfer.device.cuda_driver import CudaDriver
from kvtransfer.memory import Pool, PrivatePool, SharedPool, host_pool

if TYPE_CHECKING:
    from engine.model.parallel.group import RankGroup
    from engine.model.parallel.steps import StepFeed
    from engine.model.runner import KVNeeds, SizeKV, TorchRunner


def import_torch(num_threads: int | None = None) -> None:
    """Imports the runner, which takes seconds, and limits the number of its threads."""
    from engine.model.runner import use_threads

    if num_threads is not None:
        use_threads(num_threads)


def import_before_forks() -> None:
    """Imports the runner before forks, with the modules that the load of every model needs."""
    from engine.model.runner import prepare_loading

    prepare_loading()


def group_of(spec: WorkerSpec, place: RankPlace, rendezvous: str) -> "RankGroup":
    """Returns a rank's view of its worker's ranks.

    No rank gives up before a step counts as stuck.
    """
    from engine.model.parallel.group import TIMEOUT_S, RankGroup

    config = spec.config
    return RankGroup(
        place,
        Path(rendezvous),
        is_cuda=config.device is DeviceKind.CUDA,
        timeout_s=max(TIMEOUT_S, FIRST_STEPS_FACTOR * (config.step_timeout_s or 0.0)),
    )


def runner_of(
    spec: WorkerSpec,
    directory: Path,
    *,
    group: "RankGroup | None" = None,
    feed: "StepFeed | None" = None,
) -> "TorchRunner":
    """Returns the runner of the model in `directory`. The runner is not open yet."""
    from engine.model.profiling import LargestStep
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
        device=gpu_of(_device_id(group)) if config.device is DeviceKind.CUDA else "cpu",
        largest=LargestStep(config.max_batch_tokens, config.max_running),
        group=group,
        feed=feed,
    )


def open_runner(
    runner: "TorchRunner", spec: WorkerSpec, *, group: "RankGroup | None" = None
) -> Pool:
    """Opens the runner and returns its block pool. Raises CheckpointError, ConfigError."""
    if spec.config.device is DeviceKind.CUDA:
        from engine.model.converting import TorchConverter

        device_id = _device_id(group)
        runner.open()
        blocks = DeviceBlocks(
            *(runner.kv_address, runner.num_blocks, runner.layout.block_bytes),
            driver=CudaDriver(device_id=device_id),
            converter=TorchConverter(gpu_of(device_id)),
        )
        return DevicePool(blocks, device_id=device_id)
    pools: list[PrivatePool | SharedPool] = []

    def allocate(num_bytes: int) -> memoryview:
        block_bytes = num_bytes // runner.num_blocks
        pool = host_pool(runner.num_blocks, block_bytes, spec.config.kv_transport)
        pool.open()
        pools.append(pool)
        return pool.blocks.reshape(-1).data

    runner.open(allocate)
    return pools[0]


def gpu_of(device_id: int) -> str:
    """Returns torch's name of a GPU, by the GPU's index among the GPUs that this process sees."""
    return f"cuda:{device_id}"


def _device_id(group: "RankGroup | None") -> int:
    """Returns the index of the rank's device among the devices that the worker's processes see."""
    return 0 if group is None else group.place.rank


def _kv_bytes(spec: WorkerSpec) -> "int | SizeKV":
    """Returns the configured bytes of KV memory, or a function that computes the bytes from the
    memory available at its call.
    """
    if spec.config.kv_mib is not None:
        return spec.config.kv_mib * 2**20
    here_bytes = max(memory.available_bytes() - spec.kept_bytes, 0)
    shared_bytes = here_bytes if spec.memory_bytes is None else spec.memory_bytes
    shared_bytes = max(shared_bytes - spec.kept_bytes, 0)

    def size(needs: "KVNeeds") -> int:
        if needs.device is not None:
            return memory.device_kv_bytes(
                **needs.device.memory._asdict(),
                peak_bytes=needs.device.peak_bytes,
                block_bytes=needs.block_bytes,
                fraction=spec.config.memory_fraction,
                part=min(spec.num_gpus, 1.0) or 1.0,
            )
        # If less than this worker's share is available, other programs use the rest.
        return memory.kv_bytes(
            min(shared_bytes, here_bytes * spec.num_workers),
            num_workers=spec.num_workers,
            weights_bytes=needs.weights_bytes,
            block_bytes=needs.block_bytes,
            num_context_blocks=needs.num_context_blocks,
        )

    return size

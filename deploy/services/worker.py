"""A worker with the torch runner, built from its spec."""

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from deploy.model_source import Parts
from deploy.services.model import directory_of
from deploy.services.spec import WorkerFacts, WorkerReady, WorkerSpec
from deploy.services.thread import LoopService, die
from deploy.worker import memory
from deploy.worker.host import ModelFacts, WorkerHost, WorkerIdentity
from engine.clock import MonotonicClock
from engine.config import DeviceKind
from engine.grammar.guides import LlGuides
from engine.net.trust import Secret
from kvtransfer.device.blocks import DeviceBlocks
from kvtransfer.device.cuda_driver import CudaDriver
from kvtransfer.device.pool import DevicePool
from kvtransfer.memory import Pool, PrivatePool, SharedPool, host_pool
from kvtransfer.native.library import is_native

if TYPE_CHECKING:
    from engine.model.runner import KVNeeds, SizeKV, TorchRunner

log = logging.getLogger(__name__)

GPU = "cuda:0"  # the first of those that this process sees


class WorkerService(LoopService[WorkerReady]):
    """A worker from open to close. Its close waits for no answers: gateways have ended by then."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec

    async def open(self) -> WorkerReady:
        """Loads the model and starts to listen. Raises CheckpointError, ConfigError."""
        clock = MonotonicClock()
        begin_s = clock.now_s()
        import torch  # takes seconds to import; gateways do not need it

        from engine.model.profiling import LargestStep
        from engine.model.runner import TorchRunner

        spec, config = self._spec, self._spec.config
        torch.set_num_threads(spec.threads)
        directory = await asyncio.to_thread(directory_of, spec.model, Parts.ALL)
        runner = TorchRunner(
            directory,
            draft=config.draft_path,
            block_size=config.block_size,
            kv_format=config.kv_dtype,
            weights=config.weights,
            kv_bytes=self._kv_bytes(),
            max_len=config.max_model_len,
            device=GPU if config.device is DeviceKind.CUDA else "cpu",
            largest=LargestStep(config.max_batch_tokens, config.max_running),
        )
        pool = await asyncio.to_thread(self._open_runner, runner)
        await asyncio.to_thread(runner.warm_up)
        await asyncio.to_thread(is_native)  # so that no pull waits for a compiler
        identity = WorkerIdentity(
            spec.worker_id,
            spec.role,
            runner.fingerprint,
            Secret(spec.token),
            spec.host,
            kernels=runner.kernels,
        )
        self._runner = runner
        self._host = WorkerHost(
            identity,
            config=config,
            runner=runner,
            model=ModelFacts(
                vocab_size=runner.vocab_size,
                context_len=runner.context_len,
                has_draft_model=runner.draft_forward is not None,
                guides=LlGuides(
                    directory / "tokenizer.json",
                    vocab_size=runner.vocab_size,
                    eos_token_ids=runner.eos_token_ids,
                ),
                sizes=runner.sizes,
            ),
            memory=pool,
            clock=clock,
            on_crash=die,
            enter_thread=runner.enter_thread,
        )
        address = await self._host.open()
        facts = self._facts(runner)
        log.info("computes on %s", facts)
        return WorkerReady(
            address=address,
            pid=os.getpid(),
            context_len=runner.context_len,
            num_blocks=runner.num_blocks,
            block_bytes=runner.layout.block_bytes,
            start_s=clock.now_s() - begin_s,
            version=spec.version,
            max_len=min(runner.context_len, runner.num_blocks * runner.block_size),
            is_batch_invariant=runner.is_batch_invariant,
            facts=facts,
        )

    def _facts(self, runner: "TorchRunner") -> WorkerFacts:
        choices = runner.choices
        return WorkerFacts(
            device=self._spec.config.device,
            kernels=runner.kernels,
            weights=runner.weights,
            kv_format=runner.layout.kv_format,
            kv_bytes=runner.num_blocks * runner.layout.block_bytes,
            attention=choices.attention,
            captured_steps=choices.num_captured,
            transports=self._host.transports,
            fallbacks=choices.fallbacks,
        )

    def _open_runner(self, runner: "TorchRunner") -> Pool:
        """Opens the runner, and returns the pool of KV that it writes to."""
        if self._spec.config.device is DeviceKind.CUDA:
            from engine.model.converting import TorchConverter

            runner.open()
            blocks = DeviceBlocks(
                *(runner.kv_address, runner.num_blocks, runner.layout.block_bytes),
                driver=CudaDriver(device_id=0),
                converter=TorchConverter(GPU),
            )
            return DevicePool(blocks, device_id=0)
        pools: list[PrivatePool | SharedPool] = []

        def allocate(num_bytes: int) -> memoryview:
            block_bytes = num_bytes // runner.num_blocks
            pool = host_pool(runner.num_blocks, block_bytes, self._spec.config.kv_transport)
            pool.open()
            pools.append(pool)
            return pool.blocks.reshape(-1).data

        runner.open(allocate)
        return pools[0]

    def _kv_bytes(self) -> "int | SizeKV":
        """Returns the configured size, or a function that sizes KV by the memory available now."""
        spec = self._spec
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
            # If less is available than this worker's share, other programs use it.
            return memory.kv_bytes(
                min(shared_bytes, here_bytes * spec.num_workers),
                num_workers=spec.num_workers,
                weights_bytes=needs.weights_bytes,
                block_bytes=needs.block_bytes,
                num_context_blocks=needs.num_context_blocks,
            )

        return size

    async def close(self) -> None:
        """Ends sessions and threads, and asserts the invariants of the block pool."""
        await self._host.close()

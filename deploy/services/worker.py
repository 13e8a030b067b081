"""A worker with the torch runner, built from its spec."""

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.base.spec import WorkerFacts, WorkerReady, WorkerSpec
from deploy.base.thread import LoopService, die
from deploy.fetching.cache import Parts
from deploy.services.model import directory_of
from deploy.worker.host import ModelFacts, WorkerHost, WorkerIdentity
from deploy.worker.opening import import_torch, open_runner, runner_of
from engine.clock import MonotonicClock
from engine.grammar.guides import LlGuides
from engine.native.library import library
from engine.net.trust import Secret
from engine.worker.ranks import RankPlace
from kvtransfer.memory import Pool

if TYPE_CHECKING:
    from deploy.ranks.processes import RankProcesses
    from engine.model.runner import TorchRunner

log = logging.getLogger(__name__)


class WorkerService(LoopService[WorkerReady]):
    """Runs a worker from `open` to `close`.

    `close` waits for no answers, because the gateways have ended before.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._ranks: RankProcesses | None = None

    async def open(self) -> WorkerReady:
        """Loads the model, then starts to listen. Raises CheckpointError, ConfigError."""
        clock = MonotonicClock()
        begin_s = clock.now_s()
        spec = self._spec
        import_torch(spec.threads)
        directory = await asyncio.to_thread(directory_of, spec.model, Parts.ALL)
        runner, pool = await asyncio.to_thread(self._open_runner, directory)
        await asyncio.to_thread(runner.warm_up)
        await asyncio.to_thread(library)  # compiles the library now, so that no pull waits for it
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
            config=spec.config,
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
                layout=runner.whole_layout,
                shards=runner.shards,
                counters=runner.counters,
            ),
            memory=pool,
            clock=clock,
            on_crash=die,
            enter_thread=runner.enter_thread,
            ranks=self._ranks,
        )
        address = await self._host.open()
        facts = self._facts(runner)
        log.info("computes on %s", facts)
        return WorkerReady(
            address=address,
            pid=os.getpid(),
            context_len=runner.context_len,
            num_blocks=runner.num_blocks,
            block_bytes=runner.whole_layout.block_bytes,
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

    def _open_runner(self, directory: Path) -> tuple["TorchRunner", Pool]:
        """Opens the runner of rank 0, and the runners of the other ranks if there are any."""
        spec = self._spec
        place = RankPlace(0, spec.config.tp, spec.config.pp, spec.config.ep)
        if place.size == 1:
            runner = runner_of(spec, directory)
            return runner, open_runner(runner, spec)
        from deploy.ranks.processes import RankProcesses

        self._ranks = ranks = RankProcesses(spec, directory, place, on_death=die)
        try:
            ranks.start()
            runner = runner_of(spec, directory, group=ranks.group, feed=ranks.feed)
            ranks.await_joining()
            try:
                pool = open_runner(runner, spec, group=ranks.group)
            except Exception as error:
                reason = ranks.reason_of(error)
                if reason is error:
                    raise
                log.info("a rank failed before this one did: %s", error)
                raise reason from None
            ranks.await_start()
        except BaseException:
            ranks.close()
            raise
        return runner, pool

    async def close(self) -> None:
        """Ends sessions, threads and ranks, and asserts the invariants of the block pool."""
        await self._host.close()
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.close)

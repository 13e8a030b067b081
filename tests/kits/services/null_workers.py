"""A launcher whose workers compute nothing, for gateway tests without torch."""

import sys
from collections.abc import Mapping

import msgspec

from bench.lab.gateway.worker import NUM_BLOCKS, NullWorkerOptions
from bench.processes.driven import Driven
from deploy.base.spec import ServiceReady, ServiceSpec, WorkerReady, WorkerSpec
from deploy.local.launcher import ProcessLauncher
from deploy.local.nursery import Nursery
from tests.kits.services.lent_nursery import LentNursery


class NullWorkers(ProcessLauncher):
    """Launches real gateways, and workers that send each answer one token every `pace_s`."""

    def __init__(
        self,
        nursery: Nursery | LentNursery,
        pace_s: float = 0.001,
        kernels: Mapping[str, str] | None = None,
    ) -> None:
        """`kernels` has the names of the kernels that workers report."""
        super().__init__(nursery)
        self._pace_s = pace_s
        self._kernels = kernels or {}
        self._workers: list[Driven] = []

    def open(self) -> None:
        self._nursery.open(
            "gateway"
        )  # the nursery imports only what gateways need: these workers need no torch

    def start(self, spec: ServiceSpec) -> ServiceReady:
        if not isinstance(spec, WorkerSpec):
            return super().start(spec)
        options = NullWorkerOptions(
            spec.token,
            pace_s=self._pace_s,
            token_ids=(300, 301),
            worker_id=spec.worker_id,
            kernels=self._kernels.get(spec.worker_id, ""),
        )
        argument = msgspec.json.encode(options).decode()
        worker = Driven("worker", [sys.executable, "-m", "bench.lab.gateway.worker", argument])
        self._workers.append(worker)
        worker.start()
        facts = worker.ready(30)
        return WorkerReady(facts["address"], facts["pid"], 4096, NUM_BLOCKS, 1, 0.0)

    def close(self) -> None:
        super().close()
        for worker in self._workers:
            worker.close()

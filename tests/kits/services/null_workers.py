"""A launcher whose worker computes nothing, for gateway tests without torch."""

import sys

import msgspec

from bench.gateway.worker import NUM_BLOCKS, NullWorkerOptions
from bench.processes.driven import Driven
from deploy.local.launcher import ProcessLauncher
from deploy.local.nursery import Nursery
from deploy.services.spec import WorkerReady, WorkerSpec


class NullWorkers(ProcessLauncher):
    """A launcher of real gateways and of a worker that sends each answer a token every `pace_s`."""

    def __init__(self, nursery: Nursery, pace_s: float = 0.001) -> None:
        super().__init__(nursery)
        self._pace_s = pace_s

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        options = NullWorkerOptions(
            spec.token, pace_s=self._pace_s, token_ids=(300, 301), worker_id=spec.worker_id
        )
        argument = msgspec.json.encode(options).decode()
        self.worker = Driven("worker", [sys.executable, "-m", "bench.gateway.worker", argument])
        self.worker.start()
        facts = self.worker.ready(30)
        return WorkerReady(facts["address"], facts["pid"], 4096, NUM_BLOCKS, 1, 0.0)

    def close(self) -> None:
        super().close()
        self.worker.close()

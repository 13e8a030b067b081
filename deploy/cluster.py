"""Brings a whole deployment up on one machine, and down again."""

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deploy.launcher import Launcher
from deploy.processes import GatewayReady, GatewaySpec, WorkerReady, WorkerSpec
from engine.config import Config
from engine.errors import ConfigError
from engine.messages import Role, WorkerId

BUNDLED_MODEL = Path(__file__).parent.parent / "engine" / "model" / "bundled" / "target"

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pools:
    """How many workers of each role."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 0

    def workers(self) -> list[tuple[WorkerId, Role]]:
        """Every worker with its name. Raises ConfigError if they could not serve anything."""
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.MIXED: self.mixed}
        if min(counts.values()) < 0:
            raise ConfigError("a pool cannot have fewer than 0 workers")
        if not (self.mixed or (self.prefill and self.decode)):
            raise ConfigError("need a prefill and a decode worker, or a mixed one")
        return [
            (WorkerId(f"{role}-{i}"), role) for role, count in counts.items() for i in range(count)
        ]


class Deployment:
    """Workers and a gateway, run by a launcher."""

    def __init__(self, launcher: Launcher, *, model: Path, pools: Pools, config: Config) -> None:
        self._launcher = launcher
        self._model = model
        self._pools = pools
        self._config = config
        self.log_level = "warning"
        self.workers: dict[WorkerId, WorkerReady] = {}

    def open(self, report: Report) -> GatewayReady:
        """Starts everything and reports on it; on failure nothing is left. Raises ConfigError."""
        try:
            return self._open(report)
        except BaseException:
            self.close()
            raise

    def dead(self) -> list[str]:
        """Services that ended by themselves since the last call."""
        return self._launcher.dead()

    def close(self) -> None:
        """Stops everything."""
        self._launcher.close()

    def _open(self, report: Report) -> GatewayReady:
        if not self._model.is_dir():
            raise ConfigError(f"{self._model}: no such model directory")
        roles = self._pools.workers()
        token = secrets.token_hex(16)
        self._launcher.open()
        specs = [
            WorkerSpec(
                worker_id=worker_id,
                role=role,
                model=str(self._model.resolve()),
                config=self._config.worker,
                token=token,
                threads=self._config.worker.threads or _threads_each(len(roles)),
                log_level=self.log_level,
            )
            for worker_id, role in roles
        ]
        report(f"starting {', '.join(worker_id for worker_id, _ in roles)}")
        with ThreadPoolExecutor(len(specs)) as threads:
            started = list(threads.map(self._launcher.start_worker, specs))
        self.workers = {spec.worker_id: ready for spec, ready in zip(specs, started, strict=True)}
        report("starting the gateway")
        return self._launcher.start_gateway(
            GatewaySpec(
                workers=tuple(ready.address for ready in self.workers.values()),
                model=str(self._model.resolve()),
                context_len=min(ready.context_len for ready in self.workers.values()),
                gateway=self._config.gateway,
                router=self._config.router,
                token=token,
                log_level=self.log_level,
            )
        )


def _threads_each(num_workers: int) -> int:
    """Cores shared out: more torch threads than cores cost scheduler ticks."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)

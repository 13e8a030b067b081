"""Brings a whole deployment up on one machine, and down again."""

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from deploy.launcher import Launcher
from deploy.processes import GatewayReady, GatewaySpec, WorkerReady, WorkerSpec
from engine.clock import Clock
from engine.config import Config, WorkerConfig
from engine.errors import ConfigError
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import Role, WorkerId
from kvtransfer.messages import Identity
from kvtransfer.wire import Disagreement, agree

_BUNDLED = Path(__file__).parent.parent / "engine" / "model" / "bundled"
BUNDLED_MODEL, BUNDLED_DRAFT = _BUNDLED / "target", _BUNDLED / "draft"

FIRST_RESTART_S = 1.0
LAST_RESTART_S = 60.0
MAX_DOUBLINGS = 6  # by which the last is reached
STEADY_S = 60.0  # who lived that long ended for a new reason

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


@dataclass(slots=True)
class _Restart:
    """One gateway: how often it failed in a row, and when it is due or was started."""

    num_failed: int = 0
    due_s: float | None = None  # None while it runs
    started_s: float | None = None


class Restarts:
    """When gateways that ended are started again: later each time, until one lives for a while."""

    def __init__(self) -> None:
        self._restarts: dict[str, _Restart] = {}

    def failed(self, name: str, now_s: float) -> float:
        """It ended, or did not start; in how many seconds it is due."""
        restart = self._restarts.setdefault(name, _Restart())
        started_s, restart.started_s = restart.started_s, None
        if started_s is not None and now_s - started_s >= STEADY_S:
            restart.num_failed = 0
        delay_s = FIRST_RESTART_S * float(2 ** min(restart.num_failed, MAX_DOUBLINGS))
        delay_s = min(delay_s, LAST_RESTART_S)
        restart.num_failed += 1
        restart.due_s = now_s + delay_s
        return delay_s

    def started(self, name: str, now_s: float) -> None:
        """It runs again."""
        self._restarts[name].due_s = None
        self._restarts[name].started_s = now_s

    def due(self, now_s: float) -> str | None:
        """Who has been due for longest."""
        due = {
            name: restart.due_s
            for name, restart in self._restarts.items()
            if restart.due_s is not None and restart.due_s <= now_s
        }
        return min(due, key=due.__getitem__) if due else None


class Deployment:
    """Workers and a gateway, run by a launcher."""

    def __init__(self, launcher: Launcher, *, model: Path, pools: Pools, config: Config) -> None:
        self._launcher = launcher
        self._model = model
        self._pools = pools
        self._config = config
        self.log_level = "warning"
        self.workers: dict[WorkerId, WorkerReady] = {}
        self.gateways: list[GatewayReady] = []
        self._gateway_specs: dict[str, GatewaySpec] = {}  # by name, to start it again
        self._restarts = Restarts()
        self._siblings: tempfile.TemporaryDirectory[str] | None = None

    def open(self, report: Report) -> GatewayReady:
        """Starts everything and reports on it; on failure nothing is left. Raises ConfigError."""
        try:
            return self._open(report)
        except BaseException:
            self.close()
            raise

    def mend(self, clock: Clock) -> list[str]:
        """Sees what ended by itself and starts a gateway that is due; says what came of it.

        To be called about once a second. It starts one gateway at most, so that who wants to stop
        waits for no more than that. A worker is not replaced: what it held is lost, and requests go
        on where there are others.
        """
        told = [
            f"{how}; {self._outlook(name, clock.now_s())}"
            for name, how in self._launcher.dead().items()
        ]
        due = self._restarts.due(clock.now_s())
        if due is not None:
            told.append(f"{due} {self._start_again(due, clock)}")
        return told

    def _outlook(self, name: str, now_s: float) -> str:
        if name not in self._gateway_specs:
            return "requests go on where they can"
        delay_s = self._restarts.failed(name, now_s)
        return f"its requests are lost, it is started again in {delay_s:g} s"

    def _start_again(self, name: str, clock: Clock) -> str:
        spec = self._gateway_specs[name]
        try:
            ready = self._launcher.start_gateway(spec)
        except ConfigError as error:
            delay_s = self._restarts.failed(name, clock.now_s())
            return f"did not start again: {error}; the next attempt is in {delay_s:g} s"
        self._restarts.started(name, clock.now_s())
        self.gateways[spec.process] = ready
        return "was started again"

    def close(self) -> None:
        """Stops everything."""
        self._launcher.close()
        if self._siblings is not None:
            self._siblings.cleanup()

    def _open(self, report: Report) -> GatewayReady:
        if not self._model.is_dir():
            raise ConfigError(f"{self._model}: no such model directory")
        roles = self._pools.workers()
        token = secrets.token_hex(16)
        draft = self._config.worker.draft_path
        if draft is not None and not draft.is_dir():
            raise ConfigError(f"{draft}: no such model directory")
        configs = {role: config_of(role, self._config.worker) for _, role in roles}
        check_formats(configs)
        self._launcher.open()
        specs = [
            WorkerSpec(
                worker_id=worker_id,
                role=role,
                model=str(self._model.resolve()),
                config=configs[role],
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
        self.gateways = self._start_gateways(
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
        return self.gateways[0]

    def _start_gateways(self, spec: GatewaySpec) -> list[GatewayReady]:
        """All processes of the gateway: the others listen where the first one does."""
        num_processes = spec.gateway.processes
        replace = msgspec.structs.replace
        if num_processes > 1:
            self._siblings = tempfile.TemporaryDirectory(prefix="baton-")
            spec = replace(spec, name="gateway-0", siblings=self._siblings.name)
        first = self._launcher.start_gateway(spec)
        gateway = replace(spec.gateway, port=urlsplit(first.url).port)
        spec = replace(spec, gateway=gateway, joins=True)
        others = [replace(spec, name=f"gateway-{i}", process=i) for i in range(1, num_processes)]
        self._gateway_specs = {each.name: each for each in (spec, *others)}
        if not others:
            return [first]
        with ThreadPoolExecutor(len(others)) as threads:
            return [first, *threads.map(self._launcher.start_gateway, others)]


def config_of(role: Role, config: WorkerConfig) -> WorkerConfig:
    """What workers of that role are started with.

    `kv_dtype` is the format of their pool; `decode_kv_dtype` still says whether decode workers have
    one of their own, so that none becomes what it cannot be. `prefills_locally` is left only where
    KV that they compute is, to the bit, what would be handed over to them.
    """
    kv_dtype = config.kv_dtype
    if role is Role.DECODE and config.decode_kv_dtype is not None:
        kv_dtype = config.decode_kv_dtype
    formats = {config.kv_dtype, kv_dtype, config.kv_wire_dtype or kv_dtype}
    return msgspec.structs.replace(
        config,
        kv_dtype=kv_dtype,
        prefills_locally=config.prefills_locally and len(formats) == 1,
    )


def check_formats(configs: Mapping[Role, WorkerConfig]) -> None:
    """Raises ConfigError if KV could not get from a worker that prefills to one that decodes."""
    for source, sink in product(configs, configs):
        if source.prefills and sink.decodes and not _exchange(configs[source], configs[sink]):
            raise ConfigError(_refusal(configs[source], configs[sink]))


def _exchange(source: WorkerConfig, sink: WorkerConfig) -> bool:
    """Whether the formats of two workers go together."""
    try:
        agree(_identity(source), _identity(sink))
    except Disagreement:
        return False
    return True


def _identity(config: WorkerConfig) -> Identity:
    """As a worker of some model: which one makes no difference to formats."""
    layout = KVLayout(config.block_size, config.kv_dtype, (KVSection(1, 1, head_dim=2),))
    return Identity("", layout, kv_wire_dtype=config.kv_wire_dtype)


def _refusal(source: WorkerConfig, sink: WorkerConfig) -> str:
    """Names the flags, and what they could be."""
    ends = f"--kv-dtype {source.kv_dtype}"
    if sink.kv_dtype != source.kv_dtype:
        ends += f" and --decode-kv-dtype {sink.kv_dtype}"
    wire = source.kv_wire_dtype
    given = "without --kv-wire-dtype" if wire is None else f"with --kv-wire-dtype {wire}"
    fit = [
        kv_format
        for kv_format in KVFormat
        if _exchange(
            msgspec.structs.replace(source, kv_wire_dtype=kv_format),
            msgspec.structs.replace(sink, kv_wire_dtype=kv_format),
        )
    ]
    return f"{ends} cannot be combined {given}; possible are: {', '.join(fit) or 'none'}"


def _threads_each(num_workers: int) -> int:
    """Cores shared out: more torch threads than cores cost scheduler ticks."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)

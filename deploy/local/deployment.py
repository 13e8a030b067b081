"""Starts and stops a whole deployment on one machine."""

import logging
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from deploy.admin.api import AdminService
from deploy.base.defaults import pools_of
from deploy.base.gpus import FoundGpus, num_that_fit
from deploy.base.launcher import Launcher
from deploy.base.private_folder import PrivateFolder, sweep
from deploy.base.salts import kept_salts
from deploy.base.spec import GatewayReady
from deploy.base.thread import ServiceThread
from deploy.controller.controller import OPEN_TIMEOUT_S, PoolController
from deploy.controller.intents import IntentFile, IntentStore, orders_path, remove_orders
from deploy.controller.plan import ControllerPlan, gateway_processes
from deploy.logs.lines import CONTROLLER, LogSource, keep_lines
from deploy.model_source import default_cache, local_model, name_of, pinned
from deploy.pools.formats import check_version, formats_of
from deploy.pools.orders import OrderRefused
from deploy.services.shared_port import GRPC, HTTP, PortHolder, listen_on
from deploy.services.text import text_model
from deploy.worker.memory import available_bytes
from engine.clock import MonotonicClock
from engine.config import Config, ModelConfig, PlannerMode
from engine.control import Version, first_name
from engine.errors import ConfigError
from engine.log_context import NEWS
from engine.model.loading.files import check_files

log = logging.getLogger(__name__)

COUNT_TIMEOUT_S = 1.0  # longest wait for the number of running answers during a stop

Report = Callable[[str], None]


def with_admin_key(config: Config) -> Config:
    """Returns the configuration with a new admin key if it has none.

    Operators find the key in the run directory.
    """
    if config.admin.key is not None:
        return config
    admin = msgspec.structs.replace(config.admin, key=secrets.token_urlsafe(24))
    return msgspec.structs.replace(config, admin=admin)


def plan_of(
    model: str, config: Config, *, cores: int, memory_bytes: int | None, num_gpus: int
) -> ControllerPlan:
    """Returns the plan of a deployment. Checks model, pools and KV formats before any service
    starts. Raises ConfigError.

    `num_gpus` is the number of GPUs that all workers together can use.
    """
    plan = ControllerPlan(
        model=pinned(model),
        config=with_admin_key(config),
        pools=pools_of(config.pools),
        token=secrets.token_hex(16),
        cores=cores,
        memory_bytes=memory_bytes,
        salts=kept_salts(config.store),
        has_gpus=num_gpus > 0,
    )
    others = tuple(_version_of(name, each, plan) for name, each in config.models.items())
    plan = msgspec.structs.replace(plan, others=others)
    if plan.num_gpus and not others:
        room = num_that_fit(num_gpus, plan.num_gpus)
        plan = msgspec.structs.replace(plan, pools=pools_of(config.pools, room))
    names = [version.model_name for version in plan.first_versions]
    if names[0] in names[1:]:
        raise ConfigError(f"two models are called {names[0]}: see gateway.model_name")
    for version in plan.first_versions:
        draft = version.worker.draft_path
        if draft is not None and not draft.is_dir():
            raise ConfigError(f"{draft}: no such model directory")
        check_version(version)
    formats = set(formats_of(plan.first_versions[0]).values())
    if config.planner.mode is not PlannerMode.OFF and len(formats) > 1:
        raise ConfigError(
            f"planner.mode = {config.planner.mode} needs workers that can be flipped, and these"
            f" keep their KV: decode workers hold {config.worker.decode_kv_dtype}, others do not"
        )
    return plan


def check_models(plan: ControllerPlan, report: Report) -> None:
    """Fetches the first models and checks their small files. Raises ConfigError.

    Unlike a worker's start, this fetch has no deadline. Without this check, workers and gateways
    would raise the same errors later.
    """
    cache = default_cache(os.environ)
    for version in plan.first_versions:
        folder = local_model(version.model, cache=cache, report=report)
        check_files(folder)
        if version.worker.draft_path is not None:
            check_files(version.worker.draft_path)
        text_model(folder, plan.config.gateway)


def check_gpus(plan: ControllerPlan, found: FoundGpus) -> None:
    """Raises ConfigError if the workers of the first start need more GPUs than this machine has."""
    each = plan.num_gpus
    num_workers = sum(version.pools.total for version in plan.first_versions)
    if not each or num_workers <= num_that_fit(len(found.gpus), each):
        return
    there = f"this machine has {len(found.gpus)}" if found.gpus else found.why_none
    raise ConfigError(
        f"{num_workers} workers need {each:g} GPU each, and {there}: start fewer (`--mixed 1` is"
        " one that does all), let several share one (pools.num_gpus = 0.5), or use the CPU"
        " (worker.device = cpu)"
    )


def _version_of(name: str, model: ModelConfig, plan: ControllerPlan) -> Version:
    """Returns the first version of a model in [models]. Raises ConfigError."""
    return Version(
        name=first_name(name),
        model=pinned(model.model),
        model_name=name,
        worker=model.worker,
        pools=pools_of(model),
        line=name,
        device=plan.device_of(model.worker),
    )


def _with_gateways(plan: ControllerPlan) -> ControllerPlan:
    """Returns the plan with a number of gateways that fits this machine's cores."""
    number = gateway_processes(plan.config.gateway, plan.cores)
    gateway = msgspec.structs.replace(plan.config.gateway, processes=number)
    config = msgspec.structs.replace(plan.config, gateway=gateway)
    return msgspec.structs.replace(plan, config=config)


class Deployment:
    """Runs a controller in a thread of this process, with the launcher that the controller uses."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        model: str | Path,
        config: Config,
        fallback: str | None = None,
    ) -> None:
        self._launcher = launcher
        self._model = str(model)  # in a form that `model_source` reads
        self._fallback = fallback  # the model to serve if `model` cannot be fetched
        self.why_fallback: str | None = None  # why the fallback is served, as a sentence
        self.config = config
        self.on_news: Report = lambda _: None  # called with news of the pools, on another thread
        self._shared: PrivateFolder | None = None  # folder that gateway processes share
        self._ports: list[PortHolder] = []
        self._store: IntentStore | None = None  # its record is removed at an orderly stop
        self._thread: ServiceThread[str] | None = None
        self._end_of_lines: Callable[[], None] | None = None  # call this to stop keeping log lines

    def open(self) -> GatewayReady:
        """Starts all services.

        Returns once the services serve. After a ConfigError no process is left.
        """
        try:
            return self._open()
        except BaseException:
            self.stop_draining()
            self.close()
            raise

    def close(self) -> None:
        """Stops all services, even if the controller does not close in time."""
        thread, self._thread = self._thread, None
        shared, self._shared = self._shared, None
        ports, self._ports = self._ports, []
        store, self._store = self._store, None
        end_of_lines, self._end_of_lines = self._end_of_lines, None
        with ExitStack() as stack:
            if store is not None:  # after an orderly stop the next start uses the declaration
                stack.callback(remove_orders, store)
            if shared is not None:
                stack.callback(shared.close)
            if end_of_lines is not None:
                stack.callback(end_of_lines)
            stack.callback(self._launcher.close)
            for port in ports:  # new clients are refused while running answers finish
                stack.callback(port.close)
            if thread is not None:
                stack.callback(thread.close)

    def stop_draining(self) -> None:
        """Makes `close` stop waiting for answers. Any thread may call this method."""
        self._launcher.stop_draining()

    def num_answers(self) -> int | None:
        """Counts the requests that are being served.

        None if a gateway does not answer within a second.
        """
        if self._thread is None:
            return None
        try:
            return self._thread.ask(self.controller.sessions.requests(), COUNT_TIMEOUT_S)[0]
        except (OrderRefused, TimeoutError):
            return None

    @property
    def gateways(self) -> list[GatewayReady]:
        """All gateway processes, ordered by name."""
        found = self.controller.gateways
        return [found[name] for name in sorted(found)]

    def _tell(self, line: str) -> None:
        NEWS.info("%s", line)
        self.on_news(line)

    def _open(self) -> GatewayReady:
        found = self._launcher.gpus()
        plan = plan_of(
            self._served_model(),
            self.config,
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=available_bytes(),
            num_gpus=len(found.gpus),
        )
        check_gpus(plan, found)
        plan = _with_gateways(plan)
        check_models(plan, self._tell)
        for left in sweep():  # this also ends processes that keep the port
            log.warning("a deployment ended without an order: its folder %s is removed", left)
        plan = self._keep_lines(self._share_port(plan))
        self._launcher.open()
        clock = MonotonicClock()
        path = orders_path(plan, os.environ)
        store = None if path is None else IntentFile(path)
        self.controller = PoolController(
            plan, launcher=self._launcher, clock=clock, report=self._tell, store=store
        )
        service = AdminService(self.controller, config=plan.config.admin, clock=clock)
        self._thread = ServiceThread(service, "controller", open_timeout_s=OPEN_TIMEOUT_S)
        try:
            self.admin_url = self._thread.open()
        except BaseException:
            if self.controller.stored_own:  # otherwise the next start would use this start's record
                self._store = store
            raise
        self._store = store
        return self.gateways[0]

    def _served_model(self) -> str:
        """Fetches the model and returns its name.

        If the fetch fails, returns the fallback's name.
        """
        if self._fallback is None:
            return self._model
        try:
            local_model(self._model, cache=default_cache(os.environ), report=self._tell)
        except ConfigError as error:
            name = name_of(self._fallback)
            self.why_fallback = f"serving {name}, a toy whose answers are noise: {error}"
            return self._fallback
        return self._model

    def _hold(self, port_name: str, host: str, port: int) -> None:
        """Listens on a port for the gateways. Raises ConfigError if the port is taken."""
        assert self._shared is not None
        holder = PortHolder(self._shared.path, port_name)
        holder.hold(listen_on(host, port))
        self._ports.append(holder)

    def _keep_lines(self, plan: ControllerPlan) -> ControllerPlan:
        """Keeps the log lines of all processes in one folder. Returns the plan with that folder."""
        assert self._shared is not None
        folder = self._shared.path / "logs"
        source = LogSource(CONTROLLER, plan.config.logs, folder)
        self._end_of_lines = keep_lines(source)
        return msgspec.structs.replace(plan, log_folder=str(folder))

    def _share_port(self, plan: ControllerPlan) -> ControllerPlan:
        """Listens for all gateways. Returns the plan with the folders that gateways share."""
        shared = PrivateFolder()
        try:
            shared.open()
        except OSError as error:
            raise ConfigError(f"no private folder can be made: {error}") from error
        self._shared = shared
        gateway = plan.config.gateway
        self._hold(HTTP, gateway.host, gateway.port)
        plan = msgspec.structs.replace(plan, ports=str(shared.path))
        if not gateway.shares_port:
            return plan
        if gateway.grpc_port is not None:
            self._hold(GRPC, gateway.host, gateway.grpc_port)
        siblings = shared.path / "siblings"
        siblings.mkdir()
        return msgspec.structs.replace(plan, siblings=str(siblings))

"""Brings a whole deployment up on one machine, and down again."""

import os
import secrets
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from deploy.admin.api import AdminService
from deploy.commands.defaults import pools_of
from deploy.controller.plan import ControllerPlan
from deploy.controller.shell import OPEN_TIMEOUT_S, PoolController
from deploy.launcher import Launcher
from deploy.model_source import default_cache, local_model, pinned
from deploy.pools.formats import check_formats, config_of
from deploy.pools.orders import OrderRefused
from deploy.services.spec import GatewayReady
from deploy.services.thread import ServiceThread
from deploy.worker.memory import available_bytes
from engine.clock import MonotonicClock
from engine.config import Config
from engine.control import SERVING_ROLES
from engine.errors import ConfigError
from engine.model.loading.files import check_files

COUNT_TIMEOUT_S = 1.0  # for a count of the answers; then the stop goes on without it

Report = Callable[[str], None]


def with_admin_key(config: Config) -> Config:
    """Adds a new admin key if none is configured. Operators find it in the run directory."""
    if config.admin.key is not None:
        return config
    admin = msgspec.structs.replace(config.admin, key=secrets.token_urlsafe(24))
    return msgspec.structs.replace(config, admin=admin)


def plan_of(model: str, config: Config, *, cores: int, memory_bytes: int | None) -> ControllerPlan:
    """Checks model, pools and formats before anything starts. Raises ConfigError."""
    source = pinned(model)
    draft = config.worker.draft_path
    if draft is not None and not draft.is_dir():
        raise ConfigError(f"{draft}: no such model directory")
    pools = pools_of(config.pools)
    wanted = [role for role in SERVING_ROLES if pools.of(role)]
    check_formats({role: config_of(role, config.worker) for role in wanted})
    return ControllerPlan(
        model=source,
        config=with_admin_key(config),
        pools=pools,
        token=secrets.token_hex(16),
        cores=cores,
        memory_bytes=memory_bytes,
    )


class Deployment:
    """A controller in a thread of this process, and the launcher that it uses."""

    def __init__(self, launcher: Launcher, *, model: str | Path, config: Config) -> None:
        self._launcher = launcher
        self._model = str(model)  # in the forms of `model_source`
        self.config = config
        self.log_level = "warning"
        self.on_news: Report = lambda _: None  # called with news, in another thread
        self._siblings: tempfile.TemporaryDirectory[str] | None = None
        self._thread: ServiceThread[str] | None = None

    def open(self) -> GatewayReady:
        """Starts everything; returns when it serves. After a ConfigError nothing is left."""
        try:
            return self._open()
        except BaseException:
            self.hurry()
            self.close()
            raise

    def close(self) -> None:
        """Stops everything, even if the controller does not close in time."""
        thread, self._thread = self._thread, None
        siblings, self._siblings = self._siblings, None
        with ExitStack() as stack:
            if siblings is not None:
                stack.callback(siblings.cleanup)
            stack.callback(self._launcher.close)
            if thread is not None:
                stack.callback(thread.close)

    def hurry(self) -> None:
        """Makes `close` stop waiting for answers. Any thread may call it."""
        self._launcher.hurry()

    def num_answers(self) -> int | None:
        """Counts the requests being served. None if a gateway does not answer at once."""
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
        self.on_news(line)

    def _open(self) -> GatewayReady:
        plan = plan_of(
            self._model,
            self.config,
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=available_bytes(),
        )
        if self.config.gateway.processes > 1:
            self._siblings = tempfile.TemporaryDirectory(prefix="baton-")
            plan = msgspec.structs.replace(plan, siblings=self._siblings.name)
        plan = msgspec.structs.replace(plan, log_level=self.log_level)
        # Fetched here, where no start has a deadline.
        folder = local_model(plan.model, cache=default_cache(os.environ), report=self._tell)
        check_files(folder)  # a worker would find the same errors, but later
        self._launcher.open()
        clock = MonotonicClock()
        self.controller = PoolController(
            plan, launcher=self._launcher, clock=clock, report=self._tell
        )
        service = AdminService(self.controller, config=plan.config.admin, clock=clock)
        self._thread = ServiceThread(service, "controller", open_timeout_s=OPEN_TIMEOUT_S)
        self.admin_url = self._thread.open()
        return self.gateways[0]

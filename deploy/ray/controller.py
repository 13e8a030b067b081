"""The pool controller as a detached actor of a Ray cluster, which Ray restarts when it dies.

Workers and gateways are detached actors too, so they outlive the controller. The next controller
finds these actors by name and continues.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import ray

from deploy.admin.api import AdminService
from deploy.admin.client import UPDATE_TIMEOUT_S, AdminClient, AdminError
from deploy.admin.schema import Declaration, Difference, PoolsAnswer
from deploy.base.run_dir import log_folder, run_directory
from deploy.base.spec import READY_TIMEOUT_S
from deploy.base.thread import LateStart, ServiceThread
from deploy.controller.controller import OPEN_TIMEOUT_S, PoolController
from deploy.controller.intents import BadIntents, IntentStore, remove_orders
from deploy.controller.plan import ControllerPlan
from deploy.logs.lines import configure_logging, controller_logs
from deploy.pools.placement import ANYWHERE, NodePlacement
from deploy.ray.actors import node_name
from deploy.ray.launcher import CONTROLLER, ON_HEAD, ClusterLauncher
from deploy.ray.own_ray import NAMESPACE
from engine.clock import MonotonicClock
from engine.errors import BatonError, ConfigError
from engine.log_context import NEWS

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 120.0  # time limit of a stop; the gateways' drain time is added
ASK_TIMEOUT_S = 10.0
DECLARE_TIMEOUT_S = READY_TIMEOUT_S + UPDATE_TIMEOUT_S
RETRY_EVERY_S = 0.5
READY_WITHIN_S = 10.0  # timeout of one call of `ready`, which the caller repeats
REOPEN_AFTER_S = 1.0
ORDERS_KEY = "orders"


class RayOrders(IntentStore):
    """A store of one record in Ray's table of keys and values. If the GCS is dead, calls wait for a
    long time.

    The table is in the GCS, so it outlives the controller and all gateways. The table outlives the
    head too if the GCS keeps its state in Redis or RocksDB.
    """

    def __init__(self) -> None:
        self._is_removed = False
        self._lock = threading.Lock()  # a write may still run in another thread during `remove`

    def __str__(self) -> str:
        return "Ray's table of keys"

    def read(self) -> bytes | None:
        """Returns the record."""
        with _gcs_errors():
            found = _table()._internal_kv_get(ORDERS_KEY, namespace=NAMESPACE)
        return None if found is None else bytes(found)

    def write(self, record: bytes) -> None:
        """Replaces the record."""
        with self._lock:
            if self._is_removed:
                return
            with _gcs_errors():
                _table()._internal_kv_put(ORDERS_KEY, record, overwrite=True, namespace=NAMESPACE)

    def remove(self) -> None:
        """Removes the record."""
        with self._lock:
            self._is_removed = True
            with _gcs_errors():
                _table()._internal_kv_del(ORDERS_KEY, namespace=NAMESPACE)


@contextmanager
def _gcs_errors() -> Iterator[None]:
    """Turns errors of Ray's GCS into BadIntents."""
    try:
        yield
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise BadIntents(f"Ray's GCS does not answer: {error}") from error


def _table() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


class _ControllerActor:
    """The actor that hosts the controller.

    Its constructor opens the controller, because a restart by Ray runs only the constructor.
    """

    def __init__(self, plan_json: bytes) -> None:
        plan = _with_siblings(msgspec.json.decode(plan_json, type=ControllerPlan))
        plan = msgspec.structs.replace(plan, log_folder=_log_folder_name())
        folder = log_folder(plan.log_folder, node_name())
        source = msgspec.structs.replace(controller_logs(plan.config.logs), folder=folder)
        configure_logging(source, MonotonicClock())
        clock = MonotonicClock()
        self._launcher = ClusterLauncher(NodePlacement.of(plan.config.pools, plan.num_gpus))
        self._orders = RayOrders()
        controller = PoolController(
            plan,
            launcher=self._launcher,
            clock=clock,
            report=lambda line: NEWS.info("%s", line),
            store=self._orders,
        )
        self._plan = plan
        service = AdminService(controller, config=plan.config.admin, clock=clock)
        self._thread: ServiceThread[str] = ServiceThread(
            service, "controller", open_timeout_s=OPEN_TIMEOUT_S
        )
        self._is_first = not ray.get_runtime_context().was_current_actor_reconstructed
        self._is_open = threading.Event()
        self._url = self._error = ""
        threading.Thread(target=self._open, name="open", daemon=True).start()

    def _open(self) -> None:
        try:
            self._url = self._thread.open()
        except BaseException as error:
            if not self._is_first or not _is_final(error):
                log.critical("the controller did not open: %r", error, exc_info=error)
                threading.Event().wait(REOPEN_AFTER_S)
                os._exit(70)  # Ray then restarts the actor
            self._error = str(error)
        self._is_open.set()

    def ready(self) -> tuple[str, int, str]:
        """Returns the admin API's URL, the process id, and an error.

        While the controller opens, URL and error are empty.
        """
        self._is_open.wait(READY_WITHIN_S)
        return self._url, os.getpid(), self._error

    def pools(self) -> tuple[bytes, str]:
        """Returns the admin API's answer about the pools as JSON, or the error.

        Only this node can reach the admin API.
        """
        return self._asked(lambda client: _reachable(client.pools()))

    def differences(self, declared: bytes) -> tuple[bytes, str]:
        """Compares a declaration (JSON) with the deployment.

        Returns the differences as JSON, or the error.
        """
        body = msgspec.json.decode(declared, type=Declaration)
        return self._asked(lambda client: client.differences(body))

    def declare(self, declared: bytes) -> tuple[bytes, str]:
        """Orders the changes that a declaration (JSON) makes.

        Returns the pools as JSON, or the error.
        """
        body = msgspec.json.decode(declared, type=Declaration)
        return self._asked(lambda client: _reachable(client.declare(body)))

    def _asked(self, question: Callable[[AdminClient], object]) -> tuple[bytes, str]:
        url, _, error = self.ready()
        if error:
            return b"", error
        if not url:
            return b"", "the controller is still starting"
        try:
            with AdminClient(url, self._plan.config.admin.key or "") as client:
                return msgspec.json.encode(question(client)), ""
        except AdminError as failure:
            return b"", str(failure)

    def drain_timeout_s(self) -> float:
        """Returns the seconds in which a stopping gateway must finish its answers."""
        return self._plan.config.gateway.drain_timeout_s

    def stop(self) -> None:
        """Closes the controller, then stops the services of this and of earlier controllers."""
        self._thread.close()
        self._launcher.running()
        self._launcher.stop_all()
        self._launcher.remove_logs(_log_folder_name())
        remove_orders(self._orders)
        if self._plan.siblings is not None:
            shutil.rmtree(Path(self._plan.siblings).parent, ignore_errors=True)


def start_controller(plan: ControllerPlan) -> tuple[str, int]:
    """Starts a deployment in the joined Ray cluster and waits until it serves.

    Returns the present URL of the admin API and the controller's process id. The plan must contain
    the admin key, so that a restarted controller has the same key. Raises ConfigError.
    """
    assert plan.config.admin.key is not None
    actor_class = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(_ControllerActor)
    try:
        actor = actor_class.options(
            name=CONTROLLER, namespace=NAMESPACE, lifetime="detached", **ON_HEAD
        )
        handle = actor.remote(msgspec.json.encode(plan))
    except ValueError as error:
        raise ConfigError("a deployment runs in this cluster already") from error
    try:
        return find_controller()
    except BaseException:
        _end(handle)
        raise


def find_controller() -> tuple[str, int]:
    """Returns the controller's URL and process id. If the controller is being restarted, waits for
    it.

    Raises ConfigError.
    """
    pause = threading.Event()
    clock = MonotonicClock()
    reached_s = clock.now_s()  # time of its last answer
    end_s = reached_s + OPEN_TIMEOUT_S
    while True:
        try:
            actor = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
            url, pid, error = ray.get(actor.ready.remote(), timeout=READY_TIMEOUT_S)
        except (ValueError, ray.exceptions.RayError) as failure:
            is_back_soon = isinstance(failure, ray.exceptions.ActorUnavailableError)
            if not is_back_soon or clock.now_s() - reached_s >= READY_TIMEOUT_S:
                raise ConfigError(f"the controller cannot be reached: {failure}") from failure
            pause.wait(RETRY_EVERY_S)
            continue
        reached_s = clock.now_s()
        if error:
            raise ConfigError(error)
        if url:
            return str(url), int(pid)
        if reached_s >= end_s:
            raise ConfigError(f"the controller has not opened in {OPEN_TIMEOUT_S:g} s")


def controller_pools() -> PoolsAnswer | None:
    """Returns the admin API's answer about the pools. None if no controller runs.

    Raises ConfigError.
    """
    try:
        actor = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        return None
    return msgspec.json.decode(_answer(actor.pools, READY_TIMEOUT_S), type=PoolsAnswer)


def controller_differences(declared: Declaration) -> tuple[Difference, ...]:
    """Returns the settings whose declared and running values differ. Raises ConfigError."""
    answer = _answer(_controller().differences, DECLARE_TIMEOUT_S, msgspec.json.encode(declared))
    return msgspec.json.decode(answer, type=tuple[Difference, ...])


def controller_declare(declared: Declaration) -> PoolsAnswer:
    """Orders the declared changes. Raises ConfigError."""
    answer = _answer(_controller().declare, DECLARE_TIMEOUT_S, msgspec.json.encode(declared))
    return msgspec.json.decode(answer, type=PoolsAnswer)


def _controller() -> Any:
    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError as error:
        raise ConfigError("nothing runs there: `baton up` would start all") from error


def _answer(question: Any, timeout_s: float, *arguments: bytes) -> bytes:
    """Calls a method of the controller's actor that returns JSON or an error.

    Returns the decoded answer. Raises ConfigError.
    """
    try:
        answer, error = ray.get(question.remote(*arguments), timeout=timeout_s)
    except ray.exceptions.RayError as failure:
        raise ConfigError(f"the controller cannot be reached: {failure}") from failure
    if error:
        raise ConfigError(error)
    return bytes(answer)


def stop_deployment() -> None:
    """Ends all services of the controller, then the controller.

    If no controller runs, ends the services that it left. Raises ConfigError if there are no such
    services.
    """
    try:
        actor = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError as error:
        if ClusterLauncher(ANYWHERE).sweep() == 0:
            raise ConfigError("no deployment runs in this cluster") from error
        return
    _end(actor)


def _is_final(error: BaseException) -> bool:
    """True if another attempt cannot help, so that the first start must report the error."""
    return isinstance(error, BatonError) and not isinstance(error, LateStart)


def _end(actor: Any) -> None:
    try:
        drain_s = ray.get(actor.drain_timeout_s.remote(), timeout=ASK_TIMEOUT_S)
        ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S + drain_s)
    except ray.exceptions.RayError as error:
        log.warning("the controller did not stop by itself: %s", error)
    ray.kill(actor)
    ClusterLauncher(ANYWHERE).sweep()  # ends services that the controller did not end in time


def _with_siblings(plan: ControllerPlan) -> ControllerPlan:
    """Adds directories that the gateways on this node share.

    Every start uses the same directories.
    """
    if not plan.config.gateway.shares_port:
        return plan
    session = ray.get_runtime_context().get_session_name()
    directory = run_directory(os.environ) / f"gateways-{session}"
    siblings = directory / "siblings"
    siblings.mkdir(mode=0o700, parents=True, exist_ok=True)
    return msgspec.structs.replace(plan, siblings=str(siblings), ports=str(directory))


def _log_folder_name() -> str:
    """Returns the name of the log folder below each node's run directory.

    Every start uses the same name.
    """
    return f"logs-{ray.get_runtime_context().get_session_name()}"


def _reachable(answer: PoolsAnswer) -> PoolsAnswer:
    """Replaces 0.0.0.0 in gateways' URLs by the address of this node, which runs them."""
    here = f"//{ray.util.get_node_ip_address()}:"
    gateways = [
        msgspec.structs.replace(gateway, url=gateway.url.replace("//0.0.0.0:", here))
        for gateway in answer.gateways
    ]
    return msgspec.structs.replace(answer, gateways=gateways)

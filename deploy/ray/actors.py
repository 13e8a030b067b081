"""Runs services as Ray actors: starts, pings and stops the actors. Ray carries no requests and no
KV.

Only modules of this folder import ray. The modules `up`, `cluster_nodes` and `gcs_keeper` do not
import ray, because they must work in processes without Ray.
"""

import logging
import os
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray

from deploy.base.launcher import CUT_TIMEOUT_S, LOOK_EVERY_S, STOP_TIMEOUT_S
from deploy.base.reasons import explain
from deploy.base.spec import (
    READY_TIMEOUT_S,
    READY_TYPES,
    GatewayReady,
    ServiceReady,
    ServiceSpec,
    WorkerSpec,
    decode_spec,
)
from deploy.fetching.cache import FETCH_TIMEOUT_S
from deploy.ray.hosting import HostingChild, HostingThread
from deploy.services.model import fetch, has_to_fetch, start_limit_s
from engine.clock import MonotonicClock
from engine.errors import BatonError, ConfigError

log = logging.getLogger(__name__)

ADOPT_TIMEOUT_S = 10.0
NODE_CHARS = 16
KILLED_WITHIN_S = 2.0  # time in which Ray must kill an actor; then we send a signal
NURSERY = b"deploy.local.nursery_main"  # substring of the command line of the nursery's children


def node_name() -> str:
    """Returns the first characters of this node's id, for use in names."""
    return str(ray.get_runtime_context().get_node_id()[:NODE_CHARS])


class ServiceActor:
    """The Ray actor that hosts one service.

    Specs and answers are JSON bytes, so Ray pickles no class of Baton.
    """

    def __init__(self, kind: str, spec: bytes, nursery: str | None) -> None:
        """`nursery` is the port of a nursery on this machine; a child of the nursery then runs the
        service.
        """
        self._spec = decode_spec(kind, spec)
        self._ready = b""
        self._hosting: HostingThread | HostingChild
        if nursery is None:
            host = ray.util.get_node_ip_address()
            self._hosting = HostingThread(self._spec, host=host, node=node_name())
        else:
            self._hosting = HostingChild(self._spec, port=nursery)

    def fetch(self) -> str:
        """Fetches the model to this node. Returns the error; empty after success."""
        try:
            fetch(self._spec)
        except BatonError as error:
            return str(error)
        except OSError as error:
            log.exception("the model was not fetched")
            return explain(error)
        return ""

    def limit_s(self) -> float:
        """Returns how many seconds `start` may take. Call this after the model has been fetched."""
        return start_limit_s(self._spec)

    def start(self) -> tuple[bytes, str]:
        """Opens the service. Returns the service's answer, or else the error."""
        try:
            ready = self._hosting.start(self.limit_s())
        except BatonError as error:
            return b"", str(error)
        except (OSError, MemoryError) as error:
            log.exception("the service did not start")
            return b"", explain(error)
        self._ready = msgspec.json.encode(ready)
        return self._ready, ""

    def describe(self) -> tuple[str, bytes]:
        """Returns the kind of the service and the service's answer.

        The answer is empty before the start.
        """
        return self._spec.kind, self._ready

    def stop(self) -> None:
        """Closes the service."""
        self._hosting.stop()

    def stop_draining(self) -> None:
        """Makes a running `stop` stop waiting for answers."""
        self._hosting.stop_draining()

    def ping(self) -> None:
        """Returns at once. Other processes use this to check that the actor lives."""


@dataclass(slots=True, eq=False)
class _Hosted:
    """An actor. Compared by identity, because a later actor may have the same name.

    `ping` is the result of the latest call of the actor's `ping`. The call fails if the actor died.
    """

    actor: Any
    kind: str
    ready: ServiceReady | None = None  # answer of its service, once the service has started
    ping: Any = None


class ServiceActors:
    """The actors of one launcher, by the names of their services.

    Every actor gets `options` as its Ray options. Each actor is pinged; a ping fails when the actor
    has died. If `nursery` is set, it is the port of the nursery whose children run the services.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.nursery: str | None = None
        self._options = options
        self._hosted: dict[str, _Hosted] = {}
        self._stops_draining = threading.Event()

    @property
    def names(self) -> set[str]:
        """The names of all actors, including actors that are still starting."""
        return set(self._hosted)

    def ready(self) -> dict[str, ServiceReady]:
        """Returns the answers of all services that have started, by name."""
        hosted = list(self._hosted.items())
        return {name: each.ready for name, each in hosted if each.ready is not None}

    def start(self, spec: ServiceSpec, options: Mapping[str, Any]) -> ServiceReady:
        """Starts a service and waits until the service listens. Raises ConfigError."""
        actor_class = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)(ServiceActor)
        name, hosted = spec.name, None
        try:
            chosen = {**options, **self._options}
            actor = actor_class.options(name=name, **chosen).remote(
                spec.kind, msgspec.json.encode(spec), self.nursery
            )
            self._hosted[name] = hosted = _Hosted(actor, spec.kind)
            ready = _opened(actor, spec)
            if self._hosted.get(name) is not hosted:
                raise ConfigError(f"{name} was stopped while it started")
        except ConfigError:
            self._drop_own(name, hosted)
            raise
        except (ray.exceptions.RayError, ValueError) as failure:  # ValueError: the name is in use
            self._drop_own(name, hosted)
            raise ConfigError(f"{name} did not start: {_reason(failure)}") from failure
        hosted.ping = actor.ping.remote()
        hosted.ready = ready
        return ready

    def stop(self, name: str, *, by_force: bool) -> None:
        """Stops an actor. With `by_force`, or during the actor's start, kills the actor at once."""
        hosted = self._hosted.get(name)
        if hosted is not None and not by_force:
            self._await_stops({name: hosted})
        self._drop(name)

    def stop_all(self) -> None:
        """Stops all gateways at the same time, then all workers, then all stores."""
        for kind in ("gateway", "worker", "store"):
            of_kind = {n: each for n, each in list(self._hosted.items()) if each.kind == kind}
            self._await_stops(of_kind)
            for name in of_kind:
                self._drop(name)

    def stop_draining(self) -> None:
        """Makes actors that are being stopped end their answers at once."""
        self._stops_draining.set()

    def dead(self) -> dict[str, str]:
        """Returns the actors that have died since the last call, with the reasons."""
        dead = {}
        for name, hosted in list(self._hosted.items()):
            if hosted.ping is None or not ray.wait([hosted.ping], timeout=0)[0]:
                continue
            try:
                ray.get(hosted.ping)
                hosted.ping = hosted.actor.ping.remote()
            except ray.exceptions.ActorUnavailableError:  # the actor may be available again soon
                hosted.ping = hosted.actor.ping.remote()
            except ray.exceptions.RayError as error:
                if self._hosted.get(name) is hosted:  # no other thread has stopped it meanwhile
                    if isinstance(error, ray.exceptions.ActorDiedError):
                        del self._hosted[name]  # Ray has ended the actor and freed its name
                        self._end_child(hosted)
                    else:
                        self._drop(name)
                    dead[name] = f"{name} ended: {_reason(error)}"
        return dead

    def adopt(self, name: str, namespace: str) -> str | None:
        """Takes over an actor that another launcher started. Returns the kind of the actor's
        service.

        If the actor does not answer, or has not started its service, the actor is killed so that
        its name is free. Then returns None.
        """
        try:
            actor = ray.get_actor(name, namespace=namespace)
        except ValueError:  # the actor has ended meanwhile
            return None
        try:
            kind, answer = ray.get(actor.describe.remote(), timeout=ADOPT_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            log.warning("%s does not answer and is ended: %s", name, _reason(error))
            answer = b""
        if not answer:
            ray.kill(actor)
            return None
        ready = msgspec.json.decode(answer, type=READY_TYPES[kind])
        self._hosted[name] = _Hosted(actor, kind, ready, actor.ping.remote())
        return str(kind)

    def _await_stops(self, hosted: Mapping[str, _Hosted]) -> None:
        """Stops those of the actors that have started, with one deadline for all of them."""
        started = {name: each for name, each in hosted.items() if each.ready is not None}
        if not started:
            return
        ready = [each.ready for each in started.values()]
        drains_s = [each.drain_timeout_s for each in ready if isinstance(each, GatewayReady)]
        stopping = {name: each.actor.stop.remote() for name, each in started.items()}
        clock = MonotonicClock()
        end_s = clock.now_s() + STOP_TIMEOUT_S + max(drains_s, default=0.0)
        left, is_cut = list(stopping.values()), False
        while left and clock.now_s() < end_s:
            _, left = ray.wait(left, num_returns=len(left), timeout=LOOK_EVERY_S)
            if self._stops_draining.is_set() and not is_cut:
                is_cut, end_s = True, clock.now_s() + CUT_TIMEOUT_S
                for each in started.values():
                    each.actor.stop_draining.remote()
        for name, answer in stopping.items():
            try:
                ray.get(answer, timeout=0)
            except ray.exceptions.RayError as error:
                log.warning("%s did not stop by itself: %s", name, _reason(error))

    def _drop_own(self, name: str, hosted: _Hosted | None) -> None:
        """Ends the actor that a failed start made, unless its name belongs to another actor now."""
        if hosted is not None and self._hosted.get(name) is hosted:
            self._drop(name)

    def _end_child(self, hosted: _Hosted) -> None:
        """Kills the child process of a dead actor.

        Such a child ends by itself, unless it is paused or hangs.
        """
        if self.nursery is not None and hosted.ready is not None:
            with _ended_after(hosted.ready.pid, at_once=True):
                pass

    def _drop(self, name: str) -> None:
        """Removes and kills an actor, so that its name is free again."""
        hosted = self._hosted.pop(name, None)
        if hosted is None:
            return
        is_child = self.nursery is not None
        if hosted.ready is None or not (is_child or isinstance(hosted.ready, GatewayReady)):
            ray.kill(hosted.actor)
            return
        with _ended_after(hosted.ready.pid, at_once=is_child):
            ray.kill(hosted.actor)


def _opened(actor: Any, spec: ServiceSpec) -> ServiceReady:
    """Opens the service of a new actor. Each step has its own deadline. Raises ConfigError."""
    # Fails after a time limit if Ray never finds room for the actor.
    ray.get(actor.ping.remote(), timeout=READY_TIMEOUT_S)
    answer, error = b"", ""
    if has_to_fetch(spec):
        error = ray.get(actor.fetch.remote(), timeout=FETCH_TIMEOUT_S)
    if not error:
        limit_s = READY_TIMEOUT_S
        if isinstance(spec, WorkerSpec):
            limit_s = ray.get(actor.limit_s.remote(), timeout=READY_TIMEOUT_S)
        answer, error = ray.get(actor.start.remote(), timeout=limit_s)
    if error:
        raise ConfigError(f"{spec.name}: {error}")
    ready: ServiceReady = msgspec.json.decode(bytes(answer), type=READY_TYPES[spec.kind])
    return ready


@contextmanager
def _ended_after(pid: int, *, at_once: bool) -> Iterator[None]:
    """When the block ends, waits until a local service has ended. Kills the service if Ray is slow.

    Ray only asks a process to end. A paused process does not react, and keeps its ports. Once the
    raylet is dead, Ray cannot ask any process. A child of a nursery is killed `at_once`, because
    Ray asks only the child's actor.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # the process has ended
        yield
        return
    try:
        yield
        if at_once:
            if _is_service(pid):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                _has_ended(pidfd)
        elif _is_service(pid) and not _has_ended(pidfd):
            log.info("Ray did not end process %d in %g s: it is killed", pid, KILLED_WITHIN_S)
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            _has_ended(pidfd)
    except ProcessLookupError:  # the process has just ended by itself
        pass
    finally:
        os.close(pidfd)


def _has_ended(pidfd: int) -> bool:
    """Waits KILLED_WITHIN_S for the end of a process. Returns true if the process has ended."""
    return bool(select.select([pidfd], [], [], KILLED_WITHIN_S)[0])


def _is_service(pid: int) -> bool:
    """True if the process still runs a service.

    False if it has ended, even if another process has its id by now.
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(name in command for name in (ServiceActor.__name__.encode(), NURSERY))
    except OSError:
        return False


def _reason(error: Exception) -> str:
    """Returns the error as one line.

    If an actor's method raised an error, that error is the cause of Ray's error.
    """
    if isinstance(error, ray.exceptions.RayTaskError):
        return repr(error.cause)
    return (str(error) or repr(error)).splitlines()[0].rstrip(".")

"""Runs services as Ray actors: starts, pings and stops them. No request or KV goes through Ray.

Only files of this folder import ray. Its files `up`, `cluster_nodes` and `gcs_keeper` do not: they
must work where Ray is not imported.
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
KILLED_WITHIN_S = 2.0  # time for Ray to kill an actor, before we send a signal
NURSERY = b"deploy.local.nursery_main"  # part of the command line of the nursery's children


def node_name() -> str:
    """Returns the beginning of this node's id, for names."""
    return str(ray.get_runtime_context().get_node_id()[:NODE_CHARS])


class ServiceActor:
    """The actor: hosts one service. Specs and answers are JSON bytes; Ray pickles none of ours."""

    def __init__(self, kind: str, spec: bytes, nursery: str | None) -> None:
        """`nursery`: the port of a nursery on this machine, whose child runs the service."""
        self._spec = decode_spec(kind, spec)
        self._ready = b""
        self._hosting: HostingThread | HostingChild
        if nursery is None:
            host = ray.util.get_node_ip_address()
            self._hosting = HostingThread(self._spec, host=host, node=node_name())
        else:
            self._hosting = HostingChild(self._spec, port=nursery)

    def fetch(self) -> str:
        """Fetches the model to this node; returns the error, or nothing."""
        try:
            fetch(self._spec)
        except BatonError as error:
            return str(error)
        except OSError as error:
            log.exception("the model was not fetched")
            return explain(error)
        return ""

    def limit_s(self) -> float:
        """Returns how long `start` may take. The model has been fetched."""
        return start_limit_s(self._spec)

    def start(self) -> tuple[bytes, str]:
        """Opens the service; returns its answer, or else the error."""
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
        """Returns the kind of service and its answer, which is empty before the start."""
        return self._spec.kind, self._ready

    def stop(self) -> None:
        """Closes the service."""
        self._hosting.stop()

    def stop_draining(self) -> None:
        """Makes `stop` stop waiting for answers."""
        self._hosting.stop_draining()

    def ping(self) -> None:
        """Answers while the actor lives."""


@dataclass(slots=True, eq=False)
class _Hosted:
    """An actor, compared by identity: a later one may have the same name.

    The ping, once there is one, is never answered before the actor ends.
    """

    actor: Any
    kind: str
    ready: ServiceReady | None = None  # its service's answer, once it has started
    ping: Any = None


class ServiceActors:
    """The actors of one launcher, by service name.

    `options` are Ray's options of every actor. A standing ping on each actor fails when it dies.
    `nursery` is the port of the nursery whose children run the services, once there is one.
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
        """The services that have started, with their answers."""
        hosted = list(self._hosted.items())
        return {name: each.ready for name, each in hosted if each.ready is not None}

    def start(self, spec: ServiceSpec, options: Mapping[str, Any]) -> ServiceReady:
        """Starts a service and waits until it listens. Raises ConfigError."""
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
        except (ray.exceptions.RayError, ValueError) as failure:  # ValueError: the name is taken
            self._drop_own(name, hosted)
            raise ConfigError(f"{name} did not start: {_reason(failure)}") from failure
        hosted.ping = actor.ping.remote()
        hosted.ready = ready
        return ready

    def stop(self, name: str, *, by_force: bool) -> None:
        """Ends an actor. With `by_force`, or during its start, the actor is killed at once."""
        hosted = self._hosted.get(name)
        if hosted is not None and not by_force:
            self._await_stops({name: hosted})
        self._drop(name)

    def stop_all(self) -> None:
        """Stops all gateways at once, then all workers, then all stores."""
        for kind in ("gateway", "worker", "store"):
            of_kind = {n: each for n, each in list(self._hosted.items()) if each.kind == kind}
            self._await_stops(of_kind)
            for name in of_kind:
                self._drop(name)

    def stop_draining(self) -> None:
        """Makes stopping actors end their answers at once."""
        self._stops_draining.set()

    def dead(self) -> dict[str, str]:
        """Returns the actors whose ping failed, each once, with the reason."""
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
                if self._hosted.get(name) is hosted:  # not stopped by another thread meanwhile
                    if isinstance(error, ray.exceptions.ActorDiedError):
                        del self._hosted[name]  # Ray has ended it and freed its name
                        self._end_child(hosted)
                    else:
                        self._drop(name)
                    dead[name] = f"{name} ended: {_reason(error)}"
        return dead

    def adopt(self, name: str, namespace: str) -> str | None:
        """Takes over an actor that another launcher started; returns its kind.

        An actor that does not answer, or has not started its service, is ended so that its name is
        free: None.
        """
        try:
            actor = ray.get_actor(name, namespace=namespace)
        except ValueError:  # it has ended meanwhile
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
        """Asks the started ones of these actors to stop and waits, with one deadline for all."""
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
        """Ends the actor that a start made, unless another actor has its name by now."""
        if hosted is not None and self._hosted.get(name) is hosted:
            self._drop(name)

    def _end_child(self, hosted: _Hosted) -> None:
        """Ends a dead actor's child. The child ends by itself, unless it is paused or hangs."""
        if self.nursery is not None and hosted.ready is not None:
            with _ended_after(hosted.ready.pid, at_once=True):
                pass

    def _drop(self, name: str) -> None:
        """Removes an actor and kills it, so that its name is free again."""
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
    # The actor may never get its place.
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
    """Waits at the end of the block until a local service has ended; kills it if Ray is slow.

    Ray asks a process to end. One that is stopped does not hear it, and keeps its ports. Once its
    raylet is dead, Ray can ask no process. A child of a nursery is killed `at_once`: Ray asks only
    its actor.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # it has ended
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
    """Waits a short time for the end of a process. Returns true if it has ended."""
    return bool(select.select([pidfd], [], [], KILLED_WITHIN_S)[0])


def _is_service(pid: int) -> bool:
    """False if the process has ended, and perhaps another one has its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(name in command for name in (ServiceActor.__name__.encode(), NURSERY))
    except OSError:
        return False


def _reason(error: Exception) -> str:
    """Returns one line. An error that an actor's method raised is the cause of Ray's error."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return repr(error.cause)
    return (str(error) or repr(error)).splitlines()[0].rstrip(".")

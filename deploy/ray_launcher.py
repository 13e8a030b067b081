"""Starts workers and gateways as Ray actors. Ray places and watches them, and carries no request.

The only file that imports ray.
"""

import logging
import os
from typing import Any

import msgspec
import ray

from deploy.processes import (
    READY_TIMEOUT_S,
    GatewayReady,
    GatewaySpec,
    ServiceThread,
    WorkerReady,
    WorkerSpec,
    configure_logging,
    freeze_heap,
    service_of,
)
from engine.errors import BatonError, ConfigError

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; no KV and no token ever goes there


class _Actor:
    """Hosts one service. Specs and answers travel as JSON bytes: Ray pickles nothing of ours."""

    def __init__(self, kind: str, spec: bytes) -> None:
        service, log_level = service_of(kind, spec)
        configure_logging(log_level)
        self._thread: ServiceThread[Any] = ServiceThread(service, kind)

    def start(self) -> tuple[bytes, str]:
        """The service's answer, or what is wrong."""
        try:
            ready = self._thread.open()
        except BatonError as error:
            return b"", str(error)
        freeze_heap()
        return msgspec.json.encode(ready), ""

    def stop(self) -> None:
        """Closes the service."""
        self._thread.close()

    def ping(self) -> None:
        """Answers: the actor lives."""


class RayLauncher:
    """Runs every service as an actor of a Ray that it starts here, on loopback only."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._pings: dict[str, Any] = {}

    def open(self) -> None:
        """Starts Ray on this machine."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Leave CUDA_VISIBLE_DEVICES as it is for actors without GPUs (and do not warn about it).
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=True,
        )

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        """Starts a worker actor."""
        return msgspec.json.decode(self._start(spec.worker_id, "worker", spec), type=WorkerReady)

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway actor."""
        return msgspec.json.decode(self._start(spec.name, "gateway", spec), type=GatewayReady)

    def dead(self) -> dict[str, str]:
        """Actors whose standing ping failed, each named once."""
        dead = {}
        for name, ping in list(self._pings.items()):
            ready, _ = ray.wait([ping], timeout=0)
            if not ready:
                continue
            try:
                ray.get(ping)
                self._pings[name] = self._actors[name].ping.remote()
            except ray.exceptions.RayError as error:
                self._drop(name)
                dead[name] = f"{name} ended: {_reason(error)}"
        return dead

    def close(self) -> None:
        """Stops the actors in reverse order, then Ray."""
        for name, actor in reversed(self._actors.items()):
            try:
                ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                log.warning("%s did not stop by itself: %s", name, error)
            ray.kill(actor)
        self._actors, self._pings = {}, {}
        ray.shutdown()

    def _start(self, name: str, kind: str, spec: WorkerSpec | GatewaySpec) -> bytes:
        actor_class = ray.remote(num_cpus=0, max_restarts=0)(_Actor)
        try:
            actor = actor_class.options(name=name).remote(kind, msgspec.json.encode(spec))
            self._actors[name] = actor
            answer, error = ray.get(actor.start.remote(), timeout=READY_TIMEOUT_S)
            if error:
                raise ConfigError(f"{name}: {error}")
            self._pings[name] = actor.ping.remote()
        except ConfigError:
            self._drop(name)
            raise
        except (ray.exceptions.RayError, ValueError) as failure:  # ValueError: the name is taken
            self._drop(name)
            raise ConfigError(f"{name} did not start: {_reason(failure)}") from failure
        return bytes(answer)

    def _drop(self, name: str) -> None:
        """Forgets an actor and ends what there is of it, so that its name is free again."""
        self._pings.pop(name, None)
        actor = self._actors.pop(name, None)
        if actor is not None:
            ray.kill(actor)


def _reason(error: Exception) -> str:
    """One line. What a method raised comes as its cause, after lines of where it was called."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return repr(error.cause)
    return (str(error) or repr(error)).splitlines()[0].rstrip(".")

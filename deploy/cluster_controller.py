"""The controller of a cluster: a detached actor that outlives whoever started it.

It does there what `baton serve` does in its own process: it runs a `Deployment` over actors, which
end when it ends. The seam is `start_controller`, `status_of_controller`, `stop_controller`.
"""

import contextlib
import os
import threading
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy.cluster import Deployment
from deploy.model_source import default_cache, local_model, pinned
from deploy.processes import READY_TIMEOUT_S, configure_logging
from deploy.ray_launcher import RayLauncher
from deploy.up_config import UpConfig
from engine.clock import MonotonicClock
from engine.errors import BatonError, ConfigError

NAME = "controller"
WATCH_EVERY_S = 1.0
STOP_TIMEOUT_S = 60.0
FETCH_TIMEOUT_S = 4 * 3600.0


class _Controller:
    """Runs a deployment, and mends it."""

    def __init__(self, config: bytes) -> None:
        configure_logging("warning")
        given = msgspec.msgpack.decode(config, type=UpConfig, dec_hook=_as_path)
        self._config = given
        self._deployment: Deployment | None = None
        self._stop = threading.Event()
        self._told: list[str] = []
        self._mending = threading.Thread(target=self._mend, name="mend", daemon=True)

    def open(self) -> str:
        """Starts everything; what is wrong, or nothing."""
        try:
            deployment = Deployment(
                RayLauncher(),
                model=self._config.model,
                pools=self._config.pools,
                config=self._config.config,
            )
            deployment.open(self._told.append)
        except BatonError as error:
            return str(error)
        self._deployment = deployment
        self._mending.start()
        return ""

    def status(self) -> dict[str, Any]:
        """What runs."""
        if self._deployment is None:
            return {"gateways": [], "workers": [], "told": self._told[-5:]}
        return {
            "gateways": [
                {**msgspec.to_builtins(ready), "url": _reachable(ready.url)}
                for ready in self._deployment.gateways
            ],
            "workers": [
                {"worker_id": worker_id, **msgspec.to_builtins(ready)}
                for worker_id, ready in self._deployment.workers.items()
            ],
            "told": self._told[-5:],
        }

    def close(self) -> None:
        """Ends what was started, the gateways first."""
        self._stop.set()
        if self._deployment is not None:
            self._mending.join(STOP_TIMEOUT_S)
            self._deployment.close()

    def _mend(self) -> None:
        clock = MonotonicClock()
        while not self._stop.wait(WATCH_EVERY_S):
            assert self._deployment is not None
            self._told += self._deployment.mend(clock)
            del self._told[:-100]


def start_controller(config: UpConfig) -> None:
    """Starts the controller, unless it runs; waits until it serves. Raises ConfigError.

    Before that, every node that is there fetches the model, which may take longer than a worker is
    waited for; a node that comes later fetches it when its first worker starts.
    """
    if _find() is not None:
        return
    config = msgspec.structs.replace(config, model=pinned(config.model))
    _fetch_everywhere(config.model)
    actor_class = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)(_Controller)
    encoded = msgspec.msgpack.encode(config, enc_hook=str)
    actor = actor_class.options(name=NAME, lifetime="detached").remote(encoded)
    try:
        error = ray.get(actor.open.remote(), timeout=2 * READY_TIMEOUT_S)
    except (ray.exceptions.RayError, TimeoutError) as failure:
        error = str(failure).splitlines()[0]
    if error:
        ray.kill(actor)
        raise ConfigError(error)


def status_of_controller() -> dict[str, Any] | None:
    """None if none runs. Raises ConfigError if it does not answer."""
    actor = _find()
    if actor is None:
        return None
    try:
        return dict(ray.get(actor.status.remote(), timeout=STOP_TIMEOUT_S))
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise ConfigError(f"the controller does not answer: {error}") from error


def stop_controller() -> None:
    """Ends the controller and what it started, if it runs."""
    actor = _find()
    if actor is None:
        return
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        ray.get(actor.close.remote(), timeout=STOP_TIMEOUT_S)
    ray.kill(actor)


def _fetch_everywhere(model: str) -> None:
    """All nodes that take workers, at once: those that say so, or all if none does."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    takers = [node for node in nodes if {"prefill_node", "decode_node"} & set(node["Resources"])]
    fetches = {
        node["NodeManagerAddress"]: ray.remote(num_cpus=0)(_fetch)
        .options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            max_retries=0,
        )
        .remote(model)
        for node in takers or nodes
    }
    for address, fetch in fetches.items():
        try:
            error = ray.get(fetch, timeout=FETCH_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as failure:
            error = str(failure).splitlines()[0]
        if error:
            raise ConfigError(f"{address}: {error}")


def _fetch(model: str) -> str:
    """On a node: what is wrong, or nothing."""
    try:
        local_model(model, cache=default_cache(os.environ))
    except ConfigError as error:
        return str(error)
    return ""


def _find() -> Any:
    try:
        return ray.get_actor(NAME)
    except ValueError:
        return None


def _reachable(url: str) -> str:
    """Where a gateway that listens on all addresses is reached."""
    return url.replace("//0.0.0.0:", f"//{ray.util.get_node_ip_address()}:")


def _as_path(kind: type, value: Any) -> Any:
    return kind(value)

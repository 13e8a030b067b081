"""Launchers on Ray: `OwnRayLauncher` for `baton serve`, `ClusterLauncher` for `baton up`.

OwnRayLauncher    starts a Ray on loopback and ends it; its actors end with this process
ClusterLauncher   uses a Ray that this process has joined; its actors are detached: they outlive
                  the controller, and the next controller finds them by name
"""

import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.launcher import Launcher
from deploy.pools.placement import ANYWHERE, NodePlacement
from deploy.ray.actors import ServiceActors, ServiceReady
from deploy.ray.own_ray import NAMESPACE, OwnRay
from deploy.ray.places import RayPlaces, nodes
from deploy.services.spec import GatewayReady, GatewaySpec, WorkerReady, WorkerSpec
from engine.control import Pools
from engine.errors import ConfigError

CONTROLLER = "controller"  # the name of the one actor that is no service
ON_HEAD = {"resources": {"node:__internal_head__": 0.001}}  # Ray gives each head one of these


class OwnRayLauncher(Launcher):
    """Runs services as actors of a Ray that it starts on this machine, on loopback only."""

    def __init__(self) -> None:
        self._ray = OwnRay()
        self._actors = ServiceActors({})

    def open(self) -> None:
        """Starts Ray. Raises ConfigError."""
        with _own_sigterm():
            self._ray.open()

    def room(self, num_gpus: float) -> int:
        """Returns how many workers the GPUs suffice for, or the cores, but at least a few."""
        return ANYWHERE.with_gpus(num_gpus).room(nodes())

    def scarce(self, num_gpus: float) -> str:
        """Names what this machine has of the scarcest resource."""
        return ANYWHERE.with_gpus(num_gpus).scarce(nodes())

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        """Starts a worker actor."""
        return self._actors.start_worker(spec, {})

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway actor."""
        return self._actors.start_gateway(spec, {})

    def stop(self, name: str, *, by_force: bool) -> None:
        """Ends an actor."""
        self._actors.stop(name, by_force=by_force)

    def running(self) -> Mapping[str, ServiceReady]:
        """Returns the actors that this launcher has started."""
        return self._actors.ready()

    def dead(self) -> dict[str, str]:
        """Returns the actors that died, each once."""
        return self._actors.dead()

    def close(self) -> None:
        """Stops the actors, gateways first, then Ray."""
        self._actors.stop_all()
        self._ray.close()

    def hurry(self) -> None:
        """Makes stopping actors end their answers at once."""
        self._actors.hurry()


class ClusterLauncher(Launcher):
    """Runs services as detached actors of the Ray that this process has joined.

    Each worker gets a place (`deploy.ray.places`), which reserves its GPUs; gateways run on the
    head. `open` and `close` leave Ray and the actors alone; `stop_all` ends the actors.
    """

    def __init__(self, placement: NodePlacement) -> None:
        self._places = RayPlaces(placement)
        self._actors = ServiceActors({"lifetime": "detached", "namespace": NAMESPACE})

    def open(self) -> None:
        """Does nothing: Ray runs already."""

    def room(self, num_gpus: float) -> int:
        """Returns how many workers fit by GPUs or cores, and by custom resources."""
        return self._placement(num_gpus).room(nodes())

    def scarce(self, num_gpus: float) -> str:
        """Names what the cluster's nodes have of the scarcest resource."""
        return self._placement(num_gpus).scarce(nodes())

    def keep_places(self, names: Collection[str]) -> None:
        """Keeps the places of these dead workers, with their GPUs, and gives up the others."""
        self._places.keep(names)

    def ask_for(self, num_workers: int, wanted: Pools, num_gpus: float) -> None:
        """Asks Ray's autoscaler for nodes. Without an autoscaler it has no effect."""
        roles = self._places.roles()
        request_resources(bundles=self._placement(num_gpus).bundles(num_workers, roles, wanted))

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        """Starts a worker actor in its place. It sees only the GPUs of that place."""
        held = self._places.take(spec.worker_id, spec.role)
        place = PlacementGroupSchedulingStrategy(held.group, placement_group_bundle_index=0)
        options: dict[str, Any] = {
            "num_gpus": self._places.placement.num_gpus,
            "scheduling_strategy": place,
        }
        try:
            return self._actors.start_worker(spec, options)
        except ConfigError:
            self._places.give_back(held)
            raise

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway actor on the head."""
        return self._actors.start_gateway(spec, ON_HEAD)

    def stop(self, name: str, *, by_force: bool) -> None:
        """Ends an actor and gives up its place."""
        self._actors.stop(name, by_force=by_force)
        self._places.give_up(name)

    def running(self) -> Mapping[str, ServiceReady]:
        """Returns this launcher's actors and those of launchers before it, which it adopts.

        An older actor that does not answer, or never started, is ended: its name must be free.
        """
        self._places.adopt()
        for name in self._strangers():
            if self._actors.adopt(name, NAMESPACE) == "worker":
                self._places.use(name)
        return self._actors.ready()

    def counters(self) -> Mapping[str, int]:
        """Counts the workers that took the place of another role."""
        return {"places of another role": self._places.num_stand_ins}

    def dead(self) -> dict[str, str]:
        """Returns the actors that died, each once. Their places stay reserved for now."""
        dead = self._actors.dead()
        for name in dead:
            self._places.leave(name)
        return dead

    def close(self) -> None:
        """Does nothing: the actors outlive this launcher."""

    def stop_all(self) -> None:
        """Stops the gateways, then the workers, and gives up all places."""
        self._actors.stop_all()
        self._places.give_up_all()
        request_resources(bundles=[])  # otherwise Ray's autoscaler keeps nodes for them

    def sweep(self) -> int:
        """Ends the actors that launchers before this one left; returns how many there were."""
        num_left = len(self._strangers())
        self.running()
        self.stop_all()
        return num_left

    def hurry(self) -> None:
        """Makes stopping actors end their answers at once."""
        self._actors.hurry()

    def _strangers(self) -> list[str]:
        """Names of Baton's services in this cluster that this launcher does not know."""
        named = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
        return [name for name in names if name not in {*self._actors.names, CONTROLLER}]

    def _placement(self, num_gpus: float) -> NodePlacement:
        return self._places.placement.with_gpus(num_gpus)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keeps this process's handler of SIGTERM: Ray sets one of its own, which exits at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, own)

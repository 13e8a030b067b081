"""Starts workers and gateways as Ray actors. Ray places and watches them, and carries no request.

Beside this file only `own_ray`, `ray_places`, `ray_controller`, `cluster_controller` and `head`
import ray.
"""

import logging
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.logs import configure_logging
from deploy.model_source import FETCH_TIMEOUT_S
from deploy.pools.placement import ANYWHERE, NodePlacement
from deploy.processes import (
    READY_TIMEOUT_S,
    GatewayReady,
    GatewaySpec,
    ServiceThread,
    WorkerReady,
    WorkerSpec,
    fetch,
    freeze_heap,
    has_to_fetch,
    service_of,
)
from deploy.ray.own_ray import NAMESPACE, OwnRay
from deploy.ray.places import Held, RayPlaces, nodes
from engine.clock import MonotonicClock
from engine.control import Pools
from engine.errors import BatonError, ConfigError

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0  # gateways have their drain beside
HURRIED_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.2  # whether there is a hurry
ADOPT_TIMEOUT_S = 10.0
CONTROLLER = "controller"  # the name of the one actor that is no service
ON_HEAD = {"resources": {"node:__internal_head__": 0.001}}  # Ray gives that one to each head


class _Actor:
    """Hosts one service. Specs and answers travel as JSON bytes: Ray pickles nothing of ours."""

    def __init__(self, kind: str, spec: bytes) -> None:
        service, log_level = service_of(kind, spec, host=ray.util.get_node_ip_address())
        configure_logging(log_level, MonotonicClock())
        self._kind = kind
        self._spec = spec
        self._ready = b""
        self._thread: ServiceThread[Any] = ServiceThread(service, kind)

    def fetch(self) -> str:
        """Has the model on this node; what is wrong, or nothing."""
        try:
            fetch(self._kind, self._spec)
        except BatonError as error:
            return str(error)
        return ""

    def start(self) -> tuple[bytes, str]:
        """The service's answer, or what is wrong."""
        try:
            ready = self._thread.open()
        except BatonError as error:
            return b"", str(error)
        freeze_heap()
        self._ready = msgspec.json.encode(ready)
        return self._ready, ""

    def describe(self) -> tuple[str, bytes]:
        """Worker or gateway, and its answer: empty if it has not started."""
        return self._kind, self._ready

    def stop(self) -> None:
        """Closes the service."""
        self._thread.close()

    def hurry(self) -> None:
        """Has `stop` wait for nothing."""
        self._thread.hurry()

    def ping(self) -> None:
        """Answers: the actor lives."""


class RayLauncher:
    """Runs every service as an actor: of a Ray that it starts here, on loopback only.

    As `RayLauncher.of_cluster` of the Ray that this process is connected to already; the actors are
    detached then: they outlive whoever started them, and the next launcher finds them.
    """

    def __init__(self) -> None:
        self.is_detached = False
        self._ray = OwnRay()
        self._places = RayPlaces(ANYWHERE)
        self._actors: dict[str, Any] = {}
        self._kinds: dict[str, str] = {}
        self._pings: dict[str, Any] = {}
        self._ready: dict[str, WorkerReady | GatewayReady] = {}
        self._hurry = threading.Event()

    @classmethod
    def of_cluster(cls, placement: NodePlacement) -> "RayLauncher":
        """To be used where Ray is connected; `open` and `close` leave Ray and its actors alone."""
        launcher = cls()
        launcher.is_detached = True
        launcher._places = RayPlaces(placement)
        return launcher

    def open(self) -> None:
        """Starts Ray on this machine."""
        if not self.is_detached:
            with _own_sigterm():
                self._ray.open()

    def room(self, num_gpus: float) -> int:
        """As many as GPUs suffice for, or cores, but a few in any case; and custom resources."""
        return self._placement(num_gpus).room(nodes())

    def scarce(self, num_gpus: float) -> str:
        """All that the cluster's nodes have of it."""
        return self._placement(num_gpus).scarce(nodes())

    def ask_for(self, num_workers: int, wanted: Pools, num_gpus: float) -> None:
        """Tells Ray's autoscaler; without one nothing comes of it."""
        roles = self._places.roles()
        request_resources(bundles=self._placement(num_gpus).bundles(num_workers, roles, wanted))

    def keep_places(self, names: Collection[str]) -> None:
        """On a cluster a place is kept with its GPUs."""
        self._places.keep(names)

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        """Starts a worker actor."""
        held = self._places.take(spec.worker_id, spec.role) if self.is_detached else None
        try:
            answer = self._start(spec.worker_id, "worker", spec, self._options(held))
        except ConfigError:
            if held is not None:
                self._places.give_back(held)
            raise
        self._ready[spec.worker_id] = ready = msgspec.json.decode(answer, type=WorkerReady)
        return ready

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway actor."""
        options = ON_HEAD if self.is_detached else {}
        answer = self._start(spec.name, "gateway", spec, options)
        ready = msgspec.json.decode(answer, type=GatewayReady)
        self._ready[spec.name] = ready
        return ready

    def stop(self, name: str, *, by_force: bool) -> None:
        """Ends an actor. One that still starts is not asked."""
        actor = self._actors.get(name)
        if actor is not None and not by_force and name in self._ready:
            self._await_stops({name: actor})
        self._drop(name)
        self._places.give_up(name)

    def running(self) -> Mapping[str, WorkerReady | GatewayReady]:
        """Actors of this launcher; where they are detached, of those before it too.

        What does not answer, or had not started when its launcher ended, is ended: its name must
        be free.
        """
        if self.is_detached:
            self._places.adopt()
        for name in self._strangers():
            self._adopt(name)
        return dict(self._ready)

    def counters(self) -> Mapping[str, int]:
        """Places that were another role's."""
        return {"places of another role": self._places.num_stand_ins}

    def dead(self) -> dict[str, str]:
        """Actors whose standing ping failed, each named once."""
        dead = {}
        for name, ping in list(self._pings.items()):
            ready, _ = ray.wait([ping], timeout=0)
            if not ready:
                continue
            try:
                ray.get(ping)
                self._ping(name)
            except ray.exceptions.ActorUnavailableError:  # it may be back in a moment
                self._ping(name)
            except ray.exceptions.RayError as error:
                if self._pings.get(name) is ping:  # nobody stopped it meanwhile
                    if isinstance(error, ray.exceptions.ActorDiedError):
                        self._forget(name)  # Ray has ended it and freed its name
                    else:
                        self._drop(name)
                    self._places.leave(name)
                    dead[name] = f"{name} ended: {_reason(error)}"
        return dead

    def close(self) -> None:
        """Stops the actors, gateways first, then Ray."""
        if self.is_detached:
            return
        self.stop_all()
        self._ray.close()

    def stop_all(self) -> None:
        """Stops the gateways, then the workers, those of a kind at once."""
        for kind in ("gateway", "worker"):
            actors = {n: self._actors[n] for n, k in list(self._kinds.items()) if k == kind}
            self._await_stops({n: a for n, a in actors.items() if n in self._ready})
            for name in actors:
                self._drop(name)
        if self.is_detached:
            self._places.give_up_all()
            request_resources(bundles=[])  # else Ray's autoscaler, if Ray stays, keeps nodes ready

    def hurry(self) -> None:
        """Has actors told that stop."""
        self._hurry.set()

    def _await_stops(self, actors: Mapping[str, Any]) -> None:
        """Has these stop; those that do not in time have it in common."""
        if not actors:
            return
        ready = [self._ready[name] for name in actors]
        drains_s = [each.drain_timeout_s for each in ready if isinstance(each, GatewayReady)]
        stopping = {name: actor.stop.remote() for name, actor in actors.items()}
        clock = MonotonicClock()
        end_s = clock.now_s() + STOP_TIMEOUT_S + max(drains_s, default=0.0)
        left, is_hurried = list(stopping.values()), False
        while left and clock.now_s() < end_s:
            _, left = ray.wait(left, num_returns=len(left), timeout=LOOK_EVERY_S)
            if self._hurry.is_set() and not is_hurried:
                is_hurried, end_s = True, clock.now_s() + HURRIED_TIMEOUT_S
                for actor in actors.values():
                    actor.hurry.remote()
        for name, answer in stopping.items():
            try:
                ray.get(answer, timeout=0)
            except ray.exceptions.RayError as error:
                log.warning("%s did not stop by itself: %s", name, _reason(error))

    def sweep(self) -> int:
        """Ends what launchers before this one left running; how many actors there were."""
        num_left = len(self._strangers())
        self.running()
        self.stop_all()
        return num_left

    def _strangers(self) -> list[str]:
        """Names of detached services that are not this launcher's."""
        if not self.is_detached:
            return []
        named = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
        return [name for name in names if name not in (*self._actors, CONTROLLER)]

    def _adopt(self, name: str) -> None:
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # it ended meanwhile
            return
        self._actors[name] = actor
        try:
            kind, answer = ray.get(actor.describe.remote(), timeout=ADOPT_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            log.warning("%s does not answer and is ended: %s", name, _reason(error))
            kind, answer = "", b""
        if not answer:
            self._drop(name)
            return
        self._kinds[name] = kind
        if kind == "worker":
            self._ready[name] = msgspec.json.decode(answer, type=WorkerReady)
            self._places.use(name)
        else:
            self._ready[name] = msgspec.json.decode(answer, type=GatewayReady)
        self._ping(name)

    def _placement(self, num_gpus: float) -> NodePlacement:
        return self._places.placement.with_gpus(num_gpus)

    def _options(self, held: Held | None) -> dict[str, Any]:
        """To be in its place, and see the GPUs of that alone."""
        if held is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(held.group, placement_group_bundle_index=0)
        return {"num_gpus": self._places.placement.num_gpus, "scheduling_strategy": strategy}

    def _start(
        self, name: str, kind: str, spec: WorkerSpec | GatewaySpec, options: dict[str, Any]
    ) -> bytes:
        actor_class = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)(_Actor)
        if self.is_detached:
            options = {**options, "lifetime": "detached", "namespace": NAMESPACE}
        encoded = msgspec.json.encode(spec)
        actor = None
        try:
            actor = actor_class.options(name=name, **options).remote(kind, encoded)
            self._actors[name], self._kinds[name] = actor, kind
            answer, error = b"", ""
            ray.get(actor.ping.remote(), timeout=READY_TIMEOUT_S)  # it may never come to its place
            if has_to_fetch(kind, encoded):
                error = ray.get(actor.fetch.remote(), timeout=FETCH_TIMEOUT_S)
            if not error:
                answer, error = ray.get(actor.start.remote(), timeout=READY_TIMEOUT_S)
            if error:
                raise ConfigError(f"{name}: {error}")
            if self._actors.get(name) is not actor:
                raise ConfigError(f"{name} is not wanted any more")
        except ConfigError:
            self._drop_own(name, actor)
            raise
        except (ray.exceptions.RayError, ValueError) as failure:  # ValueError: the name is taken
            self._drop_own(name, actor)
            raise ConfigError(f"{name} did not start: {_reason(failure)}") from failure
        self._ping(name)
        return bytes(answer)

    def _ping(self, name: str) -> None:
        actor = self._actors.get(name)
        if actor is not None:
            self._pings[name] = actor.ping.remote()

    def _drop_own(self, name: str, actor: Any) -> None:
        """What a start made, unless it was stopped: another one may have its name by now."""
        if actor is not None and self._actors.get(name) is actor:
            self._drop(name)

    def _drop(self, name: str) -> None:
        """Forgets an actor and ends what there is of it, so that its name is free again."""
        actor = self._forget(name)
        if actor is not None:
            ray.kill(actor)

    def _forget(self, name: str) -> Any:
        """The actor, if there is one."""
        self._pings.pop(name, None)
        self._ready.pop(name, None)
        self._kinds.pop(name, None)
        return self._actors.pop(name, None)


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


def _reason(error: Exception) -> str:
    """One line. What a method raised comes as its cause, after lines of where it was called."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return repr(error.cause)
    return (str(error) or repr(error)).splitlines()[0].rstrip(".")

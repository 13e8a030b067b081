"""Launchers on Ray: `OwnRayLauncher` for `baton serve`, `ClusterLauncher` for `baton up`.

OwnRayLauncher    starts a Ray on loopback and ends it; its actors end with this process
ClusterLauncher   uses a Ray that this process has joined; its actors are detached: they outlive
                  the controller, and the next controller finds them by name
"""

import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from deploy.base.gpus import FoundGpus, find_gpus
from deploy.base.launcher import Launcher
from deploy.base.private_folder import PrivateFolder
from deploy.base.run_dir import log_folder
from deploy.base.spec import GatewaySpec, ServiceReady, ServiceSpec, StoreSpec, WorkerSpec
from deploy.local.nursery import SERVICES, Nursery
from deploy.local.nursery_port import NurseryPort
from deploy.logs.reading import LogPieces, LogsQuery, RingPiece, read_pieces
from deploy.pools.placement import ANYWHERE, NodePlacement
from deploy.ray.actors import NODE_CHARS, ServiceActors, node_name
from deploy.ray.gcs_keeper import parts_of_ray
from deploy.ray.own_ray import NAMESPACE, OwnRay
from deploy.ray.places import RayPlaces, nodes
from engine.control import Pools
from engine.errors import ConfigError

log = logging.getLogger(__name__)

LOGS_TIMEOUT_S = 6.0  # longest wait for nodes; clients of the admin API wait 10 s
CONTROLLER = "controller"  # the name of the only actor that is not a service
ON_HEAD = {"resources": {"node:__internal_head__": 0.001}}  # Ray gives each head one of these


class OwnRayLauncher(Launcher):
    """Runs services as actors of a Ray that it starts on this machine, on loopback only.

    Ray's raylet cannot be started again: its actors outlive it, but no actor can be made or ended.
    So once it has died, the services are stopped in order, and a new Ray starts. Calls that come
    meanwhile wait, and calls under way fail: Ray raises SystemExit in them.

    `nursery` is one that imports already: its children run the services (`deploy.ray.hosting`).
    """

    def __init__(self, nursery: Nursery | None = None) -> None:
        self._nursery = nursery or Nursery()
        self._port: NurseryPort | None = None
        self._folder = PrivateFolder()  # holds the port
        self._ray = OwnRay()
        self._actors = ServiceActors({})
        self._session = ""
        self._num_raylet_deaths = 0
        self._lost: set[str] = set()  # services that ended with a Ray and are not reported yet
        self._is_closing = False
        # The thread that starts and stops Ray. Ray's processes end with the thread that started
        # them, so it must last. In the main thread Ray would replace the handler of SIGTERM.
        self._thread = ThreadPoolExecutor(1, "own ray")
        self._restarting = threading.Lock()  # held while a new Ray replaces one without a raylet

    def open(self) -> None:
        """Starts Ray. Raises ConfigError."""
        self._open_port()
        self._thread.submit(self._ray.open).result()
        self._session = _session_name()

    def gpus(self) -> FoundGpus:
        """Returns this machine's GPUs. Ray finds the same ones, and hands them out."""
        return find_gpus(os.environ)

    def room(self, num_gpus: float) -> int:
        """Returns how many workers the GPUs suffice for, or the cores, but at least a few."""
        with self._present_ray():
            return ANYWHERE.with_gpus(num_gpus).room(nodes())

    def scarce(self, num_gpus: float) -> str:
        """Describes this machine's scarcest resource."""
        with self._present_ray():
            return ANYWHERE.with_gpus(num_gpus).scarce(nodes())

    def start(self, spec: ServiceSpec) -> ServiceReady:
        """Starts an actor."""
        options = {"num_gpus": spec.num_gpus} if isinstance(spec, WorkerSpec) else {}
        with self._present_ray():
            return self._actors.start(spec, options)

    def stop(self, name: str, *, by_force: bool) -> None:
        """Ends an actor."""
        with self._present_ray():
            self._actors.stop(name, by_force=by_force)

    def running(self) -> Mapping[str, ServiceReady]:
        """Returns the actors that this launcher has started."""
        return self._actors.ready()

    def health(self) -> Mapping[str, bool]:
        """Returns True or False (dead) for each of Ray's processes on this machine."""
        return parts_of_ray(self._session)

    def counters(self) -> Mapping[str, int]:
        """Counts the restarts of Ray's GCS, and of Ray after its raylet died."""
        return {
            "restarts of Ray's GCS": self._ray.num_gcs_restarts,
            "restarts of Ray": self._num_raylet_deaths,
            "nurseries lost": self._nursery.num_lost,
        }

    def dead(self) -> dict[str, str]:
        """Returns the actors that died, each once: all of them after Ray's raylet died.

        Then the gateways have finished their answers, and a new Ray runs, on return.
        """
        is_whole = self._is_closing or not self._session or self.health()["raylet"]
        return self._actors.dead() if is_whole else self._begin_again()

    def close(self) -> None:
        """Stops the actors, gateways first, then Ray."""
        self._is_closing = True
        with self._restarting:
            self._actors.stop_all()
            closing = self._thread.submit(self._ray.close)
            self._nursery.close()  # while Ray stops
            if self._port is not None:
                self._port.close()
                self._folder.close()
                self._port = None
            closing.result()

    def stop_draining(self) -> None:
        """Makes stopping actors end their answers at once."""
        self._actors.stop_draining()

    def _open_port(self) -> None:
        """Opens the nursery to actors. It survives a replacement of Ray. Raises ConfigError."""
        if self._port is not None:
            return
        try:
            self._nursery.open(*SERVICES)
            self._folder.open()
            port = NurseryPort(self._nursery, self._folder.path / "nursery")
            port.open()
        except OSError as error:
            raise ConfigError(f"no process can be started: {error}") from error
        self._port = port
        self._actors.nursery = str(port.path)

    def _begin_again(self) -> dict[str, str]:
        """Replaces Ray. Returns the services, which have ended. Raises ConfigError."""
        with self._restarting:
            if not self._lost:
                log.error("Ray's raylet died: its services stop, and a new Ray starts")
                self._num_raylet_deaths += 1
            self._lost |= self._actors.names
            self._actors.stop_all()
            self._thread.submit(self._ray.close).result()
            if not self._is_closing:
                self.open()  # if it fails, the next call tries again
            lost, self._lost = self._lost, set()
        return dict.fromkeys(lost, "Ray's raylet died")

    @contextmanager
    def _present_ray(self) -> Iterator[None]:
        """Waits while Ray is replaced. Raises ConfigError if it is replaced during the call."""
        with self._restarting:
            pass
        try:
            yield
        except SystemExit as error:
            raise ConfigError("Ray ended meanwhile") from error


class ClusterLauncher(Launcher):
    """Runs services as detached actors of the Ray that this process has joined.

    Each worker gets a place (`deploy.ray.places`), which reserves its GPUs; gateways run on the
    head. `open` and `close` leave Ray and the actors alone; `stop_all` ends the actors.
    """

    def __init__(self, placement: NodePlacement) -> None:
        self._places = RayPlaces(placement)
        self._actors = ServiceActors({"lifetime": "detached", "namespace": NAMESPACE})
        self._session = ""  # Ray's session; "" until it is asked for

    def open(self) -> None:
        """Does nothing: Ray runs already."""

    def gpus(self) -> FoundGpus:
        """Returns no GPUs: the nodes' GPUs count, and this may be a node without workers."""
        return FoundGpus(why_none="workers start on the cluster's nodes")

    def room(self, num_gpus: float) -> int:
        """Returns how many workers fit by GPUs or cores, and by custom resources."""
        return self._placement(num_gpus).room(nodes())

    def scarce(self, num_gpus: float) -> str:
        """Describes the scarcest resource of the cluster's nodes."""
        return self._placement(num_gpus).scarce(nodes())

    def keep_places(self, names: Collection[str]) -> None:
        """Keeps the places of these dead workers, with their GPUs, and gives up the others."""
        self._places.keep(names)

    def ask_for(self, num_workers: int, wanted: Pools, num_gpus: float) -> None:
        """Asks Ray's autoscaler for nodes. Without an autoscaler it has no effect."""
        roles = self._places.roles()
        request_resources(bundles=self._placement(num_gpus).bundles(num_workers, roles, wanted))

    def start(self, spec: ServiceSpec) -> ServiceReady:
        """Starts a gateway's actor on the head, a store's on its node, a worker's in its place.

        A worker sees only the GPUs of its place.
        """
        if isinstance(spec, GatewaySpec):
            return self._actors.start(spec, ON_HEAD)
        if isinstance(spec, StoreSpec):
            pinned = NodeAffinitySchedulingStrategy(spec.node, soft=False)
            return self._actors.start(spec, {"scheduling_strategy": pinned})
        held = self._places.take(spec.worker_id, spec.role)
        place = PlacementGroupSchedulingStrategy(held.group, placement_group_bundle_index=0)
        options: dict[str, Any] = {
            "num_gpus": self._places.placement.num_gpus,
            "scheduling_strategy": place,
        }
        try:
            return self._actors.start(spec, options)
        except ConfigError:
            self._places.give_back(held)
            raise

    def nodes(self) -> Sequence[str]:
        """Returns the ids of all live nodes that can have workers."""
        return tuple(sorted(node.node_id for node in nodes()))

    def stop(self, name: str, *, by_force: bool) -> None:
        """Ends an actor and gives up its place."""
        self._actors.stop(name, by_force=by_force)
        self._places.give_up(name)

    def running(self) -> Mapping[str, ServiceReady]:
        """Returns this launcher's actors, and actors of earlier launchers, which it adopts.

        An older actor that does not answer, or never started, is ended: its name must be free.
        """
        self._places.adopt()
        for name in self._strangers():
            if self._actors.adopt(name, NAMESPACE) == "worker":
                self._places.use(name)
        return self._actors.ready()

    def health(self) -> Mapping[str, bool]:
        """Returns whether Ray's processes on this machine are alive: it is the head."""
        self._session = self._session or _session_name()
        return parts_of_ray(self._session)

    def counters(self) -> Mapping[str, int]:
        """Counts the workers that took the place of another role."""
        return {"places of another role": self._places.num_stand_ins}

    def read_logs(self, folder: str, query: LogsQuery) -> LogPieces:
        """Reads the lines that services kept on all nodes."""
        asked = msgspec.json.encode(query)
        pieces: dict[str, RingPiece] = {}
        known: set[str] = set()
        silent = []
        for node_id, answer in _on_all_nodes("read", folder, asked).items():
            if answer is None:
                silent.append(node_id)
                continue
            read = msgspec.json.decode(answer, type=LogPieces)
            pieces |= read.pieces
            known |= set(read.known)
        return LogPieces(pieces, sorted(known), silent)

    def remove_logs(self, folder: str) -> None:
        """Removes the kept log lines on all nodes that answer."""
        _on_all_nodes("forget", folder, b"")

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
        """Ends the actors that earlier launchers left; returns their number."""
        num_left = len(self._strangers())
        self.running()
        self.stop_all()
        return num_left

    def stop_draining(self) -> None:
        """Makes stopping actors end their answers at once."""
        self._actors.stop_draining()

    def _strangers(self) -> list[str]:
        """Names of Baton's services in this cluster that this launcher does not know."""
        named = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
        return [name for name in names if name not in {*self._actors.names, CONTROLLER}]

    def _placement(self, num_gpus: float) -> NodePlacement:
        return self._places.placement.with_gpus(num_gpus)


def _on_all_nodes(verb: str, name: str, asked: bytes) -> dict[str, bytes | None]:
    """Reads or removes the log folders of all live nodes. None: a node did not answer in time.

    Ray keeps the process of such a task for a while, so the next one starts at once.
    """
    task = ray.remote(num_cpus=0)(_on_node)
    asking = {
        node.node_id[:NODE_CHARS]: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            max_retries=0,
        ).remote(verb, name, asked)
        for node in nodes()
    }
    ray.wait(list(asking.values()), num_returns=len(asking), timeout=LOGS_TIMEOUT_S)
    answers: dict[str, bytes | None] = {}
    for node_id, answer in asking.items():
        try:
            answers[node_id] = ray.get(answer, timeout=0)
        except ray.exceptions.RayError as error:
            log.info("the log lines of node %s are not read: %s", node_id, error)
            answers[node_id] = None
            ray.cancel(answer)
    return answers


def _on_node(verb: str, name: str, asked: bytes) -> bytes:
    """Runs on a node. The keys of rings name it, since a service may have rings on several."""
    node = node_name()
    folder = log_folder(name, node)
    assert folder is not None
    if verb == "forget":
        shutil.rmtree(folder.parent, ignore_errors=True)
        return b""
    query = msgspec.json.decode(asked, type=LogsQuery)
    if query.places is not None:
        suffix = f"@{node}"
        places = {
            key.removesuffix(suffix): place
            for key, place in query.places.items()
            if key.endswith(suffix)
        }
        query = msgspec.structs.replace(query, places=places)
    read = read_pieces(folder, query)
    pieces = {f"{service}@{node}": piece for service, piece in read.pieces.items()}
    return msgspec.json.encode(msgspec.structs.replace(read, pieces=pieces))


def _session_name() -> str:
    """Returns the name of the Ray session that this process has joined."""
    return str(ray.get_runtime_context().get_session_name())

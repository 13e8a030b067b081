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

LOGS_TIMEOUT_S = 6.0  # longest wait for nodes' log lines; clients of the admin API wait 10 s
CONTROLLER = "controller"  # the name of the only actor that is not a service
# Ray gives each head one unit of this resource.
ON_HEAD = {"resources": {"node:__internal_head__": 0.001}}


class OwnRayLauncher(Launcher):
    """Runs services as actors of a Ray that this launcher starts on this machine, on loopback only.

    Ray's raylet cannot be restarted. If it dies, its actors keep running, but no actor can be made
    or ended. So once the raylet has died, this launcher stops the services in order, and starts a
    new Ray. Calls that start meanwhile wait. Calls that are under way fail, because Ray raises
    SystemExit in them.

    `nursery` is a nursery that was started before; its children run the services
    (`deploy.ray.hosting`).
    """

    def __init__(self, nursery: Nursery | None = None) -> None:
        self._nursery = nursery or Nursery()
        self._port: NurseryPort | None = None
        self._folder = PrivateFolder()  # folder of the nursery's port
        self._ray = OwnRay()
        self._actors = ServiceActors({})
        self._session = ""
        self._num_raylet_deaths = 0
        self._lost: set[str] = set()  # services that ended with their Ray; not reported yet
        self._is_closing = False
        # The thread that starts and stops Ray. Ray's processes end with the thread that started
        # them, so this thread must live on. In the main thread Ray would replace the handler of
        # SIGTERM.
        self._thread = ThreadPoolExecutor(1, "own ray")
        self._restarting = threading.Lock()  # locked while a new Ray replaces one without a raylet

    def open(self) -> None:
        """Starts Ray. Raises ConfigError."""
        self._open_port()
        self._thread.submit(self._ray.open).result()
        self._session = _session_name()

    def gpus(self) -> FoundGpus:
        """Returns this machine's GPUs. Ray finds the same GPUs, and assigns them to actors."""
        return find_gpus(os.environ)

    def room(self, num_gpus: float) -> int:
        """Returns how many workers fit on the GPUs.

        Without GPUs: on the cores, but at least a few.
        """
        with self._present_ray():
            return ANYWHERE.with_gpus(num_gpus).room(nodes())

    def scarce(self, num_gpus: float) -> str:
        """Describes the resource of this machine that limits the number of workers."""
        with self._present_ray():
            return ANYWHERE.with_gpus(num_gpus).scarce(nodes())

    def start(self, spec: ServiceSpec) -> ServiceReady:
        """Starts an actor."""
        options = {"num_gpus": spec.num_gpus} if isinstance(spec, WorkerSpec) else {}
        with self._present_ray():
            return self._actors.start(spec, options)

    def stop(self, name: str, *, by_force: bool) -> None:
        """Stops an actor."""
        with self._present_ray():
            self._actors.stop(name, by_force=by_force)

    def running(self) -> Mapping[str, ServiceReady]:
        """Returns the answers of the services that this launcher has started."""
        return self._actors.ready()

    def health(self) -> Mapping[str, bool]:
        """Returns True or False (dead) for each of Ray's processes on this machine."""
        return parts_of_ray(self._session)

    def counters(self) -> Mapping[str, int]:
        """Returns the numbers of restarts of Ray's GCS and of Ray, and of lost nurseries."""
        return {
            "restarts of Ray's GCS": self._ray.num_gcs_restarts,
            "restarts of Ray": self._num_raylet_deaths,
            "nurseries lost": self._nursery.num_lost,
        }

    def dead(self) -> dict[str, str]:
        """Returns the actors that have died since the last call, with the reasons.

        If Ray's raylet has died, returns all actors. Before that, waits until the gateways have
        finished their answers and a new Ray runs.
        """
        is_whole = self._is_closing or not self._session or self.health()["raylet"]
        return self._actors.dead() if is_whole else self._begin_again()

    def close(self) -> None:
        """Stops the actors (gateways first), then Ray."""
        self._is_closing = True
        with self._restarting:
            self._actors.stop_all()
            closing = self._thread.submit(self._ray.close)
            self._nursery.close()  # at the same time as Ray stops
            if self._port is not None:
                self._port.close()
                self._folder.close()
                self._port = None
            closing.result()

    def stop_draining(self) -> None:
        """Makes stopping actors end their answers at once."""
        self._actors.stop_draining()

    def _open_port(self) -> None:
        """Opens the port by which actors use the nursery.

        The port survives a restart of Ray. Raises ConfigError.
        """
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
        """Replaces Ray after its raylet died.

        Returns all services, which have ended by then. Raises ConfigError.
        """
        with self._restarting:
            if not self._lost:
                log.error("Ray's raylet died: its services stop, and a new Ray starts")
                self._num_raylet_deaths += 1
            self._lost |= self._actors.names
            self._actors.stop_all()
            self._thread.submit(self._ray.close).result()
            if not self._is_closing:
                self.open()  # if this fails, the next call tries again
            lost, self._lost = self._lost, set()
        return dict.fromkeys(lost, "Ray's raylet died")

    @contextmanager
    def _present_ray(self) -> Iterator[None]:
        """Waits while Ray is being replaced.

        Raises ConfigError if Ray is replaced during the block.
        """
        with self._restarting:
            pass
        try:
            yield
        except SystemExit as error:
            raise ConfigError("Ray ended meanwhile") from error


class ClusterLauncher(Launcher):
    """Runs services as detached actors of the Ray cluster that this process has joined.

    Each worker gets a place (`deploy.ray.places`), which reserves its GPUs. Gateways run on the
    head. `open` and `close` change neither Ray nor the actors. `stop_all` ends the actors.
    """

    def __init__(self, placement: NodePlacement) -> None:
        self._places = RayPlaces(placement)
        self._actors = ServiceActors({"lifetime": "detached", "namespace": NAMESPACE})
        self._session = ""  # name of Ray's session; empty until first used

    def open(self) -> None:
        """Does nothing, because Ray runs already."""

    def gpus(self) -> FoundGpus:
        """Returns no GPUs: workers use GPUs of the cluster's nodes, and this node may have no
        workers.
        """
        return FoundGpus(why_none="workers start on the cluster's nodes")

    def room(self, num_gpus: float) -> int:
        """Returns how many workers fit into the nodes' GPUs or cores, and custom resources."""
        return self._placement(num_gpus).room(nodes())

    def scarce(self, num_gpus: float) -> str:
        """Describes the resources of the nodes that limit the number of workers."""
        return self._placement(num_gpus).scarce(nodes())

    def keep_places(self, names: Collection[str]) -> None:
        """Keeps the places of these dead workers, with the GPUs.

        Gives up the places of all other dead workers.
        """
        self._places.keep(names)

    def ask_for(self, num_workers: int, wanted: Pools, num_gpus: float) -> None:
        """Requests nodes from Ray's autoscaler. Has no effect if Ray has no autoscaler."""
        roles = self._places.roles()
        request_resources(bundles=self._placement(num_gpus).bundles(num_workers, roles, wanted))

    def start(self, spec: ServiceSpec) -> ServiceReady:
        """Starts the actor of a gateway on the head, of a store on its node, of a worker in its
        place.

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
        """Stops an actor and gives up its place."""
        self._actors.stop(name, by_force=by_force)
        self._places.give_up(name)

    def running(self) -> Mapping[str, ServiceReady]:
        """Adopts the actors of earlier launchers. Returns the answers of all actors' services.

        An earlier actor that does not answer, or never started its service, is killed to free its
        name.
        """
        self._places.adopt()
        for name in self._strangers():
            if self._actors.adopt(name, NAMESPACE) == "worker":
                self._places.use(name)
        return self._actors.ready()

    def health(self) -> Mapping[str, bool]:
        """Returns for each of Ray's processes on this machine (the head) if it is alive."""
        self._session = self._session or _session_name()
        return parts_of_ray(self._session)

    def counters(self) -> Mapping[str, int]:
        """Returns how often a worker has taken the place of another role."""
        return {"places of another role": self._places.num_stand_ins}

    def read_logs(self, folder: str, query: LogsQuery) -> LogPieces:
        """Reads the log lines that services kept on all nodes."""
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
        """Removes the log lines that services kept, on all nodes that answer."""
        _on_all_nodes("forget", folder, b"")

    def dead(self) -> dict[str, str]:
        """Returns the actors that have died since the last call.

        Their places stay reserved for now.
        """
        dead = self._actors.dead()
        for name in dead:
            self._places.leave(name)
        return dead

    def close(self) -> None:
        """Does nothing, because the actors outlive this launcher."""

    def stop_all(self) -> None:
        """Stops the gateways, then the workers, then the stores. Gives up all places."""
        self._actors.stop_all()
        self._places.give_up_all()
        request_resources(bundles=[])  # otherwise Ray's autoscaler keeps nodes for the workers

    def sweep(self) -> int:
        """Stops the actors that earlier launchers left. Returns the number of these actors."""
        num_left = len(self._strangers())
        self.running()
        self.stop_all()
        return num_left

    def stop_draining(self) -> None:
        """Makes stopping actors end their answers at once."""
        self._actors.stop_draining()

    def _strangers(self) -> list[str]:
        """Returns the names of Baton's services in this cluster that earlier launchers started."""
        named = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
        return [name for name in names if name not in {*self._actors.names, CONTROLLER}]

    def _placement(self, num_gpus: float) -> NodePlacement:
        return self._places.placement.with_gpus(num_gpus)


def _on_all_nodes(verb: str, name: str, asked: bytes) -> dict[str, bytes | None]:
    """Reads or removes the log folders of all live nodes. Returns the answers by node; None for a
    node that did not answer in time.

    Ray keeps the process of such a task for a while, so that the next task starts at once.
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
    """Runs as a task on a node.

    The keys of rings contain the node's name, because a service may have rings on several nodes.
    """
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

"""Keeps the places of workers on the nodes of a Ray cluster.

Each worker has a placement group of its own, detached and called by the worker's name, so

    it dies                 the group stays, and nobody takes its GPU before the next one is there
    it is flipped           the group stays as it is: see `deploy.placement`
    its node dies           the group is given up, and another one is made where there is room
    it does not start       the group is given up: another node may do better
    it is stopped           the group is removed
    the controller dies     the next one finds the groups by their names

That costs some milliseconds a start. `Placement.choose` says which node; where others than Baton
have taken what it counts on, Ray is left to find one, or an autoscaler to make one.
"""

import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from deploy.placement import Node, Place, Placement
from engine.clock import MonotonicClock
from engine.errors import ConfigError
from engine.messages import Role

log = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 60.0  # then it is tried again, as every start, until a node comes
CHOSEN_TIMEOUT_S = 2.0  # what was freed just now is free by then; else others have it
WAIT_EVERY_S = 0.5
PREFIX = "baton"  # of names of groups: PREFIX:ROLE:WORKER
NODE_LABEL = "ray.io/node-id"  # every node has it


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """One reservation: another one of the same name is not this one."""

    worker: str
    role: Role  # that which it was made for

    @property
    def name(self) -> str:
        """Of the group."""
        return f"{PREFIX}:{self.role}:{self.worker}"


class RayPlaces:
    """What is reserved for each worker. Asked from several threads at once."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self._held: dict[str, _Held] = {}  # by worker
        self._in_use: set[str] = set()  # workers that run, or are being started
        self._lock = threading.Lock()

    def take(self, worker: str, role: Role) -> PlacementGroup:
        """The place that is kept for a worker, or a new one. Raises ConfigError if there is none.

        It waits while there is no room: Ray's autoscaler sees who waits.
        """
        with self._lock:  # one after the other: each sees what the one before it was given
            self._in_use.add(worker)
            kept = self._kept(worker)
            if kept is not None:
                return kept
            held = self._held[worker] = _Held(worker, role)
            group = self._make(held)
        self._await(group, held)
        return group

    def adopt(self) -> None:
        """Learns of what was reserved before; who uses it is told by `use`."""
        with self._lock:
            for place in reserved():
                self._held.setdefault(place.worker, _Held(place.worker, place.role))

    def use(self, worker: str) -> None:
        """That worker was found running."""
        with self._lock:
            self._in_use.add(worker)

    def leave(self, worker: str) -> None:
        """It died: its place is kept for the next one of that name."""
        with self._lock:
            self._in_use.discard(worker)

    def keep(self, workers: Collection[str]) -> None:
        """Gives up the places of those that died and are not among these."""
        with self._lock:
            unused = [worker for worker in self._held if worker not in self._in_use]
            for worker in set(unused) - set(workers):
                _remove(self._held.pop(worker).name)

    def give_up(self, worker: str) -> None:
        """Frees what is reserved for it, and ends a wait for that."""
        with self._lock:
            self._in_use.discard(worker)
            held = self._held.pop(worker, None)
            if held is not None:
                _remove(held.name)

    def give_up_all(self) -> None:
        """Also what launchers before this one reserved."""
        self.adopt()
        for worker in list(self._held):
            self.give_up(worker)

    def roles(self) -> list[Role]:
        """What those who have places were first started for."""
        with self._lock:
            return [held.role for held in self._held.values()]

    def _kept(self, worker: str) -> PlacementGroup | None:
        """Its group, if that still has a node and is what a worker needs; else it is given up."""
        held = self._held.get(worker)
        if held is None:
            return None
        alive = {node.node_id for node in nodes()}
        takes = self.placement.needs(held.role)
        places = [place for place in reserved() if place.worker == worker]
        if any(place.node_id in alive and place.takes == takes for place in places):
            return get_placement_group(held.name)
        _remove(held.name)
        return None

    def _make(self, held: _Held) -> PlacementGroup:
        """On the node that is chosen; else where Ray finds room, sooner or later."""
        takes = self.placement.needs(held.role)
        chosen = self.placement.choose(held.role, nodes(), reserved())
        if chosen is not None:
            group = _reserve(held.name, takes, {NODE_LABEL: chosen})
            if group.wait(CHOSEN_TIMEOUT_S):
                return group
            log.warning("%s: node %s has no room left, Ray is to find one", held.worker, chosen)
            _remove(held.name)
        return _reserve(held.name, takes, {})

    def _await(self, group: PlacementGroup, held: _Held) -> None:
        clock = MonotonicClock()
        end_s = clock.now_s() + PLACE_TIMEOUT_S
        while not group.wait(WAIT_EVERY_S):
            if self._held.get(held.worker) is not held:
                raise ConfigError(f"{held.worker} is not wanted any more")
            if clock.now_s() >= end_s:
                takes = self.placement.needs(held.role).items()
                wanted = " and ".join(f"{each:g} {name}" for name, each in takes)
                there = self.placement.scarce(nodes())
                raise ConfigError(f"no node has {wanted} left for {held.worker}: {there}")


def nodes() -> list[Node]:
    """Those that live."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def _reserve(name: str, takes: Mapping[str, float], labels: dict[str, str]) -> PlacementGroup:
    """Of a node with these labels; it may take a while."""
    return placement_group(
        [dict(takes)], "STRICT_PACK", name, lifetime="detached", bundle_label_selector=[labels]
    )


def _remove(name: str) -> None:
    try:
        group = get_placement_group(name)
    except ValueError:  # it is gone
        return
    remove_placement_group(group)


def reserved() -> list[Place]:
    """All that is reserved in this cluster, by whomever."""
    places = []
    for group in placement_group_table().values():
        prefix, _, rest = group["name"].partition(":")
        if prefix == PREFIX and group["state"] != "REMOVED":
            role, _, worker = rest.partition(":")
            node_id = group["bundles_to_node_id"].get(0) or None
            places.append(Place(worker, Role(role), node_id, group["bundles"][0]))
    return places

"""Keeps the places of workers on the nodes of a Ray cluster.

Each worker has a placement group of its own, detached and called by the worker's name, so

    it dies                 the group stays, and nobody takes its GPU before the next one is there
    it is flipped           the group stays as it is: see `deploy.pools.placement`
    its node dies           the group is given up, and another one is made where there is room
    its role has no room    the group takes, after a while, what another role has left
    it does not start       the group is given up: another node may do better
    it is stopped           the group is removed
    the controller dies     the next one finds the groups by their names

A start takes some milliseconds longer so. `NodePlacement.choose` says which node. If programs other
than Baton took what it counts on, Ray finds a node, or an autoscaler makes one.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from deploy.pools.placement import Node, NodePlacement, NoPlace, Place
from engine.clock import MonotonicClock
from engine.errors import ConfigError
from engine.messages import Role

log = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 60.0  # then another role's will do; else the start is tried again, as every one
CHOSEN_TIMEOUT_S = 2.0  # what was freed just now is free by then; else others have it
WAIT_EVERY_S = 0.5
PREFIX = "baton"  # of names of groups: PREFIX:ROLE:WORKER
NODE_LABEL = "ray.io/node-id"  # every node has it


@dataclass(slots=True, eq=False)
class Held:
    """One reservation: another one of the same name is not this one."""

    worker: str
    role: Role  # that whose resource it takes
    group: PlacementGroup | None = None  # None: it is being made, or nobody has asked for it yet

    @property
    def name(self) -> str:
        """Of the group."""
        return f"{PREFIX}:{self.role}:{self.worker}"


class RayPlaces:
    """What is reserved for each worker. Asked from several threads at once.

    Groups are made and removed one after the other, so each choice sees the one before it, and a
    name is free before it is used again. That waits for Ray. The books have a lock of their own,
    and never do: who only writes in them goes on while a cluster gives no answer.
    """

    def __init__(self, placement: NodePlacement) -> None:
        self.placement = placement
        self._held: dict[str, Held] = {}  # by worker
        self._in_use: set[str] = set()  # workers that run, or are being started
        self.num_stand_ins = 0  # places that were taken for want of the role's own
        self._books = threading.Lock()  # of these two; taken for moments
        self._groups = threading.Lock()  # taken before the other one

    def take(self, worker: str, role: Role) -> Held:
        """The place that is kept for a worker, or a new one. Raises NoPlace; then it has none.

        It waits while there is no room: Ray's autoscaler sees who waits. If none comes it takes
        what another role has left, since a worker may become anything wherever it is.
        """
        with self._groups:
            with self._books:
                self._in_use.add(worker)
                held = self._held.get(worker)
            if held is not None and self._is_kept(held):
                return held
            held = Held(worker, role)
            self._make(held)
        try:
            if not self._comes(held):
                self._stand_in(held)
        except ConfigError:
            self.give_back(held)
            raise
        return held

    def adopt(self) -> None:
        """Learns of what was reserved before; who uses it is told by `use`."""
        there = reserved()
        with self._books:
            for place in there:
                self._held.setdefault(place.worker, Held(place.worker, place.role))

    def use(self, worker: str) -> None:
        """That worker was found running."""
        with self._books:
            self._in_use.add(worker)

    def leave(self, worker: str) -> None:
        """It died: its place is kept for the next one of that name."""
        with self._books:
            self._in_use.discard(worker)

    def keep(self, workers: Collection[str]) -> None:
        """Gives up the places of those that died and are not among these."""
        with self._books:
            unused = self._held.keys() - self._in_use - set(workers)
        for worker in unused:
            self._free(worker, lambda held: held.worker not in self._in_use)

    def give_up(self, worker: str) -> None:
        """Frees what is reserved for it, and ends a wait for that."""
        self._free(worker, lambda _: True)

    def give_back(self, held: Held) -> None:
        """Frees this one, if that was not done: the worker may have another one by now."""
        self._free(held.worker, lambda there: there is held)

    def give_up_all(self) -> None:
        """Also what launchers before this one reserved."""
        self.adopt()
        for worker in list(self._held):
            self.give_up(worker)

    def roles(self) -> list[Role]:
        """Whose resources those who have places take."""
        with self._books:
            return [held.role for held in self._held.values()]

    def _free(self, worker: str, is_meant: Callable[[Held], bool]) -> None:
        with self._groups:
            with self._books:
                held = self._held.get(worker)
                if held is not None and not is_meant(held):
                    return
                self._held.pop(worker, None)
                self._in_use.discard(worker)
            if held is not None:
                _remove(held.name)

    def _is_kept(self, held: Held) -> bool:
        """Whether it still has a node and is what a worker needs; else it is removed."""
        alive = {node.node_id for node in nodes()}
        takes = self.placement.needs(held.role)
        places = [place for place in reserved() if place.worker == held.worker]
        if any(place.node_id in alive and place.takes == takes for place in places):
            held.group = get_placement_group(held.name)
            return True
        _remove(held.name)
        return False

    def _make(self, held: Held) -> None:
        """On the node that is chosen; else where Ray finds room, sooner or later."""
        with self._books:
            self._held[held.worker] = held
        takes = self.placement.needs(held.role)
        chosen = self.placement.choose(held.role, nodes(), reserved())
        if chosen is not None:
            held.group = _reserve(held.name, takes, {NODE_LABEL: chosen})
            if held.group.wait(CHOSEN_TIMEOUT_S):
                return
            log.warning("%s: node %s has no room left, Ray is to find one", held.worker, chosen)
            _remove(held.name)
        held.group = _reserve(held.name, takes, {})

    def _comes(self, held: Held) -> bool:
        """Whether it has a node in time. Raises ConfigError once it is given up."""
        assert held.group is not None
        clock = MonotonicClock()
        end_s = clock.now_s() + PLACE_TIMEOUT_S
        while not held.group.wait(WAIT_EVERY_S):
            self._check_wanted(held)
            if clock.now_s() >= end_s:
                return False
        return True

    def _stand_in(self, held: Held) -> None:
        """Has it take what another role has left. Raises NoPlace."""
        wanted = self.placement.needs(held.role)
        with self._groups:
            self._check_wanted(held)
            other = self.placement.stand_in(held.role, nodes(), reserved())
            if other is not None:
                log.warning(
                    "%s: no room for a %s worker, it takes that of a %s worker",
                    *(held.worker, held.role, other),
                )
                _remove(held.name)
                self.num_stand_ins += 1
                held.role = other
                self._make(held)
        if other is None or not self._comes(held):
            what = " and ".join(f"{each:g} {name}" for name, each in wanted.items())
            there = self.placement.scarce(nodes())
            raise NoPlace(f"no node has {what} left for {held.worker}: {there}")

    def _check_wanted(self, held: Held) -> None:
        """Raises ConfigError."""
        with self._books:
            if self._held.get(held.worker) is not held:
                raise ConfigError(f"{held.worker} is not wanted any more")


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

"""Keeps the places of workers on the nodes of a Ray cluster.

Each worker has a placement group of its own, detached and named after the worker:

    worker dies               the group stays, so its GPU is free for the next worker of that name
    worker is flipped         the group stays as it is: see `deploy.pools.placement`
    node dies                 the group is given up, and another is made where there is room
    role has no room          after a while the group takes an unused resource of another role
    worker does not start     the group is given up, because the start may succeed on another node
    worker is stopped         the group is removed
    controller dies           the next controller finds the groups by their names. If it starts a
                              worker, the worker gets the group of its name, made for any role

Placement groups make a start some milliseconds longer. `NodePlacement.choose` chooses the node. If
other programs have taken that node's resources, Ray finds another node, or an autoscaler adds one.
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

from deploy.pools.placement import Node, NodePlacement, NoRoom, Reservation
from engine.clock import MonotonicClock
from engine.errors import ConfigError
from engine.messages import Role

log = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 60.0  # then another role's place is taken, or the start fails and is retried
CHOSEN_TIMEOUT_S = 2.0  # after this time, other programs must have taken the resources
WAIT_EVERY_S = 0.5
PREFIX = "baton"  # group names are PREFIX:ROLE:WORKER
NODE_LABEL = "ray.io/node-id"  # Ray sets it on every node


@dataclass(slots=True, eq=False)
class Held:
    """A reservation. Compared by identity, because a later reservation may have the same name."""

    worker: str
    role: Role  # the role whose custom resource is reserved
    # None: the group is being made, or adopted and not used yet.
    group: PlacementGroup | None = None

    @property
    def name(self) -> str:
        """The name of the placement group."""
        return f"{PREFIX}:{self.role}:{self.worker}"


class RayPlaces:
    """Keeps the reservation of each worker. Safe to use from several threads.

    Placement groups are made and removed one after the other. So each choice of a node takes the
    previous choice into account, and a name is free before it is used again. These operations wait
    for Ray. The records of reservations have a separate lock, under which nothing waits for Ray. So
    an event can be recorded even if the cluster does not answer.
    """

    def __init__(self, placement: NodePlacement) -> None:
        self.placement = placement
        self._held: dict[str, Held] = {}  # by worker: its reservation
        self._in_use: set[str] = set()  # workers that run or start
        self.num_stand_ins = 0  # number of places taken from another role's resource
        self._books = threading.Lock()  # guards `_held` and `_in_use`; locked only briefly
        self._groups = threading.Lock()  # always locked before `_books`

    def take(self, worker: str, role: Role) -> Held:
        """Returns the place that is kept for a worker, or else a new place. Raises NoRoom, with no
        place left.

        Waits while there is no room; Ray's autoscaler notices that the group waits. After a timeout
        the worker takes an unused resource of another role, because any role can run on any node.
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
        """Adds the reservations that earlier controllers made.

        `use` then marks the reservations in use.
        """
        there = reserved()
        with self._books:
            for place in there:
                self._held.setdefault(place.worker, Held(place.worker, place.role))

    def use(self, worker: str) -> None:
        """Marks the place of a worker, which was found running, as in use."""
        with self._books:
            self._in_use.add(worker)

    def leave(self, worker: str) -> None:
        """Marks a worker as dead. Its place is kept for the next worker of the same name."""
        with self._books:
            self._in_use.discard(worker)

    def keep(self, workers: Collection[str]) -> None:
        """Gives up the places of dead workers, except those of `workers`."""
        with self._books:
            unused = self._held.keys() - self._in_use - set(workers)
        for worker in unused:
            self._free(worker, lambda held: held.worker not in self._in_use)

    def give_up(self, worker: str) -> None:
        """Frees a worker's place. If `take` waits for this place, ends the wait."""
        self._free(worker, lambda _: True)

    def give_back(self, held: Held) -> None:
        """Frees this reservation, unless the worker has another reservation by now."""
        self._free(held.worker, lambda there: there is held)

    def give_up_all(self) -> None:
        """Frees all places, including the places of earlier controllers."""
        self.adopt()
        for worker in list(self._held):
            self.give_up(worker)

    def roles(self) -> list[Role]:
        """Returns for each reservation the role whose custom resource it takes."""
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
        """True if the group is on a live node and has the right size.

        Otherwise removes the group.
        """
        alive = {node.node_id for node in nodes()}
        takes = self.placement.needs(held.role)
        places = [place for place in reserved() if place.worker == held.worker]
        if any(place.node_id in alive and place.takes == takes for place in places):
            held.group = get_placement_group(held.name)
            return True
        _remove(held.name)
        return False

    def _make(self, held: Held) -> None:
        """Makes the group on the chosen node, or else on a node where Ray finds room."""
        with self._books:
            self._held[held.worker] = held
        takes = self.placement.needs(held.role)
        chosen = self.placement.choose(held.role, nodes(), reserved())
        if chosen is not None:
            held.group = _reserve(held.name, takes, {NODE_LABEL: chosen})
            if held.group.wait(CHOSEN_TIMEOUT_S):
                return
            log.warning("%s: node %s has no room left, Ray chooses another", held.worker, chosen)
            _remove(held.name)
        held.group = _reserve(held.name, takes, {})

    def _comes(self, held: Held) -> bool:
        """Waits until the group gets a node.

        False after the timeout. Raises ConfigError if the place was given up.
        """
        assert held.group is not None
        clock = MonotonicClock()
        end_s = clock.now_s() + PLACE_TIMEOUT_S
        while not held.group.wait(WAIT_EVERY_S):
            self._check_wanted(held)
            if clock.now_s() >= end_s:
                return False
        return True

    def _stand_in(self, held: Held) -> None:
        """Makes the group again, with an unused resource of another role. Raises NoRoom."""
        wanted = self.placement.needs(held.role)
        with self._groups:
            self._check_wanted(held)
            other = self.placement.stand_in(held.role, nodes(), reserved())
            if other is not None:
                log.warning(
                    "%s: no room for a %s worker, it takes the place of a %s worker",
                    *(held.worker, held.role, other),
                )
                _remove(held.name)
                self.num_stand_ins += 1
                held.role = other
                self._make(held)
        if other is None or not self._comes(held):
            what = " and ".join(f"{each:g} {name}" for name, each in wanted.items())
            there = self.placement.scarce(nodes())
            raise NoRoom(f"no node has {what} left for {held.worker}: {there}")

    def _check_wanted(self, held: Held) -> None:
        """Raises ConfigError if the place was given up."""
        with self._books:
            if self._held.get(held.worker) is not held:
                raise ConfigError(f"{held.worker} was stopped while it waited for a place")


def nodes() -> list[Node]:
    """Returns the live nodes of the cluster."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def _reserve(name: str, takes: Mapping[str, float], labels: dict[str, str]) -> PlacementGroup:
    """Requests a group on a node with these labels. Ray may take a while to place the group."""
    return placement_group(
        [dict(takes)], "STRICT_PACK", name, lifetime="detached", bundle_label_selector=[labels]
    )


def _remove(name: str) -> None:
    try:
        group = get_placement_group(name)
    except ValueError:  # the group is removed already
        return
    remove_placement_group(group)


def reserved() -> list[Reservation]:
    """Returns all of Baton's reservations in this cluster."""
    places = []
    for group in placement_group_table().values():
        prefix, _, rest = group["name"].partition(":")
        if prefix == PREFIX and group["state"] != "REMOVED":
            role, _, worker = rest.partition(":")
            node_id = group["bundles_to_node_id"].get(0) or None
            places.append(Reservation(worker, Role(role), node_id, group["bundles"][0]))
    return places

"""Chooses the node on which a worker starts, and counts how many workers fit. Pure: no Ray.

A worker takes GPUs and, if configured, one unit of its role's custom resource. The cluster files
call these resources `prefill_node` and `decode_node`. A node has one unit for each worker of that
role that may start there. So the resource decides where workers of a role *start*, if there is
room. A flipped worker stays on its node. If it is restarted, it gets the same place.

This module does not know which resources other programs use. Ray makes the final choice.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config import PoolsConfig, Spread
from engine.control import SERVING_ROLES, Pools
from engine.errors import ConfigError
from engine.messages import Role

LEAST_ROOM = 4  # number of workers that always fit; on fewer cores, workers share cores
HARDLY_ANYTHING = {"CPU": 0.001}  # Ray's smallest reservation, for workers that need no resource


class NoRoom(ConfigError):
    """No node has room for a worker. A node with room may join later."""


@dataclass(frozen=True, slots=True)
class Node:
    """A live node, with its total amount of each resource (used and unused)."""

    node_id: str
    address: str
    has: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Reservation:
    """A worker's reservation on a node. The reservation takes the custom resource of `role`."""

    worker: str
    role: Role
    node_id: str | None  # None: no node has room at the moment
    takes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """The resources that each worker needs, and the rule that spreads workers over nodes."""

    num_gpus: float = 0.0
    prefill_resource: str | None = None
    decode_resource: str | None = None  # also the resource of mixed workers
    spread: Spread = Spread.PACK

    @classmethod
    def of(cls, pools: PoolsConfig, num_gpus: float) -> "NodePlacement":
        """Returns the configured placement for workers that take `num_gpus` each."""
        return cls(num_gpus, pools.prefill_resource, pools.decode_resource, pools.placement)

    def with_gpus(self, num_gpus: float) -> "NodePlacement":
        """Returns the same placement for workers that take `num_gpus` each."""
        return replace(self, num_gpus=num_gpus)

    def needs(self, role: Role) -> dict[str, float]:
        """Returns the resources that a worker of this role reserves."""
        resource = self._resource(role)
        needs = {} if resource is None else {resource: 1.0}
        if self.num_gpus:
            needs["GPU"] = self.num_gpus
        return needs or dict(HARDLY_ANYTHING)

    def stand_in(
        self, role: Role, nodes: Sequence[Node], places: Sequence[Reservation]
    ) -> Role | None:
        """Returns a role whose custom resource differs and still has room.

        None if there is no such role.
        """
        others = (other for other in SERVING_ROLES if self.needs(other) != self.needs(role))
        return next((other for other in others if self.choose(other, nodes, places)), None)

    def usable(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns the nodes on which a worker of at least one role may start."""
        needs = [self.needs(role) for role in SERVING_ROLES]
        return [node for node in nodes if any(_how_many(node.has, each) for each in needs)]

    def room(self, nodes: Iterable[Node]) -> int:
        """Returns how many workers fit in total. Running workers are included."""
        usable = self.usable(nodes)
        most = sum(self._holds(node) for node in usable)
        if not self.num_gpus:  # workers can share cores, but more workers than cores are useless
            most = min(most, max(LEAST_ROOM, int(_total(usable, "CPU"))))
        return int(most)

    def room_for(self, role: Role, nodes: Iterable[Node]) -> int:
        """Returns how many workers fit if all workers start with this role."""
        return sum(_how_many(node.has, self.needs(role)) for node in nodes)

    def scarce(self, nodes: Iterable[Node]) -> str:
        """Returns the resources that limit the number of workers, as a sentence for operators.

        The sentence has the custom resources and GPUs of all nodes. It has the cores only of nodes
        on which a worker may start.
        """
        there = list(nodes)
        usable = self.usable(there)
        names = {name for role in SERVING_ROLES for name in self.needs(role)}
        totals = {name: _total(there, name) for name in names - {"CPU"}}
        if usable and not self.num_gpus:
            totals["CPU"] = _total(usable, "CPU")
        if not totals:
            return "there is no node"
        listed = ", ".join(f"{totals[name]:g} {name}" for name in sorted(totals))
        each = f", of which a worker takes {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"nodes have {listed}{each}"

    def choose(
        self, role: Role, nodes: Iterable[Node], places: Sequence[Reservation]
    ) -> str | None:
        """Returns the node on which the next worker should start. None if no node has room.

        PACK chooses the node with the most workers. SPREAD chooses the node with the fewest workers
        of the role; on a tie, the node with the fewest workers. Without GPUs both rules prefer
        nodes with idle cores.
        """
        needs = self.needs(role)

        def rank(node: Node) -> tuple[Any, ...]:
            here = [place for place in places if place.node_id == node.node_id]
            of_role = sum(place.role is role for place in here)
            full = not self.num_gpus and len(here) >= node.has.get("CPU", 0.0)
            counts = (-len(here),) if self.spread is Spread.PACK else (of_role, len(here))
            return (full, *counts, node.node_id)

        able = [node for node in nodes if _has_room(node, needs, places)]
        return min(able, key=rank).node_id if able else None

    def bundles(
        self, num_workers: int, roles: Sequence[Role], wanted: Pools
    ) -> list[dict[str, float]]:
        """Returns the resources of each worker. `roles` has the roles of places that are reserved
        already.

        Each further worker gets the role that lacks the largest share of its `wanted` number.
        """
        counts = Counter(roles)
        more = []
        for _ in range(num_workers - len(roles)):
            role = min(SERVING_ROLES, key=lambda role: _share(counts[role], wanted.of(role)))
            counts[role] += 1
            more.append(role)
        core = {} if self.num_gpus else {"CPU": 1.0}  # one core per worker, as in `room`
        return [{**self.needs(role), **core} for role in (*roles, *more)[:num_workers]]

    def _resource(self, role: Role) -> str | None:
        return self.prefill_resource if role is Role.PREFILL else self.decode_resource

    def _holds(self, node: Node) -> float:
        """Returns the number of workers that fit on a node; infinity if workers only need cores."""
        names = {self.prefill_resource, self.decode_resource}
        most = math.inf
        if None not in names:
            most = sum(_units(node.has, str(name), 1.0) for name in names)
        if self.num_gpus:
            most = min(most, _units(node.has, "GPU", self.num_gpus))
        return most


ANYWHERE = NodePlacement()


def nodes_to_start_on(
    there: Iterable[Node], config: PoolsConfig, wanted: Pools, num_gpus: float
) -> list[Node]:
    """Returns the nodes for the first workers. Raises ConfigError if some workers do not fit.

    Each worker takes `num_gpus`. If `max_workers` is configured, nodes may join later, so only one
    worker of each role must fit.
    """
    placement = NodePlacement.of(config, num_gpus)
    there = list(there)
    usable = placement.usable(there)
    for role in SERVING_ROLES:
        num_wanted = wanted.of(role) if config.max_workers is None else min(wanted.of(role), 1)
        room = placement.room_for(role, usable)
        if room < num_wanted:
            needs = " and ".join(f"{each:g} {name}" for name, each in placement.needs(role).items())
            raise ConfigError(
                f"{num_wanted} {role} workers need {needs} each, there is room for {room}: "
                f"{placement.scarce(there)}"
            )
    return usable


def _has_room(node: Node, needs: Mapping[str, float], places: Sequence[Reservation]) -> bool:
    """True if a node has room for one more worker.

    Every worker takes the same amount of a resource.
    """
    here = [place for place in places if place.node_id == node.node_id]
    return all(
        _units(node.has, name, each) > sum(name in place.takes for place in here)
        for name, each in needs.items()
    )


def _how_many(has: Mapping[str, float], needs: Mapping[str, float]) -> int:
    return min(_units(has, name, each) for name, each in needs.items())


def _units(has: Mapping[str, float], name: str, each: float) -> int:
    """Returns for how many workers a resource suffices. No worker gets parts of two GPUs."""
    there = has.get(name, 0.0)
    if name == "GPU" and each < 1:
        return int(there) * int(1 / each)
    return int(there / each)


def _share(there: int, wanted: int) -> float:
    """Returns the share of wanted workers that exist; infinity if no worker is wanted."""
    return there / wanted if wanted else math.inf


def _total(nodes: Iterable[Node], name: str) -> float:
    return sum(node.has.get(name, 0.0) for node in nodes)

"""On which node of a cluster a worker is started, and how many workers there can be. Pure: no Ray.

A worker takes GPUs and, where the configuration says so, one of a custom resource of its role:
`prefill_node` and `decode_node` of the cluster files, of which a node offers as many as it may have
workers of that role. The resource says where a role is *started*, if there is room for it there: a
worker that is flipped stays where it is, and whoever is started in its place takes that place.

What others than Baton have taken of a node is not known here: Ray has the last word.
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

LEAST_ROOM = 4  # workers, also where there are fewer cores: they wait for one another, no more
HARDLY_ANYTHING = {"CPU": 0.001}  # for who needs nothing: Ray reserves no less


class NoPlace(ConfigError):
    """No node has room for a worker; one may come."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node that lives, and how many of each resource it has, used or not."""

    node_id: str
    address: str
    has: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """What is reserved for a worker on a node. `role`: that whose resource it takes."""

    worker: str
    role: Role
    node_id: str | None  # None: there is no room for it at the moment
    takes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """What workers need of their nodes, and how they are spread over them."""

    num_gpus: float = 0.0
    prefill_resource: str | None = None
    decode_resource: str | None = None  # of mixed workers too
    spread: Spread = Spread.PACK

    @classmethod
    def of(cls, pools: PoolsConfig) -> "NodePlacement":
        """As configured."""
        return cls(pools.num_gpus, pools.prefill_resource, pools.decode_resource, pools.placement)

    def with_gpus(self, num_gpus: float) -> "NodePlacement":
        """For workers with so many GPUs."""
        return replace(self, num_gpus=num_gpus)

    def needs(self, role: Role) -> dict[str, float]:
        """What a worker that is started for that role takes of its node."""
        resource = self._resource(role)
        needs = {} if resource is None else {resource: 1.0}
        if self.num_gpus:
            needs["GPU"] = self.num_gpus
        return needs or dict(HARDLY_ANYTHING)

    def stand_in(self, role: Role, nodes: Sequence[Node], places: Sequence[Place]) -> Role | None:
        """A role that takes another resource, and has room; None where there is none."""
        others = (other for other in SERVING_ROLES if self.needs(other) != self.needs(role))
        return next((other for other in others if self.choose(other, nodes, places)), None)

    def usable(self, nodes: Iterable[Node]) -> list[Node]:
        """Nodes that a worker of some role may be started on."""
        needs = [self.needs(role) for role in SERVING_ROLES]
        return [node for node in nodes if any(_how_many(node.has, each) for each in needs)]

    def room(self, nodes: Iterable[Node]) -> int:
        """How many workers there can be in all, whatever is there already."""
        usable = self.usable(nodes)
        most = sum(self._holds(node) for node in usable)
        if not self.num_gpus:  # cores can be shared, but more workers than cores are no use
            most = min(most, max(LEAST_ROOM, int(_total(usable, "CPU"))))
        return int(most)

    def room_for(self, role: Role, nodes: Iterable[Node]) -> int:
        """How many workers there can be if all are started for that role."""
        return sum(_how_many(node.has, self.needs(role)) for node in nodes)

    def scarce(self, nodes: Iterable[Node]) -> str:
        """What limits that number, for an operator."""
        usable = self.usable(nodes)
        names = {name for role in SERVING_ROLES for name in self.needs(role)}
        names |= set() if self.num_gpus else {"CPU"}
        there = ", ".join(f"{_total(usable, name):g} {name}" for name in sorted(names))
        each = f", of which a worker takes {self.num_gpus:g} GPU" if self.num_gpus else ""
        return f"nodes have {there}{each}"

    def choose(self, role: Role, nodes: Iterable[Node], places: Sequence[Place]) -> str | None:
        """The node for one more worker; None where none has room.

        PACK takes the node that has the most workers already, SPREAD that with the fewest of its
        role, then the fewest. Without GPUs both prefer nodes with more cores than workers.
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
        """What so many workers take, of which those that there are have places of `roles`.

        More of them are of the roles of which most are missing in `wanted`, then as there.
        """
        counts = Counter(roles)
        more = []
        for _ in range(num_workers - len(roles)):
            role = min(SERVING_ROLES, key=lambda role: _share(counts[role], wanted.of(role)))
            counts[role] += 1
            more.append(role)
        core = {} if self.num_gpus else {"CPU": 1.0}  # as `room` counts
        return [{**self.needs(role), **core} for role in (*roles, *more)[:num_workers]]

    def _resource(self, role: Role) -> str | None:
        return self.prefill_resource if role is Role.PREFILL else self.decode_resource

    def _holds(self, node: Node) -> float:
        """Workers that a node may have, of whatever roles; endless where cores are all it takes."""
        names = {self.prefill_resource, self.decode_resource}
        most = math.inf
        if None not in names:
            most = sum(_units(node.has, str(name), 1.0) for name in names)
        if self.num_gpus:
            most = min(most, _units(node.has, "GPU", self.num_gpus))
        return most


ANYWHERE = NodePlacement()


def nodes_to_start_on(there: Iterable[Node], config: PoolsConfig, wanted: Pools) -> list[Node]:
    """Nodes for the first workers. Raises ConfigError where some can be started on none of them.

    With `max_workers`, which may count on nodes that come later, one of each role is enough.
    """
    placement = NodePlacement.of(config)
    usable = placement.usable(there)
    for role in SERVING_ROLES:
        num_wanted = wanted.of(role) if config.max_workers is None else min(wanted.of(role), 1)
        room = placement.room_for(role, usable)
        if room < num_wanted:
            needs = " and ".join(f"{each:g} {name}" for name, each in placement.needs(role).items())
            raise ConfigError(
                f"{num_wanted} {role} workers need {needs} each, there is room for {room}: "
                f"{placement.scarce(usable)}"
            )
    return usable


def _has_room(node: Node, needs: Mapping[str, float], places: Sequence[Place]) -> bool:
    """Next to the workers that have their places there, all of which take as much of each."""
    here = [place for place in places if place.node_id == node.node_id]
    return all(
        _units(node.has, name, each) > sum(name in place.takes for place in here)
        for name, each in needs.items()
    )


def _how_many(has: Mapping[str, float], needs: Mapping[str, float]) -> int:
    return min(_units(has, name, each) for name, each in needs.items())


def _units(has: Mapping[str, float], name: str, each: float) -> int:
    """For how many workers it suffices. A part of a GPU is never put together of two."""
    there = has.get(name, 0.0)
    if name == "GPU" and each < 1:
        return int(there) * int(1 / each)
    return int(there / each)


def _share(there: int, wanted: int) -> float:
    """Of what is wanted; of a role that is not wanted there is always enough."""
    return there / wanted if wanted else math.inf


def _total(nodes: Iterable[Node], name: str) -> float:
    return sum(node.has.get(name, 0.0) for node in nodes)

"""Workers are placed on a cluster of several nodes, whose GPUs are only declared.

All tests share one cluster; each test releases the resources that it reserved.
"""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deploy.pools.placement import Node, NodePlacement, NoRoom
from engine.config import Spread
from engine.errors import ConfigError
from engine.messages import Role
from tests.kits.services.served import poll_until

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(120),
    pytest.mark.long,  # several nodes; test_placement tests the rules, test_ray_pools a single node
]

BY_ROLE = NodePlacement(1, "prefill_node", "decode_node")
P, D = Role.PREFILL, Role.DECODE


class Nodes:
    """A cluster whose nodes declare two GPUs each. Tests can add and remove nodes."""

    def __init__(self, **resources: int) -> None:
        """The first node is the head."""
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args=self._node(resources))

    def add(self, **resources: int) -> Any:
        node = self.cluster.add_node(wait=False, **self._node(resources))
        self.cluster.wait_for_nodes()
        return node

    def _node(self, resources: dict[str, int]) -> dict[str, Any]:
        from deploy.ray.own_ray import OBJECT_STORE_BYTES

        return {
            "num_cpus": 0,  # so that Ray starts no process in advance
            "num_gpus": 2,
            "resources": resources,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    import ray

    from deploy.ray.own_ray import NAMESPACE

    there = Nodes(prefill_node=2)
    try:
        there.add(decode_node=4, spare_node=1)
        ray.init(
            address=there.cluster.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield there
    finally:
        ray.shutdown()
        there.cluster.shutdown()


@pytest.fixture
def places(nodes) -> Iterator[Any]:
    from deploy.ray.places import RayPlaces

    made: list[RayPlaces] = []

    def make(placement: NodePlacement) -> RayPlaces:
        made.append(RayPlaces(placement))
        return made[-1]

    yield make
    for each in made:
        each.give_up_all()
    poll_until(lambda: not reserved(), "nothing is reserved")


def reserved() -> dict[str, str | None]:
    """Returns the node on which each worker has its reservation."""
    from deploy.ray.places import reserved as reserved_places

    return {place.worker: place.node_id for place in reserved_places()}


def everywhere() -> list[Node]:
    from deploy.ray.places import nodes

    return nodes()


def offers(node_id: str | None) -> dict[str, float]:
    import ray

    (has,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    return has


def take(places: Any, *workers: tuple[str, Role]) -> None:
    for worker, role in workers:
        places.take(worker, role)


def test_workers_start_on_nodes_of_their_role(places):
    take(places(BY_ROLE), ("p0", P), ("d0", D), ("p1", P), ("d1", D))
    where = reserved()
    assert all("prefill_node" in offers(where[name]) for name in ("p0", "p1"))
    assert all("decode_node" in offers(where[name]) for name in ("d0", "d1"))


def test_workers_are_packed_or_spread(places):
    pack = places(NodePlacement(1))
    take(pack, ("p0", P), ("d0", D))
    assert len(set(reserved().values())) == 1
    pack.give_up_all()
    take(places(NodePlacement(1, spread=Spread.SPREAD)), ("p0", P), ("p1", P))
    assert len(set(reserved().values())) == 2


def test_gpu_of_a_dead_worker_is_kept_until_given_up(places):
    mine = places(NodePlacement(1))
    first = mine.take("d0", D)
    before = reserved()
    mine.leave("d0")
    mine.keep(["d0"])
    # the reservation is found again under another role
    assert mine.take("d0", P).group.id == first.group.id
    mine.keep([])  # the reservation is kept, because d0 uses it
    assert reserved() == before
    mine.leave("d0")
    mine.keep([])
    assert not reserved()


def test_abandoned_start_does_not_free_the_next_place(places):
    mine = places(NodePlacement(1))
    first = mine.take("d0", D)
    mine.give_up("d0")
    second = mine.take("d0", D)
    mine.give_back(first)
    assert "d0" in reserved()
    mine.give_back(second)
    assert not reserved()


def test_next_controller_finds_the_reservations(places):
    take(places(NodePlacement(1)), ("p0", P), ("d0", D), ("d1", D))
    before = reserved()
    other = places(NodePlacement(1))
    other.adopt()
    assert sorted(other.roles()) == [D, D, P]
    other.use("p0")
    other.keep(["d0"])
    assert reserved() == {name: node for name, node in before.items() if name != "d1"}


def test_missing_resource_is_named_and_the_wait_can_be_cancelled(places, monkeypatch):
    mine = places(BY_ROLE)
    take(mine, ("p0", P), ("p1", P), ("d0", D), ("d1", D))
    monkeypatch.setattr("deploy.ray.places.PLACE_TIMEOUT_S", 0.5)
    with pytest.raises(NoRoom, match="1 prefill_node and 1 GPU left for p2: nodes have 4 GPU"):
        mine.take("p2", P)
    assert "p2" not in reserved()
    monkeypatch.undo()
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(mine.take, "p3", P)
        poll_until(lambda: "p3" in reserved(), "it waits")
        mine.give_up("p3")
        with pytest.raises(ConfigError, match="was stopped while it waited"):
            waits.result(10)


def test_worker_takes_the_place_of_another_role(places, monkeypatch):
    mine = places(BY_ROLE)
    take(mine, ("p0", P), ("p1", P))
    monkeypatch.setattr("deploy.ray.places.PLACE_TIMEOUT_S", 0.5)
    assert mine.take("p2", P).role is D
    assert "decode_node" in offers(reserved()["p2"])
    mine.leave("p2")
    assert mine.take("p2", P).role is D  # the reservation is kept with its first role


def test_node_taken_by_others_is_avoided(places):
    from ray.util.placement_group import placement_group, remove_placement_group

    mine = places(NodePlacement(2))
    chosen = mine.placement.choose(P, everywhere(), [])
    theirs = placement_group([{"GPU": 1}], bundle_label_selector=[{"ray.io/node-id": str(chosen)}])
    assert theirs.wait(10)
    try:
        take(mine, ("p0", P))
        assert reserved()["p0"] not in (None, chosen)
    finally:
        remove_placement_group(theirs)


def test_workers_of_a_lost_node_are_placed_elsewhere(nodes, places):
    mine = places(NodePlacement(1, "spare_node", "spare_node", Spread.SPREAD))
    lost = nodes.add(spare_node=1)
    take(mine, ("d0", D), ("d1", D))
    (gone,) = (name for name, node_id in reserved().items() if node_id == lost.node_id)
    (stays,) = {"d0", "d1"} - {gone}
    left = reserved()[stays]
    assert mine.placement.room(everywhere()) == 2
    nodes.cluster.remove_node(lost)
    poll_until(lambda: mine.placement.room(everywhere()) == 1, "it is seen to be gone")
    mine.leave(gone)
    mine.give_up(stays)
    take(mine, (gone, D))
    assert reserved() == {gone: left}

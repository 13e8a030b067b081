"""The chosen node of each worker, and the number of workers that fit."""

import pytest

from deploy.pools.placement import (
    HARDLY_ANYTHING,
    Node,
    NodePlacement,
    Reservation,
    nodes_to_start_on,
)
from engine.config import PoolsConfig, Spread
from engine.control import Pools
from engine.errors import ConfigError
from engine.messages import Role

BY_ROLE = NodePlacement(1, "prefill_node", "decode_node")
HEAD = {"CPU": 4.0}


def nodes(*each: dict[str, float]) -> list[Node]:
    """Returns nodes with these resources, named a, b and so on."""
    return [Node(chr(ord("a") + i), f"10.0.0.{i}", has) for i, has in enumerate(each)]


def started(placement: NodePlacement, roles: list[Role], there: list[Node]) -> list[str | None]:
    """Returns the nodes on which workers are placed, one after another."""
    places: list[Reservation] = []
    for i, role in enumerate(roles):
        node_id = placement.choose(role, there, places)
        places.append(Reservation(f"w{i}", role, node_id, placement.needs(role)))
    return [place.node_id for place in places]


P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


def test_worker_takes_gpus_and_the_resource_of_its_role():
    assert BY_ROLE.needs(P) == {"GPU": 1, "prefill_node": 1}
    assert BY_ROLE.needs(D) == BY_ROLE.needs(M) == {"GPU": 1, "decode_node": 1}
    assert NodePlacement().needs(P) == HARDLY_ANYTHING


@pytest.mark.parametrize(
    ("num_gpus", "has", "expected"),
    [
        (1, [2, 2], 4),
        (2, [3, 3], 2),  # a worker cannot use GPUs of two nodes
        (0.5, [2, 1], 6),
        (0.4, [2], 4),  # a worker cannot use parts of two GPUs
        (1, [0], 0),
    ],
)
def test_room_follows_each_nodes_gpus(num_gpus, has, expected):
    there = nodes(*({"CPU": 1.0, "GPU": float(num)} for num in has))
    assert NodePlacement(num_gpus).room(there) == expected


@pytest.mark.parametrize(
    ("placement", "has", "expected"),
    [
        (NodePlacement(), [{"CPU": 8.0}, {"CPU": 2.0}], 10),
        (NodePlacement(), [{"CPU": 1.0}], 4),
        (NodePlacement(), [{"CPU": 8.0}, {}], 8),  # a node without resources gets no worker
        (BY_ROLE, [HEAD, {"GPU": 4.0, "prefill_node": 1.0}, {"GPU": 4.0, "decode_node": 2.0}], 3),
        (BY_ROLE, [{"GPU": 2.0, "prefill_node": 2.0, "decode_node": 2.0}], 2),
        (NodePlacement(0, "node", "node"), [HEAD, {"CPU": 8.0, "node": 3.0}], 3),
        (NodePlacement(0, "node", "node"), [HEAD, {"CPU": 8.0, "node": 1000.0}], 8),
        (NodePlacement(0, "prefill_node"), [HEAD, {"CPU": 8.0, "prefill_node": 1.0}], 12),
        (BY_ROLE, [HEAD], 0),
    ],
)
def test_room_follows_cores_and_custom_resources(placement, has, expected):
    assert placement.room(nodes(*has)) == expected


def test_limit_of_workers_is_explained():
    there = nodes(HEAD, {"GPU": 2.0, "prefill_node": 2.0}, {"GPU": 2.0, "decode_node": 2.0})
    assert BY_ROLE.scarce(there) == (
        "nodes have 4 GPU, 2 decode_node, 2 prefill_node, of which a worker takes 1 GPU"
    )
    assert NodePlacement().scarce(nodes(HEAD)) == "nodes have 4 CPU"
    assert NodePlacement().scarce([]) == "there is no node"


@pytest.mark.parametrize(
    ("has", "said"),
    [
        ([HEAD], "there is room for 0: nodes have 0 decode_node, 0 prefill_node$"),
        (
            [HEAD, {"CPU": 2.0, "prefill_node": 2.0}],
            "room for 0: nodes have 2 CPU, 0 decode_node, 2 prefill_node$",
        ),
        ([{"CPU": 4.0, "GPU": 1.0}], "there is room for 0: nodes have 1 GPU, 0 decode_node, 0 pre"),
    ],
)
def test_nodes_that_lack_a_resource_are_not_said_to_have_no_cores(has, said):
    config = PoolsConfig(prefill_resource="prefill_node", decode_resource="decode_node")
    with pytest.raises(ConfigError, match=said):
        nodes_to_start_on(nodes(*has), config, Pools(), 1 if "GPU" in has[0] else 0)


def test_pack_prefers_the_node_with_most_workers():
    there = nodes(*[{"GPU": 2.0}] * 3)
    assert started(NodePlacement(1), [P, D, D, P, D], there) == ["a", "a", "b", "b", "c"]


def test_spread_balances_each_role_then_all_workers():
    there = nodes(*[{"GPU": 4.0}] * 3)
    spread = NodePlacement(1, spread=Spread.SPREAD)
    assert started(spread, [P, P, D, D, D, P], there) == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("spread", Spread)
def test_roles_start_where_their_resource_is(spread):
    there = nodes(HEAD, {"GPU": 4.0, "prefill_node": 1.0}, {"GPU": 2.0, "decode_node": 4.0})
    placement = NodePlacement(1, "prefill_node", "decode_node", spread)
    assert started(placement, [P, P, D, M, D], there) == ["b", None, "c", "c", None]


def test_no_worker_gets_parts_of_two_gpus():
    assert started(NodePlacement(0.4), [P] * 5, nodes({"GPU": 2.0})) == ["a"] * 4 + [None]


@pytest.mark.parametrize("spread", Spread)
def test_without_gpus_nodes_with_free_cores_come_first(spread):
    there = nodes({"CPU": 1.0}, {"CPU": 2.0})
    found = started(NodePlacement(spread=spread), [P, D, D, D], there)
    assert sorted(str(node_id) for node_id in found[:3]) == ["a", "b", "b"]
    assert found[3] is not None


def decode_nodes(num_workers: int, roles: list[Role], wanted: Pools) -> list[float]:
    """Returns the amount of the decode resource in each requested bundle."""
    return [b.get("decode_node", 0) for b in BY_ROLE.bundles(num_workers, roles, wanted)]


def test_requested_nodes_match_the_missing_roles():
    assert decode_nodes(6, [P, P, P, P, D], Pools(3, 3)) == [0, 0, 0, 0, 1, 1]
    assert decode_nodes(3, [], Pools(0, 3)) == [1, 1, 1]
    # the same order of roles as above
    assert decode_nodes(6, [P, D, D], Pools(1, 2)) == [0, 1, 1, 0, 1, 1]
    assert decode_nodes(2, [P, P, D], Pools(2, 1)) == [0, 0]
    assert decode_nodes(0, [P, D], Pools()) == []
    assert BY_ROLE.bundles(1, [], Pools(1, 0)) == [{"GPU": 1, "prefill_node": 1}]
    assert NodePlacement().bundles(2, [], Pools()) == [{"CPU": 1.0}] * 2


def test_worker_without_room_takes_a_place_of_another_role():
    there = nodes({"GPU": 2.0, "prefill_node": 2.0}, {"GPU": 1.0, "decode_node": 1.0})
    full = [
        Reservation("d0", D, "b", BY_ROLE.needs(D)),
        Reservation("p0", P, "a", BY_ROLE.needs(P)),
    ]
    assert BY_ROLE.choose(D, there, full) is None
    assert BY_ROLE.stand_in(D, there, full) is P
    full.append(Reservation("d1", P, "a", BY_ROLE.needs(P)))
    assert BY_ROLE.stand_in(D, there, full) is BY_ROLE.stand_in(P, there, full) is None
    # no other worker can stand in
    assert NodePlacement(1).stand_in(D, nodes({"GPU": 1.0}), []) is None


def test_first_workers_must_all_fit():
    head, one, other = nodes(HEAD, {"prefill_node": 2.0}, {"decode_node": 2.0})
    both = PoolsConfig(prefill_resource="prefill_node", decode_resource="decode_node")
    assert nodes_to_start_on([head, one, other], PoolsConfig(), Pools(), 0) == [head]
    assert nodes_to_start_on([head, one, other], both, Pools(2, 2), 0) == [one, other]
    with pytest.raises(ConfigError, match=r"1 decode workers need .* room for 0"):
        nodes_to_start_on([head, one], both, Pools(), 0)
    with pytest.raises(ConfigError, match=r"3 decode workers need .* room for 2"):
        nodes_to_start_on([head, one, other], both, Pools(1, 3), 0)
    growing = PoolsConfig(
        prefill_resource="prefill_node", decode_resource="decode_node", max_workers=9
    )
    assert nodes_to_start_on([head, one, other], growing, Pools(1, 3), 0) == [one, other]

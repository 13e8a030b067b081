"""KV stores: one per version and node; no start waits for a store."""

from msgspec.structs import replace

from deploy.pools.events import Died, Found, FoundStore, NodesSeen
from deploy.pools.orders import AddVersion
from deploy.pools.stores import store_name
from engine.control import Member, Pools, Version
from tests.kits.pools import PoolWorld, settled

V2 = Version("v2", "model-2", pools=Pools(1, 1), weight=0)


def members(world: PoolWorld) -> list[str]:
    return [member.worker_id for member in world.machine.members.stores]


def test_each_node_has_a_store_for_the_version():
    world = settled(nodes=("",))
    world.run(3)
    assert world.stores == {"store-v1": "v1"}
    assert world.machine.members.stores == (Member("store-v1", "store-v1:1", "v1"),)
    world = settled(nodes=("a" * 40, "b" * 40))
    world.run(3)
    assert members(world) == [f"store-v1@{'a' * 12}", f"store-v1@{'b' * 12}"]


def test_without_the_setting_there_is_none():
    world = settled()
    world.feed(NodesSeen(("",)))
    world.run(3)
    assert not world.stores
    assert not world.machine.members.stores


def test_a_dead_store_leaves_the_members_and_is_started_again():
    world = settled(nodes=("",))
    world.run(3)
    del world.stores["store-v1"]
    world.feed(Died("store-v1", "ended with status -9"))
    assert not members(world)
    assert world.machine.troubles() == ("store-v1 ended with status -9",)
    world.run(5)
    assert members(world) == ["store-v1"]
    assert world.told[-1] == "store-v1 was started again"
    assert not world.machine.troubles()


def test_pools_settle_although_a_store_does_not_start():
    world = settled(nodes=("",))
    world.run(3)
    world.failing_stores.add("store-v1")
    del world.stores["store-v1"]
    world.feed(Died("store-v1", "ended with status 1"))
    world.run(30)
    assert world.machine.is_settled
    assert world.machine.troubles() == ("store-v1 did not start: no memory",)


def test_the_store_of_a_version_that_is_over_is_removed_with_its_blocks():
    world = settled(nodes=("",))
    world.run(3)
    world.feed(AddVersion(replace(V2, pools=Pools(1, 1)), takes_over=True))
    world.run(2)
    assert "store-v2" in world.stores
    world.settle()
    world.run(5)
    assert world.stores == {"store-v2": "v2"}
    assert world.retired == ["store-v1"]
    assert members(world) == ["store-v2"]


def test_the_store_of_a_lost_node_is_stopped_and_its_blocks_stay():
    world = settled(nodes=("a", "b"))
    world.run(3)
    world.feed(NodesSeen(("a",)))
    world.run(5)
    assert members(world) == ["store-v1@a"]
    assert not world.retired
    world.feed(NodesSeen(("a", "b")))
    world.run(5)
    assert members(world) == ["store-v1@a", "store-v1@b"]


def test_a_new_controller_takes_over_stores_that_run():
    world = settled(nodes=("",))
    world.run(3)
    fresh = PoolWorld()
    fresh.machine._stores._is_on = True
    fresh.stores["store-v1"] = "v1"
    fresh.feed(Found((), (), (FoundStore("store-v1", "store-v1:1", "v1", ""),)))
    fresh.feed(NodesSeen(("",)))
    fresh.run(5)
    assert members(fresh) == ["store-v1"]
    assert store_name("v1", "") == "store-v1"

"""The operator's pages of stores: their contents, and the order to drop them."""

import msgspec
import pytest

from deploy.admin.schema import DropAnswer, StoresAnswer
from deploy.base.spec import StoreReady
from deploy.pools.events import (
    NodesSeen,
    PoolTick,
    ServiceFailed,
    ServiceStarted,
    StartStore,
    StoresSeen,
)
from deploy.pools.machine import PoolMachine
from deploy.pools.state import PoolLimits
from engine.control import DropBlocks, Intent, Pools, PrefixUse, StoreReport, TierReport, Version
from tests.unit.deploy.admin.test_api import FakeController, ask

REPORT = StoreReport(
    block_bytes=100,
    tiers=[TierReport("host", 3, 10), TierReport("disk", 8, 40, "EIO")],
    num_peers=2,
    num_leases=1,
    num_new=5,
    num_starts=2,
    counters={"offered_blocks:host": 6.0, "taken_blocks": 9.0},
    prefixes=[PrefixUse("ab12", 4)],
)


class FakeLink:
    """A session with a store, which reports its load and records the messages sent to it."""

    def __init__(self, report: StoreReport | None) -> None:
        self.fresh_report = report
        self.is_open = self.is_late = True
        self.told: list[object] = []

    def send(self, message: object) -> bool:
        if self.is_open:
            self.told.append(message)
        return self.is_open


class WithStores(FakeController):
    """Two versions, each with stores on two nodes. All stores but a failed one are connected."""

    def __init__(self) -> None:
        super().__init__(Pools(1, 1))
        versions = (Version(pools=Pools(1, 1)), Version("v2", pools=Pools(1, 1), weight=1))
        self.machine = PoolMachine(Intent(versions), limits=PoolLimits(9, has_stores=True))
        effects = [*self.machine.handle(NodesSeen(("", "n2")), 0.0)]
        effects += self.machine.handle(PoolTick(), 0.0)
        names = {each.name for each in effects if isinstance(each, StartStore)}
        assert names == {"store-v1", "store-v1@n2", "store-v2", "store-v2@n2"}
        self.machine.handle(ServiceFailed("store-v2@n2", "no memory"), 1.0)
        for name in sorted(names - {"store-v2@n2"}):
            self.machine.handle(ServiceStarted(name, f"tcp://{name}"), 1.0)
        self.stores = {"store-v1": StoreReady("tcp://store-v1", "tcp://control", 77)}
        self.links = {name: FakeLink(REPORT) for name in names}
        self.links["store-v2@n2"].fresh_report = None
        self.sessions.store_links = self.links

    def told(self) -> set[str]:
        return {name for name, link in self.links.items() if link.told == [DropBlocks()]}


def asked_to_drop(controller, body, query=""):
    return ask("POST", f"/v1/stores/drop{query}", body, controller=controller)


def test_a_store_is_shown_with_its_tiers_and_prefixes():
    answer = ask("GET", "/v1/stores", controller=WithStores())
    assert answer.status_code == 200
    stores = msgspec.json.decode(answer.content, type=StoresAnswer).stores
    assert [s.name for s in stores] == ["store-v1", "store-v1@n2", "store-v2", "store-v2@n2"]
    first, last = stores[0], stores[-1]
    assert (first.version, first.node, first.state, first.pid) == ("v1", "", "serving", 77)
    assert (first.is_connected, first.num_new, first.num_starts) == (True, 5, 2)
    host, disk = first.tiers
    assert (host.num_bytes, host.max_bytes, host.offered_blocks) == (300, 1000, 6)
    assert (disk.fault, disk.offered_blocks) == ("EIO", 0)
    assert first.prefixes == [PrefixUse("ab12", 4)]
    assert first.block_size == 16
    assert (last.state, last.is_connected, last.tiers) == ("waiting", False, [])
    assert "no memory" in last.why


@pytest.mark.parametrize(("is_late", "state"), [(False, "starting"), (True, "serving")])
def test_a_store_that_has_just_started_is_not_said_to_be_out_of_reach(is_late, state):
    controller = WithStores()
    controller.links["store-v1"].fresh_report = None
    controller.links["store-v1"].is_late = is_late
    answer = ask("GET", "/v1/stores", controller=controller)
    [first, *_] = msgspec.json.decode(answer.content, type=StoresAnswer).stores
    assert (first.state, first.is_connected) == (state, False)


def test_without_stores_the_list_is_empty():
    assert ask("GET", "/v1/stores").json() == {"stores": []}


@pytest.mark.parametrize(
    ("body", "names"),
    [({}, {"store-v1", "store-v1@n2"}), ({"version": "v1"}, {"store-v1", "store-v1@n2"})],
)
def test_stores_of_a_version_are_ordered_to_drop_all(body, names):
    controller = WithStores()
    answer = asked_to_drop(controller, body)
    assert answer.status_code == 202, answer.text
    assert set(msgspec.json.decode(answer.content, type=DropAnswer).stores) == names
    assert controller.told() == names


def test_stores_of_every_version_are_reported():
    controller = WithStores()
    controller.links["store-v2@n2"].fresh_report = REPORT
    assert asked_to_drop(controller, {"every_version": True}).status_code == 202
    assert controller.told() == set(controller.links)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"version": "v9"}, 404, "v9"),
        ({"version": "v2"}, 409, "store-v2@n2 has no session: nothing is dropped"),
        ({"every_version": True}, 409, "store-v2@n2"),
        ({"version": "v1", "every_version": True}, 400, "not both"),
        ({"salt": "x"}, 400, "unknown field"),
    ],
)
def test_a_drop_that_cannot_be_done_drops_nothing(body, status, reason):
    controller = WithStores()
    answer = asked_to_drop(controller, body)
    assert answer.status_code == status, answer.text
    assert reason in answer.json()["error"]["message"]
    assert controller.told() == set()


def test_a_drop_without_any_store_is_refused():
    answer = asked_to_drop(FakeController(Pools(1, 1)), {})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "refused")
    assert "store.memory_mib is 0" in answer.json()["error"]["message"]


def test_a_session_that_ends_meanwhile_is_named():
    controller = WithStores()
    controller.links["store-v1@n2"].is_open = False
    answer = asked_to_drop(controller, {})
    assert answer.status_code == 409
    assert "store-v1@n2 did not get the order" in answer.json()["error"]["message"]
    assert controller.told() == {"store-v1"}


def test_a_preview_names_the_stores_and_drops_nothing():
    controller = WithStores()
    answer = asked_to_drop(controller, {}, "?preview=1")
    assert answer.status_code == 200
    assert answer.json() == {"stores": ["store-v1", "store-v1@n2"]}
    assert controller.told() == set()


@pytest.mark.parametrize(
    ("query", "told"), [("", ["DropStores(names=('store-v1'", "status=202"]), ("?preview=1", [])]
)
def test_a_drop_is_in_the_audit_log(caplog, query, told):
    with caplog.at_level("INFO", logger="baton.audit"):
        asked_to_drop(WithStores(), {}, query)
    lines = [each.getMessage() for each in caplog.records if each.name == "baton.audit"]
    assert len(lines) == bool(told)
    assert all(word in lines[0] for word in told)


def test_troubles_of_tiers_are_troubles_of_the_pools():
    controller = WithStores()
    short = TierReport("disk", 8, 40, None, "only 4 of 64 MiB can be used: ENOSPC")
    full = msgspec.structs.replace(REPORT, tiers=[TierReport("host", 3, 10), short])
    controller.links["store-v2"].fresh_report = full
    controller.machine.handle(StoresSeen(controller.sessions.store_troubles()), 2.0)
    told = controller.machine.troubles()
    assert "store-v1: its disk tier is not used: EIO" in told
    assert any(
        line == "store-v2: its disk tier is too small: only 4 of 64 MiB can be used: ENOSPC"
        for line in told
    )
    healed = msgspec.structs.replace(REPORT, tiers=[TierReport("disk", 8, 40)])
    for link in controller.links.values():
        link.fresh_report = healed
    controller.machine.handle(StoresSeen(controller.sessions.store_troubles()), 3.0)
    assert not any("tier" in line for line in controller.machine.troubles())

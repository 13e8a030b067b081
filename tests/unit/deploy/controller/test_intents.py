"""Operators' orders survive the controller and the gateways. A failing store blocks nothing."""

import asyncio
import errno
import os
from pathlib import Path

import msgspec
import pytest

from deploy.controller import intents
from deploy.controller.intents import (
    BadIntents,
    IntentFile,
    IntentWriter,
    KeptIntent,
    declared_by,
    decode_kept,
    encode_kept,
    latest,
    orders_path,
)
from deploy.controller.plan import ControllerPlan
from deploy.controller.tasks import ControllerTasks
from deploy.pools.events import OrdersStored
from engine.config import (
    AdminConfig,
    Config,
    GatewayConfig,
    PlannerMode,
    UpdateConfig,
    WorkerConfig,
)
from engine.control import Intent, Members, Pools, Rollout, Version

ORDERED = Intent(
    (Version(pools=Pools(1, 3)), Version("v2", "model", pools=Pools(2, 1))),
    PlannerMode.ON,
    rollout=Rollout("v2", Pools(2, 1), before=(Version(pools=Pools(1, 3)),)),
)
KEPT = KeptIntent(1, "declared", 7, ORDERED)


def plan(**changes: object) -> ControllerPlan:
    return msgspec.structs.replace(
        ControllerPlan("model", Config(), Pools(1, 1), "token", cores=1), **changes
    )


def test_record_returns_the_stored_value():
    assert decode_kept(encode_kept(KEPT)) == KEPT


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (b"", "damaged"),
        (b"{}", "damaged"),
        (b"\xff\xfe", "damaged"),
        (encode_kept(KEPT)[:-20], "damaged"),
        (encode_kept(KEPT).replace(b'"version":7', b'"version":8'), "checksum"),
        (encode_kept(msgspec.structs.replace(KEPT, format=2)), "format 2"),
    ],
)
def test_a_damaged_record_is_refused_with_the_reason(record: bytes, why: str):
    with pytest.raises(BadIntents, match=why):
        decode_kept(record)


def test_nothing_older_than_the_store_beats_it():
    older, newer = Members(6, (), Intent()), Members(7, (), Intent())
    assert latest(None, None) is None
    assert latest(None, older) is older
    assert latest(KEPT, None) == latest(KEPT, older) == Members(7, (), ORDERED)
    assert latest(KEPT, newer) is newer


def test_another_command_is_another_declaration():
    declared = declared_by(plan())
    assert declared_by(plan(token="other", cores=9)) == declared
    others = [
        plan(pools=Pools(1, 2)),
        plan(model="other"),
        plan(config=Config(worker=WorkerConfig(block_size=32))),
        plan(config=Config(update=UpdateConfig(hold_s=1.0))),
    ]
    assert declared not in [declared_by(each) for each in others]


def test_the_file_follows_from_name_and_port():
    environment = {"BATON_RUN_DIR": "/run/b"}
    by_port = plan(config=Config(gateway=GatewayConfig(port=8000)))
    assert orders_path(by_port, environment) == Path("/run/b/127.0.0.1-8000.orders")
    named = Config(gateway=GatewayConfig(port=0), admin=AdminConfig(name="../a b"))
    assert orders_path(plan(config=named), environment) == Path("/run/b/.._a_b.orders")
    assert orders_path(plan(config=Config(gateway=GatewayConfig(port=0))), environment) is None
    path = orders_path(by_port, {"STATE_DIRECTORY": "/var/lib/b", **environment})
    assert path is not None
    assert path.parent == Path("/var/lib/b")
    assert orders_path(by_port, {"XDG_STATE_HOME": "/s"}) == Path("/s/baton/127.0.0.1-8000.orders")


def test_a_file_is_replaced_as_a_whole_and_removed(tmp_path: Path):
    store = IntentFile(tmp_path / "state" / "a.orders")
    assert store.read() is None
    store.write(b"one")
    store.write(b"two")
    assert store.read() == b"two"
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in store.path.parent.iterdir()] == ["a.orders"]
    store.remove()
    store.write(b"a write that was under way")
    assert store.read() is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file"):
        IntentFile(tmp_path / "file" / "a.orders").write(b"one")


class FakeStore:
    """A store of one record that fails a given number of times."""

    def __init__(self, record: bytes | None = None, failures: int = 0) -> None:
        self.record = record
        self.failures = failures

    def __str__(self) -> str:
        return "/state/a.orders"

    def read(self) -> bytes | None:
        self._fail()
        return self.record

    def write(self, record: bytes) -> None:
        self._fail()
        self.record = record

    def remove(self) -> None:
        self.record = None

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/state/a.orders")


class KeeperWorld:
    """A keeper of orders, its store and its messages."""

    def __init__(self, store: FakeStore) -> None:
        self.told: list[str] = []
        self.events: list[OrdersStored] = []
        self.is_stored = asyncio.Event()
        self.tasks = ControllerTasks(self.told.append)
        self.keeper = IntentWriter(
            store,
            declared="declared",
            tasks=self.tasks,
            report=self.told.append,
            handle=self._record,
        )

    def _record(self, event: OrdersStored) -> None:
        self.events.append(event)
        if event.trouble is None:
            self.is_stored.set()


async def test_each_change_is_written_and_failures_are_reported_and_retried(monkeypatch):
    monkeypatch.setattr(intents, "RETRY_EVERY_S", 0.001)
    store = FakeStore(failures=2)
    world = KeeperWorld(store)
    world.tasks.spawn(world.keeper.run())
    assert not world.keeper.has_replaced
    world.keeper.record(Members(7, (), ORDERED))
    await asyncio.wait_for(world.is_stored.wait(), 5)
    assert world.keeper.has_replaced
    assert store.record == encode_kept(KEPT)
    troubles = [each.trouble for each in world.events]
    assert len(troubles) == 3
    assert "no space is left on the disk of /state/a.orders" in troubles[0]
    assert world.keeper.counters == {"orders not stored": 2}
    assert await world.keeper.read() == KEPT
    await world.tasks.close(1.0)


@pytest.mark.parametrize(
    ("store", "told", "count"),
    [
        (FakeStore(), [], 0),
        (FakeStore(b"{"), ["cannot be used: it is damaged"], 1),
        (FakeStore(encode_kept(KEPT), failures=1), ["no space is left"], 1),
        (
            FakeStore(encode_kept(msgspec.structs.replace(KEPT, declared="before"))),
            ["of another declaration: dropped"],
            0,
        ),
    ],
)
async def test_unusable_records_are_reported_and_never_fatal(store, told, count):
    world = KeeperWorld(store)
    assert await world.keeper.read() is None
    assert len(world.told) == len(told)
    assert all(part in line for part, line in zip(told, world.told, strict=True))
    assert world.keeper.counters["orders not read"] == count
    await world.tasks.close(1.0)

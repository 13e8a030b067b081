"""The fault `store`, and what a store still holds after the run."""

import asyncio
import signal

import pytest

from bench.chaos import services as stores
from bench.chaos.faults import STORE, FaultFailed, store_process
from bench.chaos.plan import Fault, FaultKind
from bench.chaos.services import StoreKills, StoreLeft, left_of
from engine.clock import MonotonicClock

KILL = Fault(0.0, FaultKind.STORE, 0.0)


class WithStore:
    """A deployment whose store is replaced at once or never."""

    def __init__(self, *, is_replaced: bool = True) -> None:
        self._is_replaced = is_replaced
        self.keeper, self.process = 100, 101
        self.killed: list[int] = []

    def marked(self) -> dict[int, str]:
        found = {1: "python -m deploy.commands.main serve", self.keeper: "baton-store"}
        return found | {self.process: "python -m deploy.store.main 15"}

    def is_gone(self, pid: int) -> bool:
        return pid not in self.marked()

    def signal(self, pid: int, number: signal.Signals) -> bool:
        assert number is signal.SIGKILL
        self.killed.append(pid)
        if self._is_replaced:
            if pid == self.keeper:
                self.keeper += 10
            self.process += 10
        return True

    def parent_of(self, pid: int) -> int | None:
        return self.keeper if pid == self.process else None


@pytest.fixture
def deployment(monkeypatch):
    found = WithStore()
    monkeypatch.setattr(stores, "parent_of", found.parent_of)
    return found


def inject(kills, deployment):
    return asyncio.run(kills.inject(KILL, STORE, [store_process(deployment)]))


def test_process_and_keeper_are_killed_in_turn(deployment):
    kills = StoreKills(deployment, MonotonicClock())
    told = [inject(kills, deployment) for _ in range(3)]
    assert deployment.killed == [101, 100, 121]
    assert [each.split(" ")[0] for each in told] == ["process", "keeper", "process"]


def test_a_store_that_is_not_replaced_is_a_failed_fault(monkeypatch):
    deployment = WithStore(is_replaced=False)
    monkeypatch.setattr(stores, "parent_of", deployment.parent_of)
    monkeypatch.setattr(stores, "REPLACED_WITHIN_S", 0.0)
    with pytest.raises(FaultFailed, match="process was not replaced"):
        inject(StoreKills(deployment, MonotonicClock()), deployment)


IDLE = {"slots:free": 6.0, "slots:cached": 4.0, "open_leases": 0.0}


@pytest.mark.parametrize(
    ("samples", "left"),
    [
        (IDLE, StoreLeft(num_blocks=4)),
        ({**IDLE, "slots:free": 5.0}, StoreLeft(4, leaked_blocks=1)),
        # more free slots than the store has
        ({**IDLE, "slots:free": 7.0}, StoreLeft(4, leaked_blocks=1)),
        ({**IDLE, "open_leases": 2.0}, StoreLeft(4, leaked_leases=2)),
        ({**IDLE, "prefix_offers_total:held": 3.0}, StoreLeft(4, num_offers=3)),
        ({}, StoreLeft(leaked_blocks=10)),  # no gateway is connected to the store
    ],
)
def test_slots_that_are_neither_free_nor_cached_are_leaked(samples, left):
    assert left_of(samples, 10.0) == left

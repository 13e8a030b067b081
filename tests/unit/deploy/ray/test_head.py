"""`baton up` on a running deployment orders each difference until no further order helps."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from deploy.admin.schema import RESTART, Declaration, Difference
from deploy.ray import head

MAIN = Difference("worker.kv_mib", 1, 2, "baton update")
SMALL = Difference("models.small.model", "a", "b", "baton update")
PORT = Difference("gateway.port", 1, 2, RESTART)


class FakeController:
    """Applies the first difference with each order, or silently ignores the order."""

    def __init__(self, *found: Difference, obeys: bool = True) -> None:
        self.found = list(found)
        self.obeys = obeys
        self.num_orders = 0

    def differences(self, _: Declaration) -> tuple[Difference, ...]:
        return tuple(self.found)

    def declare(self, _: Declaration) -> SimpleNamespace:
        self.num_orders += 1
        if self.obeys:
            self.found.remove(next(each for each in self.found if each.order != RESTART))
        return SimpleNamespace(settled=True)


def carried_out(monkeypatch, controller: FakeController) -> tuple[list[str], list[str]]:
    """Returns the keys that differed before, and the keys that still differ."""
    monkeypatch.setattr(head, "controller_differences", controller.differences)
    monkeypatch.setattr(head, "controller_declare", controller.declare)
    monkeypatch.setattr(head, "_status", lambda **found: SimpleNamespace(**found))
    status = head.carry_out(Declaration())
    return [each.key for each in status.differences], [each.key for each in status.left]


def test_versions_take_over_one_after_the_other(monkeypatch):
    controller = FakeController(MAIN, PORT, SMALL)
    found, left = carried_out(monkeypatch, controller)
    assert found == [MAIN.key, PORT.key, SMALL.key]
    assert left == [PORT.key]
    assert controller.num_orders == 2


def test_what_is_not_reached_is_not_ordered_again_and_again(monkeypatch):
    controller = FakeController(MAIN, obeys=False)
    assert carried_out(monkeypatch, controller) == ([MAIN.key], [MAIN.key])
    assert controller.num_orders == 1


def test_what_needs_a_restart_is_not_ordered(monkeypatch):
    controller = FakeController(PORT)
    assert carried_out(monkeypatch, controller) == ([PORT.key], [PORT.key])
    assert controller.num_orders == 0

"""Orders in Ray's key-value table, for which the test uses a dictionary."""

import pytest

pytest.importorskip("ray")

from deploy.controller.intents import BadIntents
from deploy.ray import controller
from deploy.ray.controller import RayOrders


class FakeTable:
    """Stands in for `ray.experimental.internal_kv`."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], bytes] = {}
        self.is_down = False

    def _internal_kv_get(self, key, *, namespace):
        self._check()
        return self.values.get((namespace, key))

    def _internal_kv_put(self, key, value, *, overwrite, namespace):
        self._check()
        assert overwrite
        self.values[namespace, key] = value

    def _internal_kv_del(self, key, *, namespace):
        self._check()
        self.values.pop((namespace, key), None)

    def _check(self) -> None:
        if self.is_down:
            raise RuntimeError("unavailable")


@pytest.fixture
def table(monkeypatch) -> FakeTable:
    table = FakeTable()
    monkeypatch.setattr(controller, "_table", lambda: table)
    return table


def test_a_record_is_replaced_and_removed(table: FakeTable):
    store = RayOrders()
    assert store.read() is None
    store.write(b"one")
    store.write(b"two")
    assert RayOrders().read() == b"two"
    store.remove()
    store.write(b"a write that was under way")
    assert not table.values


def test_a_dead_gcs_is_a_typed_error(table: FakeTable):
    table.is_down = True
    store = RayOrders()
    for call in (store.read, lambda: store.write(b"one"), store.remove):
        with pytest.raises(BadIntents, match="GCS does not answer: unavailable"):
            call()

"""Typed orders become calls of the admin API, or say how they are written."""

import pytest

from deploy.terminal.orders import USAGE, typed_order
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "path", "body"),
    [
        ("pools prefill=1 decode=2", "/v1/pools", {"prefill": 1, "decode": 2}),
        ("flip worker-1 prefill", "/v1/workers/worker-1/flip", {"role": "prefill"}),
        ("drain  worker-1 ", "/v1/workers/worker-1/drain", None),
        ("stop a/b", "/v1/workers/a%2Fb/stop", None),
        ("planner dry-run", "/v1/planner", {"mode": "dry-run"}),
        ("weight v1=60 v2=40", "/v1/weights", {"weights": {"v1": 60, "v2": 40}}),
        ("finish v2", "/v1/versions/v2/finish", {}),
        ("abort 'my version'", "/v1/versions/my%20version/abort", None),
        ("rollback", "/v1/rollback", {}),
        ("rollback v1", "/v1/rollback", {"name": "v1"}),
    ],
)
def test_orders_are_calls(text, path, body):
    order = typed_order(text)
    assert (order.path, order.body) == (path, body)


@pytest.mark.parametrize("text", ["", "'", "reboot", "flip d0", "pools", "pools two", "drain a b"])
def test_wrong_orders_say_how_they_are_written(text):
    with pytest.raises(ConfigError, match=r"type an order|no order|write "):
        typed_order(text)


def test_each_order_has_an_example():
    assert all(usage.startswith(name) for name, usage in USAGE.items())

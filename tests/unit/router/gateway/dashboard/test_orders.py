"""Orders of the dashboard: which orders reach the controller, and which are refused."""

import asyncio

import pytest

from router.gateway.dashboard import orders
from router.gateway.dashboard.orders import MAX_AT_ONCE, MAX_BODY_BYTES, OrderDesk, is_order
from router.inbox.api_errors import ApiError

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("method", "path", "passes"),
    [
        ("POST", "v1/pools", True),
        ("GET", "v1/pools", True),
        ("POST", "v1/workers/worker-1/flip", True),
        ("POST", "v1/versions/v2/abort", True),
        ("POST", "v1/rollback", True),
        ("GET", "v1/block-events", False),
        ("POST", "v1/workers/../pools", False),
        ("POST", "v1/workers/a/b/flip", False),
        ("DELETE", "v1/pools", False),
        ("POST", "v1/pools?x=1", False),
        ("POST", "v1/pools\n", False),
    ],
)
def test_only_orders_pass(method, path, passes):
    assert is_order(method, path) == passes


def send(desk, **changed):
    call = {"key": "k", "query": "", "body": b"{}", "path": "v1/pools", "url": URL, **changed}
    path, url = call.pop("path"), call.pop("url")
    return asyncio.run(desk.send(url, "POST", path, **call))


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"path": "v1/secrets"}, 404),
        ({"key": ""}, 401),
        ({"body": b" " * (MAX_BODY_BYTES + 1)}, 413),
        ({"url": ""}, 503),
    ],
)
def test_refusals(changed, status):
    with pytest.raises(ApiError) as refusal:
        send(OrderDesk(), **changed)
    assert refusal.value.status == status


def test_a_wrong_key_waits_and_calls_are_bounded(monkeypatch):
    waited = []

    async def wrong(*_):
        return 401, b"{}"

    async def pause(self):
        waited.append(self._at_once)

    monkeypatch.setattr(orders, "_forward", wrong)
    monkeypatch.setattr(OrderDesk, "_pause", pause)
    desk = OrderDesk()
    assert send(desk) == (401, b"{}")
    assert waited == [1]
    desk._at_once = MAX_AT_ONCE
    with pytest.raises(ApiError, match="at once"):
        send(desk)


def test_a_controller_that_is_gone_is_reported(monkeypatch):
    async def gone(*_):
        raise orders.httpx.ConnectError("refused")

    monkeypatch.setattr(orders, "_forward", gone)
    with pytest.raises(ApiError, match="does not answer: refused"):
        send(OrderDesk())

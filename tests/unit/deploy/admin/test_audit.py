"""The audit log of orders: who, from where, what, and the result."""

import logging

import pytest
from starlette.requests import Request

from deploy.admin.api import MAX_CALLER_CHARS, record_order
from deploy.pools.orders import Drain
from engine.log_context import AUDIT


@pytest.fixture
def lines():
    """The fields of the lines that are logged."""
    found = []

    class Keeper(logging.Handler):
        def emit(self, record):
            found.append(record.fields | {"text": record.getMessage()})

    keeper, level = Keeper(), AUDIT.level
    AUDIT.addHandler(keeper)
    AUDIT.setLevel(logging.INFO)
    yield found
    AUDIT.removeHandler(keeper)
    AUDIT.setLevel(level)


def request(**headers):
    return Request(
        {
            "type": "http",
            "method": "POST",
            "path": "/v1/workers/worker-1/drain",
            "query_string": b"",
            "server": ("test", 80),
            "scheme": "http",
            "client": ("10.0.0.7", 5),
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        }
    )


def test_an_order_that_is_carried_out(lines):
    record_order(request(), Drain("worker-1"), 202)
    [line] = lines
    assert line["what"] == "Drain(worker_id='worker-1')"
    assert (line["who"], line["from"], line["status"]) == ("admin", "10.0.0.7", 202)
    assert "refusal" not in line
    assert line["text"].startswith("order: who=admin from=10.0.0.7 what=Drain(")


def test_a_body_that_is_not_understood(lines):
    record_order(request(), None, 400, "it is no JSON")
    [line] = lines
    assert line["what"] == "POST /v1/workers/worker-1/drain"
    assert line["refusal"] == "it is no JSON"


def test_a_gateway_names_its_client(lines):
    record_order(request(x_baton_caller="1.2.3.4 " + "x" * 500), None, 202)
    [line] = lines
    assert line["caller"].startswith("1.2.3.4 ")
    assert len(line["caller"]) == MAX_CALLER_CHARS

"""The access log: one line for each request, and the request's id in all other log lines."""

import asyncio
from collections import Counter

import pytest

from engine.log_context import REQUEST
from router.access.limits import UNLIMITED, Tenant
from router.gateway.access_log import AccessLog
from tests.kits.router.access import access_lines
from tests.kits.router.gateway import (
    Connection,
    FakeRouter,
    Never,
    answer,
    get,
    make_app,
    post,
)

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": "yo"}


class OneKey:
    def __init__(self):
        self.counters = Counter()

    def find(self, key):
        return Tenant("alice", "alice", UNLIMITED, may_debug=False) if key == b"good" else None


@pytest.fixture
def lines():
    with access_lines() as found:
        yield found


def logged(router, **settings):
    return AccessLog(make_app(router, **settings), router.clock)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_one_line(lines, stream):
    app = logged(FakeRouter(answer("hi")), keys=OneKey())
    post(app, PATH, BODY | {"stream": stream}, authorization="Bearer good", x_request_id="mine")
    [line] = lines
    assert line["status"] == 200
    assert (line["method"], line["path"], line["key"]) == ("POST", PATH, "alice")
    assert (line["prompt_tokens"], line["outcome"]) == (2, "finished")
    assert line["completion_tokens"] > 0
    assert line["request_id"] == "mine"
    assert line["request"].startswith("cmpl-")
    assert "status=200" in line["text"]
    assert line["seconds"] > 0


def test_refused_requests_are_logged_too(lines):
    app = logged(FakeRouter(answer("hi")), keys=OneKey())
    post(app, PATH, BODY, authorization="Bearer bad")
    post(app, PATH, b"{", authorization="Bearer good")
    get(app, "/nowhere", authorization="Bearer good")
    get(app, "/health")
    assert [line["status"] for line in lines] == [401, 400, 404, 200]
    assert [line.get("key") for line in lines] == [None, "alice", "alice", None]
    assert lines[1]["outcome"] == "invalid"


def test_a_client_that_leaves_is_logged(lines):
    app = logged(FakeRouter([Never()]))

    async def leave():
        headers = {"content-type": "application/json"}
        connection = Connection(app, "POST", PATH, headers)
        connection.put_body(b'{"model": "tiny", "prompt": "yo"}')
        connection.leave()
        await connection.run()

    asyncio.run(leave())
    [line] = lines
    assert (line["status"], line["outcome"]) == (0, "cancelled")


def test_lines_of_a_request_have_both_ids():
    seen = []

    class Noting(FakeRouter):
        def submit(self, request, *rest, **named):
            seen.append((REQUEST.get(), request.request_id, request.client_id))
            return super().submit(request, *rest, **named)

    router = Noting(answer("hi"))
    post(make_app(router), PATH, BODY, x_request_id="mine")
    [(noted, own, told)] = seen
    assert told == "mine"  # the workers' log lines also contain the id
    assert noted == f"{own} mine"
    assert REQUEST.get() == ""

"""Health, readiness, load and version pages; unknown paths and methods."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.control import ControllerReport
from router.access.limits import ANONYMOUS
from router.gateway.metrics.pools import STALE_S, PoolBoard
from tests.kits.router.access import key_file
from tests.kits.router.gateway import FakeRouter, Never, fetch, get, make_app, post, versions_of


def ask(method, path, app=None):
    return asyncio.run(fetch(app or make_app(FakeRouter()), method, path))


def test_health_is_about_the_process_and_readiness_about_the_workers():
    router = FakeRouter()
    app = make_app(router)
    assert get(app, "/ready").status == 200
    router.not_ready = "no decode worker"
    assert get(app, "/health").status == 200
    assert get(app, "/ready").status == 503
    assert get(app, "/ready").json()["reason"] == "no decode worker"


def test_readiness_tells_what_is_broken_while_requests_are_served():
    router = FakeRouter()
    at_s = 100.0
    board = PoolBoard(versions_of(router), SimpleNamespace(now_s=lambda: at_s))
    app = make_app(router, board=board)
    board.take(ControllerReport(b"", ()))
    assert "troubles" not in get(app, "/ready").json()
    at_s += STALE_S + 1.0
    reply = get(app, "/ready")
    assert (reply.status, reply.json()["status"]) == (200, "ready")
    assert reply.json()["troubles"][0].startswith("no controller reports")


def test_a_ping_is_answered_when_requests_can_be_served():
    router = FakeRouter()
    app = make_app(router)
    assert get(app, "/ping").status == 200
    assert ask("POST", "/ping", app).status == 200
    router.not_ready = "no decode worker"
    assert ask("POST", "/ping", app).status == 503


def test_the_version_page_has_a_version():
    assert set(get(make_app(FakeRouter()), "/version").json()) == {"version"}


def test_the_load_counts_requests_in_flight_and_waiting():
    router = FakeRouter([Never()])
    app = make_app(router)

    async def run():
        json = {"content-type": "application/json"}
        body = b'{"prompt": "yo"}'
        running = asyncio.create_task(fetch(app, "POST", "/v1/completions", body, json))
        await router.waiting.wait()
        loaded = await fetch(app, "GET", "/load")
        running.cancel()
        await asyncio.wait([running])
        return loaded, await fetch(app, "GET", "/load")

    loaded, after = asyncio.run(run())
    assert loaded.json() == {"server_load": 1, "queued_requests": 7, "queued_s": 0.75}
    assert after.json()["server_load"] == 0


def test_head_is_answered_where_get_is():
    for path in ("/health", "/ready", "/ping", "/version", "/v1/models", "/metrics", "/load"):
        assert ask("HEAD", path).status == 200, path  # the server omits the body


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/ping", "GET, HEAD, OPTIONS, POST"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/completions", "OPTIONS, POST"),
    ],
)
def test_a_wrong_method_is_answered_with_the_right_ones(path, methods):
    wrong = ask("PUT", path)
    assert (wrong.status, wrong.headers["allow"]) == (405, methods)
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    options = ask("OPTIONS", path)
    assert (options.status, options.headers["allow"], options.body) == (204, methods, b"")


def test_an_unknown_path_is_not_found():
    for method in ("GET", "POST", "OPTIONS"):
        reply = ask(method, "/v2/models")
        assert (reply.status, reply.json()["error"]["code"]) == (404, "not_found")


def test_pages_that_show_the_load_of_all_need_a_key_that_may_debug(tmp_path):
    assert ANONYMOUS.may_debug
    keys = key_file(tmp_path / "keys.json", "sesame")
    app = make_app(FakeRouter(), keys=keys)
    for path in ("/load", "/metrics"):
        assert get(app, path).status == 401
        assert get(app, path, authorization="Bearer sesame").status == 403
    for path in ("/health", "/ready", "/ping", "/version"):
        assert get(app, path).status == 200
    assert post(app, "/ping", b"").status == 200

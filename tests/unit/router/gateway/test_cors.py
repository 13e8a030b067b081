"""Cross-origin scripts: which origins may use the API, and what they may read."""

import asyncio

from tests.kits.router.access import key_file
from tests.kits.router.gateway import FakeRouter, fetch, get, make_app, post

PAGE = "https://chat.example"
PATH = "/v1/completions"


def app_for(*origins, **settings):
    return make_app(FakeRouter(), cors_origins=origins, **settings)


def preflight(app, origin=PAGE, method="POST"):
    headers = {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type,x-stainless-os",
    }
    return asyncio.run(fetch(app, "OPTIONS", PATH, headers=headers))


def test_without_origins_no_answer_has_a_header_for_scripts():
    reply = post(app_for(), PATH, {"prompt": "yo"}, origin=PAGE)
    assert not any(name.startswith("access-control") for name in reply.headers)
    assert preflight(app_for()).headers.get("access-control-allow-origin") is None


def test_a_preflight_is_answered_before_keys_are_asked_for(tmp_path):
    keys = key_file(tmp_path / "keys.json", "sesame")
    reply = preflight(app_for(PAGE, keys=keys))
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert "x-stainless-os" in reply.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in reply.headers
    refused = post(app_for(PAGE, keys=keys), PATH, {"prompt": "yo"}, origin=PAGE)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_a_page_may_name_its_session_and_end_it():
    headers = {
        "origin": PAGE,
        "access-control-request-method": "DELETE",
        "access-control-request-headers": "x-baton-session,x-baton-keep-s",
    }
    reply = asyncio.run(fetch(app_for(PAGE), "OPTIONS", "/v1/sessions/s", headers=headers))
    assert reply.status == 200
    assert "x-baton-session" in reply.headers["access-control-allow-headers"]
    assert "DELETE" in reply.headers["access-control-allow-methods"]


def test_other_origins_and_methods_are_refused():
    assert (
        "access-control-allow-origin"
        not in preflight(app_for(PAGE), "https://evil.example").headers
    )
    assert preflight(app_for(PAGE), method="PUT").status == 400
    reply = post(app_for(PAGE), PATH, {"prompt": "yo"}, origin="https://evil.example")
    assert "access-control-allow-origin" not in reply.headers


def test_all_origins_may_be_allowed():
    assert preflight(app_for("*")).headers["access-control-allow-origin"] == "*"
    assert (
        get(app_for("*"), "/v1/models", origin=PAGE).headers["access-control-allow-origin"] == "*"
    )


def test_streams_and_errors_may_be_read_too():
    app = app_for(PAGE)
    for fields in ({"prompt": "yo", "stream": True}, {"prompt": "yo", "temperature": -1}):
        headers = post(app, PATH, fields, origin=PAGE).headers
        assert headers["access-control-allow-origin"] == PAGE
        assert "Origin" in headers["vary"]
        assert "x-request-id" in headers["access-control-expose-headers"]
        assert "x-baton-ignored" in headers["access-control-expose-headers"]
        assert "x-ratelimit-remaining-tokens" in headers["access-control-expose-headers"]


def test_requests_that_no_page_sends_are_served_as_ever():
    assert post(app_for(PAGE), PATH, {"prompt": "yo"}).status == 200

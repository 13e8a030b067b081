"""Calls that end sessions or set pins: from the body to the blocks that a prompt would look up."""

import asyncio
import random

import msgspec
import pytest

from engine.messages import PinBlocks, SessionEnd, UnpinBlocks, decode_to_worker, encode_frame
from engine.worker.blocks import hash_blocks
from router.access.limits import ANONYMOUS, KeyLimits
from router.gateway.hints import uses
from router.gateway.hints.claims import MAX_SESSION_LEN, key_id, session_id
from router.gateway.versions import ServedVersion, Versions
from tests.kits.router.access import key_file
from tests.kits.router.gateway import (
    SECRET,
    FakeRouter,
    chat,
    complete,
    fetch,
    make_app,
    make_app_of,
    post,
    text_model,
)

BLOCK_SIZE = 4
KEY = key_id(ANONYMOUS, SECRET)
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "yo"}]
JSON = {"content-type": "application/json"}


def a_router(block_size=BLOCK_SIZE):
    """Returns a router with a store."""
    router = FakeRouter()
    router.store_block = block_size
    return router


def send(app, method, path, fields=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if fields is None:
        return asyncio.run(fetch(app, method, path, b"", named))
    body = fields if isinstance(fields, bytes) else msgspec.json.encode(fields)
    return asyncio.run(fetch(app, method, path, body, JSON | named))


def pin(router, fields, method="POST", **headers):
    return send(make_app(router), method, "/v1/pins", fields, **headers)


def error_of(reply):
    error = reply.json()["error"]
    return reply.status, error["code"], error["param"]


# ---------------------------------------------------------------- the end of a session


@pytest.mark.parametrize("name", ["agent-7", "a/b?c%d", "~" * MAX_SESSION_LEN])
def test_the_end_of_a_session_names_it_as_its_requests_do(name):
    router = a_router()
    complete(router, {"prompt": "some words"}, x_baton_session=name)
    (use,) = router.told
    reply = send(make_app(router), "DELETE", f"/v1/sessions/{name}")
    assert (reply.status, reply.body) == (204, b"")
    assert router.told == [use, SessionEnd(use.key, use.session)]
    assert use.session == session_id(name, ANONYMOUS, SECRET)


def test_the_end_of_a_session_may_be_told_again_and_of_any_id():
    router = a_router()
    app = make_app(router)
    for _ in range(2):
        assert send(app, "DELETE", "/v1/sessions/unknown").status == 204
    assert len(router.told) == 2
    assert send(make_app(FakeRouter()), "DELETE", "/v1/sessions/unknown").status == 204


@pytest.mark.parametrize(
    "name", ["", "a b", "é", "x" * (MAX_SESSION_LEN + 1), "a\n", "a\nb", "\x00"]
)
def test_an_id_that_no_session_has_is_refused(name):
    router = a_router()
    reply = send(make_app(router), "DELETE", f"/v1/sessions/{name}")
    assert error_of(reply) == (400, "invalid_value", "session_id")
    assert router.told == []


def test_the_end_goes_to_the_stores_of_all_versions():
    routers = [a_router(), FakeRouter(), a_router()]
    table = [
        ServedVersion(f"v{i}", router, text_model(), ("tiny",), 64)
        for i, router in enumerate(routers)
    ]
    app = make_app_of(Versions(*table), routers[0].clock)
    assert send(app, "DELETE", "/v1/sessions/s").status == 204
    assert [len(router.told) for router in routers] == [1, 0, 1]


def test_a_key_ends_only_its_own_sessions(tmp_path):
    keys = key_file(tmp_path / "keys.json", "sesame", "lentil")
    router = a_router()
    app = make_app(router, keys=keys)
    assert send(app, "DELETE", "/v1/sessions/s").status == 401
    for key in ("sesame", "lentil"):
        reply = send(app, "DELETE", "/v1/sessions/s", authorization=f"Bearer {key}")
        assert reply.status == 204
    one, other = router.told
    assert one.session != other.session
    assert one.key != other.key


# ---------------------------------------------------------------- pins


@pytest.mark.parametrize(
    ("ask", "fields"),
    [
        (complete, {"prompt": "some words to keep"}),
        (complete, {"prompt": [1, 2, 3, 4, 5]}),
        (complete, {"prompt": "some words to keep", "cache_salt": "mine"}),
        (complete, {"prompt": "some words to keep", "truncate_prompt_tokens": 9}),
        (chat, {"messages": MESSAGES}),
        (chat, {"messages": MESSAGES[:1], "add_generation_prompt": False}),
    ],
)
def test_a_pin_and_its_end_name_the_blocks_of_a_request_with_this_body(ask, fields):
    router = a_router()
    assert ask(router, fields).status == 200
    (request,) = router.requests
    hashes = hash_blocks(request.token_ids, BLOCK_SIZE, request.salt)
    assert hashes
    reply = pin(router, fields)
    assert reply.status == 200
    assert reply.json() == {
        "object": "pin",
        "model": "tiny",
        "prompt_tokens": len(request.token_ids),
        "covered_tokens": len(hashes) * BLOCK_SIZE,
    }
    reply = pin(router, fields, "DELETE")
    assert (reply.status, reply.body) == (204, b"")
    assert router.told == [PinBlocks(KEY, hashes), UnpinBlocks(KEY, hashes)]
    assert decode_to_worker(encode_frame(router.told)) == router.told
    assert len(router.requests) == 1  # no new request, so nothing was computed


def test_a_pin_of_several_prompts_is_one_message_for_each():
    router = a_router()
    assert pin(router, {"prompt": ["the first", "x", "another"]}).json()["covered_tokens"] == 12
    salt = SECRET.salt("", "")
    assert router.told == [
        PinBlocks(KEY, hash_blocks([*text.encode()], BLOCK_SIZE, salt))
        for text in ("the first", "another")
    ]


def test_no_pin_has_more_hashes_than_its_schema_allows(monkeypatch):
    monkeypatch.setattr(uses, "MAX_HASHES", 2)
    router = a_router()
    assert pin(router, {"prompt": "x" * 40}).json()["covered_tokens"] == 2 * BLOCK_SIZE
    assert len(router.told[0].hashes) == 2


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_without_a_store_a_pin_is_no_silent_success(method):
    reply = pin(FakeRouter(), {"prompt": "some words to keep"}, method)
    assert error_of(reply) == (501, "no_store", None)
    assert "store.memory_mib" in reply.json()["error"]["message"]


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "abc"}, (400, "invalid_value", "prompt")),  # shorter than a block
        ({"prompt": ""}, (400, "invalid_value", "prompt")),
        ({}, (400, "invalid_value", "prompt")),
        ({"prompt": [-1, 2, 3, 4]}, (400, "invalid_value", "prompt")),
        ({"prompt": [10**6] * 4}, (400, "invalid_value", "prompt")),
        ({"messages": []}, (400, "invalid_value", "messages")),
        ({"messages": [{"role": "user"}]}, (400, "invalid_value", "messages[0].content")),
        ({"prompt": "a", "messages": MESSAGES}, (400, "unsupported_parameter", "prompt")),
        ({"prompt": "some words", "cache_salt": ""}, (400, "invalid_value", "cache_salt")),
        ({"prompt": "some words", "model": "gpt-9"}, (404, "model_not_found", "model")),
        ({"prompt": "x" * 100}, (400, "context_length_exceeded", "prompt")),
        (b"", (400, "invalid_json", None)),
        (b"[]", (400, "invalid_json", None)),
        (b"{", (400, "invalid_json", None)),
        (b"[" * 100_000, (400, "invalid_json", None)),
        (b"\xff\xfe", (400, "invalid_json", None)),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_pin_is_refused_and_the_field_named(fields, expected, method):
    router = a_router()
    assert error_of(pin(router, fields, method)) == expected
    assert router.told == []


def test_random_bodies_are_pinned_or_refused_and_nothing_else():
    rng = random.Random(0)
    body = msgspec.json.encode({"prompt": "some words to keep", "cache_salt": "x"})
    for _ in range(200):
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(body))] = rng.randrange(256)
        assert pin(a_router(), bytes(damaged)).status in (200, 400)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_body_of_another_type_is_refused(method):
    headers = {"content-type": "text/plain", "content-length": "3"}
    reply = asyncio.run(fetch(make_app(a_router()), method, "/v1/pins", b"{}", headers))
    assert error_of(reply) == (415, "unsupported_media_type", "content-type")


def test_a_body_that_is_too_long_is_refused_and_a_long_one_is_read_in_a_thread():
    app = make_app(a_router(), max_body_bytes=1000)
    reply = send(app, "DELETE", "/v1/pins", {"prompt": "x" * 1000})
    assert reply.status == 413
    long = make_app(a_router(), context_len=10**6)
    reply = send(long, "POST", "/v1/pins", {"prompt": "yo " * 30_000})
    assert reply.json()["prompt_tokens"] == 90_000


def test_pins_count_on_the_limits_of_a_key_and_are_its_own(tmp_path):
    keys = key_file(
        tmp_path / "keys.json", "sesame", "lentil", limits=KeyLimits(requests_per_s=0.001)
    )
    router = a_router()
    app = make_app(router, keys=keys)
    fields = {"prompt": "some words to keep"}
    assert post(app, "/v1/pins", fields).status == 401
    for key in ("sesame", "lentil"):
        reply = post(app, "/v1/pins", fields, authorization=f"Bearer {key}")
        assert (reply.status, reply.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    refused = send(app, "DELETE", "/v1/pins", fields, authorization="Bearer sesame")
    assert error_of(refused)[:2] == (429, "rate_limit_exceeded")
    one, other = router.told
    assert one.key != other.key
    assert set(one.hashes).isdisjoint(other.hashes)


def test_a_pin_and_its_end_reach_the_same_of_two_versions():
    routers = [a_router(), a_router()]
    table = [
        ServedVersion(f"v{i}", router, text_model(), ("tiny",), 64)
        for i, router in enumerate(routers)
    ]
    app = make_app_of(Versions(*table), routers[0].clock)
    fields = {"prompt": "some words to keep"}
    for method in ("POST", "DELETE") * 5:
        assert send(app, method, "/v1/pins", fields).status in (200, 204)
    assert sorted(len(router.told) for router in routers) == [0, 10]
    for name, router in zip(("v0", "v1"), routers, strict=True):
        router.told.clear()
        send(app, "POST", "/v1/pins", fields, x_baton_version=name)
        assert len(router.told) == 1

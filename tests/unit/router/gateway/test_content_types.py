"""Bodies whose content type is not JSON are refused before they are read."""

import asyncio

import pytest

from tests.kits.router.gateway import FakeRouter, fetch, make_app

BODY = b'{"prompt": "yo"}'


def send(headers, path="/v1/completions", body=BODY):
    named = {"content-length": str(len(body)), **headers}
    return asyncio.run(fetch(make_app(FakeRouter()), "POST", path, body, named))


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON;charset=UTF-8",
        "application/vnd.api+json",
    ],
)
def test_json_is_taken_under_all_its_names(kind):
    assert send({"content-type": kind}).status == 200


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", "json", ""]
)
def test_another_type_is_refused_and_the_error_says_what_to_send(kind):
    reply = send({"content-type": kind} if kind else {})
    error = reply.json()["error"]
    assert (reply.status, error["code"]) == (415, "unsupported_media_type")
    assert error["param"] == "content-type"
    assert "send the header `content-type: application/json`" in error["message"]
    assert kind in error["message"]


def test_the_type_is_shown_in_part_if_it_is_long():
    message = send({"content-type": "x" * 5000}).json()["error"]["message"]
    assert len(message) < 300


def test_a_body_of_unknown_length_needs_a_type_too():
    body = {"transfer-encoding": "chunked", "content-length": "0"}
    assert send(body).status == 415


def test_a_request_without_a_body_needs_no_type():
    reply = send({"content-length": "0"}, body=b"")
    assert (reply.status, reply.json()["error"]["code"]) == (400, "invalid_json")


def test_a_compressed_body_is_refused_by_name():
    json = {"content-type": "application/json"}
    assert send({**json, "content-encoding": "identity"}).status == 200
    reply = send({**json, "content-encoding": "gzip"})
    assert (reply.status, reply.json()["error"]["param"]) == (415, "content-encoding")


def test_uploads_are_forms():
    reply = send({"content-type": "application/json"}, "/v1/files")
    assert reply.status == 415
    assert "multipart/form-data" in reply.json()["error"]["message"]
    form = {"content-type": "multipart/form-data; boundary=x"}
    assert send(form, "/v1/files").status != 415


def test_requests_that_are_refused_by_their_heads_are_counted():
    app = make_app(FakeRouter())
    for path in ("/v1/completions", "/tokenize"):
        named = {"content-length": str(len(BODY)), "content-type": "text/plain"}
        assert asyncio.run(fetch(app, "POST", path, BODY, named)).status == 415
    metrics = asyncio.run(fetch(app, "GET", "/metrics")).body
    assert b'baton_requests_total{outcome="invalid"} 1.0' in metrics

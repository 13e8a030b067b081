"""Request headers: the client's own request id and its timeout."""

import pytest

from tests.kits.router.gateway import FakeRouter, Never, chat, make_app, post, tokens


def test_the_clients_id_comes_back_in_header_and_body() -> None:
    reply = chat(FakeRouter(), x_request_id="trace-7")
    assert reply.headers["x-request-id"] == "trace-7"
    assert reply.json()["id"] == "chatcmpl-trace-7"


def test_two_calls_with_one_id_are_two_requests() -> None:
    router = FakeRouter()
    app = make_app(router)
    for _ in range(2):
        reply = post(app, "/v1/completions", {"prompt": "yo"}, x_request_id="same")
        assert reply.status == 200
    assert len({request.request_id for request in router.requests}) == 2


def test_each_event_of_a_stream_has_the_clients_id() -> None:
    reply = chat(FakeRouter(), {"stream": True}, x_request_id="trace-7")
    assert reply.headers["x-request-id"] == "trace-7"
    *events, _ = reply.events()
    assert {event["id"] for event in events} == {"chatcmpl-trace-7"}


def test_a_refusal_has_an_id_too() -> None:
    for headers in ({"x_request_id": "trace-7"}, {}):
        reply = chat(FakeRouter(), {"temperature": -1}, **headers)
        assert reply.status == 400
        expected = headers.get("x_request_id", "chatcmpl-")
        assert reply.headers["x-request-id"].startswith(expected)


@pytest.mark.parametrize("wrong", ["", "x" * 129, "tab\there", "é"])
def test_an_id_that_cannot_be_sent_back_is_refused(wrong: str) -> None:
    reply = chat(FakeRouter(), x_request_id=wrong)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "x-request-id")


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_before_the_first_token_is_a_504(stream: bool) -> None:
    router = FakeRouter([Never()])
    reply = chat(router, {"stream": stream}, x_request_timeout="0.5")
    assert (reply.status, reply.json()["error"]["code"]) == (504, "request_timeout")
    assert router.live == 0
    assert router.cancelled == [router.requests[0].request_id]


def test_a_timeout_after_the_first_token_ends_a_stream_with_an_error() -> None:
    router = FakeRouter([tokens("a"), Never()])
    reply = chat(router, {"stream": True}, x_request_timeout="0.5")
    assert reply.status == 200
    *_, last = reply.events()
    assert last["error"]["code"] == "request_timeout"
    assert router.live == 0


def test_an_answer_within_its_timeout_is_unchanged() -> None:
    reply = chat(FakeRouter(), x_request_timeout="3600")
    assert (reply.status, reply.json()["choices"][0]["message"]["content"]) == (200, "hi")


@pytest.mark.parametrize("wrong", ["soon", "0", "0.0005", "-1", "nan", "inf", "86401"])
def test_a_timeout_that_is_none_is_refused(wrong: str) -> None:
    reply = chat(FakeRouter(), x_request_timeout=wrong)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "x-request-timeout")

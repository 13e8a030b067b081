"""Limits of API keys as clients see them."""

from tests.kits.router.gateway import FakeRouter, answer, make_app, post

BODY = {"prompt": "yo", "max_tokens": 4}


def ask(app, **body):
    return post(app, "/v1/completions", {**BODY, **body})


def headers_of(reply):
    return {
        name.decode(): value.decode()
        for name, value in reply.messages[0]["headers"]
        if name.startswith((b"x-ratelimit", b"retry-after"))
    }


def test_answers_have_limit_headers_and_the_next_request_gets_429():
    app = make_app(FakeRouter(), requests_per_s=0.001, tokens_per_min=1000)
    reply = ask(app)
    assert reply.status == 200
    assert headers_of(reply)["x-ratelimit-remaining-requests"] == "0"
    assert headers_of(reply)["x-ratelimit-limit-tokens"] == "1000"
    refused = ask(app)
    assert refused.status == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(headers_of(refused)["retry-after"]) > 900


def test_streams_tell_it_too():
    app = make_app(FakeRouter(), requests_per_s=1.0)
    assert headers_of(ask(app, stream=True))["x-ratelimit-limit-requests"] == "1"


def test_without_limits_no_headers_are_sent():
    assert headers_of(ask(make_app(FakeRouter()))) == {}


def test_a_request_is_refused_before_its_prompt_is_looked_at():
    app = make_app(FakeRouter(), requests_per_s=0.001)
    ask(app)
    assert ask(app, prompt="x" * 1000).status == 429


def test_tokens_are_refused_when_the_prompt_is_known():
    router = FakeRouter()
    app = make_app(router, tokens_per_min=10)
    assert ask(app, max_tokens=50).status == 200  # uses all available tokens
    assert ask(app, max_tokens=50).status == 429
    assert len(router.requests) == 1


def test_unused_tokens_of_an_answer_are_given_back():
    app = make_app(FakeRouter(answer("hi")), tokens_per_min=60)
    assert ask(app, max_tokens=60).status == 200  # reserved all tokens, and used five
    assert ask(app, max_tokens=40).status == 200

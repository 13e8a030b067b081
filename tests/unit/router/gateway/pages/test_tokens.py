"""Tokenising texts and messages, and decoding tokens."""

import asyncio

import pytest

from router.access.limits import KeyLimits
from router.gateway.pages.tokens import MAX_TOKENS
from router.text.tokenizer import LONGEST_CUT
from tests.kits.router.access import key_file
from tests.kits.router.gateway import (
    CONTEXT_LEN,
    EOS,
    FakeRouter,
    chat,
    fetch,
    make_app,
    post,
)


def user(text):
    return [{"role": "user", "content": text}]


MESSAGES = user("yo")
LONG = "x" * (LONGEST_CUT + 1)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def tokenize(**fields):
    return post(make_app(FakeRouter()), "/tokenize", fields)


def detokenize(tokens):
    return post(make_app(FakeRouter()), "/detokenize", {"tokens": tokens})


def error_of(reply):
    error = reply.json()["error"]
    return reply.status, error["code"], error["param"]


def test_a_text_becomes_tokens():
    assert tokenize(model="tiny", prompt="héy").json() == {
        "count": 4,
        "max_model_len": CONTEXT_LEN,
        "tokens": list("héy".encode()),
        "token_strs": None,
    }


def test_tokens_come_with_their_names_if_asked_for():
    answer = tokenize(prompt="a b<|eos|>", return_token_strs=True).json()
    assert answer["token_strs"] == ["a", "Ġ", "b", "<|eos|>"]
    assert answer["tokens"][-1] == EOS


def test_messages_become_the_tokens_that_a_chat_completion_would_send():
    router = FakeRouter()
    chat(router, {"messages": MESSAGES})
    assert tokenize(messages=MESSAGES).json()["tokens"] == list(router.requests[0].token_ids)
    assert tokenize(messages=MESSAGES, tools=TOOLS, temperature=0.5).status == 200


def test_a_text_may_be_longer_than_the_context():
    assert tokenize(prompt="x" * 5000).json()["count"] == 5000


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (400, "invalid_value", "prompt")),
        ({"prompt": ["a", "b"]}, (400, "invalid_value", "prompt")),
        ({"prompt": [1, 2]}, (400, "invalid_value", "prompt")),
        ({"prompt": "a", "messages": MESSAGES}, (400, "invalid_value", "prompt")),
        ({"messages": []}, (400, "invalid_value", "messages")),
        ({"prompt": "a", "return_token_strs": 1}, (400, "invalid_value", "return_token_strs")),
        (
            {"messages": MESSAGES, "add_special_tokens": 3},
            (400, "invalid_value", "add_special_tokens"),
        ),
        ({"prompt": "a", "model": "gpt-9"}, (404, "model_not_found", "model")),
    ],
)
def test_a_wrong_body_is_refused_and_the_field_named(fields, expected):
    assert error_of(tokenize(**fields)) == expected


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body):
    for path in ("/tokenize", "/detokenize"):
        assert post(make_app(FakeRouter()), path, body).status == 400


@pytest.mark.parametrize("fields", [{"prompt": LONG}, {"messages": user(LONG)}])
def test_a_text_of_more_characters_than_are_ever_encoded_is_refused(fields):
    reply = tokenize(**fields)
    param = next(iter(fields))
    assert error_of(reply) == (400, "context_length_exceeded", param)
    assert str(LONGEST_CUT) in reply.json()["error"]["message"]


def test_a_text_is_cut_as_a_request_would_be():
    fields = {"prompt": "ab" * CONTEXT_LEN, "truncate_prompt_tokens": -1, "max_tokens": 4}
    assert tokenize(**fields).json()["count"] == CONTEXT_LEN - 4


def test_tokens_become_a_text_with_its_special_tokens():
    assert detokenize([*"héy".encode(), EOS]).json() == {"prompt": "héy<|eos|>"}
    assert detokenize([]).json() == {"prompt": ""}


@pytest.mark.parametrize("tokens", [[-1], [10**6], [2**70], ["a"], [1.5], [True], None, "abc"])
def test_wrong_tokens_are_refused(tokens):
    status, code, param = error_of(detokenize(tokens))
    assert (status, code) == (400, "invalid_value")
    assert param.startswith("tokens")


def test_a_list_of_more_tokens_than_a_text_may_have_is_refused():
    assert error_of(detokenize([1] * (MAX_TOKENS + 1))) == (400, "invalid_value", "tokens")


def test_long_bodies_are_read_in_a_thread_within_the_limit_of_bodies():
    assert tokenize(prompt="yo " * 30_000).json()["count"] == 90_000
    small = make_app(FakeRouter(), max_body_bytes=1000)
    assert error_of(post(small, "/tokenize", {"prompt": "x" * 1000})) == (
        413,
        "request_too_large",
        None,
    )


def test_pages_of_tokens_count_on_the_limits_of_a_key(tmp_path):
    keys = key_file(tmp_path / "keys.json", "sesame", limits=KeyLimits(requests_per_s=0.001))
    app = make_app(FakeRouter(), keys=keys)
    assert post(app, "/tokenize", {"prompt": "a"}).status == 401
    first = post(app, "/tokenize", {"prompt": "a"}, authorization="Bearer sesame")
    assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    second = post(app, "/detokenize", {"tokens": [1]}, authorization="Bearer sesame")
    assert (second.status, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(second.headers["retry-after"]) > 0


def test_a_client_that_leaves_before_its_body_is_complete_costs_nothing():
    app = make_app(FakeRouter(), max_streams=1)

    async def run():
        async def leaves():
            return {"type": "http.disconnect"}

        async def send(_):
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/tokenize",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await app(scope, leaves, send)
        body = b'{"prompt": "a"}'
        return await fetch(app, "POST", "/tokenize", body, {"content-type": "application/json"})

    assert asyncio.run(run()).status == 200

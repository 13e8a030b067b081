"""A request for more log-probabilities than an answer may have is refused before any work."""

import pytest

from engine.messages import Logprobs
from router.gateway.requests.parameters import MAX_SCORES
from tests.kits.router.gateway import LENGTH, FakeRouter, make_app, post, tokens

CONTEXT_LEN = 2**15
SCORES = Logprobs(-0.5, 1, (104, 105), (-0.5, -1.5))
MESSAGES = [{"role": "user", "content": "yo"}]


def ask(path, context_len=CONTEXT_LEN, **fields):
    prompt = (SCORES,) * (len(fields.get("prompt", "")) - 1)
    router = FakeRouter([tokens("h", logprobs=(SCORES,), prompt_logprobs=prompt, outcome=LENGTH)])
    return router, post(make_app(router, context_len=context_len), f"/v1/{path}", fields)


@pytest.mark.parametrize(
    ("path", "fields", "number", "param"),
    [
        (
            "completions",
            {"prompt": ["a"] * 8, "n": 16, "max_tokens": 300, "logprobs": 20},
            8 * 16 * 300 * 21,
            "logprobs",
        ),
        (
            "completions",
            {"prompt": "a", "best_of": 16, "max_tokens": 1200, "logprobs": 20},
            16 * 1200 * 21,
            "logprobs",
        ),
        (
            "completions",
            {"prompt": "a", "n": 16, "max_tokens": 1200, "logprobs": 20, "stream": True},
            16 * 1200 * 21,
            "logprobs",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "max_tokens": 12_500, "logprobs": True, "top_logprobs": 20},
            12_500 * 21,
            "top_logprobs",
        ),
        (
            "completions",
            {"prompt": [1] * 1000, "n": 16, "prompt_logprobs": 20, "max_tokens": 1},
            1000 * 16 * 21,
            "prompt_logprobs",
        ),
        (
            "completions",
            {"prompt": [1] * 1000, "n": 16, "echo": True, "logprobs": 20, "max_tokens": 0},
            1000 * 16 * 21,
            "logprobs",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x" * 20_000}], "prompt_logprobs": 20},
            20_002 * 21,
            "prompt_logprobs",
        ),
    ],
)
def test_too_many_log_probabilities_are_refused_with_their_number(path, fields, number, param):
    router, reply = ask(path, **fields)
    error = reply.json()["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "invalid_value", param)
    assert str(number) in error["message"]
    assert str(MAX_SCORES) in error["message"]
    assert router.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 16, "max_tokens": 600, "logprobs": 20},
        {"n": 16, "max_tokens": 16_000},
        {"prompt": [1] * 12_000, "prompt_logprobs": 20},
    ],
)
def test_as_many_as_are_allowed_are_served(fields):
    _, reply = ask("completions", **{"prompt": "a", **fields})
    assert reply.status == 200
    assert len(reply.json()["choices"]) == fields.get("n", 1)


def test_a_chat_that_names_no_length_gets_one_whose_log_probabilities_fit():
    fields = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 19}
    router, _ = ask("chat/completions", **fields, n=2)
    limits = router.requests[0].limits
    assert limits.max_len - limits.prompt_len == MAX_SCORES // (2 * 20)
    router, _ = ask("chat/completions", messages=MESSAGES)
    assert router.requests[0].limits.max_len == CONTEXT_LEN

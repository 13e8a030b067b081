"""Several prompts in one call: the router's requests, and the joint answer."""

import asyncio
from typing import Any

import msgspec
import pytest

from engine.messages import Logprobs
from router.machine.requests import Failed, Update
from tests.kits.router.gateway import (
    LENGTH,
    TIMELINE,
    Connection,
    FakeRouter,
    Never,
    Reply,
    answer,
    complete,
    make_app,
    post,
    tokens,
)


def scored(text: str, logprob: float, prompt: str = "") -> list[Update]:
    """Returns a whole answer as one update; with a prompt, also the scores of the prompt's
    tokens."""
    return [
        tokens(
            text,
            logprobs=(Logprobs(logprob, 1),) * len(text),
            prompt_logprobs=(Logprobs(-0.5, 1),) * max(len(prompt) - 1, 0),
            outcome=LENGTH,
            timeline=TIMELINE,
        )
    ]


def streamed(reply: Reply) -> dict[int, dict[str, Any]]:
    """Returns the text and the scored tokens of each choice of a stream."""
    found: dict[int, dict[str, Any]] = {}
    for event in reply.events()[:-1]:
        for choice in event["choices"]:
            own = found.setdefault(choice["index"], {"text": "", "tokens": []})
            own["text"] += choice["text"]
            own["tokens"] += (choice["logprobs"] or {"tokens": []})["tokens"]
    return found


@pytest.mark.parametrize("prompts", [["ab", "c"], [[97, 98], [99]]])
def test_each_prompt_is_a_group_of_requests(prompts):
    router = FakeRouter()
    assert complete(router, {"prompt": prompts, "n": 2, "seed": 7, "max_tokens": 5}).status == 200
    first, second, third, fourth = router.requests
    assert [r.token_ids for r in router.requests] == [(97, 98)] * 2 + [(99,)] * 2
    assert [r.leader for r in router.requests] == [None, first.request_id, None, third.request_id]
    assert [r.sampling.seed for r in router.requests] == [7, 8, 7, 8]
    assert [r.limits.max_len for r in router.requests] == [7, 7, 6, 6]
    ids = [r.request_id for r in router.requests]
    assert ids == [first.request_id, *(f"{first.request_id}-{i}" for i in (1, 2, 3))]
    assert (second.limits.prompt_len, fourth.limits.prompt_len) == (2, 1)


def test_choices_are_numbered_prompt_by_prompt_and_counted_together():
    router = FakeRouter(answer("a"), answer("bb"), answer("c"), [tokens("dd", outcome=LENGTH)])
    body = complete(router, {"prompt": ["one", "four"], "n": 2}).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "a"),
        (1, "bb"),
        (2, "c"),
        (3, "dd"),
    ]
    assert body["usage"]["prompt_tokens"] == 3 + 4
    assert body["usage"]["completion_tokens"] == 2 + 3 + 2 + 2


def test_cached_tokens_are_those_of_all_prompts():
    body = complete(FakeRouter(), {"prompt": ["a", "b", "c"], "n": 2}).json()
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 3 * TIMELINE.num_cached_tokens


def test_a_batch_of_one_is_as_the_prompt_alone():
    alone, batch = FakeRouter(), FakeRouter()
    complete(alone, {"prompt": "a", "seed": 1})
    complete(batch, {"prompt": ["a"], "seed": 1})
    assert alone.requests == batch.requests


def test_the_best_candidates_of_each_prompt_are_shown():
    router = FakeRouter(scored("a", -3.0), scored("b", -1.0), scored("c", -1.0), scored("d", -2.0))
    body = complete(router, {"prompt": ["x", "y"], "best_of": 2}).json()
    assert [c["text"] for c in body["choices"]] == ["b", "c"]
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_echoes_its_own_prompt_with_its_scores(stream):
    scripts = [scored(t, -1.0, p) for t, p in (("a", "one"), ("b", ""), ("c", "x"), ("d", ""))]
    fields = {"prompt": ["one", "x"], "n": 2, "echo": True, "logprobs": 0, "stream": stream}
    reply = complete(FakeRouter(*scripts), fields)
    if stream:
        found = streamed(reply)
    else:
        choices = reply.json()["choices"]
        found = {
            c["index"]: {"text": c["text"], "tokens": c["logprobs"]["tokens"]} for c in choices
        }
    texts = {0: "onea", 1: "oneb", 2: "xc", 3: "xd"}
    assert found == {i: {"text": text, "tokens": list(text)} for i, text in texts.items()}


def test_scores_of_prompts_are_in_the_choices_of_their_prompt():
    router = FakeRouter(scored("a", -1.0, "one"), scored("b", -1.0, "x"))
    body = complete(router, {"prompt": ["one", "x"], "prompt_logprobs": 0}).json()
    assert [len(c["prompt_logprobs"]) for c in body["choices"]] == [3, 1]


async def test_choices_wait_for_the_scores_of_their_prompt():
    """If the worker of the first choice is lost, other choices may start before the first."""
    router = FakeRouter([Never()], scored("b", -1.0))
    connection = Connection(make_app(router), "POST", "/v1/completions", {})
    fields = {"prompt": "yo", "n": 2, "echo": True, "logprobs": 0, "stream": True}
    connection.put_body(msgspec.json.encode(fields))
    call = asyncio.create_task(connection.run())
    await router.waiting.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert connection.reply.messages == []
    connection.leave()
    await call
    assert router.live == 0


def test_a_prompt_that_fails_fails_the_batch():
    router = FakeRouter(answer("a"), [Update(outcome=Failed("lost"))], [Never()])
    reply = complete(router, {"prompt": ["a", "b", "c"]})
    assert (reply.status, reply.json()["error"]["message"]) == (503, "lost")
    assert router.live == 0


def test_an_operator_bounds_the_answers_of_a_batch():
    app = make_app(FakeRouter(), max_batch_choices=4)
    ask = {"prompt": ["a", "b"], "n": 2}
    assert post(app, "/v1/completions", ask).status == 200
    error = post(app, "/v1/completions", ask | {"prompt": ["a"] * 3}).json()["error"]
    assert error["param"] == "prompt"
    assert "at most 4" in error["message"]


def test_all_prompts_count_for_the_limits_of_a_key():
    app = make_app(FakeRouter([tokens("abc", outcome=LENGTH)]), tokens_per_min=20)
    fields = {"prompt": ["abc", "abcd"], "max_tokens": 3}
    reply = post(app, "/v1/completions", fields)
    assert reply.headers["x-ratelimit-remaining-tokens"] == "7"


def test_prompts_of_a_batch_count_as_requests_in_flight():
    app = make_app(FakeRouter(), max_streams=2)
    assert post(app, "/v1/completions", {"prompt": ["a", "b"]}).status == 200
    reply = post(app, "/v1/completions", {"prompt": ["a", "b", "c"]})
    assert (reply.status, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert post(app, "/v1/completions", {"prompt": ["a", "b"]}).status == 200

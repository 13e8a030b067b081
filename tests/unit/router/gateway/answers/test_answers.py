"""Whole and streamed answers: text, finish reasons, usage, timeline, and the router's requests."""

import asyncio

import pytest

from engine.messages import Limits, Sampling
from router.gateway.answering import LONG_BODY_BYTES
from router.machine.requests import Update
from tests.kits.router.gateway import (
    CONTEXT_LEN,
    EOS,
    LENGTH,
    TIMELINE,
    Connection,
    FakeRouter,
    Never,
    answer,
    chat,
    complete,
    make_app,
    post,
    tokens,
)


def asked(ask, fields, **headers):
    """Returns the single request that the router received."""
    router = FakeRouter()
    assert ask(router, fields, **headers).status == 200
    (request,) = router.requests
    return request


def text_of(events):
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content", "") for c in choices)


# ---------------------------------------------------------------- whole answers


def test_a_chat_answer_is_a_message():
    body = chat(FakeRouter(answer("héllo"))).json()
    assert body.pop("created") > 1_600_000_000
    assert body.pop("id").startswith("chatcmpl-")
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "fp-1",
        "prompt_token_ids": None,
        "prompt_logprobs": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "héllo", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 7,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


def test_a_completion_answer_is_a_text():
    body = complete(FakeRouter([tokens("hello", outcome=LENGTH)])).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    assert body["usage"]["prompt_tokens_details"] is None  # the router gave no timeline


def test_the_answer_names_its_request():
    router = FakeRouter()
    reply = chat(router)
    assert reply.headers["x-request-id"] == reply.json()["id"] == router.requests[0].request_id


# ---------------------------------------------------------------- streams


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_marker():
    reply = chat(FakeRouter(answer("hé")), {"stream": True})
    *chunks, marker = reply.events()
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert marker == "[DONE]"
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "é"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    common = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
    assert len(common) == 1
    assert all("usage" not in c and c["system_fingerprint"] == "fp-1" for c in chunks)


def test_usage_comes_in_a_chunk_of_its_own_when_asked_for():
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, _ = chat(FakeRouter(answer("hi")), fields).events()
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("include", [True, None])
def test_usage_comes_in_every_chunk_when_asked_for(include):
    options = {"include_usage": include, "continuous_usage_stats": True}
    fields = {"stream": True, "stream_options": options}
    *chunks, usage, _ = chat(FakeRouter(answer("hi")), fields).events()
    assert [c["usage"]["completion_tokens"] for c in chunks] == [0, 1, 2, 3]
    assert all(c["usage"]["prompt_tokens"] == 4 for c in chunks)
    assert usage["usage"]["completion_tokens"] == 3


def test_text_and_the_reason_of_its_end_come_in_one_chunk():
    script = [tokens("a"), tokens("b", outcome=LENGTH)]
    *chunks, _ = complete(FakeRouter(script), {"stream": True}).events()
    ends = [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert ends == [("a", None), ("b", "length")]
    *chunks, _ = chat(FakeRouter(script), {"stream": True}).events()
    assert chunks[-1]["choices"][0]["delta"] == {"content": "b"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_usage_in_every_chunk_needs_usage():
    options = {"include_usage": False, "continuous_usage_stats": True}
    *chunks, _ = chat(FakeRouter(), {"stream": True, "stream_options": options}).events()
    assert all("usage" not in chunk for chunk in chunks)


def test_the_head_waits_for_the_first_token_and_then_goes_at_once():
    router = FakeRouter([Update(), tokens("a"), Never()])

    async def ask():
        connection = Connection(make_app(router), "POST", "/v1/completions", {})
        connection.put_body(b'{"prompt": "yo", "stream": true}')
        task = asyncio.create_task(connection.run())
        await router.waiting.wait()
        sent = list(connection.reply.messages)
        connection.leave()
        await task
        return sent

    start, chunk = asyncio.run(ask())
    assert start["type"] == "http.response.start"
    assert b'"text":"a"' in chunk["body"]


# ---------------------------------------------------------------- timeline


def test_the_timeline_comes_on_request():
    body = chat(FakeRouter(), x_baton_timeline="1").json()
    assert body["baton_timeline"]["prefill_compute_s"] == TIMELINE.prefill_compute_s
    assert body["baton_timeline"]["num_cached_tokens"] == 3
    assert "baton_timeline" not in chat(FakeRouter()).json()


def test_the_timeline_of_a_stream_is_its_last_chunk():
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    *_, usage, timeline, marker = chat(FakeRouter(), fields, x_baton_timeline="1").events()
    assert usage["usage"]["completion_tokens"] == 3
    assert (timeline["choices"], marker) == ([], "[DONE]")
    assert timeline["baton_timeline"]["prefill_worker"] == "p0"


# ---------------------------------------------------------------- stop strings


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_answer_and_cancels_the_request(stream):
    router = FakeRouter([*answer("one two END three")[:-1], Never()])
    fields = {"stop": ["nothing", "END"], "stream": stream}
    reply = complete(router, fields)
    if stream:
        assert text_of(reply.events()) == "one two "
        assert reply.events()[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        assert reply.json()["choices"][0]["text"] == "one two "
        assert reply.json()["choices"][0]["finish_reason"] == "stop"
        assert reply.json()["usage"]["completion_tokens"] == len("one two END")
    assert router.cancelled == [router.requests[0].request_id]


def test_text_that_could_begin_a_stop_string_is_not_sent_before_it_is_known():
    script = [tokens("a<"), tokens("b"), tokens("<e", outcome=LENGTH)]
    *chunks, _ = complete(FakeRouter(script), {"stream": True, "stop": "<end>"}).events()
    assert [c["choices"][0]["text"] for c in chunks] == ["a", "<b", "<e"]


def test_a_stop_string_is_not_looked_for_in_the_shortest_answer():
    script = [tokens("xx"), tokens("yx")]
    body = complete(FakeRouter(script), {"stop": "x", "min_tokens": 2}).json()
    assert body["choices"][0]["text"] == "xxy"


def test_the_clients_own_stop_token_is_counted_and_not_shown():
    script = [tokens("ab", outcome=LENGTH)]
    body = complete(FakeRouter(script), {"stop_token_ids": [ord("b")]}).json()
    assert body["choices"][0]["text"] == "a"
    assert body["usage"]["completion_tokens"] == 2


def test_an_answer_cut_inside_a_character_shows_the_break():
    script = [Update(token_ids=(ord("a"), 0xF0, 0x9F), outcome=LENGTH)]
    assert complete(FakeRouter(script)).json()["choices"][0]["text"] == "a\ufffd"
    events = complete(FakeRouter(script), {"stream": True}).events()
    assert text_of(events) == "a\ufffd"


# ---------------------------------------------------------------- requests to the router


def test_messages_go_through_the_template():
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]
    request = asked(chat, {"messages": messages})
    assert request.token_ids == (257, ord("s"), 258, ord("a"), ord("\n"), ord("b"), 259, 259)


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [("hé", (104, 195, 169)), ([5, 6], (5, 6)), (["h"], (104,)), ([[5, 6]], (5, 6))],
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_one(prompt, token_ids):
    assert asked(complete, {"prompt": prompt}).token_ids == token_ids


def test_limits_are_absolute():
    fields = {"max_tokens": 5, "min_tokens": 2, "stop_token_ids": [9, EOS]}
    assert asked(complete, fields).limits == Limits(
        max_len=7, min_len=4, stop_token_ids=(EOS, 9), prompt_len=2
    )


def test_without_max_tokens_the_rest_of_the_context_may_be_used():
    assert asked(chat, {}).limits.max_len == CONTEXT_LEN


@pytest.mark.parametrize(("prompt_len", "max_len"), [(2, 18), (60, CONTEXT_LEN)])
def test_a_completion_has_sixteen_tokens_if_nothing_is_said(prompt_len, max_len):
    assert asked(complete, {"prompt": [1] * prompt_len}).limits.max_len == max_len


def test_an_answer_may_fill_the_context_exactly():
    assert asked(complete, {"max_tokens": CONTEXT_LEN - 2}).limits.max_len == CONTEXT_LEN


def test_max_completion_tokens_goes_before_its_older_name():
    assert asked(chat, {"max_completion_tokens": 5, "max_tokens": 9}).limits.max_len == 4 + 5


def test_ignore_eos_leaves_only_the_clients_stop_tokens():
    fields = {"ignore_eos": True, "stop_token_ids": [9]}
    assert asked(complete, fields).limits.stop_token_ids == (9,)


def test_sampling_is_taken_over():
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": -1}
    expected = Sampling(temperature=0.0, top_p=0.5, top_k=7, min_p=0.1, seed=2**64 - 1)
    assert asked(complete, fields).sampling == expected


def test_top_k_of_minus_one_means_all():
    assert asked(complete, {"top_k": -1}).sampling.top_k == 0


def test_without_a_seed_each_request_draws_its_own():
    router = FakeRouter()
    app = make_app(router)
    for _ in range(2):
        post(app, "/v1/completions", {"prompt": "yo"})
    first, second = router.requests
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id != second.request_id


def test_a_long_prompt_is_encoded_in_a_thread_and_means_the_same():
    router = FakeRouter()
    app = make_app(router, context_len=10 * LONG_BODY_BYTES)
    assert post(app, "/v1/completions", {"prompt": "ab" * LONG_BODY_BYTES}).status == 200
    assert router.requests[0].token_ids == (97, 98) * LONG_BODY_BYTES


def test_without_a_name_or_with_an_alias_the_model_answers():
    app = make_app(FakeRouter(), model_names=("tiny", "org/tiny"))
    assert post(app, "/v1/completions", {"prompt": "yo"}).json()["model"] == "tiny"
    named = {"prompt": "yo", "model": "org/tiny"}
    assert post(app, "/v1/completions", named).json()["model"] == "org/tiny"

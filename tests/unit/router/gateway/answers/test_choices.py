"""Several choices of one prompt: the router's requests, and the joint answer."""

import asyncio

import msgspec
import pytest

from engine.messages import Logprobs
from router.gateway.answers.following import MAX_OPEN
from router.machine.requests import Failed, Rejected, Update
from tests.kits.router.gateway import (
    EOS,
    LENGTH,
    STOP,
    TIMELINE,
    V1,
    Connection,
    FakeRouter,
    Never,
    answer,
    chat,
    complete,
    make_app,
    post,
    samples,
    tokens,
)


def scored(text: str, logprob: float) -> list[Update]:
    """Returns one update whose tokens have the same log-probability."""
    scores = (Logprobs(logprob, 1),) * len(text)
    return [tokens(text, logprobs=scores, outcome=LENGTH)]


async def until_quiet(connection: Connection) -> None:
    """Lets the app run until it sends no more parts. Nothing that the app awaits takes time."""
    num_sent = -1
    while num_sent < len(connection.reply.messages):
        num_sent = len(connection.reply.messages)
        for _ in range(20):
            await asyncio.sleep(0)


# ---------------------------------------------------------------- requests to the router


async def test_of_many_prompts_only_some_are_open_at_once_and_in_order():
    router = FakeRouter([tokens("h"), Never()])
    app = make_app(router, max_batch_choices=2 * MAX_OPEN, max_choices=2)
    connection = Connection(app, "POST", "/v1/completions", {"content-type": "application/json"})
    connection.put_body(msgspec.json.encode({"prompt": ["a"] * MAX_OPEN, "n": 2}))
    task = asyncio.create_task(connection.run())
    async with asyncio.timeout(10):
        await router.waiting.wait()
    await until_quiet(connection)
    assert router.live == MAX_OPEN
    names = [request.request_id for request in router.requests]
    assert [request.leader for request in router.requests[1::2]] == names[::2]
    connection.leave()
    await task
    assert router.live == 0


def test_each_choice_is_a_request_that_follows_the_first_and_has_the_next_seed():
    first = [tokens("a", outcome=LENGTH, prompt_logprobs=(Logprobs(-1.0, 1),))]
    router = FakeRouter(first, answer("b"), answer("c"))
    complete(router, {"n": 3, "seed": -2, "prompt_logprobs": 1, "max_tokens": 9})
    leader, *followers = router.requests
    assert leader.leader is None
    assert [f.leader for f in followers] == [leader.request_id] * 2
    assert [r.sampling.seed for r in router.requests] == [2**64 - 2, 2**64 - 1, 0]
    assert len({r.request_id for r in router.requests}) == 3
    assert [r.prompt_logprobs for r in router.requests] == [1, None, None]
    assert {(r.token_ids, r.limits) for r in router.requests} == {(leader.token_ids, leader.limits)}


def test_an_operator_may_allow_more_or_fewer_choices():
    app = make_app(FakeRouter(), max_choices=2)
    assert post(app, "/v1/completions", {"prompt": "yo", "n": 2}).status == 200
    error = post(app, "/v1/completions", {"prompt": "yo", "n": 3}).json()["error"]
    assert (error["param"], "at most 2" in error["message"]) == ("n", True)


# ---------------------------------------------------------------- whole answers


def test_a_whole_answer_lists_its_choices_and_sums_their_tokens():
    router = FakeRouter(answer("hé"), [tokens("abc", outcome=LENGTH)])
    body = chat(router, {"n": 2}).json()
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert [c["message"]["content"] for c in body["choices"]] == ["hé", "abc"]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "length"]
    assert body["usage"]["completion_tokens"] == 4 + 3
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_a_stop_string_ends_only_its_own_choice():
    router = FakeRouter([tokens("one END"), Never()], [tokens("two"), tokens("!", outcome=LENGTH)])
    body = complete(router, {"n": 2, "stop": "END"}).json()
    assert [c["text"] for c in body["choices"]] == ["one ", "two!"]
    assert router.cancelled == [router.requests[0].request_id]


def test_the_likeliest_candidates_are_returned_and_all_are_counted():
    router = FakeRouter(scored("bad", -3.0), scored("best!", -1.0), scored("good", -2.0))
    body = complete(router, {"n": 2, "best_of": 3}).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "best!"), (1, "good")]
    assert all(c["logprobs"] is None for c in body["choices"])
    assert body["usage"]["completion_tokens"] == 3 + 5 + 4
    assert all(r.sampling.logprobs == 0 for r in router.requests)


def test_a_candidate_is_ranked_by_its_tokens_before_the_stop_string():
    cut = tokens("aXbb", logprobs=tuple(Logprobs(p, 1) for p in (-1.0, -1.0, -90.0, -90.0)))
    router = FakeRouter([cut, Never()], scored("cc", -2.0))
    body = complete(router, {"best_of": 2, "stop": "X"}).json()
    assert [c["text"] for c in body["choices"]] == ["a"]


def test_as_many_candidates_as_answers_are_not_compared():
    router = FakeRouter()
    assert complete(router, {"n": 2, "best_of": 2, "stream": True}).status == 200
    assert all(r.sampling.logprobs is None for r in router.requests)


# ---------------------------------------------------------------- streams


def test_every_choice_of_a_chat_stream_begins_with_the_role():
    events = chat(FakeRouter(), {"n": 2, "stream": True}).events()
    roles = [c["index"] for e in events[:-1] for c in e["choices"] if "role" in c.get("delta", {})]
    assert roles == [0, 1]


async def test_the_choices_of_a_stream_come_as_they_are_made():
    router = FakeRouter([tokens("a"), Never()], answer("bc"))
    connection = Connection(make_app(router), "POST", "/v1/completions", {})
    connection.put_body(b'{"prompt": "yo", "stream": true, "n": 2}')
    task = asyncio.create_task(connection.run())
    await router.waiting.wait()
    await until_quiet(connection)
    assert b'"text":"a"' in connection.reply.body
    connection.leave()
    await task
    assert router.cancelled == [router.requests[0].request_id]


# ---------------------------------------------------------------- failures and disconnects


@pytest.mark.parametrize("outcome", [Failed("lost"), Rejected("full", 1.0)])
def test_a_choice_that_fails_fails_the_answer_and_cancels_the_others(outcome):
    router = FakeRouter([tokens("a"), Never()], [Update(outcome=outcome)], [Never()])
    reply = chat(router, {"n": 3})
    assert (reply.status, reply.json()["error"]["message"]) == (
        429 if isinstance(outcome, Rejected) else 503,
        outcome.message,
    )
    assert router.live == 0
    assert len(router.cancelled) == len(router.requests) - 1


def test_a_choice_that_fails_breaks_the_stream_off():
    router = FakeRouter([tokens("a"), Never()], [tokens("b"), Update(outcome=Failed("lost"))])
    *chunks, error = chat(router, {"n": 2, "stream": True}).events()
    assert error["error"]["message"] == "lost"
    assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])
    assert router.live == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_all_choices(stream):
    router = FakeRouter([tokens("a"), Never()], answer("bc"), [Never()])
    connection = Connection(make_app(router), "POST", "/v1/completions", {})
    connection.put_body(msgspec.json.encode({"prompt": "yo", "n": 3, "stream": stream}))
    call = asyncio.create_task(connection.run())
    await router.waiting.wait()
    connection.leave()
    assert not (await call).is_complete
    assert router.live == 0
    assert len(router.requests) == 3
    assert {router.requests[0].request_id, router.requests[2].request_id} <= set(router.cancelled)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_in_one_choice_is_raised_and_leaves_nothing_behind(stream):
    router = FakeRouter([RuntimeError("bug")], [Never()])
    connection = Connection(make_app(router), "POST", "/v1/completions", {})
    connection.put_body(msgspec.json.encode({"prompt": "yo", "n": 2, "stream": stream}))
    with pytest.raises(ExceptionGroup, match="unhandled"):
        await connection.run()
    assert router.live == 0


# ---------------------------------------------------------------- metrics


def test_a_request_of_several_choices_is_one_request_with_one_prompt():
    router = FakeRouter(answer("ab"), [tokens("cd", outcome=LENGTH, timeline=TIMELINE)])
    app = make_app(router)
    post(app, "/v1/completions", {"prompt": "yo", "n": 2})
    found = samples(app)
    assert found["baton_prompt_tokens_total"] == {(): 2.0}
    assert found["baton_generation_tokens_total"] == {(): 5.0}
    assert found["baton_ttft_seconds_count"] == {(V1,): 1.0}
    assert found["baton_e2e_seconds_count"] == {(V1,): 1.0}
    assert found["baton_itl_seconds_count"] == {(V1,): 2.0}  # the first choice has three updates
    assert found["baton_requests_total"][(("outcome", "finished"),)] == 1.0


def test_usage_counts_drafted_tokens():
    def drafted(timeline, num_drafted, num_accepted):
        return msgspec.structs.replace(
            timeline, num_drafted_tokens=num_drafted, num_accepted_tokens=num_accepted
        )

    ends = [
        [Update(token_ids=(EOS,), outcome=STOP, timeline=drafted(TIMELINE, *counts))]
        for counts in ((5, 3), (2, 2))
    ]
    body = chat(FakeRouter(*ends), {"n": 2}, x_baton_timeline="1").json()
    assert body["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 2,
    }
    assert body["baton_timeline"]["num_drafted_tokens"] == 5
    assert body["baton_timeline"]["num_accepted_tokens"] == 3
    assert "completion_tokens_details" not in chat(FakeRouter()).json()["usage"]

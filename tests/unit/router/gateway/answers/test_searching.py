"""Beam search with a router: its requests, its answers, and its failures."""

import asyncio
import math
import random

import msgspec
import pytest

from engine.messages import Logprobs, Sampling
from engine.worker.blocks import hash_blocks
from router.gateway.answers import searching
from router.gateway.requests import calls
from router.gateway.requests.body import MAX_BEAM_TOKENS
from router.machine.requests import Failed, Rejected, Update
from tests.kits.router.beams import reference_beams
from tests.kits.router.gateway import (
    EOS,
    LENGTH,
    TIMELINE,
    Connection,
    FakeRouter,
    Never,
    chat,
    complete,
    make_app,
    post,
)

LETTERS = b"abcdefgh"
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 4, "temperature": 0}


def after(token_ids):
    """Returns log-probabilities of all next tokens; letters and the end of the text are likely."""
    rng = random.Random(repr(list(token_ids)))
    logits = {token: rng.gauss(0.0, 2.0) for token in (*LETTERS, EOS)}
    total = math.log(sum(map(math.exp, logits.values())))
    return [logits.get(token, -math.inf) - total for token in range(260)]


class ScoringRouter(FakeRouter):
    """Answers each request with one token and a model's scores."""

    def _script_of(self, number: int) -> list[Update | Never | Exception]:
        request = self.requests[number]
        scores = after(request.token_ids)
        ids = sorted(range(260), key=lambda i: -scores[i])[: request.sampling.logprobs]
        top = Logprobs(scores[ids[0]], 1, tuple(ids), tuple(scores[i] for i in ids))
        prompt = ()
        if request.prompt_logprobs is not None:
            prompt = (Logprobs(-0.5, 1),) * (len(request.token_ids) - 1)
        token = Update(
            (ids[0],), logprobs=(top,), prompt_logprobs=prompt, timeline=TIMELINE, outcome=LENGTH
        )
        return self.script or [token]


class StoppedClock:
    """A clock that stands still, so that no rate limit refills."""

    def now_s(self) -> float:
        return 0.0


def router():
    return ScoringRouter([])


def expected(prompt: str, **rules) -> list[list[int]]:
    rules = {"width": 2, "max_tokens": 4, "end_ids": [EOS], **rules}
    return [tokens for tokens, _ in reference_beams(after, list(prompt.encode()), **rules)]


def text_of(token_ids):
    return bytes(token for token in token_ids if token != EOS).decode()


def test_stores_get_the_blocks_of_the_best_result():
    fake = router()
    fake.store_block = 2
    assert complete(fake, BEAMS, x_baton_session="s").status == 200
    (best, *_) = expected("yo")
    salt = fake.requests[0].salt
    (use,) = fake.told
    assert use.hashes == hash_blocks([*b"yo", *best][:-1], 2, salt)


@pytest.mark.parametrize("penalty", [None, 0, 2])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_choices_are_the_best_hypotheses(penalty, ignore_eos):
    fields = {**BEAMS, "length_penalty": penalty, "ignore_eos": ignore_eos}
    body = complete(router(), fields).json()
    rules = {} if penalty is None else {"length_penalty": penalty}
    if ignore_eos:
        rules["end_ids"] = []
    found = expected("yo", **rules)
    assert [c["text"] for c in body["choices"]] == [text_of(tokens) for tokens in found]
    ends = ["stop" if tokens[-1] == EOS and not ignore_eos else "length" for tokens in found]
    assert [c["finish_reason"] for c in body["choices"]] == ends
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == sum(map(len, found))


def test_more_hypotheses_than_answers_may_be_searched():
    body = complete(router(), {**BEAMS, "n": 1, "best_of": 3}).json()
    assert [c["text"] for c in body["choices"]] == [text_of(expected("yo", width=3)[0])]


def test_each_prompt_has_its_own_search():
    body = complete(router(), {**BEAMS, "prompt": ["yo", "x"]}).json()
    found = [*expected("yo"), *expected("x")]
    assert [c["text"] for c in body["choices"]] == [text_of(tokens) for tokens in found]


def test_a_chat_may_be_searched():
    body = chat(router(), {**BEAMS, "logprobs": True, "return_token_ids": True}).json()
    prompt = body["prompt_token_ids"]
    found = reference_beams(after, prompt, width=2, max_tokens=4, end_ids=[EOS])
    assert [c["token_ids"] for c in body["choices"]] == [tokens for tokens, _ in found]
    for choice, (tokens, total) in zip(body["choices"], found, strict=True):
        scores = [item["logprob"] for item in choice["logprobs"]["content"]]
        assert len(scores) == len(tokens)
        assert sum(scores) == pytest.approx(total)


def test_a_token_of_the_client_may_end_a_hypothesis():
    body = complete(router(), {**BEAMS, "stop_token_ids": [ord("a")]}).json()
    found = expected("yo", end_ids=[EOS, ord("a")])
    assert [c["stop_reason"] for c in body["choices"]] == [
        ord("a") if tokens[-1] == ord("a") else None for tokens in found
    ]


def test_prompts_are_echoed_and_scored_once():
    fake = router()
    body = complete(fake, {**BEAMS, "echo": True, "logprobs": 1}).json()
    assert [len(c["logprobs"]["tokens"]) for c in body["choices"]] == [
        2 + len(tokens) for tokens in expected("yo")
    ]
    assert [r.prompt_logprobs for r in fake.requests[:2]] == [1, None]


def test_a_step_asks_for_one_token_after_each_hypothesis():
    fake = router()
    complete(fake, {**BEAMS, "slo_ttft_ms": 1000, "seed": 5})
    first, *later = fake.requests
    assert first.token_ids == tuple(b"yo")
    assert [len(r.token_ids) for r in later] == [3, 3, 4, 4, 5, 5][: len(later)]
    assert all(r.limits.max_len == len(r.token_ids) + 1 for r in fake.requests)
    assert {r.sampling for r in fake.requests} == {Sampling(temperature=0.0, logprobs=4)}
    assert len({r.request_id for r in fake.requests}) == len(fake.requests)
    assert [r.deadline_s is None for r in fake.requests] == [False] + [True] * len(later)
    assert {r.salt for r in later} == {first.salt}


def test_what_is_generated_for_dropped_hypotheses_counts_too():
    fake = router()
    fake.clock = StoppedClock()
    app = make_app(fake, tokens_per_min=1000)
    reply = post(app, "/v1/completions", {"prompt": "yo", **BEAMS})
    used = 2 + len(fake.requests)
    assert reply.headers["x-ratelimit-remaining-tokens"] == str(1000 - 2 - 2 * 4)
    again = post(app, "/v1/completions", {"prompt": "yo", **BEAMS})
    assert again.headers["x-ratelimit-remaining-tokens"] == str(1000 - used - 2 - 2 * 4)


@pytest.mark.parametrize("outcome", [Failed("lost"), Rejected("full", 1.0)])
def test_a_step_that_fails_fails_the_answer(outcome):
    fake = ScoringRouter([Update(outcome=outcome)])
    reply = complete(fake, {**BEAMS, "prompt": ["a", "b"]})
    assert (reply.status, reply.json()["error"]["message"]) == (
        429 if isinstance(outcome, Rejected) else 503,
        outcome.message,
    )
    assert fake.live == 0


class FullRouter(ScoringRouter):
    """A router that refuses every third request, because it is full."""

    def _script_of(self, number: int) -> list[Update | Never | Exception]:
        if number % 3 == 2:
            return [Update(outcome=Rejected("full", 0.001))]
        return super()._script_of(number)


def test_a_later_step_waits_for_room():
    found = complete(FullRouter([]), {"prompt": "ab", **BEAMS})
    assert (
        found.json()["choices"] == complete(router(), {"prompt": "ab", **BEAMS}).json()["choices"]
    )
    waiting = FullRouter([])
    complete(waiting, {"prompt": "ab", **BEAMS})
    ids = [request.request_id for request in waiting.requests]
    assert len(set(ids)) == len(ids)
    assert any("again" in each for each in ids)


def test_a_step_waits_only_so_often(monkeypatch):
    monkeypatch.setattr(searching, "MAX_TRIES", 3)

    class FirstOnly(ScoringRouter):
        def _script_of(self, number):
            full = [Update(outcome=Rejected("full", 0.001))]
            return full if number else super()._script_of(number)

    assert complete(FirstOnly([]), {"prompt": "ab", **BEAMS}).status == 429


async def test_a_client_that_leaves_ends_the_search():
    fake = ScoringRouter([Never()])
    connection = Connection(make_app(fake), "POST", "/v1/completions", {})
    connection.put_body(msgspec.json.encode({"prompt": ["a", "b"], **BEAMS}))
    call = asyncio.create_task(connection.run())
    await fake.waiting.wait()
    connection.leave()
    assert not (await call).is_complete
    assert fake.live == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"stop": "x"}, "stop"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"structured_outputs": {"regex": "a"}}, "use_beam_search"),
        ({"early_stopping": True}, "early_stopping"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"n": 17}, "n"),
        ({"max_tokens": 4097}, "max_tokens"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ],
)
def test_what_a_search_cannot_do_is_named(fields, param):
    reply = complete(router(), {**BEAMS, **fields})
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


def test_a_step_is_bounded_in_its_tokens(monkeypatch):
    monkeypatch.setattr(calls, "MAX_STEP_TOKENS", 24)
    fields = {**BEAMS, "prompt": ["yo", "x"]}  # two beams for each prompt
    assert complete(router(), fields | {"max_tokens": 4}).status == 200
    error = complete(router(), fields | {"max_tokens": 5}).json()["error"]
    assert error["param"] == "use_beam_search"


def test_without_a_bound_an_answer_is_not_searched_to_the_end_of_the_context():
    fields = {"messages": [{"role": "user", "content": "yo"}]}
    fields |= {"use_beam_search": True, "length_penalty": 0}
    app = make_app(router(), context_len=2**17, tokens_per_min=5000)
    reply = post(app, "/v1/chat/completions", fields)
    assert reply.headers["x-ratelimit-remaining-tokens"] == str(5000 - 4 - MAX_BEAM_TOKENS)


def test_fields_that_ask_for_nothing_are_taken():
    fields = {"top_p": 1, "top_k": -1, "stop": [], "logit_bias": {}, "seed": 1, "length_penalty": 1}
    assert complete(router(), {**BEAMS, **fields}).status == 200

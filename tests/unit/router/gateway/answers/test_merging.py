"""The merged chunks of a stream equal the whole answer, for any request."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.messages import FinishReason, Logprobs
from router.machine.requests import Finished, Update
from tests.kits.router.gateway import EOS, TIMELINE, FakeRouter, Never, Reply, chat, complete

STOPS = ("ab", "é", "ba")
LETTERS = [*b"ab", *"é".encode(), 258]


class DrawingRouter(FakeRouter):
    """Answers each request with tokens that depend only on its prompt and seed."""

    def _script_of(self, number: int) -> list[Update | Never | Exception]:
        request = self.requests[number]
        rng = random.Random(repr((request.token_ids, request.sampling.seed)))
        room = request.limits.max_len - len(request.token_ids)
        ids = rng.choices(LETTERS, k=room)
        reason = FinishReason.LENGTH
        ends = [at for at, token in enumerate(ids) if token in request.limits.stop_token_ids]
        if ends or rng.random() < 0.5:
            reason = FinishReason.STOP
            ids = ids[: ends[0] + 1] if ends else [*ids[: rng.randrange(room)], EOS]
        script = []
        while ids:
            size = rng.randint(1, 3)
            script.append(Update(tuple(ids[:size]), logprobs=self._scores(request, rng, size, ids)))
            del ids[:size]
        scores = ()
        if request.prompt_logprobs is not None:
            scores = (Logprobs(-0.5, 2, (5,), (-0.25,)),) * (len(request.token_ids) - 1)
        first, last = script[0], script[-1]
        script[0] = Update(first.token_ids, logprobs=first.logprobs, prompt_logprobs=scores)
        script[-1] = Update(
            last.token_ids,
            outcome=Finished(reason),
            timeline=TIMELINE,
            logprobs=last.logprobs,
            prompt_logprobs=script[-1].prompt_logprobs,
        )
        return script

    def _scores(self, request, rng, size, ids):
        if request.sampling.logprobs is None:
            return ()
        tops = tuple(range(request.sampling.logprobs))
        scores = tuple(-float(rank) for rank in tops)
        return tuple(Logprobs(-rng.random(), 1, tops, scores) for _ in ids[:size])


def merged(reply: Reply) -> dict[str, Any]:
    """Merges the chunks of a stream into one answer."""
    *chunks, usage, marker = reply.events()
    assert marker == "[DONE]"
    body = {name: usage[name] for name in ("model", "system_fingerprint", "usage")}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if "prompt_token_ids" in chunk:
            body["prompt_token_ids"] = chunk["prompt_token_ids"]
        for choice in chunk["choices"]:
            _merge(choices.setdefault(choice["index"], {"logprobs": None}), choice)
    return body | {"choices": [choices[index] for index in sorted(choices)]}


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    assert whole.get("finish_reason") is None, "a choice goes on after its end"
    text = part["text"] if "text" in part else part["delta"].get("content", "")
    whole["text"] = whole.get("text", "") + text
    for name in ("index", "finish_reason", "stop_reason", "prompt_token_ids"):
        if name in part:
            whole[name] = part[name]
    if "token_ids" in part:
        whole["token_ids"] = whole.get("token_ids", []) + part["token_ids"]
    if part["logprobs"] is not None:
        lists = {n: v for n, v in part["logprobs"].items() if v is not None}
        known = whole["logprobs"] or {name: [] for name in lists}
        whole["logprobs"] = {name: known[name] + items for name, items in lists.items()}


def whole(reply: Reply) -> dict[str, Any]:
    """Returns an answer without streaming in the form of `merged`."""
    body = reply.json()
    for choice in body["choices"]:
        _drop_nulls(choice, "token_ids", "prompt_token_ids", "prompt_logprobs")
        if "message" in choice:
            choice["text"] = choice.pop("message")["content"]
        if choice["logprobs"] is not None:
            choice["logprobs"] = {n: v for n, v in choice["logprobs"].items() if v is not None}
            if not any(choice["logprobs"].values()):
                choice["logprobs"] = None
    _drop_nulls(body, "prompt_token_ids", "prompt_logprobs")
    return {name: body[name] for name in body if name not in ("id", "object", "created")}


def _drop_nulls(fields: dict[str, Any], *names: str) -> None:
    for name in names:
        if name in fields and fields[name] is None:
            del fields[name]


FIELDS = {
    "n": st.integers(1, 3),
    "seed": st.integers(0, 50),
    "max_tokens": st.integers(1, 6),
    "min_tokens": st.integers(0, 1),
    "stop": st.sampled_from([None, "ab", list(STOPS)]),
    "stop_token_ids": st.sampled_from([None, [ord("b")]]),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
    "usage_in_chunks": st.booleans(),
}
COMPLETIONS = {
    **FIELDS,
    "prompt": st.sampled_from(["yo", ["yo"], ["a", "bé"], [[97, 98], [258], [99]]]),
    "echo": st.booleans(),
    "logprobs": st.sampled_from([None, 0, 2]),
}
CHATS = {**FIELDS, "logprobs": st.booleans()}


def check(ask: Any, asked: dict[str, Any]) -> None:
    continuous = asked.pop("usage_in_chunks")
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    reply = whole(ask(DrawingRouter(), asked))
    stream = ask(DrawingRouter(), asked | {"stream": True, "stream_options": options})
    assert merged(stream) == reply
    check_usage(stream, continuous=continuous, num_choices=len(reply["choices"]))


def check_usage(stream: Reply, *, continuous: bool, num_choices: int) -> None:
    """Asserts that each chunk counts its choice's tokens so far, or that no chunk does."""
    *chunks, last, _ = stream.events()
    counts: dict[int, list[int]] = {}
    for chunk in chunks:
        assert (chunk["usage"] is not None) == continuous
        if continuous:
            [choice] = chunk["choices"]
            counts.setdefault(choice["index"], []).append(chunk["usage"]["completion_tokens"])
    assert all(numbers == sorted(numbers) for numbers in counts.values())
    if continuous:
        assert len(counts) == num_choices
        total = sum(numbers[-1] for numbers in counts.values())
        assert total == last["usage"]["completion_tokens"]


quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(asked=st.fixed_dictionaries(COMPLETIONS))
def test_chunks_of_completions_merge_to_the_whole_answer(asked):
    check(complete, asked)


@quick
@given(asked=st.fixed_dictionaries(CHATS))
def test_chunks_of_chats_merge_to_the_whole_answer(asked):
    check(chat, asked)


@pytest.mark.parametrize("prompt", ["yo", ["a", "bé"]])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_prompt_alone_merges_too(prompt, logprobs):
    fields = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": logprobs}
    reply = whole(complete(DrawingRouter(), fields))
    options = {"include_usage": True}
    stream = complete(DrawingRouter(), fields | {"stream": True, "stream_options": options})
    assert merged(stream) == reply
    assert reply["usage"]["completion_tokens"] == 0

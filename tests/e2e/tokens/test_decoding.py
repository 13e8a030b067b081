"""Decoding through the whole product: speculation, choices, structure, log-probabilities."""

import json

import httpx
import jsonschema
import openai
import pytest

from tests.kits.services.served import matching, metrics, poll_until

pytestmark = pytest.mark.torch

MODEL = "baton-bundled"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"key": {"enum": ["a", "b"]}},
            "required": ["key"],
        },
    },
}


def test_choices_are_those_of_single_requests_with_the_next_seeds(client):
    prompt = "def choices(" + "a, " * 40
    options = {"model": MODEL, "max_tokens": 24, "temperature": 0.8}
    together = client.completions.create(**options, prompt=prompt, n=3, seed=7)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    alone = [client.completions.create(**options, prompt=prompt, seed=7 + i) for i in range(3)]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]
    assert together.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)
    assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens


def test_choices_interleave_in_a_stream(client):
    options = {"model": MODEL, "max_tokens": 16, "temperature": 0.8, "n": 2, "seed": 3}
    whole = client.completions.create(**options, prompt="import sys\n")
    texts = ["", ""]
    for chunk in client.completions.create(**options, prompt="import sys\n", stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_an_answer_follows_its_schema(client):
    schema = {"name": "person", "schema": SCHEMA, "strict": True}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Who?"}],
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=256,
        seed=1,
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_a_schema_that_cannot_be_followed_is_refused_by_name(client):
    schema = {"name": "wrong", "schema": {"type": "nonsense"}}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Who?"}],
            response_format={"type": "json_schema", "json_schema": schema},
        )


def test_a_tool_that_must_be_called_is_called(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Look it up"}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "lookup"}},
        max_tokens=128,
        seed=2,
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "lookup"
    jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])


def test_log_probabilities_are_the_same_in_a_stream(client):
    options = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a Python function `f`: Return x."}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(whole) == 12
    assert all(one.logprob == one.top_logprobs[0].logprob for one in whole)
    streamed = [
        one
        for chunk in client.chat.completions.create(**options, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for one in choice.logprobs.content or ()
    ]
    assert [one.token for one in streamed] == [one.token for one in whole]
    assert [one.logprob for one in streamed] == [one.logprob for one in whole]


def test_penalties_and_biases_change_the_answer(client):
    options = {"model": MODEL, "prompt": "x = ", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**options).choices[0].text
    penalised = client.completions.create(**options, frequency_penalty=2.0).choices[0].text
    biased = client.completions.create(**options, logit_bias={"300": 100}).choices[0].text
    assert len({plain, penalised, biased}) == 3


def test_drafted_tokens_are_reported_and_counted(served):
    """The gain of drafts is learned, so the first answers may have none."""
    body = {"prompt": "a = 1\n" * 30, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    headers = {"X-Baton-Timeline": "1"}
    answers = []

    def has_accepted() -> bool:
        answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60)
        answers.append(answer.json())
        return answers[-1]["baton_timeline"]["num_accepted_tokens"] > 0

    poll_until(has_accepted, "drafted tokens are accepted")
    timeline = answers[-1]["baton_timeline"]
    assert timeline["num_drafted_tokens"] >= timeline["num_accepted_tokens"]
    details = answers[-1]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == timeline["num_accepted_tokens"]

    def drafted() -> dict[str, float]:
        return matching(r"baton_draft_tokens_total\{", metrics(served.url))

    poll_until(lambda: sum(drafted().values()) > 0, "the decode worker has told")

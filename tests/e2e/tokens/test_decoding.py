"""Decoding with the whole product: each choice has its seed, and drafts are counted."""

import pytest

from tests.kits.services.served import HTTP, matching, metrics, poll_until

pytestmark = pytest.mark.torch

MODEL = "baton-bundled"


def test_choices_are_those_of_single_requests_with_the_next_seeds(client):
    prompt = "def choices(" + "a, " * 40
    options = {"model": MODEL, "max_tokens": 24, "temperature": 0.8}
    together = client.completions.create(**options, prompt=prompt, n=3, seed=7)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    alone = [client.completions.create(**options, prompt=prompt, seed=7 + i) for i in range(3)]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]
    assert together.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)
    assert together.usage.prompt_tokens == alone[0].usage.prompt_tokens


def test_drafted_tokens_are_reported_and_counted(served):
    """The gain of drafts is learned, so the first answers may have no drafts."""
    body = {"prompt": "a = 1\n" * 30, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
    headers = {"X-Baton-Timeline": "1"}
    answers = []

    def has_accepted() -> bool:
        answer = HTTP.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60)
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

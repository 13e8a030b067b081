"""Completions with several prompts, echoed prompts and scores, through a public client."""

import pytest

pytestmark = pytest.mark.torch

MODEL = "baton-bundled"
PROMPTS = ["import os\n", "def add(a, b):\n", "import os\n"]
GREEDY = {"model": MODEL, "temperature": 0.0, "max_tokens": 8}


def test_a_batch_answers_each_prompt_whole_and_streamed(client):
    batch = client.completions.create(prompt=PROMPTS, n=2, **GREEDY)
    alone = [client.completions.create(prompt=prompt, **GREEDY) for prompt in PROMPTS]
    expected = [answer.choices[0].text for answer in alone for _ in range(2)]
    assert [choice.text for choice in batch.choices] == expected
    assert [choice.index for choice in batch.choices] == list(range(6))
    assert batch.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    texts = [""] * 3
    for chunk in client.completions.create(prompt=PROMPTS, stream=True, **GREEDY):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
    assert texts == expected[::2]


def test_a_prompt_is_scored_alone_as_before_an_answer(client):
    """Evaluation programs request no token, or ignore the only token."""
    options = {"prompt": PROMPTS[:2], "echo": True, "logprobs": 1, "model": MODEL, "temperature": 0}
    alone = client.completions.create(max_tokens=0, **options)
    before = client.completions.create(max_tokens=1, **options)
    assert [choice.text for choice in alone.choices] == PROMPTS[:2]
    assert alone.usage.completion_tokens == 0
    for one, other in zip(alone.choices, before.choices, strict=True):
        assert one.logprobs.tokens == other.logprobs.tokens[:-1]
        assert one.logprobs.token_logprobs[1:] == pytest.approx(
            other.logprobs.token_logprobs[1:-1], abs=1e-3
        )


def test_a_long_answer_comes_in_parts_that_equal_its_stream(client):
    options = GREEDY | {"prompt": PROMPTS[0], "max_tokens": 100, "logprobs": 20, "n": 2}
    options["extra_body"] = {"ignore_eos": True}
    raw = client.completions.with_raw_response.create(**options)
    assert "content-length" not in raw.headers
    whole = [choice.logprobs for choice in raw.parse().choices]
    streamed = [[], []]
    for chunk in client.completions.create(stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert [logprobs.tokens for logprobs in whole] == streamed
    assert [len(logprobs.top_logprobs) for logprobs in whole] == [100, 100]

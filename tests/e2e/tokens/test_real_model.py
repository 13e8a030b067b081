"""The default model of `baton serve` answers a client that sets no sampling options."""

import pytest

from deploy.base.defaults import DEFAULT_MODEL
from tests.kits.models.real import real_model
from tests.kits.services.served import HTTP, serve

pytestmark = pytest.mark.torch


def test_the_default_model_knows_the_capital_of_france_and_ends_by_itself(lent):
    real_model()
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "smollm2-135m-instruct", "messages": [question], "seed": 1}
    options = ("--launcher", "process", "--mixed", "1")
    with serve(*options, model=DEFAULT_MODEL, command=lent) as served:
        reply = HTTP.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    choice = reply["choices"][0]
    assert choice["message"]["content"].startswith("The capital of France is Paris")
    assert choice["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == 37

"""Responses over real processes: conversations of a model, and two gateways that share a store."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from pydantic import BaseModel

from deploy.base.defaults import BUNDLED_MODEL
from deploy.local.deployment import Deployment
from engine.config import Config, GatewayConfig, PoolsConfig
from tests.kits.services.cluster import NURSERY
from tests.kits.services.null_workers import NullWorkers
from tests.kits.services.served import matching, metrics, poll_until

LEASE_S = 10.0
LONG = {"input": "a", "background": True, "max_output_tokens": 2000}
ON = {"ignore_eos": True}


class Point(BaseModel):
    x: int


TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds one.",
    "parameters": Point.model_json_schema(),
    "strict": True,
}


@pytest.mark.torch
def test_a_conversation_with_a_model(client):
    model = client.models.list().data[0].id
    text = "def add(a, b):\n    return a + b\n" * 8
    asked = {"model": model, "temperature": 0, "max_output_tokens": 24}
    first = client.responses.create(input=text, **asked)
    assert first.usage.output_tokens <= 24
    with client.responses.stream(
        input="and then?", previous_response_id=first.id, **asked
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]

    second = client.responses.create(input="and then?", previous_response_id=first.id, **asked)
    assert second.output_text == "".join(deltas)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 2
    assert client.responses.retrieve(first.id).output_text == first.output_text


@pytest.mark.torch
def test_a_model_calls_a_function_and_gets_its_output(client):
    model = client.models.list().data[0].id
    asked = {"model": model, "tools": [TOOL], "max_output_tokens": 128}
    called = client.responses.create(
        input="add 3", tool_choice={"type": "function", "name": "add"}, temperature=0, **asked
    )
    [call] = called.output
    assert (call.type, call.name) == ("function_call", "add")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    if called.status == "completed":
        Point.model_validate_json(call.arguments)
        answered = client.responses.create(
            input=[output], previous_response_id=called.id, tool_choice="none", **asked
        )
        assert answered.status in ("completed", "incomplete")


WRITE = {
    "type": "custom",
    "name": "write",
    "format": {"type": "grammar", "syntax": "regex", "definition": '[abc"]{3}'},
}
FILES = {"type": "namespace", "name": "files", "description": "Files.", "tools": [WRITE]}


@pytest.mark.torch
def test_a_model_calls_a_custom_tool_of_a_namespace(client):
    asked = {"model": client.models.list().data[0].id, "tools": [{"type": "web_search"}, FILES]}
    made = client.responses.with_raw_response.create(
        input="write",
        tool_choice={"type": "custom", "name": "write"},
        max_output_tokens=128,
        **asked,
    )
    assert made.headers["x-baton-ignored"] == "tools[0].web_search"
    [call] = made.parse().output
    assert (call.type, call.namespace, call.name) == ("custom_tool_call", "files", "write")
    assert re.fullmatch('[abc"]{3}', call.input)
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    history = [call.model_dump(exclude_none=True), output]
    answered = client.responses.create(input=history, max_output_tokens=4, **asked)
    assert answered.status in ("completed", "incomplete")


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "run"))
    gateway = GatewayConfig(
        port=0, processes=2, store=str(tmp_path / "store.sqlite"), drain_timeout_s=1
    )
    config = Config(gateway=gateway, pools=PoolsConfig(mixed=1))
    running = Deployment(NullWorkers(NURSERY, pace_s=0.02), model=BUNDLED_MODEL, config=config)
    running.open()
    yield running
    running.close()


def in_flight(url: str) -> dict[str, float]:
    """Returns the number of unfinished requests of each gateway process."""
    found = matching(r"baton_requests_in_flight\{", metrics(url))
    return {name.split('process="')[1][0]: count for name, count in found.items()}


def test_gateways_share_responses_and_outlive_each_other(deployment):
    url = deployment.gateways[0].url

    def client() -> openai.OpenAI:
        """Returns a client with a new connection, so that the kernel chooses a gateway process."""
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    previous = None
    for _ in range(6):
        with client() as each:
            made = each.responses.create(
                input="a", max_output_tokens=2, previous_response_id=previous, extra_body=ON
            )
            previous = made.id
    with client() as each:
        assert len(each.responses.input_items.list(previous, limit=50).data) == 11
        cancelled = each.responses.create(**LONG, extra_body=ON)
    poll_until(lambda: sum(in_flight(url).values()) == 1, "it runs")
    with client() as each:
        assert each.responses.cancel(cancelled.id).status == "cancelled"
    poll_until(lambda: sum(in_flight(url).values()) == 0, "it is cancelled where it runs")

    with client() as each:
        lost = each.responses.create(**LONG, extra_body=ON)
    [process] = [name for name, count in in_flight(url).items() if count]
    os.kill(deployment.gateways[int(process)].pid, signal.SIGKILL)

    def status() -> str:
        try:
            with client() as each:
                return str(each.responses.retrieve(lost.id).status)
        except openai.APIConnectionError:  # the connection belonged to the killed process
            return "not reached"

    poll_until(lambda: status() == "failed", "it has failed", LEASE_S + 5)
    with client() as each:
        assert "process" in each.responses.retrieve(lost.id).error.message
        assert each.responses.retrieve(previous).status == "incomplete"

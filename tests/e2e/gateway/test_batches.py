"""Files and batches with real processes and the `openai` package. All processes are killed once."""

import json
import time
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from bench.processes.deployment import kill_at_once, serving
from deploy.base.defaults import BUNDLED_MODEL
from tests.kits.services.served import matching, metrics, poll_until, serve

pytestmark = pytest.mark.torch

NUM_LINES = 200
IDLE_S = 0.05
LONG = {"ignore_eos": True}
RUNNING = 'baton_batch_requests{state="running"}'
ENDED = ("completed", "failed", "expired", "cancelled")


def line_of(index: int) -> str:
    body = {"model": "baton-bundled", "prompt": f"a{index} =", "max_tokens": 4, "ignore_eos": True}
    line = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line)


def begun(client: openai.OpenAI, number: int) -> str:
    data = "\n".join(line_of(index) for index in range(number)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert client.files.content(file.id).content == data
    assert [each.id for each in client.files.list(purpose="batch")] == [file.id]
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        metadata={"of": "a test"},
    ).id


def texts_of(client: openai.OpenAI, batch: Batch) -> list[str]:
    lines = client.files.content(batch.output_file_id).text.splitlines()
    return [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in lines]


def pauses_do_not_change_answers(client: openai.OpenAI, url: str) -> None:
    """Interrupts sampled answers many times, and compares them with the answers of other
    requests."""
    body = {"model": "baton-bundled", "max_tokens": 300}
    bodies = [{**body, "prompt": f"def f{i}(", "seed": i} for i in range(6)]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | LONG}
        for i, body in enumerate(bodies)
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )

    def has_ended() -> bool:
        return client.batches.retrieve(batch.id).status in ENDED

    while not has_ended():
        poll_until(lambda: metrics(url)[RUNNING] > 0 or has_ended(), "it goes on")
        client.completions.create(model="baton-bundled", prompt="x", max_tokens=1)
    asked = [client.completions.create(**body, extra_body=LONG) for body in bodies]
    plain = [answer.choices[0].text for answer in asked]
    assert texts_of(client, client.batches.retrieve(batch.id)) == plain
    assert sum(matching("baton_batch_pauses_total", metrics(url)).values()) > 0


def test_a_batch_goes_on_after_kill_9_of_every_process(lent, tmp_path: Path) -> None:
    store = {
        "BATON_GATEWAY__STORE": str(tmp_path / "store.sqlite"),
        "BATON_GATEWAY__BATCH_IDLE_S": str(IDLE_S),
    }
    options = {"--mixed": 1, "--threads": 1, "--kv-mib": 64}
    with (
        serving(BUNDLED_MODEL, options, store) as deployment,
        openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none") as client,
    ):
        batch_id = begun(client, NUM_LINES)

        def num_completed() -> int:
            counts = client.batches.retrieve(batch_id).request_counts
            assert counts is not None
            return counts.completed

        poll_until(lambda: num_completed() >= 20, "a part is answered")
        before = num_completed()
        kill_at_once(deployment)
    assert before < NUM_LINES
    options = ("--launcher", "process", "--mixed", "1", "--threads", "1")
    with (
        serve(*options, command=lent, **store) as deployment,
        openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none") as client,
    ):
        assert client.batches.retrieve(batch_id).request_counts.completed >= before
        poll_until(lambda: client.batches.retrieve(batch_id).status in ENDED, "it ends")
        batch = client.batches.retrieve(batch_id)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert batch.metadata == {"of": "a test"}
        lines = [
            json.loads(line)
            for line in client.files.content(batch.output_file_id).text.splitlines()
        ]
        assert [line["custom_id"] for line in lines] == [f"r{i}" for i in range(NUM_LINES)]
        assert {line["response"]["status_code"] for line in lines} == {200}
        assert [each.id for each in client.batches.list(limit=5)] == [batch_id]
        other = client.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
        )
        time.sleep(0.2)
        assert client.batches.cancel(other.id).status == "cancelling"
        poll_until(lambda: client.batches.retrieve(other.id).status == "cancelled", "it ends")
        pauses_do_not_change_answers(client, deployment.url)
        assert client.files.delete(batch.input_file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(batch.input_file_id)

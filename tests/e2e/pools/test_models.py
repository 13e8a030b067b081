"""Two models in one deployment, each served by name. An idle model sleeps; requests wake it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deploy.base.defaults import BUNDLED_DRAFT
from tests.kits.operator import CHANGE_S, baton
from tests.kits.services.served import HTTP, Served, poll_until, serve

pytestmark = pytest.mark.torch

NUM_ASKED = 8
CONFIG = f"""
[worker]
kv_mib = 16

[models.small]
model = "{BUNDLED_DRAFT}"
mixed = 1
idle_s = 2
"""


@pytest.fixture(scope="module")
def served(lent, run_dir, tmp_path_factory) -> Iterator[Served]:
    config = tmp_path_factory.mktemp("models") / "baton.toml"
    config.write_text(CONFIG)
    options = ("--launcher", "process", "--config", str(config))
    with serve(*options, command=lent, BATON_RUN_DIR=str(run_dir)) as running:
        yield running


def ask(url: str, model: str | None) -> dict[str, Any]:
    body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
    body |= {} if model is None else {"model": model}
    answer = HTTP.post(f"{url}/v1/completions", json=body, timeout=CHANGE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_model_answers_by_its_name_and_an_idle_one_wakes(served, admin, run_dir):
    main, small = ask(served.url, None), ask(served.url, "small")
    assert small["model"] == "small"
    assert small["choices"][0]["text"] != main["choices"][0]["text"]
    assert small["system_fingerprint"] != main["system_fingerprint"]

    def is_asleep() -> bool:
        return [v.is_asleep for v in admin.pools().versions if v.name == "small-v1"] == [True]

    def has_workers() -> bool:
        return any(worker.version == "small-v1" for worker in admin.pools().workers)

    poll_until(lambda: is_asleep() and not has_workers(), "small sleeps", CHANGE_S)
    listed = HTTP.get(f"{served.url}/v1/models").json()["data"]
    assert [each["id"] for each in listed] == [main["model"], "small"]
    assert "asleep" in baton(run_dir, "versions").stdout
    with ThreadPoolExecutor(NUM_ASKED) as clients:  # concurrent requests that wait for the model
        answers = list(clients.map(lambda _: ask(served.url, "small"), range(NUM_ASKED)))
    assert {answer["choices"][0]["text"] for answer in answers} == {small["choices"][0]["text"]}
    assert {answer["system_fingerprint"] for answer in answers} == {small["system_fingerprint"]}
    counters = admin.pools().counters
    assert (counters["models put to sleep"], counters["models woken"]) == (1, 1)

"""`baton serve` as a user runs it: the command, HTTP, public clients, and a clean exit."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest

from deploy.base.defaults import BUNDLED_MODEL
from engine.clock import MonotonicClock
from tests.kits.services.served import (
    BATON,
    HTTP,
    START_TIMEOUT_S,
    held,
    matching,
    metrics,
    poll_until,
    services,
)
from tests.kits.services.sockets import beyond_loopback, tree

pytestmark = pytest.mark.torch


def test_stages_of_the_timeline_sum_to_less_than_the_clients_time(served):
    clock = MonotonicClock()
    begin_s = clock.now_s()
    response = HTTP.post(
        f"{served.url}/v1/completions",
        json={"prompt": "def f(", "max_tokens": 2, "ignore_eos": True},
        headers={"X-Baton-Timeline": "1"},
        timeout=30,
    )
    took_s = clock.now_s() - begin_s
    timeline = response.json()["baton_timeline"]
    # These are measured quantities, not stages.
    beside = ("kv_transfer_s", "kv_exposed_s", "prefix_pull_s", "move_pull_s")
    stages = [v for name, v in timeline.items() if name.endswith("_s") and name not in beside]
    assert len(stages) == 7
    assert all(value >= 0 for value in stages)
    assert 0 < sum(stages) < took_s
    assert (timeline["prefill_worker"], timeline["decode_worker"]) == ("worker-0", "worker-1")


def test_metrics_count_every_block_by_state(served):
    def blocks() -> dict[str, float]:
        return matching(r"baton_worker_blocks\{", metrics(served.url))

    workers = ("worker-0", "worker-1")
    poll_until(
        lambda: all(any(f'"{name}"' in series for series in blocks()) for name in workers),
        "both workers have reported their blocks",
    )
    assert sum(blocks().values()) == served.num_blocks


def test_a_client_that_disconnects_frees_everything_at_once(served):
    body = {"prompt": [9] * 300, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as response:
        assert next(response.iter_lines()).startswith("data: ")

    poll_until(lambda: not held(served), lambda: f"nothing is held: {held(served)}")


def test_plain_processes_listen_on_loopback_only(served):
    assert beyond_loopback(served, tree(served.process.pid) | services()) == []


def run_command(
    *arguments: str, program: Sequence[str] = BATON, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*program, *arguments],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        env={**os.environ, "COLUMNS": "200", **environment},
        check=False,
    )


def test_a_missing_model_directory_is_one_clear_line_and_a_bad_exit():
    result = run_command("serve", "/nonexistent", "--launcher", "process")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines() == ["error: /nonexistent: no such model directory"]


def test_a_start_that_fails_is_one_clear_line(lent, tmp_path):
    model = tmp_path / "not [here]"
    shutil.copytree(BUNDLED_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "nothing"}))
    command = ("serve", str(model), "--launcher", "process", "--port", "0")
    environment = {"BATON_ADMIN__NAME": "fails", "BATON_RUN_DIR": str(tmp_path)}
    result = run_command(*command, program=lent, **environment)
    assert result.returncode == 1
    [line] = result.stderr.strip().splitlines()
    assert re.match(r"error: worker-[01]: .*model type `nothing`", line)
    assert str(model) in line  # the line has no markup
    # A failed start leaves no stored orders for the next start.
    assert not list(tmp_path.glob("*.orders"))

"""`baton serve` as a user runs it: the command, HTTP, public clients, and a clean end."""

import os
import re
import subprocess
import sys

import pytest

from engine.clock import MonotonicClock
from kvtransfer.transports.nixl_agent import PACKAGES
from tests.kits.services.served import (
    HTTP,
    START_TIMEOUT_S,
    held,
    marked_pids,
    matching,
    metrics,
    poll_until,
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
    # Measures, not stages.
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
    pids = tree(served.process.pid) | set(marked_pids(served.mark))
    assert beyond_loopback(served, pids) == []


def run_command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "deploy.commands.main", *arguments],
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


def test_nixl_where_it_is_not_installed_is_one_clear_line(tmp_path):
    for package in PACKAGES:
        (tmp_path / f"{package}.py").write_text("raise ImportError('not [here]')")
    arguments = (
        "serve",
        "bundled",
        "--launcher",
        "process",
        "--kv-transport",
        "nixl",
        "--port",
        "0",
    )
    folder = {"PYTHONPATH": str(tmp_path), "BATON_RUN_DIR": str(tmp_path)}
    result = run_command(*arguments, BATON_ADMIN__NAME="fails", **folder)
    assert result.returncode == 1
    [line] = result.stderr.strip().splitlines()
    assert re.match(r"error: worker-[01]: .*\bNIXL\b", line)
    assert all(f"{package}: not [here]" in line for package in PACKAGES)  # no markup
    # A start that fails leaves no orders for the next one.
    assert not list(tmp_path.glob("*.orders"))

"""`baton serve` as a user runs it: the command, HTTP, public clients, and a clean end."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from engine.clock import MonotonicClock

pytestmark = pytest.mark.torch

START_TIMEOUT_S = 110.0
STOP_TIMEOUT_S = 45.0
MARK = "BATON_TEST_MARK"


@dataclass(frozen=True, slots=True)
class Served:
    """A running `baton serve`."""

    url: str
    process: "subprocess.Popen[bytes]"
    mark: str


def marked_processes(mark: str) -> list[str]:
    """Command lines of all live processes that descend from a command with this mark."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone, or not ours
            if f"{MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                found.append((environ.parent / "cmdline").read_bytes().decode(errors="replace"))
    return [line for line in found if line]


def poll_until(holds, what: str, deadline_s: float) -> None:
    clock = MonotonicClock()
    end_s = clock.now_s() + deadline_s
    while not holds():
        assert clock.now_s() < end_s, f"did not happen in {deadline_s} s: {what}"
        select.select([], [], [], 0.05)


@contextmanager
def serve(*arguments: str) -> Iterator[Served]:
    """Runs `baton serve`; interrupts it at the end and looks for processes that it left."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "serve", "--port", "0", "--kv-mib", "64", *arguments],
        stderr=subprocess.PIPE,
        env={**os.environ, MARK: mark, "COLUMNS": "200"},
        start_new_session=True,
    )
    try:
        yield Served(_url(process), process, mark)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0
        poll_until(lambda: not marked_processes(mark), f"no process is left of {mark}", 20)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _url(process) -> str:
    """Reads what the command prints until the URL comes."""
    clock = MonotonicClock()
    end_s = clock.now_s() + START_TIMEOUT_S
    printed = b""
    while (found := re.search(rb"serving \S+ at (http://\S+)", printed)) is None:
        ready, _, _ = select.select([process.stderr], [], [], max(0.0, end_s - clock.now_s()))
        piece = os.read(process.stderr.fileno(), 4096) if ready else b""
        assert piece, f"baton serve did not start: {printed.decode()}"
        printed += piece
    return found[1].decode()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--launcher", "process") as running:
        yield running


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as c:
        yield c


def test_the_openai_client_lists_the_model(client):
    assert [model.id for model in client.models.list()] == ["baton-bundled"]


def test_the_openai_client_gets_a_chat_answer_whole_and_streamed_the_same(client):
    messages = [{"role": "user", "content": "Write a Python function `add`: Add two numbers."}]
    options = {"model": "baton-bundled", "messages": messages, "max_tokens": 40, "seed": 11}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == 40
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_the_openai_client_gets_a_completion_that_ends_at_a_stop_string(client):
    options = {"model": "baton-bundled", "prompt": "import os\n", "temperature": 0}
    free = client.completions.create(**options, max_tokens=48).choices[0].text
    middle = free[len(free) // 2 :][:4]
    stopped = client.completions.create(**options, max_tokens=48, stop=[middle]).choices[0]
    assert stopped.text == free[: free.index(middle)]
    assert stopped.finish_reason == "stop"


def test_the_openai_client_sees_typed_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="baton-bundled", prompt="")
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model="baton-bundled", prompt=[7] * 5000)


def test_stages_of_the_timeline_sum_to_less_than_the_clients_time(served):
    clock = MonotonicClock()
    begin_s = clock.now_s()
    response = httpx.post(
        f"{served.url}/v1/completions",
        json={"prompt": "def f(", "max_tokens": 2, "ignore_eos": True},
        headers={"X-Baton-Timeline": "1"},
        timeout=30,
    )
    took_s = clock.now_s() - begin_s
    timeline = response.json()["baton_timeline"]
    beside = ("kv_transfer_s", "kv_exposed_s")  # measures, not stages
    stages = [v for name, v in timeline.items() if name.endswith("_s") and name not in beside]
    assert len(stages) == 7
    assert all(value >= 0 for value in stages)
    assert 0 < sum(stages) < took_s
    assert (timeline["prefill_worker"], timeline["decode_worker"]) == ("prefill-0", "decode-0")


def test_metrics_say_where_every_block_is(served):
    def blocks() -> float:
        lines = httpx.get(f"{served.url}/metrics", timeout=10).text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("baton_worker_blocks{"))

    poll_until(lambda: blocks() > 0, "workers have reported their blocks", 10)
    assert blocks() == 2 * (64 * 2**20 // 98_304)


def test_a_client_that_disconnects_frees_everything_at_once(served):
    body = {"prompt": [9] * 300, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=30) as response:
        assert next(response.iter_lines()).startswith("data: ")

    def held() -> float:
        lines = httpx.get(f"{served.url}/metrics", timeout=10).text.splitlines()
        held = re.compile(r'baton_worker_blocks\{.*state="(owned|leased|in_flight)"')
        return sum(float(x.split()[-1]) for x in lines if held.match(x))

    poll_until(lambda: held() == 0, "no block is held", 10)


def test_ray_serves_and_leaves_no_process_behind():
    pytest.importorskip("ray", reason="Ray is not installed")
    with serve("--launcher", "ray") as running:
        response = httpx.post(
            f"{running.url}/v1/completions",
            json={"prompt": "def f(", "max_tokens": 8},
            headers={"X-Baton-Timeline": "1"},
            timeout=60,
        )
        assert response.status_code == 200
        assert response.json()["baton_timeline"]["decode_worker"] == "decode-0"
        assert len(marked_processes(running.mark)) > 3


def run_command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )


def test_a_missing_model_directory_is_one_clear_line_and_a_bad_exit():
    result = run_command("serve", "/nonexistent", "--launcher", "process")
    assert result.returncode == 1
    assert result.stderr.strip().splitlines() == ["error: /nonexistent: no such model directory"]


def test_a_model_directory_that_lacks_a_file_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    result = run_command("serve", str(tmp_path), "--launcher", "process")
    assert result.returncode == 1
    assert "tokenizer.json" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_version_is_printed():
    assert run_command("version").stdout.startswith("baton 0.")

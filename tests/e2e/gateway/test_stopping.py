"""What happens to answers and processes when a deployment stops."""

import json
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from engine.clock import MonotonicClock
from tests.kits.services.null_serve import LENT
from tests.kits.services.served import (
    HTTP,
    MARK,
    START_TIMEOUT_S,
    WAIT_S,
    marked_processes,
    poll_until,
    services,
)

NUM_STREAMS = 8
FOR_EVER = 4000  # tokens: an answer that does not finish during the test


@dataclass(slots=True)
class Command:
    """A running `baton serve` command and its output so far."""

    process: "subprocess.Popen[bytes]"
    mark: str
    others: set[int]  # pids of services of other tests
    printed: bytes = b""
    url: str = ""
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2 * NUM_STREAMS))

    def read_until(self, pattern: bytes) -> "re.Match[bytes]":
        clock = MonotonicClock()
        end_s = clock.now_s() + START_TIMEOUT_S
        while (found := re.search(pattern, self.printed)) is None:
            ready, _, _ = select.select([self.process.stderr], [], [], end_s - clock.now_s())
            piece = os.read(self.process.stderr.fileno(), 4096) if ready else b""
            assert piece, f"{pattern!r} was not printed: {self.printed.decode()}"
            self.printed += piece
        return found

    def ended(self, timeout_s: float = WAIT_S) -> tuple[int, float, str]:
        """Waits for the exit.

        Returns status, seconds and output, and asserts that no process is left.
        """
        clock = MonotonicClock()
        begin_s = clock.now_s()
        status = self.process.wait(timeout_s)
        took_s = clock.now_s() - begin_s
        poll_until(lambda: not marked_processes(self.mark), "no process is left")
        poll_until(lambda: services() <= self.others, "no service is left")
        self.printed += self.process.stderr.read()
        text = self.printed.decode()
        assert "Traceback" not in text, text
        return status, took_s, text

    def ask(self, max_tokens: int) -> "Future[str]":
        """Sends a request without streaming, and returns the text of the answer."""
        body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}
        url = f"{self.url}/v1/completions"
        return self.threads.submit(lambda: HTTP.post(url, json=body, timeout=WAIT_S).text)

    def streams(self, max_tokens: int) -> "list[Future[str]]":
        """Starts several streams and waits until each has delivered an event."""
        begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        asked = [self.threads.submit(self._read, max_tokens, begun) for _ in range(NUM_STREAMS)]
        for _ in asked:
            begun.get(timeout=WAIT_S)
        return asked

    def _read(self, max_tokens: int, begun: "queue.SimpleQueue[None]") -> str:
        """Reads a stream to its end and returns its text; reports the first event."""
        body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        url = f"{self.url}/v1/completions"
        with HTTP.stream("POST", url, json=body, timeout=WAIT_S) as answer:
            pieces = answer.iter_text()
            first = next(pieces)
            begun.put(None)
            return first + "".join(pieces)

    def listens(self) -> bool:
        url = httpx.URL(self.url)
        try:
            socket.create_connection((url.host, url.port), timeout=5).close()
        except ConnectionRefusedError:
            return False
        return True

    def num_running(self) -> float:
        page = HTTP.get(f"{self.url}/metrics", timeout=10).text
        return float(re.search(r"^baton_requests_in_flight (\S+)", page, re.MULTILINE)[1])


@contextmanager
def started(*command: str, **environment: str) -> Iterator[Command]:
    mark, before = uuid.uuid4().hex, services()
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stderr=subprocess.PIPE,
        env={**os.environ, MARK: mark, "COLUMNS": "200", **environment},
        start_new_session=True,
    )
    running = Command(process, mark, before)
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        running.threads.shutdown()


@contextmanager
def serving(lent: Sequence[str] = (), *, drain_s: float) -> Iterator[Command]:
    """Starts `baton serve` with its own nursery, so that its output has the gateways' lines too."""
    command = ("tests.kits.services.null_serve", str(drain_s), "0.01")
    with started(*command, **({LENT: lent[-1]} if lent else {})) as running:
        running.url = running.read_until(rb"serving \S+ at (http://\S+)")[1].decode()
        yield running


def error_code(answer: str) -> str:
    """Returns the error code in the last event of a stream, or in an answer without streaming."""
    return json.loads(answer.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"]


def test_begun_answers_are_completed_and_new_requests_are_refused(lent):
    with serving(lent, drain_s=60) as running:
        answers = running.streams(300)
        running.process.send_signal(signal.SIGTERM)
        running.read_until(rb"draining: \d+ answers running, up to 60 s; Ctrl-C again to stop now")
        poll_until(lambda: not running.listens(), "it stops listening")
        assert all(answer.result(WAIT_S).endswith("data: [DONE]\n\n") for answer in answers)
        status, _, text = running.ended()
        assert status == 0
        assert "stopped" in text


def test_an_answer_longer_than_the_drain_ends_with_an_error():
    with serving(drain_s=0.5) as running:
        answers = [*running.streams(FOR_EVER), running.ask(FOR_EVER)]
        poll_until(lambda: running.num_running() == NUM_STREAMS + 1, "the last has begun")
        running.process.send_signal(signal.SIGTERM)
        assert {error_code(answer.result(WAIT_S)) for answer in answers} == {"server_shutdown"}
        status, _, text = running.ended()
        assert status == 0
        assert f"{NUM_STREAMS + 1} requests are ended before they are complete" in text


def test_a_second_signal_ends_at_once(lent):
    with serving(lent, drain_s=60) as running:
        answers = running.streams(FOR_EVER)
        running.process.send_signal(signal.SIGINT)
        running.read_until(b"draining")
        running.process.send_signal(signal.SIGINT)
        status, took_s, _ = running.ended()
        assert {error_code(answer.result(WAIT_S)) for answer in answers} == {"server_shutdown"}
        assert status == 128 + signal.SIGINT
        assert took_s < 5


def test_when_the_command_is_killed_answers_end_at_once():
    with serving(drain_s=60) as running:
        answers = running.streams(FOR_EVER)
        running.process.kill()
        assert {error_code(answer.result(WAIT_S)) for answer in answers} == {"server_shutdown"}
        status, _, text = running.ended()
        assert status == -signal.SIGKILL
        assert "the controller died: answers that run are ended" in text


@pytest.mark.torch
@pytest.mark.parametrize(
    "num_processes",
    [2, pytest.param(3, marks=pytest.mark.long)],
    ids=["while the nursery imports", "while workers start"],
)
def test_a_signal_before_it_serves_leaves_nothing(num_processes):
    with started(
        "deploy.commands.main", "serve", "bundled", "--launcher", "process", "--port", "0"
    ) as running:
        poll_until(
            lambda: len(marked_processes(running.mark)) >= num_processes, "it starts some", 30
        )
        running.process.send_signal(signal.SIGTERM)
        status, took_s, text = running.ended()
        assert status == 128 + signal.SIGTERM
        assert "stopped before it served" in text
        assert took_s < 15

"""What a handoff costs a request, asked of `baton serve` as a user runs it.

One prefill worker and one decode worker, each with one thread, and prompts that arrive one at a
time, so that what is seen is the path itself and no queue. Prompts have the same length, and no two
begin alike: every block of each is computed and moved. The figures are the gateway's timelines.
"""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import uvloop

from bench.kv_plan import HandoffPlan
from bench.kv_results import Handoffs
from bench.plan import Ask, Load, Plan, Target
from bench.serve import measure as measure_server
from bench.shapes import cached_checkpoint
from engine.clock import MonotonicClock
from engine.errors import BatonError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 60.0
OUTPUT_LEN = 4  # the second token ends the handoff
KV_MIB = 512
SERVING = re.compile(r"serving \S+ at (http://\S+)")
NUM_LAST_LINES = 6


class ServerFailed(BatonError):
    """`baton serve` did not start; the message holds the last that it said."""


def measure(plan: HandoffPlan, transport: str, *, seed: int) -> Handoffs:
    """Timelines of all requests over one transport. Raises BatonError where there are none."""
    checkpoint = cached_checkpoint(plan.shape, seed)
    with serving(checkpoint, transport) as url:
        asked = Plan(
            target=Target(url, timeout_s=REQUEST_TIMEOUT_S),
            load=Load(
                rate_per_s=float("inf"),
                num_requests=plan.num_requests,
                concurrency_limit=1,
                num_warmup=1,
                num_repeats=plan.num_repeats,
            ),
            ask=Ask(plan.prompt_len, OUTPUT_LEN, tokenizer_dir=checkpoint),
            seed=seed,
        )
        runs = uvloop.run(measure_server(asked)).runs
    return Handoffs(
        transport=transport,
        repetitions=tuple(
            tuple(answer.timeline_s for answer in run.answers) for run in runs if run.answers
        ),
        num_failed=sum(len(run.failures) for run in runs),
    )


@contextmanager
def serving(checkpoint: Path, transport: str) -> Iterator[str]:
    """Runs `baton serve`; yields its URL. On leaving, all its processes are gone."""
    options = {
        "--launcher": "process",
        "--prefill": 1,
        "--decode": 1,
        "--threads": 1,
        "--kv-mib": KV_MIB,
        "--kv-transport": transport,
        "--port": 0,
    }
    command = [sys.executable, "-m", "deploy.cli", "serve", str(checkpoint)]
    process = subprocess.Popen(
        [*command, *(str(text) for pair in options.items() for text in pair)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "COLUMNS": "200"},  # its URL stays in one line
        start_new_session=True,
    )
    said: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: no more will come
    reader = threading.Thread(target=_read, args=(process.stderr, said), daemon=True)
    reader.start()
    try:
        yield _url(said)
    finally:
        _end(process)
        reader.join(STOP_TIMEOUT_S)
        if not reader.is_alive():  # else closing would wait for it
            process.stderr.close()  # type: ignore[union-attr]


def _read(pipe: IO[str], said: "queue.SimpleQueue[str | None]") -> None:
    for line in pipe:  # to the end, or the server would wait for somebody who reads
        said.put(line)
    said.put(None)


def _url(said: "queue.SimpleQueue[str | None]") -> str:
    """Waits for the line in which the server names its URL. Raises ServerFailed."""
    clock = MonotonicClock()
    end_s = clock.now_s() + START_TIMEOUT_S
    last: deque[str] = deque(maxlen=NUM_LAST_LINES)
    while True:
        try:
            line = said.get(timeout=max(0.0, end_s - clock.now_s()))
        except queue.Empty:
            raise ServerFailed(f"baton serve did not start in {START_TIMEOUT_S:g} s") from None
        if line is None:
            raise ServerFailed(f"baton serve did not start: {' '.join(' '.join(last).split())}")
        last.append(line)
        if (found := SERVING.search(line)) is not None:
            return found[1]


def _end(process: "subprocess.Popen[str]") -> None:
    """Asks it to end, then ends its session by force."""
    with suppress(ProcessLookupError, subprocess.TimeoutExpired):
        process.send_signal(signal.SIGINT)
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

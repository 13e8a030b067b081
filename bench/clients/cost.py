"""Processor time of a harness: all of it, and its share of the machine while it loads the server.

A thread reads the counters of the harness's session several times a second. The server says when
the first request came and when the last answer ended, on the clock that all processes share. So a
harness's start, which takes seconds and depends on its imports, is told apart from the load.
"""

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.clients.results import ClientFailed
from bench.common.background import Reading, read
from bench.processes.child import ChildProcess
from engine.clock import MonotonicClock

SAMPLE_EVERY_S = 0.25
TIMEOUT_S = 300.0
NUM_LAST_LINES = 4


@dataclass(frozen=True, slots=True)
class CpuSample:
    """The counters at one moment."""

    at_s: float
    reading: Reading


@dataclass(frozen=True, slots=True)
class HarnessCost:
    """What one run of a harness cost."""

    cpu_s: float  # of all its processes, from their start to their end
    samples: tuple[CpuSample, ...]


def share_within(samples: Sequence[CpuSample], begin_s: float, end_s: float) -> float:
    """The harness's share of all cores between these times. Raises ClientFailed."""
    inside = [one.reading for one in samples if begin_s <= one.at_s <= end_s]
    if len(inside) < 2 or inside[-1].total == inside[0].total:
        raise ClientFailed("the load was too short for its cost to be measured")
    return (inside[-1].own - inside[0].own) / (inside[-1].total - inside[0].total)


def run_harness(command: Sequence[str], environment: Mapping[str, str]) -> HarnessCost:
    """Runs a harness to its end, and ends all that it leaves behind. Raises ClientFailed."""
    name = Path(command[0]).name
    last: deque[str] = deque(maxlen=NUM_LAST_LINES)

    def keep(line: str | None) -> None:
        if line and line.strip():
            last.append(line.strip())

    before = os.times()
    child = ChildProcess(
        command, on_stdout=keep, on_stderr=keep, has_stdin=False, environment=environment
    )
    samples: list[CpuSample] = []
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=[child.pid, samples, ended], daemon=True)
    watch.start()
    try:
        if not child.ends_within(TIMEOUT_S):
            raise ClientFailed(f"{name} did not end in {TIMEOUT_S:g} s")
    finally:
        ended.set()
        child.kill()
        watch.join()
    if child.process.returncode:
        raise ClientFailed(f"{name}: {' '.join(last)}")
    after = os.times()
    spent_s = after.children_user + after.children_system
    return HarnessCost(spent_s - before.children_user - before.children_system, tuple(samples))


def _watch(session: int, samples: list[CpuSample], ended: threading.Event) -> None:
    clock = MonotonicClock()
    while not ended.wait(SAMPLE_EVERY_S):
        at_s, reading = clock.now_s(), read([session])
        if reading is not None:
            samples.append(CpuSample(at_s, reading))

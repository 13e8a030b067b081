"""A signal ends a benchmark, and also the processes that the benchmark started."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.serve.processes import children_end_early

STUB = """
import sys, threading
print("serving stub at http://127.0.0.1:9", file=sys.stderr, flush=True)
threading.Event().wait(60)
"""
BENCH = """
import threading, typer
from pathlib import Path
from bench.cli import app
from bench.common.command import printed_errors
from bench.processes import deployment as serving

serving.BATON = "stub_of_serve"

@app.command()
def held() -> None:
    with printed_errors(), serving.serving(Path("none"), {}) as served:
        print(served.pid, flush=True)
        threading.Event().wait(60)

app(["held"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_that_a_benchmark_started(tmp_path, number):
    (tmp_path / "stub_of_serve.py").write_text(STUB)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    bench = subprocess.Popen(
        [sys.executable, "-c", BENCH],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # like a shell's `&`
    )
    assert bench.stdout is not None
    server = int(bench.stdout.readline())
    assert Path(f"/proc/{server}").exists()
    bench.send_signal(number)
    _, said = bench.communicate(timeout=30)
    assert not Path(f"/proc/{server}").exists()
    assert (bench.returncode, said) == (128 + number, f"ended by {number.name}\n")


def test_client_processes_end_with_an_interrupted_load():
    child = multiprocessing.get_context("spawn").Process(target=signal.pause)
    child.start()
    with pytest.raises(KeyboardInterrupt), children_end_early():
        raise KeyboardInterrupt
    child.join(10)
    assert child.exitcode == -signal.SIGTERM

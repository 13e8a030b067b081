"""A service that gets a stop signal during its start exits at once, with all its children."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import msgspec
import pytest

from deploy.base.spec import WorkerSpec
from engine.config import DeviceKind, WorkerConfig
from engine.devices.settings import resolve
from engine.messages import Role, WorkerId
from tests.kits.checkpoints import tiny_checkpoint
from tests.kits.services.cluster import NURSERY
from tests.kits.services.processes import descendants_of, ended
from tests.kits.services.served import START_TIMEOUT_S, poll_until

LEAVES_WITHIN_S = 10.0  # seconds, although the model never finishes loading


@contextlib.contextmanager
def running(command):
    """Runs a program, and kills it at the end if it still runs."""
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.torch
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_worker_that_loads_its_model_leaves_at_once_with_its_ranks(
    tmp_path, tmp_path_factory, ranks
):
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(tmp_path_factory, "llama"), model)
    endless = model / "config.json"
    endless.unlink()
    os.mkfifo(endless)
    config = resolve(WorkerConfig(kv_mib=16, tp=ranks), DeviceKind.CPU)
    spec = WorkerSpec(WorkerId("w"), Role.MIXED, str(model), config, "token", threads=1)
    child = NURSERY.fork("worker")
    try:
        child.await_start(START_TIMEOUT_S)
        child.stdin.write(msgspec.json.encode(spec) + b"\n")
        child.stdin.flush()
        writers: list[int] = []
        poll_until(lambda: _reads(endless, writers), "the worker loads its model")
        started = descendants_of(child.pid)
        assert len(started) == ranks - 1
        child.terminate()
        child.wait(LEAVES_WITHIN_S)
        assert child.exit_status == 0
    finally:
        child.kill()
        child.close()
    assert all(ended(pid) for pid in started)
    os.close(writers[0])


def _reads(fifo, writers):
    """Returns True if a process reads the FIFO, whose data then never ends."""
    with contextlib.suppress(OSError):
        writers.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    return bool(writers)


def test_processes_that_were_started_while_it_starts_are_killed(tmp_path):
    there = tmp_path / "there"
    program = f"""
        import signal, subprocess, threading
        from deploy.local.leaving import leave
        signal.signal(signal.SIGTERM, leave)
        command = ["sh", "-c", "sleep 600 & echo > {there}; wait"]
        threading.Thread(target=subprocess.run, args=(command,)).start()
    """
    with running([sys.executable, "-c", textwrap.dedent(program)]) as process:
        poll_until(there.exists, "the program runs")
        started = descendants_of(process.pid)
        assert len(started) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(LEAVES_WITHIN_S) == 0
    assert all(ended(pid) for pid in started)

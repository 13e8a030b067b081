"""Runs `baton serve` in its own process, for tests that use it over HTTP."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from engine.clock import MonotonicClock
from tests.kits.services.processes import descendants_of

# Long deadlines: waits end with their event, and other tests may use the same cores.
START_TIMEOUT_S = 250.0
STOP_TIMEOUT_S = 120.0
WAIT_S = 120.0  # deadline of quick server actions
STEADY_S = 2.0  # workers report once a second
POLL_S = 0.1
MARK = "BATON_TEST_MARK"
BATON = (sys.executable, "-m", "deploy.commands.main")
KV_MIB = 64  # MiB for each worker
HANDS_OVER = {"BATON_POOLS__FLUID": "false"}  # every prompt is handed over
# A single client, because a new client loads certificates. Each request has a new connection.
HTTP = httpx.Client(headers={"connection": "close"}, timeout=60, trust_env=False)


@dataclass(slots=True)
class Served:
    """A running `baton serve`."""

    url: str
    process: "subprocess.Popen[bytes]"
    mark: str
    num_blocks: int  # blocks of all workers; a test must update the number when workers join
    printed: str = ""  # output before the server was ready
    grpc: str = ""  # address of the gRPC server, if there is one
    run_dir: str = ""  # run folder, if the test chose it


def marked_pids(mark: str) -> list[int]:
    """Returns all live processes that descend from a command with this mark."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has exited, or belongs to another user
            if f"{MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def command_line(pid: int) -> str:
    """Returns the command line of a process, or "" if the process has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def marked_processes(mark: str) -> list[str]:
    """Returns command lines of all live processes that descend from a command with this mark."""
    return [line for line in map(command_line, marked_pids(mark)) if line]


def services() -> set[int]:
    """Returns the pids of services that descend from this process, also through a lent nursery."""
    return {pid for pid in descendants_of(os.getpid()) if _name(pid).startswith("baton-")}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""  # the process has exited


def poll_until(
    holds: Callable[[], bool],
    what: str | Callable[[], str],
    deadline_s: float = WAIT_S,
    every_s: float = POLL_S,
) -> None:
    clock = MonotonicClock()
    end_s = clock.now_s() + deadline_s
    while not holds():
        late = clock.now_s() >= end_s
        assert not late, f"not in {deadline_s} s: {what if isinstance(what, str) else what()}"
        select.select([], [], [], every_s)


def metrics(url: str) -> dict[str, float]:
    """Returns every metric sample, by name and labels as written on the page."""
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    samples = (line.rsplit(maxsplit=1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def matching(pattern: str, samples: dict[str, float]) -> dict[str, float]:
    """Returns the samples whose names begin with the prefix."""
    return {name: value for name, value in samples.items() if re.match(pattern, name)}


def held(served: Served) -> dict[str, float]:
    """Returns the metrics that show blocks held for a request, or missing blocks."""
    found = metrics(served.url)
    busy = matching(r'baton_worker_blocks\{.*state="(owned|leased|in_flight)"', found)
    busy |= matching(r"baton_worker_(open_leases|waiting_seqs|running_seqs)\{", found)
    idle = matching(r'baton_worker_blocks\{.*state="(free|cached)"', found)
    wrong = {name: value for name, value in busy.items() if value}
    if sum(idle.values()) != served.num_blocks:
        wrong |= idle | {"workers": len(matching("baton_worker_open_leases", found))}
    return wrong


def conserved(served: Served) -> None:
    """Waits until every block is free or cached, and remains so."""
    clock = MonotonicClock()
    since_s = clock.now_s()

    def is_steady() -> bool:
        nonlocal since_s
        if held(served):
            since_s = clock.now_s()
        return clock.now_s() - since_s > STEADY_S

    poll_until(is_steady, lambda: f"nothing is held: {held(served)}", every_s=STEADY_S / 4)


@contextmanager
def serve(
    *arguments: str,
    model: str = "bundled",
    kv_mib: int | None = KV_MIB,
    command: Sequence[str] = BATON,
    **environment: str,
) -> Iterator[Served]:
    """Runs `baton serve` with two workers and more `environment`; interrupts it at the end.

    Asserts that the workers hold no request at the end, and that no process is left afterwards.
    """
    mark, before = uuid.uuid4().hex, services()
    options = ["--port", "0"] if kv_mib is None else ["--port", "0", "--kv-mib", str(kv_mib)]
    process = subprocess.Popen(
        [*command, "serve", model, *options, *arguments],
        stderr=subprocess.PIPE,
        env={**os.environ, MARK: mark, "COLUMNS": "200", **environment},
        start_new_session=True,
    )
    try:
        served = _served(process, mark)
        served.run_dir = environment.get("BATON_RUN_DIR", "")
        yield served
        conserved(served)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0
        poll_until(lambda: not marked_processes(mark), f"no process is left of {mark}")
        poll_until(lambda: services() <= before, "no service is left")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _served(process, mark: str) -> Served:
    """Reads the command's output up to the URL."""
    clock = MonotonicClock()
    end_s = clock.now_s() + START_TIMEOUT_S
    printed = b""
    while (found := re.search(rb"serving \S+ at (http://[^\s\"]+)", printed)) is None:
        ready, _, _ = select.select([process.stderr], [], [], max(0.0, end_s - clock.now_s()))
        piece = os.read(process.stderr.fileno(), 4096) if ready else b""
        assert piece, f"baton serve did not start: {printed.decode()}"
        printed += piece
    num_blocks = sum(map(int, re.findall(rb"(\d+) KV blocks", printed)))
    grpc = re.search(rb"serving gRPC at ([^\s\"]+)", printed)
    address = "" if grpc is None else grpc[1].decode()
    return Served(found[1].decode(), process, mark, num_blocks, printed.decode(), address)

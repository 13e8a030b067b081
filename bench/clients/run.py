"""The shell of `bench clients`: one server, and harnesses that load it in turns."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from bench.clients.cost import run_harness, share_within
from bench.clients.harnesses import LoadHarness
from bench.clients.plan import ClientLoop, ClientsPlan
from bench.clients.results import ClientFailed, Told, with_cost
from bench.common.options import PeerProgram
from bench.common.progress import Say

SERVER = "bench.clients.server"
ASK_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
TAIL = 300  # characters of an error that are told


class _Address(msgspec.Struct):
    port: int


def measure(
    plan: ClientsPlan, harnesses: Sequence[LoadHarness], num_repeats: int, say: Say
) -> Mapping[str, Mapping[ClientLoop, Sequence[Told]]]:
    """The figures of all repetitions, by harness and load. Raises ClientFailed.

    Harnesses take turns at one server, and each repetition begins with another one.
    """
    found: dict[str, dict[ClientLoop, list[Told]]] = {
        one.name: {loop: [] for loop in ClientLoop} for one in harnesses
    }
    with _serving(plan) as url:
        for repeat in range(num_repeats):
            first = repeat % len(harnesses)
            for loop in ClientLoop:
                for harness in (*harnesses[first:], *harnesses[:first]):
                    say(f"{repeat + 1} of {num_repeats}: {harness.name}, {loop} loop")
                    found[harness.name][loop].append(_measured(plan, harness, loop, url))
    return found


def version_of(peer: PeerProgram) -> str:
    """The version that the peer's Python has. Raises ClientFailed."""
    code = f"from importlib.metadata import version; print(version({peer.name!r}))"
    done = subprocess.run(
        [str(peer.python), "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise ClientFailed(f"{peer.name}: {done.stderr[-TAIL:]}")
    return done.stdout.strip()


def _measured(plan: ClientsPlan, harness: LoadHarness, loop: ClientLoop, url: str) -> Told:
    """One run of one harness."""
    with TemporaryDirectory() as folder:
        _window(url)  # forgets the one before
        cost = run_harness(harness.command(loop, url, Path(folder)), harness.environment)
        try:
            told = harness.told(Path(folder))
        except OSError as error:
            raise ClientFailed(f"{harness.name} wrote no report: {error}") from error
    share = share_within(cost.samples, *_window(url))
    return with_cost(told, cpu_s=cost.cpu_s, share=share)


def _window(url: str) -> tuple[float, float]:
    """When the load since the last call began and ended; 0 and 0 without any."""
    with urllib.request.urlopen(f"{url}/window", timeout=ASK_TIMEOUT_S) as response:
        begin_s, end_s = msgspec.json.decode(response.read(), type=list[float]) or (0.0, 0.0)
    return begin_s, end_s


@contextmanager
def _serving(plan: ClientsPlan) -> Iterator[str]:
    """Runs the server in a process of its own. It ends with its standard input."""
    command = [sys.executable, "-m", SERVER, str(plan.ttft_ms), str(plan.itl_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ClientFailed("the server of known latencies did not start")
            yield f"http://127.0.0.1:{msgspec.json.decode(line, type=_Address).port}"
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()

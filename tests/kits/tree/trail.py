"""Counts the code that one streamed chat enters. `python -m tests.kits.tree.trail` prints files,
functions and calls of each process, by folder.

Every process of a deployment gets a profile hook (`sitecustomize`, found through PYTHONPATH). One
signal starts a recording, and the next signal writes it. The first chats warm the deployment up.
Calls of an idle deployment are recorded too and subtracted. Calls into compiled code are not seen.
"""

import json
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.kits.services.served import Served, marked_pids, poll_until, serve

SIGNAL = signal.SIGRTMIN + 5
IDLE_S = 2.0  # two reports of each worker
TREE = Path(__file__).parents[3]
HOOK = f"""
import collections, json, os, signal, sys, threading
tree, folder = os.environ["TRAIL_TREE"], os.environ["TRAIL_FOLDER"]
calls, is_on, num_flips = collections.Counter(), False, 0
def hook(frame, event, _):
    if event == "call" and is_on:
        code = frame.f_code
        if code.co_filename.startswith(tree) and "/.venv" not in code.co_filename:
            calls[code.co_filename[len(tree):] + ":" + code.co_qualname] += 1
def flip(*_):
    global is_on, num_flips
    is_on, num_flips = not is_on, num_flips + 1
    path = f"{{folder}}/{{os.getpid()}}.{{num_flips}}"
    with open(path + ".new", "w") as file:
        json.dump(calls, file)
    os.rename(path + ".new", path)
    calls.clear()
signal.signal({int(SIGNAL)}, flip)
threading.setprofile(hook)
sys.setprofile(hook)
"""


@dataclass(frozen=True, slots=True)
class Trail:
    """The calls of one process for a request, counted by `file:function`."""

    process: str
    calls: Mapping[str, int]

    @property
    def files(self) -> set[str]:
        """Returns the files of the tree that were entered."""
        return {name.partition(":")[0] for name in self.calls}


def of_one_chat() -> list[Trail]:
    """Returns the trails of a warm streamed chat of 8 tokens, in a gateway and two workers.

    The prefill and the decode worker are processes and not fluid, so the prompt is handed over.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        environment = {
            "PYTHONPATH": os.pathsep.join((name, str(TREE))),
            "TRAIL_TREE": f"{TREE}/",
            "TRAIL_FOLDER": name,
        }
        roles = ("--prefill", "1", "--decode", "1", "--no-fluid")
        with serve("--launcher", "process", *roles, **environment) as served:
            return _trails(served, folder)


def _trails(served: Served, folder: Path) -> list[Trail]:
    for number in range(3):
        _chat(served.url, f"Write a Python function add{number}: return a plus b. " * 8)
    pids = [pid for pid in marked_pids(served.mark) if _is_hooked(pid)]
    _flip(pids, folder, 1)
    threading.Event().wait(IDLE_S)
    _flip(pids, folder, 2)
    _flip(pids, folder, 3)
    _chat(served.url, "Write a Python function mul: return a times b, and say why. " * 8)
    _flip(pids, folder, 4)
    trails = []
    for pid in pids:
        idle, asked = (json.loads((folder / f"{pid}.{number}").read_text()) for number in (2, 4))
        calls = {name: count for name, count in asked.items() if name not in idle}
        if calls:
            trails.append(Trail(Path(f"/proc/{pid}/comm").read_text().strip(), calls))
    return trails


def _chat(url: str, text: str) -> None:
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def _is_hooked(pid: int) -> bool:
    """Returns True if the process handles the signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False  # the process has exited
    caught = next(line for line in lines if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (SIGNAL - 1) & 1)


def _flip(pids: Iterable[int], folder: Path, number: int) -> None:
    """Starts or ends the recording of all processes."""
    for pid in pids:
        os.kill(pid, SIGNAL)
    poll_until(
        lambda: all((folder / f"{pid}.{number}").exists() for pid in pids), "all have written"
    )


def report(trails: Sequence[Trail]) -> list[str]:
    """Returns the printed lines: each process, each folder, and the sum."""
    lines = [
        f"{trail.process}: {len(trail.files)} files, {len(trail.calls)} functions,"
        f" {sum(trail.calls.values())} calls"
        for trail in trails
    ]
    files, functions = entered(trails)
    rooms = Counter("/".join(file.split("/")[:2]) for file in files)
    lines += [f"{num:5} {room}" for room, num in sorted(rooms.items())]
    return [*lines, f"{len(files)} files, {len(functions)} functions for one streamed chat"]


def entered(trails: Iterable[Trail]) -> tuple[set[str], set[str]]:
    """Returns the files and functions that any process entered."""
    functions = {name for trail in trails for name in trail.calls}
    return {name.partition(":")[0] for name in functions}, functions


if __name__ == "__main__":
    sys.stdout.write("\n".join(report(of_one_chat())) + "\n")

"""Starts `baton serve` again and again, and times it."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.common.progress import Say
from bench.common.report import Figure
from bench.processes.driven import DrivenFailed
from bench.processes.serving import serving
from bench.starts.plan import FIRST, IMPORT, IMPORTS, StartsPlan
from engine.clock import MonotonicClock

BUNDLED = Path(__file__).parents[2] / "engine" / "model" / "bundled" / "target"
IMPORT_TIMEOUT_S = 120.0
KEEPS_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # else each start compiles Python


def measure(plan: StartsPlan, say: Say) -> list[dict[str, Figure]]:
    """Returns the figures of each round. Raises ServerFailed, DrivenFailed."""
    rounds = []
    for number in range(plan.num_repeats + 1):
        found = _round(plan, warms=number == 0)
        if number:
            rounds.append(found)
            say(", ".join(f"{name} {figure.value:.2f} s" for name, figure in found.items()))
    return rounds


def _round(plan: StartsPlan, *, warms: bool) -> dict[str, Figure]:
    found = {f"ready/{name}": _ready_s(name, {}) for name in plan.launchers}
    found[IMPORT] = _import_s()
    if plan.has_first and not warms:
        with TemporaryDirectory(prefix="baton-") as cache:
            found[FIRST] = _ready_s("process", {"XDG_CACHE_HOME": cache})
    return {name: Figure(seconds, "s") for name, seconds in found.items()}


def _ready_s(launcher: str, environment: Mapping[str, str]) -> float:
    """Returns the time from the start of the command to its URL. Raises ServerFailed."""
    clock = MonotonicClock()
    with TemporaryDirectory(prefix="baton-") as run_dir:
        there = {**KEEPS_BYTECODE, "BATON_RUN_DIR": run_dir, **environment}
        begin_s = clock.now_s()
        with serving(BUNDLED, {"--launcher": launcher}, there):
            return clock.now_s() - begin_s


def _import_s() -> float:
    """Returns the time of a process that imports what a worker needs. Raises DrivenFailed."""
    clock = MonotonicClock()
    begin_s = clock.now_s()
    try:
        command = [sys.executable, "-c", f"import gc; gc.disable(); {IMPORTS}"]
        subprocess.run(command, check=True, timeout=IMPORT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise DrivenFailed("the import of a worker", str(error), ()) from error
    return clock.now_s() - begin_s

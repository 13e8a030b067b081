"""Runs the parts of `bench store`, one after the other. A part that fails is reported."""

import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import background
from bench.common.progress import Say, say_nothing
from bench.common.report import Missing
from bench.store import disk, peer, restarts, slab, streams, turns
from bench.store.plan import StorePart, StorePlan
from bench.store.results import StoreMeasured
from engine.errors import BatonError

PARTS: dict[StorePart, tuple[str, Callable[[StorePlan, Path, Say], Any]]] = {
    StorePart.TTFT: ("restarts", restarts.measure),
    StorePart.MEMORY: ("pulls", lambda plan, _, say: slab.measure(plan, say)),
    StorePart.DISK: ("disk", lambda plan, _, say: disk.measure(plan, say)),
    StorePart.ITL: ("streams", streams.measure),
    StorePart.RECOVERY: ("recovery", disk.recovery),
    StorePart.TURNS: ("turns", lambda plan, _, say: turns.measure(plan, say)),
}

IDLE_CHECK_S = 0.5


def measure(plan: StorePlan, say: Say = say_nothing) -> StoreMeasured:
    """Carries out the plan's parts. Each one's files are removed behind it."""
    found: dict[str, Any] = {}
    missing: list[Missing] = []
    busy: list[float] = []
    for part in plan.parts:
        name, measured = PARTS[part]
        busy += _busy_share()
        with TemporaryDirectory(prefix="baton-store-", dir=plan.disk) as folder:
            try:
                found[name] = measured(plan, Path(folder), say)
            except (BatonError, OSError) as error:
                missing.append(Missing(str(part), str(error)))
    for program in plan.peers:
        with TemporaryDirectory(prefix="baton-store-", dir=plan.disk) as folder:
            try:
                found["peer"] = peer.measure(plan, program, Path(folder), say)
            except BatonError as error:
                missing.append(Missing(program.name, str(error)))
    return StoreMeasured(**found, background=tuple(busy), missing=tuple(missing))


def _busy_share() -> list[float]:
    """Returns the share of the CPU that others use while nothing of ours runs; empty if unknown."""
    before = background.read(())
    threading.Event().wait(IDLE_CHECK_S)
    share = background.share_of_others(before, background.read(()))
    return [] if share is None else [share]

"""Runs the parts of `bench store`, one after the other. A part that fails is reported."""

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.common import background
from bench.common.command import Say
from bench.common.options import PeerProgram
from bench.common.report import Missing, notes_on
from bench.lab.experiment import Findings
from bench.lab.kv.cases import Mover, mover_of
from bench.lab.kv.contest import TimeKey, contest
from bench.lab.store import disk, parts, peer
from bench.lab.store.figures import SLAB, StoreMeasured, results, warnings
from bench.lab.store.plan import StorePart, StorePlan
from bench.processes.driven import Driven
from engine.errors import BatonError

IDLE_CHECK_S = 0.5
SLAB_COMMAND = [sys.executable, "-m", "bench.lab.store.slab_worker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStudy(StorePlan):
    """Measure what a KV store saves after restarts, its limits, and its cost to running streams.

    Exits with status 1 if a part could not be measured.
    """

    def measure(self, say: Say) -> Findings:
        """Runs the parts of the study and returns the findings."""
        measured = self.run(say)
        found = results(measured)
        versions = {} if measured.peer is None else {"vllm": measured.peer.version}
        config = notes_on(versions, measured.missing)
        if measured.disk is not None:
            config["disk_engines"] = measured.disk.facts
        is_whole = not measured.missing
        return Findings(found, warnings(measured, found), config=config, is_whole=is_whole)

    def run(self, say: Say) -> StoreMeasured:
        """Runs all parts. Removes the files of each part after it."""
        found: dict[str, Any] = {}
        missing: list[Missing] = []
        busy: list[float] = []
        tasks = {str(part): PARTS[part] for part in self.chosen} | {
            program.name: ("peer", partial(_peer, program)) for program in self.peers
        }
        for name, (result, measured) in tasks.items():
            busy += _busy_share()
            with TemporaryDirectory(prefix="baton-store-", dir=self.folder) as folder:
                try:
                    found[result] = measured(self, Path(folder), say)
                except (BatonError, OSError) as error:
                    missing.append(Missing(name, str(error)))
        return StoreMeasured(**found, background=tuple(busy), missing=tuple(missing))


def slab_pulls(plan: StorePlan, say: Say) -> Mapping[TimeKey, tuple[float, ...]]:
    """Returns the seconds of pulls from a store's slab, of pulls between workers, and of memcpy."""
    slab = Mover(SLAB, Driven("slab source", SLAB_COMMAND), Driven("slab sink", SLAB_COMMAND))
    movers = {name: partial(mover_of, name) for name in ("shm", "memcpy")} | {SLAB: lambda: slab}
    return contest(plan.pulls, movers, say).seconds


def _peer(program: PeerProgram, plan: StorePlan, folder: Path, say: Say) -> peer.PeerRestart:
    return peer.measure(plan, program, folder, say)


PARTS: dict[StorePart, tuple[str, Callable[[StorePlan, Path, Say], Any]]] = {
    StorePart.TTFT: ("restarts", parts.measure_restarts),
    StorePart.MEMORY: ("pulls", lambda plan, _, say: slab_pulls(plan, say)),
    StorePart.DISK: ("disk", lambda plan, _, say: disk.measure(plan, say)),
    StorePart.ITL: ("streams", parts.measure_streams),
    StorePart.RECOVERY: ("recovery", disk.recovery),
    StorePart.TURNS: ("turns", lambda plan, _, say: parts.measure_turns(plan, say)),
}


def _busy_share() -> list[float]:
    """Returns the share of the CPU that other programs use while our processes wait. Empty if
    unknown.
    """
    before = background.read(())
    threading.Event().wait(IDLE_CHECK_S)
    share = background.share_of_others(before, background.read(()))
    return [] if share is None else [share]

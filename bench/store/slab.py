"""Measures pulls out of a store's slab beside pulls between workers and beside memcpy.

All three move the same scattered blocks, in the same process run, in an order that is new in each
repetition. Before that each has moved every case once, compared byte by byte.
"""

import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack

from bench.common.progress import Say, say_nothing
from bench.kv.movers import Mover, mover_of, ways_of
from bench.kv.plan import KvCase, cases_of, order_of, pulls_of
from bench.kv.results import TimeKey
from bench.processes.driven import Driven
from bench.store.plan import PULLS_IN_A_REPETITION, StorePlan

SLAB = "slab"
BESIDE = ("shm", "memcpy")
WARM_UP = -1  # not a repetition: its blocks are used nowhere else
COMMAND = [sys.executable, "-m", "bench.store.slab_worker"]


def measure(plan: StorePlan, say: Say = say_nothing) -> Mapping[TimeKey, tuple[float, ...]]:
    """Seconds of whole pulls, one median for each repetition. Raises DrivenFailed, WrongBytes."""
    pulls = plan.pulls
    cases = [case for case in cases_of(pulls) if case.is_whole]
    with ExitStack() as stack:
        movers = {name: mover_of(name, pulls) for name in BESIDE}
        movers[SLAB] = Mover(SLAB, Driven("slab source", COMMAND), Driven("slab sink", COMMAND))
        for mover in movers.values():
            stack.callback(mover.close)
            mover.start()
        say("opening pools of blocks")
        facts = {name: mover.open(pulls) for name, mover in movers.items()}
        ways = [way for name in movers for way in ways_of(movers[name], facts[name])]
        for name, way in ways:
            for case in cases:
                movers[name].verify(way, case, pulls_of(pulls, case, WARM_UP)[0])
        seconds: dict[TimeKey, list[float]] = {}
        for repeat in range(pulls.num_repeats):
            say(f"pulls, repetition {repeat + 1} of {pulls.num_repeats}")
            for name, way, case in order_of(pulls, ways, repeat):
                if case.is_whole:
                    found = _seconds(movers[name], way, case, plan, repeat)
                    seconds.setdefault(TimeKey(name, way, case), []).append(found)
        return {key: tuple(runs) for key, runs in seconds.items()}


def _seconds(mover: Mover, way: str, case: KvCase, plan: StorePlan, repeat: int) -> float:
    pulls = pulls_of(plan.pulls, case, repeat) * PULLS_IN_A_REPETITION
    return statistics.median(mover.move(way, case, pulls))

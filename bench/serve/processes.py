"""Runs the client processes of `bench serve`: divides a load among them, and prints its progress.

Every process draws all sessions of the plan and plays its own share: the first of n processes plays
sessions 0, n, 2n and so on. The load's time 0 is the same moment in all processes, since Linux has
one monotonic clock for all processes.
"""

import multiprocessing.connection
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from threading import Thread
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from bench.client.load import ClientCost, LoadRun, SloBounds
from bench.serve.plan import ServePlan, rate_text
from bench.serve.run import (
    ENDED,
    NUM_COUNTS,
    ServeMeasured,
    Tally,
    measure,
    measured_of,
    play_repetition,
    prepare,
    told,
)
from engine.clock import MonotonicClock

READY_TIMEOUT_S = 120.0  # seconds in which the slowest process must have drawn its sessions
LEAD_S = 0.1  # seconds from the moment when all processes are ready to the load's time 0
REFRESH_PER_S = 4
BAR_WIDTH = 16  # width of the progress bar in columns of the terminal

_shared: "_Shared"  # set in each client process at its start


class _Shared:
    """Objects that all client processes of a load share."""

    def __init__(self, counts: Any, start_s: Any, barrier: Barrier) -> None:
        self.counts = counts
        self.start_s = start_s
        self.barrier = barrier

    def agreed_start_s(self) -> float:
        """Waits until all processes are ready. Returns the time at which all begin."""
        if self.barrier.wait(READY_TIMEOUT_S) == 0:
            self.start_s.value = MonotonicClock().now_s() + LEAD_S
        self.barrier.wait(READY_TIMEOUT_S)
        return float(self.start_s.value)


def measure_shown(plan: ServePlan) -> ServeMeasured:
    """Measures the plan with its number of processes. Shows the progress on stderr."""
    if plan.load.num_processes > 1:
        return _measure_in_processes(plan)
    counts = [0.0] * NUM_COUNTS
    with _progress([counts], plan):
        measured: ServeMeasured = uvloop.run(measure(plan, tally=Tally(counts, plan.slo)))
    return measured


def _measure_in_processes(plan: ServePlan) -> ServeMeasured:
    context = multiprocessing.get_context("spawn")
    number = plan.load.num_processes
    all_counts = [context.RawArray("d", NUM_COUNTS) for _ in range(number)]
    shared = (all_counts, context.RawValue("d", 0.0), context.Barrier(number))
    model = uvloop.run(prepare(plan, MonotonicClock()))
    with (
        _progress(all_counts, plan),
        ProcessPoolExecutor(number, context, initializer=_begin, initargs=shared) as pool,
        children_end_early(),
    ):
        runs = []
        for repeat in range(plan.load.num_repeats):
            # Each process gets one share, because it waits until all processes have a share.
            shares = [pool.submit(_play, plan, repeat, model, place) for place in range(number)]
            runs.append(merged([share.result() for share in shares]))
    return measured_of(model, runs)


@contextmanager
def children_end_early() -> Iterator[None]:
    """Ends our client processes if the block raises. Otherwise the pool would wait for the whole
    load.
    """
    try:
        yield
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise


def merged(shares: Sequence[LoadRun]) -> LoadRun:
    """Joins the results of all processes into one run."""
    outcomes = sorted((one for share in shares for one in share.outcomes), key=lambda o: o.due_s)
    costs = [share.cost for share in shares if share.cost is not None]
    cost = ClientCost(sum(c.cpu_s for c in costs), costs[0].num_cores) if costs else None
    return LoadRun(max(share.duration_s for share in shares), tuple(outcomes), cost)


def share_of(plan: ServePlan, place: int) -> ServePlan:
    """Returns the plan of one process, with its part of the clients and of the slots."""
    load = plan.load
    number = load.num_processes

    def part(whole: int | None) -> int | None:
        return None if whole is None else (whole + number - 1 - place) // number

    return replace(
        plan,
        load=replace(
            load, clients=part(load.clients), concurrency_limit=part(load.concurrency_limit)
        ),
    )


def _begin(counts: Any, start_s: Any, barrier: Barrier) -> None:
    global _shared
    _shared = _Shared(counts, start_s, barrier)
    parent = multiprocessing.parent_process()
    assert parent is not None
    Thread(target=_end_with, args=[parent.sentinel], daemon=True).start()


def _end_with(sentinel: int) -> None:
    """Waits until the parent process has ended, even by SIGKILL, and then ends this process."""
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _play(plan: ServePlan, repeat: int, model: str, place: int) -> LoadRun:
    """Plays one share of the sessions, in a client process."""
    run: LoadRun = uvloop.run(
        play_repetition(
            share_of(plan, place),
            repeat,
            model=model,
            clock=MonotonicClock(),
            tally=Tally(_shared.counts[place], plan.slo),
            share=slice(place, None, plan.load.num_processes),
            start_s=_shared.agreed_start_s,
        )
    )
    return run


class _Told(ProgressColumn):
    """Returns the summed counts of all processes in words."""

    def __init__(self, counts: Sequence[Sequence[float]], slo: SloBounds | None) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._counts = counts
        self._slo = slo

    def render(self, task: Task) -> Text:
        sums = [sum(column) for column in zip(*self._counts, strict=True)]
        task.completed = sums[ENDED]
        return Text(told(sums, self._slo))


@contextmanager
def _progress(counts: Sequence[Sequence[float]], plan: ServePlan) -> Iterator[None]:
    """Prints a line with the current counts during the block, if stderr is a terminal."""
    console = Console(stderr=True)
    shown = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(BAR_WIDTH),
        MofNCompleteColumn(),
        TimeElapsedColumn(Column(min_width=7)),
        _Told(counts, plan.slo),
        console=console,
        refresh_per_second=REFRESH_PER_S,
        transient=True,
        disable=not console.is_terminal,
    )
    with shown:
        total = plan.load.num_requests * plan.load.num_repeats
        shown.add_task(rate_text(plan), total=total)
        yield

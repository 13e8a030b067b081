"""Makes the tables and lines that the commands print."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from deploy.admin.schema import (
    Difference,
    GatewayInfo,
    PlannerAnswer,
    PoolsAnswer,
    RequestsAnswer,
    StepInfo,
    WorkerInfo,
)
from deploy.base.spec import WorkerFacts
from deploy.terminal.rows import (
    COLUMNS,
    TopRow,
    View,
    pool_rows,
    request_rows,
    version_rows,
    worker_rows,
)
from engine.config import Config, DashboardMode, DeviceKind, Speculate
from engine.control import SERVING_ROLES, Pools, with_role

WATCH_EVERY_S = 1.0
PIPE_COLUMNS = 1000
DIFFERS = 3  # exit status if there are differences; 1: an error, 2: a wrong command line
NUM_STEPS = 8  # number of latest steps shown below the tables
# Longest time from a worker's start to the controller's session with the worker.
FIRST_SESSION_S = 3.0
NUM_DECISIONS = 8  # number of the planner's latest decisions that are shown


T = TypeVar("T")


def differences_table(found: Sequence[Difference]) -> Table:
    """Returns a table with a row for each setting whose declared and running values differ."""
    columns = ("setting", "running", "declared", "changed by")
    table = table_of("declared beside running", columns, ())
    for each in found:
        values = (escape(msgspec.json.encode(v).decode()) for v in (each.running, each.declared))
        table.add_row(each.key, *values, each.order)
    return table


class Output:
    """Prints answers as tables for people, or as JSON for programs (one document per line)."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        # A pipe has no width, so each row is printed on one line with complete names.
        self._console = console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            self._console = Console(width=PIPE_COLUMNS)

    def show(
        self, ask: Callable[[], T], view: Callable[[T], Group | Table], *, watch: bool
    ) -> None:
        """Prints the answer that `ask` returns. With `watch`, refreshes the answer until Ctrl-C."""
        pause = threading.Event()
        if self.as_json:
            self.json(ask())
            while watch and not pause.wait(WATCH_EVERY_S):
                self.json(ask())
            return
        if not watch:
            self._console.print(view(ask()))
            return
        with Live(view(ask()), console=self._console, auto_refresh=False) as live:
            while not pause.wait(WATCH_EVERY_S):
                live.update(view(ask()), refresh=True)

    def json(self, answer: object) -> None:
        """Prints one line of JSON and flushes the output."""
        print(msgspec.json.encode(answer).decode(), flush=True)  # noqa: T201 - for programs

    def step(self, step: StepInfo) -> None:
        """Prints a step of a change."""
        if self.as_json:
            self.json(step)
        else:
            self.line(f"  {step_line(step)}")

    def line(self, text: str) -> None:
        """Prints a line in rich's markup."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Prints a remark to standard error, because standard output is for programs."""
        typer.echo(text, err=True)

    def differences(self, found: Sequence[Difference]) -> None:
        """Prints the differences of a file. Exits with status 3 if there are any."""
        if self.as_json:
            self.json(found)
        elif found:
            self._console.print(differences_table(found))
        else:
            self._console.print("[green]✓[/green] runs as declared")
        if found:
            raise typer.Exit(DIFFERS)

    def done(self) -> None:
        """Prints for people that the change is complete. Programs read the exit status instead."""
        if not self.as_json:
            self._console.print("[green]✓[/green] done")


def pools_view(answer: PoolsAnswer) -> Group:
    """Returns the pools, workers and gateways as tables, then the latest steps."""
    used = [row for row in pool_rows(answer) if set(row.cells[1:]) != {"0"}]
    table = table_with(View.POOLS, used)
    planner = f"planner {answer.planner.mode}"
    lines = [f"{answer.state}; at most {answer.max_workers} workers; {planner}"]
    lines += [f"[red]{escape(trouble)}[/red]" for trouble in answer.troubles]
    lines += [f"  {reason}" for reason in answer.planner.reasons]
    lines += [f"  {step.age_s:5.0f} s ago  {step_line(step)}" for step in answer.steps[-NUM_STEPS:]]
    workers, gateways = workers_view(answer.workers), _gateways_view(answer.gateways)
    return Group(table, "", workers, "", gateways, "", *lines)


def planner_view(answer: PlannerAnswer) -> Group:
    """Returns the planner's present proposal, then its latest decisions with their reasons."""
    wanted = answer.wanted
    lines: list[str | Padding] = [
        f"[bold]planner {answer.planner.mode}[/bold]; wanted now: {_counts(wanted)}",
        *(_indented(escape(reason), 2) for reason in answer.planner.reasons),
    ]
    for one in answer.decisions[-NUM_DECISIONS:]:
        lines.append(f"{one.age_s:5.0f} s ago  {one.mode}: [bold]{escape(one.summary)}[/bold]")
        lines += [_indented(f"[dim]{escape(reason)}[/dim]", 13) for reason in one.reasons]
    return Group(*lines)


def _indented(text: str, columns: int) -> Padding:
    return Padding(text, (0, 0, 0, columns), expand=False)


def _counts(pools: Pools) -> str:
    return ", ".join(f"{pools.of(role)} {role}" for role in SERVING_ROLES if pools.of(role))


def table_of(
    title: str, texts: Sequence[str], numbers: Sequence[str], *, wraps: Sequence[str] = ()
) -> Table:
    """Returns an empty table whose columns are first texts, then numbers.

    On a narrow terminal only the columns in `wraps` are wrapped. Other columns have names that
    operators copy or type, so a name stays on one line.
    """
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in texts:
        table.add_column(name, no_wrap=name not in wraps)
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def table_with(
    view: View, rows: Iterable[TopRow], title: str = "", *, wraps: Sequence[str] = ()
) -> Table:
    """Returns the table of a view."""
    table = table_of(title or view.value, *COLUMNS[view], wraps=wraps)
    for row in rows:
        table.add_row(*map(escape, row.cells), style=row.style)
    return table


def workers_view(workers: list[WorkerInfo]) -> Group:
    """Returns a table with a row for each worker, then remarks on some workers."""
    table = table_with(View.WORKERS, worker_rows(workers))
    remarks = [(w.worker_id, remark) for w in workers if (remark := _remark(w))]
    told = [(w.worker_id, w.facts) for w in workers if w.facts and _is_worth_telling(w.facts)]
    remarks += [(name, f"computes on {escape(str(facts))}") for name, facts in told]
    if len({w.kernels for w in workers if w.kernels}) > 1:
        said = ((w.worker_id, w.kernels) for w in workers if w.kernels)
        remarks += [(name, f"computes with {escape(kernels)}") for name, kernels in said]
    return Group(table, *(f"  {worker_id} {remark}" for worker_id, remark in remarks))


def _is_worth_telling(facts: WorkerFacts) -> bool:
    return facts.device != DeviceKind.CPU or bool(facts.fallbacks)


def _remark(worker: WorkerInfo) -> str:
    why = f": {escape(worker.why)}" if worker.why else ""
    if worker.is_crash_looping:
        return f"[red]failed {worker.failures} times in a row{why}[/red]"
    if why:
        return f"[red]{why.removeprefix(': ')}[/red]"
    if worker.state in ("waiting", "starting", "stopping"):
        return ""
    if not worker.is_connected and worker.state_s >= FIRST_SESSION_S:
        return "[red]cannot be reached[/red]"
    return f"moves {worker.leaving_seqs} sequences away" if worker.leaving_seqs else ""


def _gateways_view(gateways: list[GatewayInfo]) -> Group:
    table = table_of("gateways", ("gateway", "state", "url"), ("requests", "waiting"))
    for g in gateways:
        table.add_row(g.name, g.state, g.url, str(g.num_requests), str(g.num_waiting))
    missing = [(g.name, escape(g.missing)) for g in gateways if g.missing is not None]
    return Group(table, *(f"  {name}: [red]{what}[/red]" for name, what in missing))


def requests_table(answer: RequestsAnswer) -> Table:
    """Returns a table with a row for each request that is being served."""
    title = f"{answer.num_requests} requests"
    return table_with(View.REQUESTS, request_rows(answer), title, wraps=("request", "gateway"))


def versions_table(answer: PoolsAnswer) -> Table:
    """Returns a table with a row for each version. Current versions are bold."""
    over = f": {answer.taking_over} takes over" if answer.taking_over is not None else ""
    rows, wraps = version_rows(answer.versions), ("state", "model", "workers")
    return table_with(View.VERSIONS, rows, f"versions{over}", wraps=wraps)


def step_line(step: StepInfo) -> str:
    """Returns one step of a change with its reason, in rich's markup."""
    why = f"[dim]: {escape(step.why)}[/dim]" if step.why else ""
    return f"[bold]{escape(with_role(step.subject, step.role))}[/bold] {escape(step.what)}{why}"


def deployment_lines(config: Config, url: str, admin_url: str) -> Iterator[str]:
    """Yields one line about each of: store, speculation, dashboard and the operators' API."""
    store = config.store
    if store.is_on:
        disk = f", {store.disk_gib:g} GiB at most in {store.disk}" if store.disk else ""
        objects = f", {store.objects_gib:g} GiB at most in {store.objects}" if store.objects else ""
        yield f"store: {store.memory_mib:,} MiB of KV in memory{disk}{objects}"
    else:
        yield "store: none (--store MIB)"
    draft = config.worker.draft_path
    model = "" if draft is None else f", with the draft model {draft}"
    how = "" if config.worker.speculate is not Speculate.OFF else " (--speculate ngram)"
    yield f"speculation: {config.worker.speculate}{model}{how}"
    if config.gateway.dashboard is DashboardMode.OFF:
        yield "dashboard: off (gateway.dashboard)"
    else:
        yield f"dashboard: {url}/dashboard; playground: {url}/play"
    yield f"operators' API: {admin_url} (baton pools, baton top)"

"""Commands for who runs a deployment: `baton pools`, `workers`, `flip`, `drain`, and so on."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from deploy.admin.client import AdminClient, AdminError, connect
from deploy.admin.schema import (
    GatewayInfo,
    PlannerAnswer,
    PoolsAnswer,
    RequestsAnswer,
    StepInfo,
    WorkerInfo,
)
from engine.config import PlannerMode
from engine.control import SERVING_ROLES, Pools
from engine.errors import ConfigError
from engine.messages import Role

WATCH_EVERY_S = 1.0
POLL_EVERY_S = 0.2
NUM_STEPS = 8  # shown below the tables
NUM_DECISIONS = 8  # of the planner

AdminUrl = Annotated[
    str | None,
    typer.Option(
        "--admin-url", envvar="BATON_ADMIN_URL", help="default: what runs on this machine"
    ),
]
AdminKey = Annotated[str | None, typer.Option("--admin-key", envvar="BATON_ADMIN_KEY")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="until it is done")]

pools_app = typer.Typer(help="How many workers of each role there are.")


@pools_app.callback(invoke_without_command=True)
def pools_command(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="until Ctrl-C")] = False,  # noqa: FBT002
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
) -> None:
    """Shows the pools."""
    if context.invoked_subcommand is not None:
        context.obj = (admin_url, admin_key)
        return
    with connect(admin_url, admin_key) as client:
        show(lambda: pools_view(client.pools()), watch=watch)


@pools_app.command("set")
def set_command(
    context: typer.Context,
    counts: Annotated[list[str], typer.Argument(metavar="ROLE=NUMBER...")],
    version: Annotated[str | None, typer.Option(help="default: the current one")] = None,
    wait: Wait = True,  # noqa: FBT002
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
) -> None:
    """Sets how many workers there are: `baton pools set prefill=3 decode=5`."""
    wanted = parse_counts(counts)
    with connect_below(context, admin_url, admin_key) as client:
        follow(client, client.set_pools(wanted, version), wait=wait)


def flip_command(
    worker: Annotated[str, typer.Argument(metavar="WORKER")],
    to: Annotated[Role | None, typer.Option(help="default: the other one of the two")] = None,
    wait: Wait = True,  # noqa: FBT002
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
) -> None:
    """Changes a worker's role in place; what it runs is moved. One that is drained serves again."""
    with connect(admin_url, admin_key) as client:
        role = to or _other_role(client.pools(), worker)
        answer = client.order(worker, "flip", {"role": role})
        follow(client, answer, wait=wait, check=lambda seen: check_role(seen, worker, role))


def drain_command(
    worker: Annotated[str, typer.Argument(metavar="WORKER")],
    wait: Wait = True,  # noqa: FBT002
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
) -> None:
    """Takes all work from a worker, which stays; `baton flip WORKER --to ROLE` brings it back."""
    with connect(admin_url, admin_key) as client:
        answer = client.order(worker, "drain")
        follow(client, answer, wait=wait, check=lambda seen: check_role(seen, worker, Role.DRAINED))


def stop_worker_command(
    worker: Annotated[str, typer.Argument(metavar="WORKER")],
    wait: Wait = True,  # noqa: FBT002
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
) -> None:
    """Drains a worker, then ends it; its pool has one less from then on."""
    with connect(admin_url, admin_key) as client:
        follow(client, client.order(worker, "stop"), wait=wait)


def workers_command(
    watch: Annotated[bool, typer.Option("--watch", help="until Ctrl-C")] = False,  # noqa: FBT002
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
) -> None:
    """Shows every worker."""
    with connect(admin_url, admin_key) as client:
        show(lambda: _workers_view(client.pools().workers), watch=watch)


def requests_command(
    watch: Annotated[bool, typer.Option("--watch", help="until Ctrl-C")] = False,  # noqa: FBT002
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
) -> None:
    """Shows the requests that are being served."""
    with connect(admin_url, admin_key) as client:
        show(lambda: _requests_table(client.requests()), watch=watch)


def planner_command(
    mode: Annotated[
        PlannerMode | None, typer.Argument(help="what becomes of its proposals from now on")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="until Ctrl-C")] = False,  # noqa: FBT002
    admin_url: AdminUrl = None,
    admin_key: AdminKey = None,
) -> None:
    """Shows what the planner of the pools says and did; with MODE, sets what it may do."""
    with connect(admin_url, admin_key) as client:
        if mode is not None:
            client.set_planner(mode)
        show(lambda: planner_view(client.planner()), watch=watch)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.add_typer(pools_app, name="pools")
    app.command("flip")(flip_command)
    app.command("drain")(drain_command)
    app.command("stop-worker")(stop_worker_command)
    app.command("workers")(workers_command)
    app.command("requests")(requests_command)
    app.command("planner")(planner_command)


def connect_below(context: typer.Context, url: str | None, key: str | None) -> AdminClient:
    """As `connect`, for a command of a group: options may be given to either. Raises AdminError."""
    given_url, given_key = context.obj
    return connect(url or given_url, key or given_key)


def parse_counts(counts: list[str]) -> dict[str, int]:
    """Workers by role from "prefill=3". Raises ConfigError."""
    wanted: dict[str, int] = {}
    for given in counts:
        role, _, number = given.partition("=")
        if role not in SERVING_ROLES or not number.isdecimal() or role in wanted:
            roles = ", ".join(SERVING_ROLES)
            raise ConfigError(f"{given!r} is not ROLE=NUMBER, with each role once, one of {roles}")
        wanted[role] = int(number)
    return wanted


# ---------------------------------------------------------------- progress


def follow(
    client: AdminClient,
    answer: PoolsAnswer,
    *,
    wait: bool,
    check: Callable[[PoolsAnswer], None] = lambda _: None,
) -> None:
    """Prints each step as it is made, until nothing is under way. Ctrl-C undoes nothing.

    `check` raises AdminError where that is not what was ordered.
    """
    console = Console()
    for step in _steps(client, answer, wait=wait):
        console.print(f"  {_step(step)}", highlight=False)
    if wait:
        check(client.pools())
        console.print("[green]✓[/green] done")


def _steps(client: AdminClient, answer: PoolsAnswer, *, wait: bool) -> Iterator[StepInfo]:
    pause = threading.Event()
    last = 0
    while True:
        yield from answer.steps
        last = max([last, *(step.number for step in answer.steps)])
        if not wait or answer.settled:
            return
        pause.wait(POLL_EVERY_S)
        answer = client.pools(since=last)


def _step(step: StepInfo) -> str:
    why = f"[dim]: {escape(step.why)}[/dim]" if step.why else ""
    return f"[bold]{escape(step.subject)}[/bold] {escape(step.what)}{why}"


def check_role(answer: PoolsAnswer, worker_id: str, role: Role) -> None:
    """Raises AdminError where another worker, or none, has become that."""
    found = next((each for each in answer.workers if each.worker_id == worker_id), None)
    if found is None:
        raise AdminError(f"{worker_id} is gone")
    if found.target is not role:
        raise AdminError(f"{worker_id} is {found.target}, not {role}: see what happened above")


def _other_role(answer: PoolsAnswer, worker_id: str) -> Role:
    """Raises AdminError where there is no other one to be meant."""
    others = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
    for worker in answer.workers:
        if worker.worker_id == worker_id:
            if worker.target not in others:
                raise AdminError(f"{worker_id} is {worker.target}: say to what with --to")
            return others[worker.target]
    raise AdminError(f"no worker is called {worker_id}")


# ---------------------------------------------------------------- tables


def show(view: Callable[[], Group | Table], *, watch: bool) -> None:
    """Prints it, or keeps it up to date until Ctrl-C."""
    console = Console()
    if not watch:
        console.print(view())
        return
    pause = threading.Event()
    with Live(view(), console=console, auto_refresh=False) as live:
        while not pause.wait(WATCH_EVERY_S):
            live.update(view(), refresh=True)


def pools_view(answer: PoolsAnswer) -> Group:
    """The pools as a table: wanted, there, and on the way."""
    table = table_of("pools", ("role",), ("wanted", "serving", "on the way"))
    for role in SERVING_ROLES:
        of_role = [w for w in answer.workers if w.target is role]
        serving = sum(w.state == "serving" and w.is_connected for w in of_role)
        if answer.wanted.of(role) or of_role:
            wanted = answer.wanted.of(role)
            table.add_row(role, str(wanted), str(serving), str(len(of_role) - serving))
    state = "all as wanted" if answer.settled else "changes are under way"
    planner = f"planner {answer.planner.mode}"
    lines = [f"{state}; at most {answer.max_workers} workers; {planner}"]
    lines += [f"  {reason}" for reason in answer.planner.reasons]
    lines += [f"  {step.age_s:5.0f} s ago  {_step(step)}" for step in answer.steps[-NUM_STEPS:]]
    workers, gateways = _workers_view(answer.workers), _gateways_view(answer.gateways)
    return Group(table, "", workers, "", gateways, "", *lines)


def planner_view(answer: PlannerAnswer) -> Group:
    """What is needed now, then what was decided, with the reasons of then."""
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
    return Padding(text, (0, 0, 0, columns))


def _counts(pools: Pools) -> str:
    return ", ".join(f"{pools.of(role)} {role}" for role in SERVING_ROLES if pools.of(role))


def table_of(
    title: str, texts: Sequence[str], numbers: Sequence[str], *, wraps: Sequence[str] = ()
) -> Table:
    """An empty one, with columns of texts, then of numbers. Where a terminal is narrow, those in
    `wraps` give way: names are typed again, in orders, and stay whole.
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


def _workers_view(workers: list[WorkerInfo]) -> Group:
    texts = ("worker", "version", "role", "state")
    table = table_of("workers", texts, ("for", "runs", "waits", "KV free", "pid"))
    for w in workers:
        role = w.role or "?"
        if w.target not in (None, w.role):
            role += f" → {w.target}"
        free = f"{100 * w.free_blocks / w.num_blocks:.0f} %" if w.num_blocks and w.role else ""
        table.add_row(
            w.worker_id,
            w.version,
            role,
            w.state,
            f"{w.state_s:.0f} s",
            str(w.running_seqs),
            str(w.waiting_seqs),
            free,
            "" if w.pid is None else str(w.pid),
        )
    remarks = [(w.worker_id, remark) for w in workers if (remark := _remark(w))]
    return Group(table, *(f"  {worker_id} {remark}" for worker_id, remark in remarks))


def _remark(worker: WorkerInfo) -> str:
    if worker.is_crash_looping:
        return f"[red]failed {worker.failures} times in a row[/red]"
    if worker.state in ("waiting", "starting", "stopping"):
        return ""
    if not worker.is_connected:
        return "[red]cannot be reached[/red]"
    return f"moves {worker.leaving_seqs} sequences away" if worker.leaving_seqs else ""


def _gateways_view(gateways: list[GatewayInfo]) -> Group:
    table = table_of("gateways", ("gateway", "state", "url"), ("requests", "waiting"))
    for g in gateways:
        table.add_row(g.name, g.state, g.url, str(g.num_requests), str(g.num_waiting))
    missing = [(g.name, escape(g.missing)) for g in gateways if g.missing is not None]
    return Group(table, *(f"  {name}: [red]{what}[/red]" for name, what in missing))


def _requests_table(answer: RequestsAnswer) -> Table:
    texts = ("request", "state", "prefill", "decode", "gateway")
    numbers = ("age", "prompt", "answer", "attempts")
    title = f"{answer.num_requests} requests"
    table = table_of(title, texts, numbers, wraps=("request", "gateway"))
    for each in answer.requests:
        r = each.request
        table.add_row(
            r.request_id,
            r.state,
            r.prefill or "",
            r.decode or "",
            each.gateway,
            f"{r.age_s:.1f} s",
            str(r.prompt_len),
            str(r.answer_len),
            str(r.num_attempts),
        )
    return table

"""Commands that operate a deployment: `baton pools`, `workers`, `flip`, `drain`, and so on."""

import threading
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from deploy.admin.client import AdminClient, AdminError
from deploy.admin.schema import PoolsAnswer, StepInfo
from deploy.commands.options import (
    Wait,
    Watch,
    WorkerName,
    operates,
    parse_numbers,
)
from deploy.commands.views import (
    Output,
    planner_view,
    pools_view,
    requests_table,
    workers_view,
)
from engine.config import PlannerMode
from engine.control import SERVING_ROLES
from engine.errors import ConfigError
from engine.messages import Role

COUNTS = "ROLE=NUMBER"
POLL_EVERY_S = 0.2

operator_app = typer.Typer()  # its commands are direct subcommands of `baton`
pools_app = typer.Typer(help="How many workers of each role there are.")
operator_app.add_typer(pools_app, name="pools")


@operates(pools_app.callback(invoke_without_command=True))
def pools_command(client: AdminClient, output: Output, *, watch: Watch = False) -> None:
    """Shows the pools."""
    output.show(client.pools, pools_view, watch=watch)


@operates(pools_app.command("set"))
def set_command(
    client: AdminClient,
    output: Output,
    counts: Annotated[list[str], typer.Argument(metavar=f"{COUNTS}...")],
    version: Annotated[
        str | None, typer.Option(help="version to change (default: the current one)")
    ] = None,
    *,
    wait: Wait = True,
) -> None:
    """Sets the number of workers: `baton pools set prefill=3 decode=5`."""
    wanted = parse_numbers(counts, COUNTS, SERVING_ROLES)
    follow(client, output, client.set_pools(wanted, version), wait=wait)


@operates(operator_app.command("flip"))
def flip_command(
    client: AdminClient,
    output: Output,
    worker: WorkerName,
    to: Annotated[
        Role | None, typer.Option(help="new role (default: the other one of prefill and decode)")
    ] = None,
    *,
    wait: Wait = True,
) -> None:
    """Changes a worker's role in place and moves its sequences. A drained worker serves again."""
    role = to or _other_role(client.pools(), worker)
    answer = client.order(worker, "flip", {"role": role})
    follow(client, output, answer, wait=wait, check=lambda seen: check_role(seen, worker, role))


@operates(operator_app.command("drain"))
def drain_command(
    client: AdminClient, output: Output, worker: WorkerName, *, wait: Wait = True
) -> None:
    """Takes all work from a worker and keeps it; `baton flip WORKER --to ROLE` brings it back."""
    answer = client.order(worker, "drain")
    follow(
        client, output, answer, wait=wait, check=lambda seen: check_role(seen, worker, Role.DRAINED)
    )


@operates(operator_app.command("stop-worker"))
def stop_worker_command(
    client: AdminClient, output: Output, worker: WorkerName, *, wait: Wait = True
) -> None:
    """Drains a worker, then ends it. Its pool has one worker less from then on."""
    follow(client, output, client.order(worker, "stop"), wait=wait)


@operates(operator_app.command("workers"))
def workers_command(client: AdminClient, output: Output, *, watch: Watch = False) -> None:
    """Shows every worker."""
    output.show(lambda: client.pools().workers, workers_view, watch=watch)


@operates(operator_app.command("top"))
def top_command(client: AdminClient, output: Output) -> None:
    """Shows a deployment on the whole terminal, live: views, filter, details and orders."""
    if output.as_json:
        raise ConfigError("top is for people: `baton pools --json --watch` is for programs")
    from deploy.terminal.top import Top  # slow to import

    Top(client).run()


@operates(operator_app.command("requests"))
def requests_command(client: AdminClient, output: Output, *, watch: Watch = False) -> None:
    """Shows the requests that are being served."""
    output.show(client.requests, requests_table, watch=watch)


@operates(operator_app.command("planner"))
def planner_command(
    client: AdminClient,
    output: Output,
    mode: Annotated[PlannerMode | None, typer.Argument(help="the new mode")] = None,
    *,
    watch: Watch = False,
) -> None:
    """Shows what the planner of the pools proposes and did. With MODE, sets its mode first."""
    if mode is not None:
        client.set_planner(mode)
    output.show(client.planner, planner_view, watch=watch)


def follow(
    client: AdminClient,
    output: Output,
    answer: PoolsAnswer,
    *,
    wait: bool,
    check: Callable[[PoolsAnswer], None] = lambda _: None,
) -> None:
    """Prints each step when it happens, until the pools are settled. Ctrl-C stops printing, and
    undoes nothing.

    At the end `check` is called; it raises AdminError if the result differs from the order.
    """
    for step in _steps(client, answer, wait=wait):
        output.step(step)
    if wait:
        check(client.pools())
        output.done()


def check_role(answer: PoolsAnswer, worker_id: str, role: Role) -> None:
    """Raises AdminError if the worker no longer exists or has another target role."""
    found = next((each for each in answer.workers if each.worker_id == worker_id), None)
    if found is None:
        raise AdminError(f"{worker_id} is gone")
    if found.target is not role:
        raise AdminError(f"{worker_id} is {found.target}, not {role}: see what happened above")


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


def _other_role(answer: PoolsAnswer, worker_id: str) -> Role:
    """Returns decode for prefill, and prefill for decode. Raises AdminError for other roles."""
    others = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
    for worker in answer.workers:
        if worker.worker_id == worker_id:
            if worker.target not in others:
                raise AdminError(f"{worker_id} is {worker.target}: give the new role with --to")
            return others[worker.target]
    raise AdminError(f"no worker is called {worker_id}")

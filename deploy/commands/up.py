"""`baton up`, `baton status` and `baton down`: Baton on a Ray cluster; and `baton apply`.

`up` and `apply` change a running deployment to the settings in a file. They name the settings that
need a restart; then the exit status is 3.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from deploy.admin.client import AdminClient
from deploy.admin.declared import read_declaration
from deploy.admin.schema import RESTART, Difference
from deploy.base.defaults import load_up_config
from deploy.commands.operator import follow
from deploy.commands.options import AsJson, ClusterFile, Wait, operates
from deploy.commands.views import DIFFERS, Output, differences_table, pools_view, table_of
from deploy.ray.up import Status, bring_up, cluster_of, take_down
from engine.errors import ConfigError

up_app = typer.Typer()  # its commands are direct subcommands of `baton`


@up_app.command("up")
def up_command(
    config: ClusterFile = Path("baton.yaml"),
    *,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="only show what the file declares otherwise; status 3 if so"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Brings up a cluster and Baton on it, or changes what runs otherwise than FILE declares."""
    console, output = Console(stderr=True), Output(as_json=as_json)
    cluster = cluster_of(load_up_config(config))
    if diff:
        output.differences(cluster.ask("diff", config).differences)
        return
    with console.status("starting") as progress:
        status = bring_up(cluster, config, progress.update)
    if as_json:
        output.json(status)
    else:
        _say(console, status)
        if status.differences:
            console.print(differences_table(status.differences))
    _end(output, status.left)


@operates(up_app.command("apply"))
def apply_command(
    client: AdminClient,
    output: Output,
    config: Annotated[Path, typer.Option("-c", "--config", help="TOML file, or baton.yaml")],
    *,
    diff: Annotated[
        bool, typer.Option("--diff", help="only show what differs; status 3 if something does")
    ] = False,
    wait: Wait = True,
) -> None:
    """Changes a running deployment to what a file declares, as far as that needs no restart."""
    declared = read_declaration(config)
    found = client.differences(declared)
    if diff or not found:
        output.differences(found)
        return
    output.show(lambda: found, differences_table, watch=False)
    left: Sequence[Difference] = found
    before: Sequence[Difference] = ()
    while left != before and any(each.order != RESTART for each in left):  # one version a round
        follow(client, output, client.declare(declared), wait=wait)
        before, left = left, client.differences(declared) if wait else left
    _end(output, left, was_ordered=not wait)


def _end(output: Output, left: Sequence[Difference], *, was_ordered: bool = False) -> None:
    """Exits with status 3 if a restart is needed for some settings. Raises ConfigError for other
    differences.

    `was_ordered`: the orders were given, but their effects were not awaited.
    """
    missed = [each.key for each in left if each.order != RESTART]
    if missed and not was_ordered:
        raise ConfigError(f"not as declared: {', '.join(missed)}; see `baton events`")
    waiting = [each.key for each in left if each.order == RESTART]
    if waiting:
        if not output.as_json:
            output.line(f"[yellow]![/yellow] needs a restart: {escape(', '.join(waiting))}")
        raise typer.Exit(DIFFERS)


@up_app.command("status")
def status_command(config: ClusterFile = Path("baton.yaml")) -> None:
    """Shows the nodes, the pools and the gateways of a cluster."""
    console = Console(stderr=True)
    cluster = cluster_of(load_up_config(config))
    with console.status("asking"):
        status = cluster.ask("status")
    _say(console, status)


@up_app.command("down")
def down_command(config: ClusterFile = Path("baton.yaml")) -> None:
    """Takes down Baton, and the cluster if `ray up` made it; status 1 if anything is left."""
    console = Console(stderr=True)
    cluster = cluster_of(load_up_config(config))
    with console.status("stopping"):
        left = take_down(cluster, lambda line: console.print(escape(line), highlight=False))
    if not left:
        console.print("[green]✓[/green] nothing is left")
        return
    console.print("[red]left running:[/red]")
    for each in left:
        console.print(f"  {escape(str(each))}", highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def _say(console: Console, status: Status) -> None:
    numbers = ("CPU", "GPU", "prefill_node", "decode_node")
    table = table_of("nodes", ("node", "state"), numbers)
    for node in status.nodes:
        amounts = [node.resources.get(name, 0.0) for name in ("CPU", "GPU")]
        amounts += [node.resources.get(name, 0.0) for name in ("prefill_node", "decode_node")]
        state = "alive" if node.is_alive else "[red]dead[/red]"
        table.add_row(node.address, state, *(f"{amount:g}" for amount in amounts))
    console.print(table)
    if status.pools is None:
        console.print("[red]✗[/red] no controller runs")
        return
    console.print(pools_view(status.pools))
    for gateway in status.pools.gateways:
        if gateway.state == "serving":
            console.print(f"[green]✓[/green] serving at {gateway.url}", soft_wrap=True)

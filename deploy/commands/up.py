"""`baton up`, `baton status` and `baton down`: Baton on a Ray cluster."""

from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from deploy.commands.options import ClusterFile
from deploy.commands.views import pools_view, table_of
from deploy.ray.config import load_up_config
from deploy.ray.up import Status, bring_up, cluster_of, take_down

up_app = typer.Typer()  # its commands stand at the top level


@up_app.command("up")
def up_command(config: ClusterFile = Path("baton.yaml")) -> None:
    """Brings up a cluster and Baton on it. Parts that run already stay as they are."""
    console = Console(stderr=True)
    cluster = cluster_of(load_up_config(config))
    with console.status("starting") as progress:
        status = bring_up(cluster, config, progress.update)
    _say(console, status)


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

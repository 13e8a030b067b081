"""`baton store` and its subcommands `drop` and `warm`."""

import threading
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer

from deploy.admin.client import AdminClient, AdminError
from deploy.admin.schema import DropBody
from deploy.commands.chat import first_model
from deploy.commands.options import Watch, operates, parse_seconds
from deploy.commands.store.prompts import read_prompts
from deploy.commands.store.views import stores_view
from deploy.commands.store.warming import (
    KeptTokens,
    WarmedPrompts,
    compute,
    kept_by,
    until_taken,
)
from deploy.commands.views import Output
from engine.clock import MonotonicClock
from engine.errors import ConfigError

ANSWER_TIMEOUT_S = 600.0  # for one prompt, which may wait in the queue
MAX_AT_ONCE = 256

store_app = typer.Typer(help="Stores of KV, which keep prefixes beyond their workers.")


class WarmAnswer(msgspec.Struct, frozen=True):
    """The JSON answer of `baton store warm`."""

    computed: WarmedPrompts
    kept: list[KeptTokens]


@operates(store_app.callback(invoke_without_command=True))
def store_command(client: AdminClient, output: Output, *, watch: Watch = False) -> None:
    """Shows every store: its tiers, hits, faults and most used prefixes."""
    output.show(client.stores, stores_view, watch=watch)


@operates(store_app.command("drop"))
def drop_command(
    client: AdminClient,
    output: Output,
    version: Annotated[
        str | None, typer.Option(help="whose stores (default: the current version)")
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="the stores of all versions")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> None:
    """Lets stores forget all blocks, in memory, on disk and as objects. Requests go on."""
    body = DropBody(version, every)
    if not yes:
        names = ", ".join(client.drop_stores(body, preview=True))
        typer.confirm(f"All blocks of {names} are lost. Go on?", abort=True, err=True)
    dropped = client.drop_stores(body)
    if output.as_json:
        output.json(dropped)
    else:
        output.line(f"[green]✓[/green] {', '.join(dropped)}: told to drop all blocks")


@operates(store_app.command("warm"))
def warm_command(  # noqa: PLR0913 - a command's options
    client: AdminClient,
    output: Output,
    file: Annotated[Path, typer.Argument(help="one object with prompt or messages a line")],
    model: Annotated[
        str | None, typer.Option(help="model name (default: the first that is served)")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of the gateway (default: the deployment's)")
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="BATON_API_KEY", help="key of the gateway")] = "",
    concurrency: Annotated[
        int, typer.Option(min=1, max=MAX_AT_ONCE, help="requests at the same time")
    ] = 4,
    timeout: Annotated[
        str, typer.Option(metavar="TIME", help="for the stores to take all in: 90s, 5m, 1h")
    ] = "5m",
) -> None:
    """Has prompts computed, one token each, and waits until the stores keep their KV.

    Status 1 if a prompt failed, or the stores are not done in time.
    """
    timeout_s = parse_seconds(timeout)
    num_prompts = sum(1 for _ in read_prompts(file))  # finds invalid lines before sending
    if not num_prompts:
        raise ConfigError(f"{file} has no prompt")
    if not client.stores():
        raise AdminError("there is no store, so nothing would be kept: store.memory_mib is 0")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Timeout(10.0, read=ANSWER_TIMEOUT_S)
    with httpx.Client(
        base_url=url or _gateway(client), headers=headers, timeout=limits, trust_env=False
    ) as gateway:
        name = model or first_model(gateway)
        done = compute(gateway, read_prompts(file), model=name, num_at_once=concurrency)
    for error in done.errors:
        output.note(f"a prompt failed: {error}")
    pause = threading.Event().wait
    stores = until_taken(client.stores, clock=MonotonicClock(), pause=pause, timeout_s=timeout_s)
    _tell(output, done, kept_by(stores))
    if done.num_failed:
        raise typer.Exit(1)


def _gateway(client: AdminClient) -> str:
    """Returns the URL of the first gateway that serves. Raises AdminError."""
    found = (each.url for each in client.pools().gateways if each.url and each.is_connected)
    url = next(found, None)
    if url is None:
        raise AdminError("no gateway serves: give its URL with --url")
    return url


def _tell(output: Output, done: WarmedPrompts, kept: list[KeptTokens]) -> None:
    if output.as_json:
        output.json(WarmAnswer(done, kept))
        return
    mark = "[yellow]![/yellow]" if done.num_failed else "[green]✓[/green]"
    output.line(
        f"{mark} {done.num_prompts - done.num_failed} of {done.num_prompts} prompts computed:"
        f" {done.prompt_tokens:,} tokens, {done.cached_tokens:,} of them were cached"
    )
    for each in kept:
        tiers = ", ".join(f"{number:,} in {tier}" for tier, number in each.by_tier.items())
        output.line(f"{mark} {each.store} keeps tokens: {tiers}")

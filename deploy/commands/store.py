"""`baton store` and its subcommands `drop` and `warm`."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from deploy.admin.client import AdminClient, AdminError
from deploy.admin.schema import DropBody, StoreInfo, StoreTier
from deploy.commands.chat import first_model
from deploy.commands.options import Watch, operates, parse_seconds
from deploy.commands.views import Output, table_of
from deploy.commands.warming import (
    KeptTokens,
    WarmedPrompts,
    compute,
    kept_by,
    read_prompts,
    until_taken,
)
from engine.clock import MonotonicClock
from engine.errors import ConfigError

ANSWER_TIMEOUT_S = 600.0  # longest wait for one prompt's answer, including its time in the queue
MAX_AT_ONCE = 256

store_app = typer.Typer(help="Stores of KV, which keep prefixes beyond their workers.")


class WarmAnswer(msgspec.Struct, frozen=True):
    """The JSON output of `baton store warm`."""

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
    # Finds invalid lines before any prompt is sent.
    num_prompts = sum(1 for _ in read_prompts(file))
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
    """Returns the URL of the first serving gateway. Raises AdminError."""
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


NUM_PREFIXES = 5  # number of prefixes shown for each store
ROOT_CHARS = 12  # number of characters shown of a prefix's hash
GIB, MIB = 2**30, 2**20
_COUNTS = ("taken_blocks", "dropped_blocks", "written_blocks", "loaded_blocks", "evicted_blocks")
_FAULTS = ("failed_loads", "failed_writes", "dropped_writes", "fallbacks")


def stores_view(stores: Sequence[StoreInfo]) -> Group | Table:
    """Returns a row for each tier, then the counters and the top prefixes of each store."""
    texts = ("store", "version", "node", "state", "tier")
    table = table_of("stores", texts, ("blocks", "size", "full", "hits"))
    for store in stores:
        names = (store.name, store.version, store.node[:ROOT_CHARS], _state(store))
        for number, tier in enumerate(store.tiers):
            first = names if number == 0 else ("", "", "", "")
            table.add_row(*first, tier.medium, *_numbers(tier))
        if not store.tiers:
            table.add_row(*names, "", "", "", "", "")
    if not stores:
        return Group(table, "no store: give `baton serve` --store MIB, or set store.memory_mib")
    return Group(table, *(f"  {line}" for store in stores for line in _lines(store)))


def size_text(num_bytes: float) -> str:
    """Returns a number of bytes as text in MiB or GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def totals_of(counters: Mapping[str, float]) -> dict[str, float]:
    """Returns the counters by name, summed over tiers and reasons."""
    totals: dict[str, float] = {}
    for key, number in counters.items():
        name = key.partition(":")[0]
        totals[name] = totals.get(name, 0) + number
    return totals


def _numbers(tier: StoreTier) -> tuple[str, str, str, str]:
    full = f"{100 * tier.num_blocks / tier.max_blocks:.0f} %" if tier.max_blocks else ""
    size = f"{size_text(tier.num_bytes)} of {size_text(tier.max_bytes)}"
    return str(tier.num_blocks), size, full, str(tier.offered_blocks)


def _state(store: StoreInfo) -> str:
    if store.state == "serving" and not store.is_connected:
        return "[red]cannot be reached[/red]"
    if store.is_connected and not store.block_bytes:
        return "waits for a worker"
    return store.state


def _lines(store: StoreInfo) -> Iterator[str]:
    if store.why:
        yield f"{store.name}: [red]{escape(store.why)}[/red]"
    if not store.is_connected:
        return
    for tier in store.tiers:
        if tier.fault is not None:
            yield f"{store.name}: [red]{tier.medium} is not used: {escape(tier.fault)}[/red]"
        elif tier.shortage is not None:
            yield f"{store.name}: [red]{tier.medium}: {escape(tier.shortage)}[/red]"
    totals = totals_of(store.counters)
    done = [
        f"{totals[name]:.0f} {name.removesuffix('_blocks')}" for name in _COUNTS if name in totals
    ]
    again = f", {store.num_starts} starts" if store.num_starts > 1 else ""
    yield (
        f"{store.name}: {', '.join([*done, f'{store.num_new} new at workers'])};"
        f" {store.num_peers} peers, {store.num_leases} leases{again}"
    )
    faults = [
        f"{key} {number:.0f}"
        for key, number in sorted(store.counters.items())
        if key.partition(":")[0] in _FAULTS and number
    ]
    if faults:
        yield f"{store.name}: [yellow]{escape(', '.join(faults))}[/yellow]"
    if store.prefixes:
        top = (f"{each.root[:ROOT_CHARS]} {each.num_offers}×" for each in store.prefixes)
        shown = [text for text, _ in zip(top, range(NUM_PREFIXES), strict=False)]
        yield f"{store.name}: top prefixes {', '.join(shown)}"

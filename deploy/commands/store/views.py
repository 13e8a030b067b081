"""The tables of `baton store`."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from deploy.admin.schema import StoreInfo, StoreTier
from deploy.commands.views import table_of

NUM_PREFIXES = 5  # shown prefixes of each store
ROOT_CHARS = 12  # shown characters of a prefix's hash
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
    """Returns a size as text in MiB or GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def totals_of(counters: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of the counters by name, over tiers and reasons."""
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

"""The load reports of KV stores, as families of samples.

A store computes no tokens, so it has no series of workers. A store's report has counts of several
kinds. The form of a key shows the kind:

    name                         of the store                  baton_store_<name>
    name:reason                  the same, by reason           label `reason`
    name:medium                  by tier                       label `medium`
    name:medium_reason           by tier and reason            both labels
    medium_name, .._name:reason  counted in a lower tier       baton_store_tier_<name>, `medium`

Blocks are counted in two ways. `baton_store_blocks` is the number of blocks that can be found, by
tier. `baton_store_slots` is the number of memory slots by state; its sum is the capacity of the
memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from engine.messages import LoadReport, Role
from engine.worker.block_events import LOWER_MEDIA
from router.gateway.metrics.families import counter, gauge
from router.gateway.metrics.workers import (
    BLOCK_STATES,
    COUNTER_TEXTS,
    GAUGE_TEXTS,
    metric_name,
)
from router.port import RouterStatus

OF_TIERS = {  # by name in a load report: help text. Reasons begin with the medium
    "evicted_blocks": "Blocks that left a full tier",
    "failed_loads": "Blocks that could not be read from a lower tier, by reason",
    "failed_writes": "Blocks that could not be written to a lower tier, by reason",
    "dropped_writes": "Blocks that were not written to a lower tier, by reason",
    "loaded_blocks": "Blocks read from a lower tier into memory",
    "offered_blocks": "Blocks that were found for a prompt, by where they were: hits",
    "written_blocks": "Blocks written to a lower tier",
}
_AS_WORKERS = (  # names of counts that workers have too
    *("bad_messages", "cpu_seconds", "dropped_reads", "exposed_seconds"),
    *("failed_fetches", "private_builds"),
    *(
        "refused_connections",
        "refused_sessions",
        "reread_blocks",
        "served_reads",
        "slow_sinks",
        "unsent_messages",
    ),
)
STORE_TEXTS = {
    **{name: COUNTER_TEXTS[name] for name in _AS_WORKERS},
    "dropped_blocks": "Blocks of workers that were not taken, by reason",
    "fallbacks": "Slower ways taken, by reason",
    "leases_ended": "Ends of leases that workers pull under, by reason",
    "prefetched_blocks": "Blocks read into memory before their prompt came",
    "prefix_offers": "Answers to requests for a cached prefix: held, or not_held",
    "pulled_blocks": "Blocks pulled from workers",
    "pulled_bytes": "Bytes pulled from workers",
    "pulls_done": "Complete pulls of the store",
    "pulls_failed": "Pulls of the store that failed, by reason",
    "taken_blocks": "Blocks taken from workers",
    "transfer_seconds": "Time in which blocks were on their way to the store",
}
TIER_TEXTS = {  # by name: help text of counts that a lower tier makes
    "abandoned": "Operations that did not end before the store's end",
    "blocks_got": "Blocks read from objects",
    "blocks_put": "Blocks written to objects",
    "errors": "Operations that failed, by reason",
    "fallbacks": "Slower ways of reading and writing, by reason",
    "growth_errors": "Attempts to take more space that failed, by reason",
    "offs": "Times that the tier stepped back after faults",
    "read_bytes": "Bytes read",
    "reads": "Blocks read",
    "recovered": "Blocks found at the start",
    "segments_deleted": "Objects deleted",
    "segments_put": "Objects written",
    "skipped": "Blocks that a start found and did not believe, by reason",
    "write_bytes": "Bytes written",
    "writes": "Blocks written",
}
_OBJECT_BYTES = "object_bytes"  # reported as a count, but exported as a gauge because it may fall
_TIER_GAUGES = {  # by name in a load report: exported name, text
    "store_blocks": ("blocks", "Blocks that can be found in the tier"),
    "load_fixed_s": (
        "load_fixed_seconds",
        "Recent time from the first load of a burst to its first block",
    ),
    "load_block_s": ("load_block_seconds", "Recent time of each block of a burst"),
}


@dataclass(frozen=True, slots=True)
class StoreCount:
    """A count of a store: its name after `baton_store_`, and its labels."""

    name: str
    text: str
    medium: str | None = None
    reason: str | None = None


def read_count(key: str) -> StoreCount:
    """Parses the key of a count in a store's report. Unknown names are accepted."""
    name, _, reason = key.partition(":")
    if name in OF_TIERS:
        medium, _, why = reason.partition("_")
        has_reason = name.startswith(("failed_", "dropped_"))
        return StoreCount(name, OF_TIERS[name], medium, why if has_reason else None)
    medium, _, rest = name.partition("_")
    if medium in LOWER_MEDIA and rest:
        text = TIER_TEXTS.get(rest, "Counted by the tier")
        return StoreCount(f"tier_{metric_name(rest)}", text, medium, reason)
    text = STORE_TEXTS.get(name, "Counted by the store")
    return StoreCount(metric_name(name), text, None, reason or None)


def store_loads(port: RouterStatus) -> list[tuple[str, LoadReport]]:
    """Returns the last load report of each store that sent one."""
    return [
        (str(name), status.load)
        for name, status in port.workers().items()
        if status.role is Role.STORE and status.load is not None
    ]


def store_families(port: RouterStatus) -> Iterator[Metric]:
    """Yields memory slots, leases, counts and gauges of all stores; yields nothing if there is no
    store.
    """
    loads = store_loads(port)
    if not loads:
        return
    slots = [
        ((store, state), getattr(load, f"{state}_blocks"))
        for store, load in loads
        for state in BLOCK_STATES
    ]
    leases = [((store,), load.open_leases) for store, load in loads]
    text = "Slots of the store's memory by state"
    yield gauge("baton_store_slots", text, ("store", "state"), slots)
    text = "Leases that workers may pull under"
    yield gauge("baton_store_open_leases", text, ("store",), leases)
    yield from _counts(loads)
    yield from _gauges(loads)


def _counts(loads: list[tuple[str, LoadReport]]) -> Iterator[Metric]:
    found: dict[str, list[tuple[str, StoreCount, float]]] = {}
    for store, load in loads:
        for key, value in load.counters.items():
            if key != _OBJECT_BYTES:
                count = read_count(key)
                found.setdefault(count.name, []).append((store, count, value))
    for name, counts in sorted(found.items()):
        has_medium = any(count.medium is not None for _, count, _ in counts)
        has_reason = any(count.reason for _, count, _ in counts)
        labels = ["store", *(["medium"] if has_medium else []), *(["reason"] if has_reason else [])]
        rows = []
        for store, count, value in counts:
            of_tier = [count.medium or ""] if has_medium else []
            why = [count.reason or ""] if has_reason else []
            rows.append(([store, *of_tier, *why], value))
        yield counter(f"baton_store_{name}", counts[0][1].text, labels, rows)


def _gauges(loads: list[tuple[str, LoadReport]]) -> Iterator[Metric]:
    for key, (name, text) in _TIER_GAUGES.items():
        rows = [
            ((store, medium), value)
            for store, load in loads
            for medium, value in _of(load.gauges, key).items()
        ]
        yield gauge(f"baton_store_{name}", text, ("store", "medium"), rows)
    counts = [(store, load.counters) for store, load in loads]
    sizes = [((store,), known[_OBJECT_BYTES]) for store, known in counts if _OBJECT_BYTES in known]
    text = "Bytes of all objects of the store's model"
    yield gauge("baton_store_object_bytes", text, ("store",), sizes)
    names = {name for _, load in loads for name in load.gauges if ":" not in name}
    for name in sorted(names):
        text = GAUGE_TEXTS.get(name, "Measured by the worker").replace("worker", "store")
        given = [((store,), load.gauges[name]) for store, load in loads if name in load.gauges]
        yield gauge(f"baton_store_{metric_name(name)}", text, ("store",), given)


def _of(gauges: Mapping[str, float], name: str) -> dict[str, float]:
    """Returns the values of gauges with this name, by medium."""
    prefix = f"{name}:"
    return {
        key.removeprefix(prefix): value for key, value in gauges.items() if key.startswith(prefix)
    }

"""Lists every metric of a gateway, read from a gateway that has all its parts.

`python -m tests.kits.tree.metric_table` prints the tables of docs/users/metrics.md.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from deploy.controller.metrics import controller_families
from deploy.pools.events import NodesSeen, PoolTick
from deploy.pools.machine import PoolMachine
from deploy.pools.planning import Planning, rules_of
from deploy.pools.state import PoolLimits
from engine.config import Config
from engine.control import (
    ControllerReport,
    Intent,
    Members,
    PrefixUse,
    StoreReport,
    TierReport,
    Version,
)
from engine.messages import LoadReport, Role, WorkerId
from engine.worker.costs import CostErrors
from router.access.keys import FixedKeys
from router.edge.limits import Book
from router.gateway.app import app_of
from router.gateway.background import BackgroundWork
from router.gateway.metrics.families import encode_metrics
from router.gateway.metrics.meters import ChoiceMeter, RequestMeter
from router.gateway.metrics.pools import PoolBoard
from router.gateway.metrics.process import ProcessMeter
from router.gateway.metrics.siblings import Siblings
from router.gateway.metrics.stores import OF_TIERS, STORE_TEXTS, TIER_TEXTS
from router.gateway.metrics.workers import COUNTER_TEXTS, GAUGE_TEXTS
from router.machine.requests import Forecast
from router.port import WorkerStatus
from tests.kits.router.gateway import (
    STOP,
    TIMELINE,
    FakeRouter,
    TickingClock,
    create_parts,
    versions_of,
)

SECTIONS = (  # title and prefixes; a metric is in the first section that fits
    ("Under vLLM's names", ("vllm:",)),
    ("Workers", ("baton_worker_", "baton_draft", "baton_accepted", "baton_cost_error")),
    ("Controller", ("baton_controller_", "baton_launcher_", "baton_planner_", "baton_cost_")),
    ("Stores", ("baton_store_",)),
    ("Pools", ("baton_pool", "baton_service_", "baton_version_", "baton_canary_")),
    ("Keys", ("baton_key_",)),
    ("Batches and kept responses", ("baton_batch", "baton_response")),
    ("Router", ("baton_router_", "baton_queue_", "baton_severed_", "baton_predict")),
    (
        "Gateway",
        ("baton_edge_", "baton_tls_", "baton_conn", "baton_gateway", "baton_event", "http_"),
    ),
    ("Process", ("process_",)),
    ("Requests", ("",)),
)
ORDER = (
    *("Requests", "Router", "Workers", "Stores", "Pools", "Controller", "Keys", "Gateway"),
    "Process",
    *("Batches and kept responses", "Under vLLM's names"),
)
WITHOUT_REASON = frozenset(COUNTER_TEXTS) - {
    *("failed_fetches", "fallbacks", "held_steps", "leases_ended", "prefix_offers"),
    *("pulls_failed", "refused_connections", "refused_sessions"),
}
STORE = WorkerId("store-v1")
WITH_REASON = frozenset(  # the store's counters that have a `reason` label
    {
        *("dropped_blocks", "failed_fetches", "fallbacks", "leases_ended", "prefix_offers"),
        *("pulls_failed", "refused_connections", "refused_sessions"),
        *("errors", "growth_errors", "skipped"),
    }
)


def full_load() -> LoadReport:
    """Returns a load report with every counter and gauge that a worker may send."""
    counters = {name if name in WITHOUT_REASON else f"{name}:reason": 1.0 for name in COUNTER_TEXTS}
    more = {"drafted:ngram": 1.0, "accepted:ngram": 1.0, "accepted_len:1": 1.0}
    gauges = dict.fromkeys(GAUGE_TEXTS, 1.0)
    return LoadReport(1, 1, 1, 1, 1, 1, 1, 1, counters | more, gauges=gauges)


def full_store_load() -> LoadReport:
    """Returns a load report with every counter and gauge that a store may send."""
    counters = {f"{name}:disk": 1.0 for name in OF_TIERS}
    for name in ("dropped_writes", "failed_loads", "failed_writes"):
        counters[f"{name}:disk_reason"] = counters.pop(f"{name}:disk")
    for prefix, names in (("", STORE_TEXTS), ("disk_", TIER_TEXTS)):
        for name in names:
            counters[f"{prefix}{name}{':reason' if name in WITH_REASON else ''}"] = 1.0
    counters["object_bytes"] = 1.0
    of_tiers = ("store_blocks:host", "load_fixed_s:disk", "load_block_s:disk")
    gauges = dict.fromkeys((*of_tiers, *("loop_lag_seconds", "max_fds", "open_fds")), 1.0)
    gauges["resident_memory_bytes"] = 1.0
    return LoadReport(1, 1, 1, 1, 1, 0, 0, 1, counters, gauges=gauges)


def store_report() -> StoreReport:
    """Returns the report of a store whose disk tier is suspended."""
    return StoreReport(
        block_bytes=4096,
        tiers=[TierReport("host", 1, 4), TierReport("disk", 0, 8, "EIO")],
        num_peers=2,
        num_leases=1,
        num_new=3,
        num_starts=1,
        counters={"taken_blocks": 1.0},
        prefixes=[PrefixUse("aa", 5)],
    )


def controller_metrics(config: Config) -> list[Metric]:
    """Returns the metrics of a controller that has just started."""
    limits = PoolLimits(4, has_stores=True)
    machine = PoolMachine(Intent((Version(),)), limits=limits, gateways=["gateway"])
    machine.handle(NodesSeen(("",)), 0.0)
    machine.handle(PoolTick(), 0.0)
    planning = Planning(machine, rules_of(config), order=lambda _: None)
    found = controller_families(
        machine,
        planning,
        counters={"workers died": 1},
        health={"gcs": True, "raylet": True},
        price_per_hour=2.0,
        stores={STORE: store_report()},
    )
    return list(found)


def full_page() -> str:
    """Returns /metrics of one of several gateway processes, with all parts and a controller."""
    router, clock = FakeRouter(), TickingClock()
    forecast = Forecast(wait_s=1.0, tpot_s=0.1, errors=CostErrors(0.1, 0.1, 0.1))
    router.statuses[WorkerId("m0")] = WorkerStatus(
        Role.MIXED, full_load(), 0, 0, forecast, kernels="cpu avx2 fused"
    )
    router.statuses[STORE] = WorkerStatus(Role.STORE, full_store_load(), 0, 0)
    router.severed_pairs.append((WorkerId("p0"), WorkerId("d0")))
    router.events["moved", "flip"] = 1
    versions = versions_of(router)
    parts = create_parts(versions, clock=clock, siblings=Siblings(None, "0"))
    board = PoolBoard(versions, _StillClock())
    board.members = Members(1, (), Intent((Version(),)))
    board.take(ControllerReport(encode_metrics(controller_metrics(Config()))))
    keys, edge, background = FixedKeys([]), Book(), BackgroundWork()
    app_of(
        parts,
        keys=keys,
        siblings=Siblings(None, "0"),
        edge=edge,
        background=background,
        board=board,
        process=ProcessMeter(clock),
    )
    for counts in (keys.counters, edge.refusals, edge.tls_events, parts.grammars.counters):
        counts["reason"] = 1
    with RequestMeter(parts.metrics) as meter:
        meter.accept(0.0, 1, "v1", key="alice")
        choice = ChoiceMeter(meter, 1)
        choice.tokens(2, 1.0)
        choice.tokens(2, 2.0)
        choice.finish(STOP, TIMELINE)
        meter.finish(STOP, 2.0)
    parts.metrics.record_status("POST", "/v1/completions", 200)
    parts.metrics.prediction_ratio.observe(1.0, ("ttft",))
    return parts.metrics.exposition().decode()


class _StillClock:
    def now_s(self) -> float:
        return 0.0


@cache
def full_families() -> list[Metric]:
    return list(text_string_to_metric_families(full_page()))


def tables(families: Sequence[Metric] | None = None) -> str:
    """Returns the Markdown of docs/users/metrics.md: one table for each part."""
    found = full_families() if families is None else families
    by_section: dict[str, list[Metric]] = {title: [] for title in ORDER}
    for metric in found:
        title = next(t for t, prefixes in SECTIONS if metric.name.startswith(prefixes))
        by_section[title].append(metric)
    lines: list[str] = []
    for title, metrics in by_section.items():
        lines += [f"### {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        lines += [_row(metric) for metric in sorted(metrics, key=lambda each: each.name)]
        lines.append("")
    return "\n".join(lines)


def _row(metric: Metric) -> str:
    name = metric.name + ("_total" if metric.type == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in _labels(metric))
    return f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |"


def _labels(metric: Metric) -> Iterable[str]:
    found: Iterator[str] = (label for sample in metric.samples for label in sample.labels)
    return [label for label in dict.fromkeys(found) if label not in ("le", "process", "quantile")]


if __name__ == "__main__":
    sys.stdout.write(tables())

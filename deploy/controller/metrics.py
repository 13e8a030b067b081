"""The controller's metrics for Prometheus: pools, services, planner, and the launcher's parts.

Gateways receive these metrics once a second and export them on their own /metrics. So a scraper
needs no admin key, and one target has the metrics of the whole deployment. The operator's API
exports the same metrics, in case no gateway answers.

Every series is exported from the first scrape on, with the value 0. If a series first appeared with
the value 1, Prometheus would count no increase.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deploy.pools.gateways import GatewayState
from deploy.pools.machine import PoolMachine
from deploy.pools.planning import DecisionKind, DecisionOutcome, Planning
from deploy.pools.stores import StoreState
from deploy.pools.workers.record import WorkerState
from engine.config import PlannerMode
from engine.control import CanaryVerdict, EndedCounts, StoreReport, by_number
from router.gateway.metrics.collectors import counter_of

_COSTLY = frozenset(WorkerState) - {
    WorkerState.WAITING
}  # states in which a worker uses its place, which costs money
_process = ProcessCollector(namespace="baton_controller", registry=None)


def controller_families(
    machine: PoolMachine,
    planning: Planning,
    *,
    counters: Mapping[str, int],
    health: Mapping[str, bool],
    price_per_hour: float | None,
    stores: Mapping[str, StoreReport | None],
) -> Iterator[Metric]:
    """Yields all metrics of the controller. `price_per_hour` is the price of one worker per hour.

    `stores` has the fresh report of each store of KV; None for a store without a fresh report.
    """
    yield from _services(machine)
    if machine.stores:
        yield from _stores(machine, stores)
    yield from _state(machine)
    yield from _canary(machine)
    yield from _planner(planning, machine.intent.planner)
    text = "Troubles of the pools and their launcher, by name"
    yield counter_of("baton_pool_events", text, "event", counters)
    parts = GaugeMetricFamily(
        "baton_launcher_up", "1 if a part that services depend on is alive: Ray's", labels=["part"]
    )
    for part, is_alive in health.items():
        parts.add_metric([part], is_alive)
    yield parts
    if price_per_hour is not None:
        num_workers = sum(worker.state in _COSTLY for worker in machine.workers.values())
        yield GaugeMetricFamily(
            "baton_cost_per_hour",
            "Price of the workers that there are, in the configured currency",
            num_workers * price_per_hour,
        )
    yield from _process.collect()


def _services(machine: PoolMachine) -> Iterator[Metric]:
    """Yields the number of workers and gateways by state, and the number of their failures."""
    workers = GaugeMetricFamily(
        "baton_pool_workers", "Workers by state", labels=["version", "role", "state"]
    )
    found = Counter(
        (each.version, "" if each.target is None else each.target.value, each.state)
        for each in machine.workers.values()
    )
    for (version, role), state in (
        (pool, state)
        for pool in sorted({(version, role) for version, role, _ in found})
        for state in WorkerState
    ):
        workers.add_metric([version, role, state.value], found[version, role, state])
    yield workers
    gateways = GaugeMetricFamily("baton_pool_gateways", "Gateways by state", labels=["state"])
    states = Counter(machine.gateways.values())
    for gateway_state in GatewayState:
        gateways.add_metric([gateway_state.value], states[gateway_state])
    yield gateways
    restarts = CounterMetricFamily(
        "baton_service_restarts",
        "Ends and failed starts of a service, each followed by another start",
        labels=["service"],
    )
    looping = GaugeMetricFamily(
        "baton_service_crash_looping", "1 after three failures in a row", labels=["service"]
    )
    workers_first = sorted(machine.workers, key=by_number)
    for name in [*workers_first, *machine.gateways, *sorted(machine.stores)]:
        restarts.add_metric([name], machine.restarts.num_ends(name))
        looping.add_metric([name], machine.restarts.is_looping(name))
    yield from (restarts, looping)


def _stores(machine: PoolMachine, reports: Mapping[str, StoreReport | None]) -> Iterator[Metric]:
    """Yields the number of stores by state, and the metrics in the stores' reports."""
    by_state = GaugeMetricFamily(
        "baton_pool_stores", "Stores of KV by state", labels=["version", "state"]
    )
    states = Counter((store.version.name, store.state) for store in machine.stores.values())
    for version in sorted({name for name, _ in states}):
        for state in StoreState:
            by_state.add_metric([version, state.value], states[version, state])
    yield by_state
    up = GaugeMetricFamily(
        "baton_store_up", "1 if the store reports", labels=["store", "version", "node"]
    )
    for name, store in sorted(machine.stores.items()):
        up.add_metric([name, store.version.name, store.node], reports.get(name) is not None)
    yield up
    told = {name: each for name, each in sorted(reports.items()) if each is not None}
    starts = CounterMetricFamily(
        "baton_store_process_starts",
        "Starts of the store's process, whose memory outlives it",
        labels=["store"],
    )
    new = GaugeMetricFamily(
        "baton_store_new_blocks",
        "Blocks that workers cached and the store has not looked at yet: its lag",
        labels=["store"],
    )
    peers = GaugeMetricFamily(
        "baton_store_peers", "Workers and other stores that the store follows", labels=["store"]
    )
    for name, report in told.items():
        starts.add_metric([name], report.num_starts)
        new.add_metric([name], report.num_new)
        peers.add_metric([name], report.num_peers)
    yield from (starts, new, peers)
    yield from _tiers(told)


def _tiers(reports: Mapping[str, StoreReport]) -> Iterator[Metric]:
    """Yields the size, the use and the state of each store's tiers."""
    labels = ["store", "medium"]
    families = {
        name: GaugeMetricFamily(f"baton_store_{name}", text, labels=labels)
        for name, text in (
            ("capacity_blocks", "Blocks that the tier may hold"),
            ("bytes", "Bytes of the blocks that can be found in the tier"),
            ("capacity_bytes", "Bytes of the blocks that the tier may hold"),
            ("tier_up", "1 if the tier is used, 0 if it could not be opened or has stepped back"),
            ("tier_short", "1 if the tier holds less than it may, because its disk is full"),
        )
    }
    for store, report in reports.items():
        for tier in report.tiers:
            values = (
                tier.max_blocks,
                tier.num_blocks * report.block_bytes,
                tier.max_blocks * report.block_bytes,
                tier.fault is None,
                tier.shortage is not None,
            )
            for family, value in zip(families.values(), values, strict=True):
                family.add_metric([store, tier.medium], value)
    yield from families.values()


def _state(machine: PoolMachine) -> Iterator[Metric]:
    """Yields the state of the pools as a whole."""
    for name, text, value in (
        ("settled", "1 if everything is as wanted and no change is under way", machine.is_settled),
        ("max_workers", "The most workers that there can be", machine.limits.max_workers),
        ("members_version", "Number of the list of workers", machine.members.version),
        ("rollout", "1 while a version takes over", machine.intent.rollout is not None),
        ("drained_workers", "Workers kept without work", len(machine.intent.drained)),
    ):
        yield GaugeMetricFamily(f"baton_pools_{name}", text, float(value))


def _canary(machine: PoolMachine) -> Iterator[Metric]:
    """Yields the ended requests of a version that takes over, and of all other versions, in the
    rollout's present step.
    """
    standing = machine.canary
    verdicts = GaugeMetricFamily(
        "baton_canary_verdict",
        "1 for what is thought of the version that takes over; all 0 if none does",
        labels=["verdict"],
    )
    for each in CanaryVerdict:
        is_it = standing is not None and standing.verdict is each
        verdicts.add_metric([each.value.replace(" ", "_")], is_it)
    yield verdicts
    requests = GaugeMetricFamily(
        "baton_canary_requests",
        "Requests that ended in the present step of a rollout",
        labels=["served_by", "outcome"],
    )
    none = EndedCounts()
    sides = (none, none) if standing is None else (standing.own, standing.others)
    for side, counts in zip(("new_version", "others"), sides, strict=True):
        other = counts.ended - counts.failed - counts.late
        for outcome, number in (("failed", counts.failed), ("late", counts.late), ("other", other)):
            requests.add_metric([side, outcome], number)
    yield requests


def _planner(planning: Planning, mode: PlannerMode) -> Iterator[Metric]:
    modes = GaugeMetricFamily("baton_planner_mode", "1 for the present mode", labels=["mode"])
    for each in PlannerMode:
        modes.add_metric([each.value], each is mode)
    yield modes
    decisions = CounterMetricFamily(
        "baton_planner_decisions",
        "Proposals of the planner that change something",
        labels=["kind", "outcome"],
    )
    for kind in DecisionKind:
        for outcome in DecisionOutcome:
            labels = [kind.value, outcome.value.replace(" ", "_")]
            decisions.add_metric(labels, planning.counts[kind, outcome])
    yield decisions

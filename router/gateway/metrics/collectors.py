"""Counts of other parts of the gateway, read when Prometheus scrapes."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.worker.ranks import split_of
from router.edge.limits import Book
from router.gateway.metrics.workers import computing
from router.gateway.versions import Versions
from router.port import RouterStatus

QUEUE = "baton_queue_requests"


def counter_of(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    """Returns a counter with one label, whose values are the keys of `counts`."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in list(counts.items()):
        family.add_metric([value], count)
    return family


def edge_families(book: Book) -> Iterator[Metric]:
    """Yields counts of the listener's connections, and of connections refused before a request."""
    yield GaugeMetricFamily("baton_connections", "Connections of clients", book.num_connections)
    yield counter_of("baton_edge_refusals", "Connections refused or cut", "reason", book.refusals)
    yield counter_of("baton_tls_events", "Reloads of certificates", "event", book.tls_events)


def router_families(port: RouterStatus) -> Iterator[Metric]:
    """Yields the queue lengths and event counts of the routers of all versions."""
    yield GaugeMetricFamily(QUEUE, "Requests waiting for a worker", port.queue_len())
    yield GaugeMetricFamily(
        "baton_queue_predicted_seconds",
        "Predicted for one worker to compute the prompts that wait",
        port.queued_s(),
    )
    severed = port.severed()
    yield GaugeMetricFamily(
        "baton_severed_pairs", "Pairs of workers between which KV does not arrive", len(severed)
    )
    pairs = GaugeMetricFamily(
        "baton_severed_pair",
        "1 for a pair between which KV does not arrive",
        labels=["source", "sink"],
    )
    for source, sink in severed:
        pairs.add_metric([source, sink], 1)
    yield pairs
    events = CounterMetricFamily(
        "baton_router_events", "Retries, refusals, fallbacks", labels=["event", "reason"]
    )
    for (event, reason), count in port.counters().items():
        events.add_metric([event, reason], count)
    yield events


def kernel_families(versions: Versions) -> Iterator[Metric]:
    """Yields the kernels of workers, and the number of ranks per worker."""
    kernels = GaugeMetricFamily(
        "baton_worker_kernels",
        "1: what the worker computes with, and how it is split into ranks",
        labels=["worker", "role", "version", "kernels", "split"],
    )
    for each in versions.table:
        for worker_id, status in computing(each.port).items():
            if status.kernels:
                split = split_of(status.kernels)
                values = [worker_id, status.role.value, each.name, status.kernels, split]
                kernels.add_metric(values, 1)
    yield kernels


def version_families(versions: Versions) -> Iterator[Metric]:
    """Yields each version's weight, served requests, and ends of other requests."""
    labels = ["version", "fingerprint"]
    weights = GaugeMetricFamily(
        "baton_version_weight", "Weight of the version: its share of requests", labels=labels
    )
    running = GaugeMetricFamily(
        "baton_version_requests", "Requests that the version serves now", labels=labels
    )
    ended = CounterMetricFamily(
        "baton_version_ended_requests",
        "Requests of the version that ended: failed, late or refused, or other",
        labels=["version", "outcome"],
    )
    for each in versions.table:
        values, tally = [each.name, each.port.fingerprint()], versions.tallies.of(each.name)
        other = tally.ended - tally.failed - tally.late
        for outcome, number in (("failed", tally.failed), ("late", tally.late), ("other", other)):
            ended.add_metric([each.name, outcome], number)
        weights.add_metric(values, each.weight)
        running.add_metric(values, versions.num_running[each.name])
    yield from (weights, running, ended)

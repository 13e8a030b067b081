"""Metrics of other parts of the gateway, which are read when Prometheus scrapes."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from engine.worker.ranks import split_of
from router.edge.limits import Book
from router.gateway.metrics.families import counter, gauge
from router.gateway.metrics.workers import computing
from router.gateway.versions import Versions
from router.port import RouterStatus

QUEUE = "baton_queue_requests"


def counter_of(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    """Returns a counter with one label. The values of the label are the keys of `counts`."""
    return counter(name, text, (label,), [((value,), n) for value, n in list(counts.items())])


def edge_families(book: Book) -> Iterator[Metric]:
    """Yields counts of the listener's connections, refused or cut connections, and TLS events."""
    yield GaugeMetricFamily("baton_connections", "Connections of clients", book.num_connections)
    yield counter_of("baton_edge_refusals", "Connections refused or cut", "reason", book.refusals)
    yield counter_of("baton_tls_events", "Reloads of certificates", "event", book.tls_events)


def router_families(port: RouterStatus) -> Iterator[Metric]:
    """Yields the queue lengths and event counts of the routers, summed over all versions."""
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
    text = "1 for a pair between which KV does not arrive"
    yield gauge("baton_severed_pair", text, ("source", "sink"), [(pair, 1) for pair in severed])
    text, events = "Retries, refusals, fallbacks", port.counters().items()
    yield counter("baton_router_events", text, ("event", "reason"), events)


def kernel_families(versions: Versions) -> Iterator[Metric]:
    """Yields the kernels that each worker computes with, and its split into ranks."""
    kernels = [
        ((worker, status.role.value, each.name, status.kernels, split_of(status.kernels)), 1)
        for each in versions.table
        for worker, status in computing(each.port).items()
        if status.kernels
    ]
    text = "1: what the worker computes with, and how it is split into ranks"
    labels = ("worker", "role", "version", "kernels", "split")
    yield gauge("baton_worker_kernels", text, labels, kernels)


def version_families(versions: Versions) -> Iterator[Metric]:
    """Yields each version's weight, running requests, and ended requests by outcome."""
    weights: list[tuple[tuple[str, str], float]] = []
    running, ended = weights.copy(), weights.copy()
    for each in versions.table:
        values, tally = (each.name, each.port.fingerprint()), versions.tallies.of(each.name)
        other = tally.ended - tally.failed - tally.late
        for outcome, number in (("failed", tally.failed), ("late", tally.late), ("other", other)):
            ended.append(((each.name, outcome), number))
        weights.append((values, each.weight))
        running.append((values, versions.num_running[each.name]))
    labels, text = ("version", "fingerprint"), "Weight of the version: its share of requests"
    yield gauge("baton_version_weight", text, labels, weights)
    text = "Requests that the version serves now"
    yield gauge("baton_version_requests", text, labels, running)
    text = "Requests of the version that ended: failed, late or refused, or other"
    yield counter("baton_version_ended_requests", text, ("version", "outcome"), ended)

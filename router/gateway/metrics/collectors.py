"""Counts that other parts of the gateway keep, read when Prometheus scrapes."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.edge.limits import Book
from router.gateway.metrics.workers import forecast_families
from router.gateway.versions import Versions
from router.port import RouterStatus

QUEUE = "baton_queue_requests"


def counter_of(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    """A counter with one label, whose values are the keys of `counts`."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in list(counts.items()):
        family.add_metric([value], count)
    return family


class LabelledCounts(Collector):
    """Exports a mapping that is counted elsewhere, by one label."""

    def __init__(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> None:
        self._family = (name, text, label)
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """The counter as it is now."""
        yield counter_of(*self._family, self._counts)


class EdgeCounts(Collector):
    """The listener's connections, and what it refused before there was a request."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        """The counts as they are now."""
        book = self._book
        yield GaugeMetricFamily("baton_connections", "Connections of clients", book.num_connections)
        yield counter_of(
            "baton_edge_refusals", "Connections refused or cut", "reason", book.refusals
        )
        yield counter_of("baton_tls_events", "Reloads of certificates", "event", book.tls_events)


class RouterCounts(Collector):
    """The queue and the events of the routers of all versions."""

    def __init__(self, port: RouterStatus) -> None:
        self._port = port

    def collect(self) -> Iterator[Metric]:
        """The routers as they are at the time of the scrape."""
        waiting = self._port.queue_len()
        yield GaugeMetricFamily(QUEUE, "Requests waiting for a worker", waiting)
        yield GaugeMetricFamily(
            "baton_queue_predicted_seconds",
            "Predicted for one worker to compute the prompts that wait",
            self._port.queued_s(),
        )
        events = CounterMetricFamily(
            "baton_router_events", "Retries, refusals, fallbacks", labels=["event", "reason"]
        )
        for (event, reason), count in self._port.counters().items():
            events.add_metric([event, reason], count)
        yield events


class Forecasts(Collector):
    """This gateway's predictions for the workers. Each gateway process learns by itself."""

    def __init__(self, port: RouterStatus) -> None:
        self._port = port

    def collect(self) -> Iterator[Metric]:
        """The predictions as they are now."""
        yield from forecast_families(self._port)


class VersionShares(Collector):
    """The weight of each version and the requests that it serves."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def collect(self) -> Iterator[Metric]:
        """The versions as they are now, which are few."""
        labels = ["version", "fingerprint"]
        weights = GaugeMetricFamily(
            "baton_version_weight", "Weight of the version: its share of requests", labels=labels
        )
        running = GaugeMetricFamily(
            "baton_version_requests", "Requests that the version serves now", labels=labels
        )
        for each in self._versions.table:
            values = [each.name, each.port.fingerprint()]
            weights.add_metric(values, each.weight)
            running.add_metric(values, self._versions.num_requests(each.name))
        yield from (weights, running)

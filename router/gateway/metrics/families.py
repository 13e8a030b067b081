"""Functions on families of samples: relabel, join, and encode for another process."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Rows = Iterable[tuple[Sequence[str], float]]  # label values, and the value of the sample


def gauge(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Returns a gauge with one sample per row."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Returns a counter with one sample per row."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


class CompleteFamilies(Collector):
    """A collector of families that were collected before."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """Returns the families."""
        return self._families


def labelled(metric: Metric, labels: Mapping[str, str], *, name: str | None = None) -> Metric:
    """Returns a copy of a metric with additional labels, and with the new `name` if it is given."""
    copy = Metric(name or metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name)
        copy.samples.append(Sample(copy.name + suffix, {**labels, **sample.labels}, sample.value))
    return copy


def joined(processes: Iterable[Iterable[Metric]]) -> list[Metric]:
    """Joins the metrics of several processes into one family per name."""
    families: dict[str, Metric] = {}
    for metric in chain.from_iterable(processes):
        family = families.setdefault(
            metric.name, Metric(metric.name, metric.documentation, metric.type)
        )
        family.samples += metric.samples
    return list(families.values())


_Wire = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]


def encode_metrics(metrics: Iterable[Metric]) -> bytes:
    """Encodes metrics as bytes that are sent to another process."""
    wire: _Wire = [
        (m.name, m.documentation, m.type, [(s.name, s.labels, float(s.value)) for s in m.samples])
        for m in metrics
    ]
    return msgspec.msgpack.encode(wire)


def decode_metrics(data: bytes) -> list[Metric]:
    """Decodes the result of `encode_metrics`. Raises msgspec.DecodeError."""
    metrics = []
    for name, text, kind, samples in msgspec.msgpack.decode(data, type=_Wire):
        metric = Metric(name, text, kind)
        metric.samples = [Sample(*sample) for sample in samples]
        metrics.append(metric)
    return metrics

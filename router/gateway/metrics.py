"""What the gateway measures, as Prometheus text.

Decides names, buckets and when something is observed. A `RequestMeter` feeds the histograms; what
the router already counts is read from the `RouterPort` at scrape time, and costs nothing between
scrapes. Each app has its own registry: no globals.

Series that mean what a vLLM series means are exported a second time under vLLM's name with its
`model_name` label, so that existing dashboards work.

What the workers count comes with their load reports, by "name" or "name:reason", and is exported as
`baton_worker_<name>_total`, but for what speculation counts, which has names of its own:

    drafted:<proposer>    tokens that a proposer put forward     baton_draft_tokens_total
    accepted:<proposer>   of these, what the model chose too     baton_accepted_tokens_total
    accepted_len:<n>      drafts of which n tokens were kept     baton_accepted_length

Tokens per step are `baton_worker_step_tokens_total` over `baton_worker_steps_total`.

Where several gateway processes share a port, each is asked by whoever the port gives the connection
to, so that one tells of all: what a process counts by itself has a label `process` then, and what
all see alike, the workers and what is the same of all, is told once and has none.

Predictions are exported as they are made and beside what came of them. `baton_prediction_ratio` is
the truth over the prediction: of the time from a request's placement to its first token, where it
was placed once, and of its time per token. `baton_cost_error_ratio` says how far the formulas for
workers of a class were off lately, as a share of what each observation was.

Latencies are told by the version of the model that served. A name stays for as long as the process
runs, and is given by an operator: there are as many series as there were updates.

An inter-token latency is observed once for each update of a stream, which is once a step: tokens
that speculation yields together arrive together, and count as one gap.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from engine.messages import LoadReport
from router.edge.limits import Book
from router.gateway.versions import Versions
from router.machine.requests import (
    Cancelled,
    Decision,
    Failed,
    Finished,
    Outcome,
    Rejected,
    Timeline,
)
from router.port import RouterStatus

# fmt: off
TTFT_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)
ITL_BUCKETS_S = (
    0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1, 2.5, 5, 10, 20, 40, 80,
)
E2E_BUCKETS_S = (
    0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920,
)
STAGE_BUCKETS_S = (
    0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1, 2.5, 5, 10, 30, 60, 300,
)
RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
# fmt: on

OUTCOMES = ("finished", "rejected", "failed", "cancelled", "invalid")
_OUTCOME_NAMES: dict[type[Outcome], str] = {
    Finished: "finished",
    Rejected: "rejected",
    Failed: "failed",
    Cancelled: "cancelled",
}
_MEASURES = (
    "kv_transfer_s",
    "kv_exposed_s",
    "move_pull_s",
)  # beside the stages: they overlap with them
_STAGES = tuple(
    name for name in Timeline.__struct_fields__ if name.endswith("_s") and name not in _MEASURES
)
ACCEPTED_LENGTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
_BY_PROPOSER = {  # name in a load report: name here, name of vLLM's, text
    "drafted": ("draft_tokens", "num_draft_tokens", "Tokens proposed to the model"),
    "accepted": ("accepted_tokens", "num_accepted_tokens", "Proposed tokens that were kept"),
}
_ACCEPTED_LEN = "accepted_len"
_QUEUE = "baton_queue_requests"
_BLOCK_STATES = ("free", "cached", "owned", "leased", "in_flight")
_VLLM_NAMES = {
    "baton_ttft_seconds": "vllm:time_to_first_token_seconds",
    "baton_itl_seconds": "vllm:inter_token_latency_seconds",
    "baton_e2e_seconds": "vllm:e2e_request_latency_seconds",
    "baton_prompt_tokens": "vllm:prompt_tokens",
    "baton_generation_tokens": "vllm:generation_tokens",
}


class Buckets:
    """What one series of a histogram has counted."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: of what is above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class Histogram(Collector):
    """Counts by bucket. prometheus_client's own takes a lock and a method call for each bucket."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        *,
        labels: Sequence[str] = (),
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(bounds)
        self._labels = tuple(labels)
        self._series: dict[tuple[str, ...], Buckets] = {}
        if not labels:
            self.series()

    def series(self, labels: tuple[str, ...] = ()) -> Buckets:
        """What is counted under these labels: to be kept by whoever counts often."""
        series = self._series.get(labels)
        if series is None:
            self._series[labels] = series = Buckets(self._bounds)
        return series

    def observe(self, value: float, labels: tuple[str, ...] = ()) -> None:
        """Counts a value."""
        self.series(labels).observe(value)

    def collect(self) -> Iterator[Metric]:
        """As it is now."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, series in self._series.items():
            buckets = zip(bounds, accumulate(series.counts), strict=True)
            family.add_metric(labels, list(buckets), series.sum)
        yield family


class GatewayMetrics:
    """Histograms and counters of one gateway."""

    def __init__(
        self,
        versions: Versions,
        *,
        version: str,
        process: str | None = None,
        key_events: Mapping[str, int] | None = None,
    ) -> None:
        """`key_events` are counted elsewhere: refused keys, and reloads of their file."""
        self._versions = port = versions
        self._version = version
        self._process = process
        self._own: list[Collector] = []
        by = ("version",)
        self.ttft = self._histogram("ttft", "HTTP request to first token", TTFT_BUCKETS_S, by)
        self.itl = self._histogram("itl", "Gap between two updates of a stream", ITL_BUCKETS_S, by)
        self.tpot = self._histogram("tpot", "Time per token after the first", ITL_BUCKETS_S, by)
        self.e2e = self._histogram("e2e", "HTTP request to last token", E2E_BUCKETS_S, by)
        self.kv_transfer = self._histogram(
            "kv_transfer", "KV blocks on their way to a decode worker", STAGE_BUCKETS_S
        )
        self.kv_exposed = self._histogram(
            "kv_exposed", "Of the KV transfer, what prefill did not hide", STAGE_BUCKETS_S
        )
        self.stages = self._histogram(
            "stage", "Where the time of a request went", STAGE_BUCKETS_S, labels=("stage",)
        )
        self.predicted_ttft = self._histogram(
            "predicted_ttft", "Placement to first token, as predicted then", TTFT_BUCKETS_S
        )
        self.predicted_tpot = self._histogram(
            "predicted_tpot", "Time per token, as predicted at the placement", ITL_BUCKETS_S
        )
        self.prediction_ratio = Histogram(
            "baton_prediction_ratio",
            "What it came to, over what was predicted",
            RATIO_BUCKETS,
            labels=("measure",),
        )
        self._own.append(self.prediction_ratio)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_in_flight = 0
        self.num_by_outcome = dict.fromkeys(OUTCOMES, 0)
        self._own += [_Counts(self), _Queue(port), _Forecasts(port), _Shares(versions)]
        if key_events is not None:
            self._own.append(_KeyEvents(key_events))

    def watch_edge(self, book: Book) -> None:
        """Exports the counts of the gateway's listener, too."""
        self._own.append(_Edge(book))

    def watch_grammars(self, counts: Mapping[str, int]) -> None:
        """Exports how many grammars were compiled, and to which verdict."""
        self._own.append(_Grammars(counts))

    @contextmanager
    def request(self) -> Iterator["RequestMeter"]:
        """Counts one request, from its head to its end however it ends."""
        meter = RequestMeter(self)
        self.num_in_flight += 1
        try:
            yield meter
        finally:
            self.num_in_flight -= 1
            self.num_by_outcome[meter.outcome] += 1

    def own(self) -> list[Metric]:
        """What this process counts by itself."""
        metrics = [metric for collector in self._own for metric in collector.collect()]
        if self._process is None:
            return metrics
        return [_labelled(metric, {"process": self._process}) for metric in metrics]

    def exposition(self, others: Sequence[Sequence[Metric]] = ()) -> bytes:
        """Everything in Prometheus' text format 0.0.4, with what other processes count."""
        registry = CollectorRegistry()
        registry.register(_Page([*self._families(others)]))
        return generate_latest(registry)

    def _families(self, others: Sequence[Sequence[Metric]]) -> Iterator[Metric]:
        counted = _joined([self.own(), *others])
        yield from counted
        if self._process is not None:
            told = 1 + len(others)
            yield GaugeMetricFamily("baton_gateway_processes", "That answered when asked", told)
        build = {"version": self._version, "fingerprint": self._versions.fingerprint()}
        yield InfoMetricFamily("baton_build", "What runs, with which model", build)
        yield from _worker_metrics(self._versions)
        yield from _vllm_names(counted, self._versions)

    def _histogram(
        self, name: str, text: str, bounds_s: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        histogram = Histogram(f"baton_{name}_seconds", text, bounds_s, labels=labels)
        self._own.append(histogram)
        return histogram


class RequestMeter:
    """Measures one HTTP request, which may have several choices.

    Whoever does not say how it ended has left: it counts as cancelled.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.outcome = "cancelled"
        self._metrics = metrics
        self.labels = ("",)  # the version that serves it
        self._received_s = 0.0
        self._prompt_tokens = 0
        self._is_answered = False

    def accept(self, received_s: float, prompt_tokens: int, version: str) -> None:
        """The request is valid and goes to the router of a version."""
        self.labels = (version,)
        self._received_s = received_s
        self._prompt_tokens = prompt_tokens

    def refuse(self) -> None:
        """The request is not valid."""
        self.outcome = "invalid"

    def choice(self) -> "ChoiceMeter":
        """Measures one choice of its answer."""
        return ChoiceMeter(self._metrics, self)

    def first_tokens(self, now_s: float) -> None:
        """A choice has its first token; that of the request is the first of all."""
        if not self._is_answered:
            self._is_answered = True
            self._metrics.num_prompt_tokens += self._prompt_tokens
            self._metrics.ttft.observe(now_s - self._received_s, self.labels)

    def end(self, outcome: Outcome, now_s: float) -> None:
        """The router is done with the request."""
        self.outcome = _OUTCOME_NAMES[type(outcome)]
        if isinstance(outcome, Finished):
            self._metrics.e2e.observe(now_s - self._received_s, self.labels)


class ChoiceMeter:
    """Measures one choice: gaps between tokens are those of one stream of tokens."""

    def __init__(self, metrics: GatewayMetrics, request: RequestMeter) -> None:
        self._metrics = metrics
        self._request = request
        self._itl = metrics.itl.series(request.labels)
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_tokens = 0

    def tokens(self, num_tokens: int, now_s: float) -> None:
        """More tokens of the choice."""
        if self._first_s is None:
            self._first_s = now_s
            self._request.first_tokens(now_s)
        else:
            self._itl.observe(now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += num_tokens
        self._metrics.num_generation_tokens += num_tokens

    def end(self, outcome: Outcome, timeline: Timeline | None, now_s: float) -> None:
        """The router is done with the choice."""
        if timeline is not None:
            for name, seconds in _stages(timeline):
                self._metrics.stages.observe(seconds, (name,))
            if timeline.kv_transfer_s is not None:
                self._metrics.kv_transfer.observe(timeline.kv_transfer_s)
            if timeline.kv_exposed_s is not None:
                self._metrics.kv_exposed.observe(timeline.kv_exposed_s)
        tpot_s = None
        if isinstance(outcome, Finished) and self._first_s is not None and self._num_tokens > 1:
            tpot_s = (self._last_s - self._first_s) / (self._num_tokens - 1)
            self._metrics.tpot.observe(tpot_s, self._request.labels)
        if timeline is not None and timeline.decision is not None and self._first_s is not None:
            self._compare(timeline, timeline.decision, tpot_s)

    def _compare(self, timeline: Timeline, decision: Decision, tpot_s: float | None) -> None:
        """What was predicted when the choice was placed, and what it came to."""
        metrics = self._metrics
        ttft_s = timeline.prefill_queue_s + timeline.prefill_compute_s
        if timeline.attempts > 1:
            return  # the last placement did not begin the answer, or not alone
        for name, predicted_s, true_s, histogram in (
            ("ttft", decision.predicted_ttft_s, ttft_s, metrics.predicted_ttft),
            ("tpot", decision.predicted_tpot_s, tpot_s, metrics.predicted_tpot),
        ):
            if predicted_s is None:
                continue
            histogram.observe(predicted_s)
            if true_s is not None and predicted_s > 0:
                metrics.prediction_ratio.observe(true_s / predicted_s, (name,))


class _Counts(Collector):
    """The plain integers of `GatewayMetrics`."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        prompt = metrics.num_prompt_tokens
        yield CounterMetricFamily(
            "baton_prompt_tokens", "Tokens of prompts that got an answer", prompt
        )
        generated = metrics.num_generation_tokens
        yield CounterMetricFamily("baton_generation_tokens", "Tokens sent out", generated)
        in_flight = metrics.num_in_flight
        yield GaugeMetricFamily("baton_requests_in_flight", "Requests not ended yet", in_flight)
        ended = CounterMetricFamily("baton_requests", "Requests ended", labels=["outcome"])
        for outcome, count in metrics.num_by_outcome.items():
            ended.add_metric([outcome], count)
        yield ended


class _KeyEvents(Collector):
    """What became of keys and of their file."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        events = CounterMetricFamily(
            "baton_key_events", "Refused keys, reloads of the keys file", labels=["event"]
        )
        for event, count in self._counts.items():
            events.add_metric([event], count)
        yield events


class _Grammars(Collector):
    """The verdicts on clients' grammars, each once until it is forgotten."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        verdicts = CounterMetricFamily(
            "baton_grammars", "Grammars compiled before workers get them", labels=["verdict"]
        )
        for verdict, count in self._counts.items():
            verdicts.add_metric([verdict], count)
        yield verdicts


class _Edge(Collector):
    """The listener's connections, and what it refused before there was a request."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        book = self._book
        yield GaugeMetricFamily("baton_connections", "Connections of clients", book.num_connections)
        refused = CounterMetricFamily(
            "baton_edge_refusals", "Connections refused or cut", labels=["reason"]
        )
        for reason, count in list(book.refusals.items()):
            refused.add_metric([reason], count)
        yield refused
        reloads = CounterMetricFamily(
            "baton_tls_events", "Reloads of certificates", labels=["event"]
        )
        for event, count in list(book.tls_events.items()):
            reloads.add_metric([event], count)
        yield reloads


class _Queue(Collector):
    """The router as it is at the time of the scrape."""

    def __init__(self, port: RouterStatus) -> None:
        self._port = port

    def collect(self) -> Iterator[Metric]:
        waiting = self._port.queue_len()
        yield GaugeMetricFamily(_QUEUE, "Requests waiting for a worker", waiting)
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


class _Forecasts(Collector):
    """What this gateway predicts of the workers, as far as it can: each learns by itself."""

    def __init__(self, port: RouterStatus) -> None:
        self._port = port

    def collect(self) -> Iterator[Metric]:
        yield from _forecasts(self._port)


class _Shares(Collector):
    """The versions that there are, which are few: what each is to have and has."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def collect(self) -> Iterator[Metric]:
        labels = ["version", "fingerprint"]
        weights = GaugeMetricFamily(
            "baton_version_weight", "Share of the requests that it is to have", labels=labels
        )
        running = GaugeMetricFamily(
            "baton_version_requests", "Requests of it that are not over", labels=labels
        )
        for each in self._versions.table:
            values = [each.name, each.port.fingerprint()]
            weights.add_metric(values, each.weight)
            running.add_metric(values, self._versions.num_requests(each.name))
        yield from (weights, running)


class _Page(Collector):
    """Families that are complete."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def _vllm_names(counted: Sequence[Metric], versions: Versions) -> Iterator[Metric]:
    """The series that mean what vLLM's mean, under vLLM's names."""
    labels = {"model_name": versions.model_name}
    for metric in counted:
        if metric.name in _VLLM_NAMES:
            yield _labelled(metric, labels, name=_VLLM_NAMES[metric.name])
    loads = [load for _, load in _loads(versions)]
    running = sum(load.running_seqs for load in loads)
    queued = sum(s.value for metric in counted if metric.name == _QUEUE for s in metric.samples)
    waiting = queued + sum(load.waiting_seqs for load in loads)
    gauges = (
        ("vllm:num_requests_running", "Sequences in running batches", running),
        ("vllm:num_requests_waiting", "Requests waiting", waiting),
    )
    for name, text, value in gauges:
        yield _labelled(GaugeMetricFamily(name, text, value), labels)
    for name, (_, vllm_name, text) in _BY_PROPOSER.items():
        counts = (_by_reason(load, name).values() for load in loads)
        total = sum(map(sum, counts))
        yield _labelled(CounterMetricFamily(f"vllm:spec_decode_{vllm_name}", text, total), labels)


def _stages(timeline: Timeline) -> Iterator[tuple[str, float]]:
    for name in _STAGES:
        seconds: float | None = getattr(timeline, name)
        if seconds is not None:
            yield name.removesuffix("_s"), seconds


def _loads(port: RouterStatus) -> list[tuple[tuple[str, str], LoadReport]]:
    """The last report of each worker that made one, by (worker, role)."""
    return [
        ((str(worker_id), status.role.value), status.load)
        for worker_id, status in port.workers().items()
        if status.load is not None
    ]


def _worker_metrics(port: RouterStatus) -> Iterator[Metric]:
    loads = _loads(port)
    blocks = GaugeMetricFamily(
        "baton_worker_blocks", "KV blocks by state", labels=["worker", "role", "state"]
    )
    for worker, load in loads:
        for state in _BLOCK_STATES:
            blocks.add_metric([*worker, state], getattr(load, f"{state}_blocks"))
    yield blocks
    for name, text in (
        ("waiting_seqs", "Sequences waiting in the worker"),
        ("running_seqs", "Sequences in its running batch"),
        ("open_leases", "Leases that others may pull under"),
    ):
        gauge = GaugeMetricFamily(f"baton_worker_{name}", text, labels=["worker", "role"])
        for worker, load in loads:
            gauge.add_metric(worker, getattr(load, name))
        yield gauge
    yield from _speculation(loads)
    yield from _worker_counters(loads)


def _forecasts(port: RouterStatus) -> Iterator[Metric]:
    labels = ["worker", "role"]
    waits = GaugeMetricFamily(
        "baton_worker_predicted_wait_seconds",
        "Until it has computed the prompts that it was given",
        labels=labels,
    )
    paces = GaugeMetricFamily(
        "baton_worker_predicted_tpot_seconds", "A step of all that it decodes", labels=labels
    )
    errors = GaugeMetricFamily(
        "baton_cost_error_ratio",
        "How far predictions for workers like this one were off lately",
        labels=[*labels, "work"],
    )
    for worker_id, status in port.workers().items():
        worker, forecast = (str(worker_id), status.role.value), status.forecast
        if forecast.wait_s is not None:
            waits.add_metric(worker, forecast.wait_s)
        if forecast.tpot_s is not None:
            paces.add_metric(worker, forecast.tpot_s)
        for work in ("prefill", "decode", "pull"):
            error: float | None = getattr(forecast.errors, work)
            if error is not None:
                errors.add_metric([*worker, work], error)
    yield from (waits, paces, errors)


def _by_reason(load: LoadReport, name: str) -> dict[str, float]:
    """What a worker counted under a name, by reason."""
    prefix = f"{name}:"
    counts = load.counters.items()
    return {key.removeprefix(prefix): n for key, n in counts if key.startswith(prefix)}


def _speculation(loads: list[tuple[tuple[str, str], LoadReport]]) -> Iterator[Metric]:
    for name, (our_name, _, text) in _BY_PROPOSER.items():
        counter = CounterMetricFamily(
            f"baton_{our_name}", text, labels=["worker", "role", "proposer"]
        )
        for worker, load in loads:
            for proposer, count in _by_reason(load, name).items():
                counter.add_metric([*worker, proposer], count)
        yield counter
    lengths = HistogramMetricFamily(
        "baton_accepted_length", "Tokens kept of one draft", labels=["worker", "role"]
    )
    for worker, load in loads:
        counts = {int(n): count for n, count in _by_reason(load, _ACCEPTED_LEN).items()}
        if counts:
            num_tokens = sum(n * count for n, count in counts.items())
            lengths.add_metric(worker, _cumulative(counts), num_tokens)
    yield lengths


def _cumulative(counts: Mapping[int, float]) -> list[tuple[str, float]]:
    """Counts of all lengths up to each bound, as Prometheus wants them."""
    bounds = [
        (str(float(bound)), sum(count for n, count in counts.items() if n <= bound))
        for bound in ACCEPTED_LENGTH_BUCKETS
    ]
    return [*bounds, ("+Inf", sum(counts.values()))]


def _worker_counters(loads: list[tuple[tuple[str, str], LoadReport]]) -> Iterator[Metric]:
    """Everything else that the workers count; a reason becomes a label."""
    by_name: dict[str, list[tuple[tuple[str, str], str, float]]] = {}
    for worker, load in loads:
        for key, value in load.counters.items():
            name, _, reason = key.partition(":")
            if name in _BY_PROPOSER or name == _ACCEPTED_LEN:
                continue
            by_name.setdefault(_metric_name(name), []).append((worker, reason, value))
    for name, counts in sorted(by_name.items()):
        labels = ["worker", "role"]
        if any(reason for _, reason, _ in counts):
            labels.append("reason")
        counter = CounterMetricFamily(
            f"baton_worker_{name}", "Counted by the worker", labels=labels
        )
        for worker, reason, value in counts:
            counter.add_metric([*worker, reason][: len(labels)], value)
        yield counter


def _metric_name(name: str) -> str:
    return re.sub("[^a-zA-Z0-9_]", "_", name).removesuffix("_total")


def _labelled(metric: Metric, labels: Mapping[str, str], *, name: str | None = None) -> Metric:
    """A copy with more labels, perhaps under another name."""
    copy = Metric(name or metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name)
        copy.samples.append(Sample(copy.name + suffix, {**labels, **sample.labels}, sample.value))
    return copy


def _joined(told: Iterable[Iterable[Metric]]) -> list[Metric]:
    """What several tell, with one family for each name."""
    families: dict[str, Metric] = {}
    for metric in chain.from_iterable(told):
        family = families.setdefault(
            metric.name, Metric(metric.name, metric.documentation, metric.type)
        )
        family.samples += metric.samples
    return list(families.values())


_Wire = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]


def encode_metrics(metrics: Iterable[Metric]) -> bytes:
    """For another process."""
    wire: _Wire = [
        (m.name, m.documentation, m.type, [(s.name, s.labels, s.value) for s in m.samples])
        for m in metrics
    ]
    return msgspec.msgpack.encode(wire)


def decode_metrics(data: bytes) -> list[Metric]:
    """The inverse of `encode_metrics`. Raises msgspec.DecodeError."""
    metrics = []
    for name, text, kind, samples in msgspec.msgpack.decode(data, type=_Wire):
        metric = Metric(name, text, kind)
        metric.samples = [Sample(*sample) for sample in samples]
        metrics.append(metric)
    return metrics

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

An inter-token latency is observed once for each update of a stream, which is once a step: tokens
that speculation yields together arrive together, and count as one gap.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from engine.messages import LoadReport
from router.requests import Cancelled, Failed, Finished, Outcome, Rejected, RouterPort, Timeline

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
# fmt: on

OUTCOMES = ("finished", "rejected", "failed", "cancelled", "invalid")
_OUTCOME_NAMES: dict[type[Outcome], str] = {
    Finished: "finished",
    Rejected: "rejected",
    Failed: "failed",
    Cancelled: "cancelled",
}
_MEASURES = ("kv_transfer_s", "kv_exposed_s")  # beside the stages: they overlap with them
_STAGES = tuple(
    name for name in Timeline.__struct_fields__ if name.endswith("_s") and name not in _MEASURES
)
ACCEPTED_LENGTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
_BY_PROPOSER = {  # name in a load report: name here, name of vLLM's, text
    "drafted": ("draft_tokens", "num_draft_tokens", "Tokens proposed to the model"),
    "accepted": ("accepted_tokens", "num_accepted_tokens", "Proposed tokens that were kept"),
}
_ACCEPTED_LEN = "accepted_len"
_BLOCK_STATES = ("free", "cached", "owned", "leased", "in_flight")
_VLLM_NAMES = {
    "baton_ttft_seconds": "vllm:time_to_first_token_seconds",
    "baton_itl_seconds": "vllm:inter_token_latency_seconds",
    "baton_e2e_seconds": "vllm:e2e_request_latency_seconds",
    "baton_prompt_tokens": "vllm:prompt_tokens",
    "baton_generation_tokens": "vllm:generation_tokens",
}


class GatewayMetrics:
    """Histograms and counters of one gateway."""

    def __init__(self, port: RouterPort, *, model_name: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self.ttft = self._histogram("ttft", "HTTP request to first token", TTFT_BUCKETS_S)
        self.itl = self._histogram("itl", "Gap between two updates of a stream", ITL_BUCKETS_S)
        self.tpot = self._histogram("tpot", "Time per token after the first", ITL_BUCKETS_S)
        self.e2e = self._histogram("e2e", "HTTP request to last token", E2E_BUCKETS_S)
        self.kv_transfer = self._histogram(
            "kv_transfer", "KV blocks on their way to a decode worker", STAGE_BUCKETS_S
        )
        self.kv_exposed = self._histogram(
            "kv_exposed", "Of the KV transfer, what prefill did not hide", STAGE_BUCKETS_S
        )
        self.stages = Histogram(
            "baton_stage_seconds",
            "Where the time of a request went",
            ("stage",),
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_in_flight = 0
        self.num_by_outcome = dict.fromkeys(OUTCOMES, 0)
        counts = _Counts(self)
        self.registry.register(counts)
        self.registry.register(_PortState(port, version))
        aliased = (self.ttft, self.itl, self.e2e, counts)
        self.registry.register(_VllmNames(aliased, port, model_name))

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

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        name = f"baton_{name}_seconds"
        return Histogram(name, text, buckets=buckets_s, registry=self.registry)


class RequestMeter:
    """Measures one HTTP request, which may have several choices.

    Whoever does not say how it ended has left: it counts as cancelled.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.outcome = "cancelled"
        self._metrics = metrics
        self._received_s = 0.0
        self._prompt_tokens = 0
        self._is_answered = False

    def accept(self, received_s: float, prompt_tokens: int) -> None:
        """The request is valid and goes to the router."""
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
            self._metrics.ttft.observe(now_s - self._received_s)

    def end(self, outcome: Outcome, now_s: float) -> None:
        """The router is done with the request."""
        self.outcome = _OUTCOME_NAMES[type(outcome)]
        if isinstance(outcome, Finished):
            self._metrics.e2e.observe(now_s - self._received_s)


class ChoiceMeter:
    """Measures one choice: gaps between tokens are those of one stream of tokens."""

    def __init__(self, metrics: GatewayMetrics, request: RequestMeter) -> None:
        self._metrics = metrics
        self._request = request
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_tokens = 0

    def tokens(self, num_tokens: int, now_s: float) -> None:
        """More tokens of the choice."""
        if self._first_s is None:
            self._first_s = now_s
            self._request.first_tokens(now_s)
        else:
            self._metrics.itl.observe(now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += num_tokens
        self._metrics.num_generation_tokens += num_tokens

    def end(self, outcome: Outcome, timeline: Timeline | None, now_s: float) -> None:
        """The router is done with the choice."""
        if timeline is not None:
            for name, seconds in _stages(timeline):
                self._metrics.stages.labels(name).observe(seconds)
            if timeline.kv_transfer_s is not None:
                self._metrics.kv_transfer.observe(timeline.kv_transfer_s)
            if timeline.kv_exposed_s is not None:
                self._metrics.kv_exposed.observe(timeline.kv_exposed_s)
        if isinstance(outcome, Finished) and self._first_s is not None and self._num_tokens > 1:
            self._metrics.tpot.observe((self._last_s - self._first_s) / (self._num_tokens - 1))


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


class _PortState(Collector):
    """The router and its workers as they are at the time of the scrape."""

    def __init__(self, port: RouterPort, version: str) -> None:
        self._port = port
        self._version = version

    def collect(self) -> Iterator[Metric]:
        build = {"version": self._version, "fingerprint": self._port.fingerprint()}
        yield InfoMetricFamily("baton_build", "What runs, with which model", build)
        waiting = self._port.queue_len()
        yield GaugeMetricFamily("baton_queue_requests", "Requests waiting for a worker", waiting)
        events = CounterMetricFamily(
            "baton_router_events", "Retries, refusals, fallbacks", labels=["event", "reason"]
        )
        for (event, reason), count in self._port.counters().items():
            events.add_metric([event, reason], count)
        yield events
        yield from _worker_metrics(self._port)


class _VllmNames(Collector):
    """The series that mean what vLLM's mean, under vLLM's names."""

    def __init__(self, aliased: Sequence[Collector], port: RouterPort, model_name: str) -> None:
        self._aliased = aliased
        self._port = port
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        for metric in chain.from_iterable(source.collect() for source in self._aliased):
            if metric.name in _VLLM_NAMES:
                yield _renamed(metric, _VLLM_NAMES[metric.name], self._labels)
        loads = [load for _, load in _loads(self._port)]
        running = sum(load.running_seqs for load in loads)
        yield self._gauge("vllm:num_requests_running", "Sequences in running batches", running)
        waiting = self._port.queue_len() + sum(load.waiting_seqs for load in loads)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting", waiting)
        for name, (_, vllm_name, text) in _BY_PROPOSER.items():
            counts = (_by_reason(load, name).values() for load in loads)
            yield self._counter(f"vllm:spec_decode_{vllm_name}", text, sum(map(sum, counts)))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric


def _stages(timeline: Timeline) -> Iterator[tuple[str, float]]:
    for name in _STAGES:
        seconds: float | None = getattr(timeline, name)
        if seconds is not None:
            yield name.removesuffix("_s"), seconds


def _loads(port: RouterPort) -> list[tuple[tuple[str, str], LoadReport]]:
    """The last report of each worker that made one, by (worker, role)."""
    return [
        ((str(worker_id), status.role.value), status.load)
        for worker_id, status in port.workers().items()
        if status.load is not None
    ]


def _worker_metrics(port: RouterPort) -> Iterator[Metric]:
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


def _renamed(metric: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    copy = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name)
        copy.samples.append(Sample(name + suffix, {**labels, **sample.labels}, sample.value))
    return copy

"""The gateway's own measurements: latencies, token counts and outcomes.

A `RequestMeter` and its `ChoiceMeter`s fill the histograms. Counts of the routers and workers are
read when Prometheus scrapes, and cost nothing between scrapes. Each application has its own
metrics, so no metrics are global.

If several gateway processes share a port, the scraped process queries all other processes. Then the
counts of each process have a label `process`. Metrics of workers and of the build are equal in all
processes, so they are exported once, without the label.

The histograms of predictions have the values predicted at the placement. `baton_prediction_ratio`
is the measured value over the predicted value. It covers TPOT and the time from placement to first
token, for requests that were placed once. `baton_cost_error_ratio` is the recent relative error of
the cost formulas for workers of a class.

Latencies have the label `version`. Operators choose the names of versions, and a series exists
until the process ends. So there is one series for each version that the process has served.

An inter-token latency is observed once for each update of a stream, which is once per step. Tokens
that speculation yields in one step arrive together and count as one gap.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Self

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)

from engine.messages import FinishReason
from router.gateway.metrics.collectors import (
    counter_of,
    kernel_families,
    router_families,
    version_families,
)
from router.gateway.metrics.families import CompleteFamilies, joined, labelled
from router.gateway.metrics.series import (
    E2E_BUCKETS_S,
    ITL_BUCKETS_S,
    LENGTH_BUCKETS_TOKENS,
    RATIO_BUCKETS,
    STAGE_BUCKETS_S,
    TTFT_BUCKETS_S,
    Histogram,
    KeyUsage,
    UsageOfKey,
)
from router.gateway.metrics.stores import store_families
from router.gateway.metrics.vllm_names import vllm_families
from router.gateway.metrics.workers import forecast_families, worker_families
from router.gateway.tracing.stages import Attributes
from router.gateway.tracing.trace import RequestTrace
from router.gateway.versions import Versions
from router.machine.requests import (
    Cancelled,
    Failed,
    Finished,
    Outcome,
    Rejected,
    Timeline,
)
from router.text.detokenizer import PlainTextState, TextState

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
INVALID = "invalid"  # outcome of a request that failed a check
OUTCOMES = ("finished", "rejected", "failed", "cancelled", INVALID)
OUTCOME_NAMES: dict[type[Outcome], str] = {
    Finished: "finished",
    Rejected: "rejected",
    Failed: "failed",
    Cancelled: "cancelled",
}
_MEASURES = (
    "kv_transfer_s",
    "kv_exposed_s",
    "prefix_pull_s",
    "move_pull_s",
)  # these times overlap with the stages
_STAGES = tuple(
    name for name in Timeline.__struct_fields__ if name.endswith("_s") and name not in _MEASURES
)
_STAGE_LABELS = tuple((name.removesuffix("_s"),) for name in _STAGES)
_times_of = attrgetter(*_STAGES)


class GatewayMetrics:
    """The histograms and counters of one gateway process."""

    def __init__(self, versions: Versions, *, version: str, process: str | None = None) -> None:
        """`process` is the name of this process among the processes that share a port."""
        self._versions = versions
        self._version = version
        self._process = process
        self._own: list[Callable[[], Iterable[Metric]]] = []
        by = ("version",)
        self.ttft = self._histogram("ttft", "HTTP request to first token", TTFT_BUCKETS_S, by)
        self.itl = self._histogram("itl", "Gap between two updates of a stream", ITL_BUCKETS_S, by)
        self.tpot = self._histogram("tpot", "Time per token after the first", ITL_BUCKETS_S, by)
        self.e2e = self._histogram("e2e", "HTTP request to last token", E2E_BUCKETS_S, by)
        self.kv_transfer = self._histogram(
            "kv_transfer", "KV blocks on their way to a decode worker", STAGE_BUCKETS_S
        )
        self.kv_exposed = self._histogram(
            "kv_exposed", "Part of the KV transfer that prefill did not hide", STAGE_BUCKETS_S
        )
        self.prefix_pull = self._histogram(
            "prefix_pull",
            "Pulls of prompts' prefixes, from workers and from each medium of stores",
            STAGE_BUCKETS_S,
            labels=("medium",),
        )
        self.stages = self._histogram(
            "stage", "Where the time of a request went", STAGE_BUCKETS_S, labels=("stage",)
        )
        # Times of whole requests, with names that other servers use too.
        self.queue_time = self._histogram(
            "request_queue", "Waits of a sequence in the router and in its worker", E2E_BUCKETS_S
        )
        self.decode_time = self._histogram(
            "request_decode", "First to last token of a sequence", E2E_BUCKETS_S
        )
        self.inference_time = self._histogram(
            "request_inference", "Begin of prefill to last token of a sequence", E2E_BUCKETS_S
        )
        self.prompt_lengths = self._lengths("prompt", "Tokens of the prompts of a request")
        self.answer_lengths = self._lengths("generation", "Tokens of the answers of a request")
        self.longest_answers = self._lengths(
            "max_generation", "Tokens of the longest answer of a request"
        )
        self.predicted_ttft = self._histogram(
            "predicted_ttft", "Placement to first token, as predicted then", TTFT_BUCKETS_S
        )
        self.predicted_tpot = self._histogram(
            "predicted_tpot", "Time per token, as predicted at the placement", ITL_BUCKETS_S
        )
        self.prediction_ratio = Histogram(
            "baton_prediction_ratio",
            "Measured over predicted",
            RATIO_BUCKETS,
            labels=("measure",),
        )
        self._own.append(self.prediction_ratio.collect)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_batched_tokens = 0  # tokens that C++ converted to text
        self.num_in_flight = 0
        self.on_arrival: Callable[[], None] | None = None  # called when a request starts
        self.num_by_outcome = dict.fromkeys(OUTCOMES, 0)
        self.num_by_finish = {reason.value: 0 for reason in FinishReason}
        self._answers: Counter[tuple[str, str, str]] = Counter()  # by method, path and status
        self.num_looked_up_tokens = 0  # prompt tokens looked up in caches
        self.num_cached_tokens = 0  # looked-up tokens found in caches
        self.key_usage = KeyUsage()
        self._shared: list[Callable[[], Iterable[Metric]]] = []
        self._own += [
            self._counts,
            lambda: self.key_usage.families(),
            partial(router_families, versions),
            partial(forecast_families, versions),
            partial(version_families, versions),
        ]

    def watch(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Adds a source of this process's metrics to the export."""
        self._own.append(families)

    def watch_shared(self, families: Callable[[], Iterable[Metric]]) -> None:
        """Adds a source of metrics that are equal in all processes.

        These metrics are exported once, without the label `process`.
        """
        self._shared.append(families)

    def watch_counts(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> None:
        """Adds a counter with one label to the export.

        The keys of `counts` are the label's values.
        """
        self.watch(lambda: [counter_of(name, text, label, counts)])

    def record_status(self, method: str, handler: str, status: int) -> None:
        """Counts the head of an HTTP answer.

        `handler` is the path of an endpoint, or `OTHER_PATHS`.
        """
        if method not in _METHODS:
            method = "other"
        self._answers[method, handler, f"{status // 100}xx"] += 1

    @contextmanager
    def detached(self, meter: "RequestMeter") -> Iterator[None]:
        """Counts a detached request as running until the block ends."""
        try:
            yield
        finally:
            self.num_in_flight -= 1
            self.num_by_outcome[meter.outcome] += 1

    def own(self) -> list[Metric]:
        """Returns the metrics of this process."""
        metrics = [metric for families in self._own for metric in families()]
        if self._process is None:
            return metrics
        return [labelled(metric, {"process": self._process}) for metric in metrics]

    def exposition(self, others: Sequence[Sequence[Metric]] = ()) -> bytes:
        """Returns all metrics in Prometheus' text format 0.0.4; `others` are the metrics of other
        processes.
        """
        return generate_latest(CompleteFamilies([*self._families(others)]))

    def _families(self, others: Sequence[Sequence[Metric]]) -> Iterator[Metric]:
        counted = joined([self.own(), *others])
        yield from counted
        if self._process is not None:
            num_processes = 1 + len(others)
            yield GaugeMetricFamily(
                "baton_gateway_processes",
                "Gateway processes that answered when asked",
                num_processes,
            )
        build = {"version": self._version, "fingerprint": self._versions.fingerprint()}
        yield InfoMetricFamily("baton_build", "What runs, with which model", build)
        yield from kernel_families(self._versions)
        yield from worker_families(self._versions)
        yield from store_families(self._versions)
        for families in self._shared:
            yield from families()
        yield from vllm_families(counted, self._versions)

    def _histogram(
        self, name: str, text: str, bounds_s: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        histogram = Histogram(f"baton_{name}_seconds", text, bounds_s, labels=labels)
        self._own.append(histogram.collect)
        return histogram

    def _lengths(self, what: str, text: str) -> Histogram:
        histogram = Histogram(f"baton_request_{what}_tokens", text, LENGTH_BUCKETS_TOKENS)
        self._own.append(histogram.collect)
        return histogram

    def _counts(self) -> Iterator[Metric]:
        prompt, generated = self.num_prompt_tokens, self.num_generation_tokens
        yield CounterMetricFamily(
            "baton_prompt_tokens", "Tokens of prompts that got an answer", prompt
        )
        yield CounterMetricFamily("baton_generation_tokens", "Tokens sent out", generated)
        text = "Generated tokens that became text in C++, for many streams at once"
        yield CounterMetricFamily("baton_batched_tokens", text, self.num_batched_tokens)
        in_flight = self.num_in_flight
        yield GaugeMetricFamily("baton_requests_in_flight", "Requests not ended yet", in_flight)
        yield counter_of("baton_requests", "Requests ended", "outcome", self.num_by_outcome)
        text = "Choices with a complete answer, by why it ended"
        yield counter_of("baton_finished_choices", text, "reason", self.num_by_finish)
        answers = CounterMetricFamily(
            "http_requests",
            "HTTP answers; not counting refusals by a listener or for a missing key",
            labels=["method", "handler", "status"],
        )
        for labels, count in list(self._answers.items()):
            answers.add_metric(labels, count)
        yield answers
        yield CounterMetricFamily(
            "baton_prefix_lookup_tokens", "Tokens of prompts looked up", self.num_looked_up_tokens
        )
        yield CounterMetricFamily(
            "baton_prefix_hit_tokens", "Tokens of prompts found in caches", self.num_cached_tokens
        )


_UNKNOWN_KEY = UsageOfKey()  # usage of requests before they are accepted; never exported


class RequestMeter:
    """Measures one request, which may have several choices.

    The caller enters the meter when the head of the request has arrived, and exits at the request's
    end. A request without a recorded outcome counts as cancelled, because its client has left.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.metrics = metrics
        self.outcome = "cancelled"
        self.is_detached = False  # True if the request outlives its call: `GatewayMetrics.detached`
        self.labels = ("",)  # values of labels: the request's version
        self.received_s = 0.0
        self.prompt_tokens = 0
        self.is_answered = False  # True once a choice has had a token
        self.usage = _UNKNOWN_KEY
        self.num_tokens = self.longest = 0  # tokens of all answers, and of the longest answer
        self.request_id = ""  # set once the call is read
        self.shown_id = ""  # id in the head of the response
        self.key = ""  # name of the API key
        self.trace: RequestTrace | None = None
        self.num_sent_tokens = 0  # tokens of all choices, set at the request's end

    def __enter__(self) -> Self:
        self.metrics.num_in_flight += 1
        if self.metrics.on_arrival is not None:
            self.metrics.on_arrival()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_detached:
            self.metrics.num_in_flight -= 1
            self.metrics.num_by_outcome[self.outcome] += 1

    def accept(self, received_s: float, prompt_tokens: int, version: str, *, key: str = "") -> None:
        """Records that the request is valid and will be submitted to a version's router.

        `key` is the name of the request's API key.
        """
        self.labels = (version,)
        self.usage = self.metrics.key_usage.of(key)
        self.usage.num_requests += 1
        self.received_s = received_s
        self.prompt_tokens = prompt_tokens

    def finish_trace(self) -> None:
        """Ends the request's trace."""
        assert self.trace is not None
        attributes: Attributes = {
            "baton.version": self.labels[0],
            "baton.key": self.key,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.num_sent_tokens,
        }
        self.trace.end(self.outcome, attributes)

    def finish(self, outcome: Outcome, now_s: float) -> None:
        """Records the outcome and the lengths of the request."""
        self.outcome = OUTCOME_NAMES[type(outcome)]
        if isinstance(outcome, Finished):
            metrics = self.metrics
            metrics.e2e.observe(now_s - self.received_s, self.labels)
            metrics.prompt_lengths.observe(self.prompt_tokens)
            metrics.answer_lengths.observe(self.num_tokens)
            metrics.longest_answers.observe(self.longest)


class ChoiceMeter:
    """Measures one choice. Inter-token gaps are measured within one choice."""

    def __init__(self, request: RequestMeter, prompt_len: int) -> None:
        self._metrics = request.metrics
        self._request = request
        self._prompt_len = prompt_len
        self.gaps = request.metrics.itl.series(request.labels)
        self._first_s: float | None = None
        self._num_tokens = 0  # tokens that Python has handled
        self.state: TextState = PlainTextState()  # the choice's text; counts C++'s tokens

    def tokens(self, num_tokens: int, now_s: float) -> None:
        """Records new tokens of the choice.

        The first token of all choices counts for the request's TTFT.
        """
        metrics, request = self._metrics, self._request
        if self._first_s is not None:
            self.gaps.observe(now_s - self.state.last_s)
        else:
            self._first_s = now_s
            if not request.is_answered:
                request.is_answered = True
                metrics.num_prompt_tokens += request.prompt_tokens
                request.usage.num_prompt_tokens += request.prompt_tokens
                metrics.ttft.observe(now_s - request.received_s, request.labels)
        self.state.last_s = now_s
        self._num_tokens += num_tokens
        metrics.num_generation_tokens += num_tokens

    def finish(self, outcome: Outcome, timeline: Timeline | None) -> None:
        """Records the outcome of the choice, its tokens, and the times of its stages."""
        metrics, request = self._metrics, self._request
        num_tokens = self._num_tokens + self.state.num_batched
        request.num_tokens += num_tokens
        request.longest = max(request.longest, num_tokens)
        request.usage.num_generation_tokens += num_tokens
        tpot_s = None
        if isinstance(outcome, Finished):
            metrics.num_by_finish[outcome.reason] += 1
            if self._first_s is not None and num_tokens > 1:
                tpot_s = (self.state.last_s - self._first_s) / (num_tokens - 1)
                metrics.tpot.observe(tpot_s, request.labels)
        if timeline is None:
            return
        if request.trace is not None:
            request.trace.add_choice(timeline)
        metrics.stages.observe_each(_STAGE_LABELS, _times_of(timeline))
        if timeline.kv_transfer_s is not None:
            metrics.kv_transfer.observe(timeline.kv_transfer_s)
        if timeline.kv_exposed_s is not None:
            metrics.kv_exposed.observe(timeline.kv_exposed_s)
        decision = timeline.decision
        if timeline.prefix_pull_s is not None and decision is not None:
            labels = (decision.pulled_medium or "worker",)
            metrics.prefix_pull.observe(timeline.prefix_pull_s, labels)
        if self._first_s is not None:
            self._record_answered(timeline, self.state.last_s - self._first_s, tpot_s)

    def _record_answered(self, timeline: Timeline, decode_s: float, tpot_s: float | None) -> None:
        """Records the cached tokens and the times of a choice that has had a token.

        Compares the times with the predictions that were made at the placement. Requests with
        several attempts are not compared, because the predictions cover only the last attempt.
        """
        metrics, decision = self._metrics, timeline.decision
        metrics.num_looked_up_tokens += self._prompt_len
        metrics.num_cached_tokens += timeline.num_cached_tokens
        self._request.usage.num_cached_tokens += timeline.num_cached_tokens
        metrics.queue_time.observe(timeline.queue_s + timeline.prefill_queue_s)
        metrics.decode_time.observe(decode_s)
        metrics.inference_time.observe(timeline.prefill_compute_s + decode_s)
        if decision is None or timeline.attempts > 1:
            return
        ttft_s = timeline.prefill_queue_s + timeline.prefill_compute_s
        for labels, predicted_s, true_s, histogram in (
            (("ttft",), decision.predicted_ttft_s, ttft_s, metrics.predicted_ttft),
            (("tpot",), decision.predicted_tpot_s, tpot_s, metrics.predicted_tpot),
        ):
            if predicted_s is None:
                continue
            histogram.observe(predicted_s)
            if true_s is not None and predicted_s > 0:
                metrics.prediction_ratio.observe(true_s / predicted_s, labels)

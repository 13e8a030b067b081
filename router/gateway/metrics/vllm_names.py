"""Series under vLLM's names, so that dashboards for vLLM work with Baton.

The label `engine` of vLLM is the name of a worker. Names that vLLM no longer has but older
dashboards use are exported too. The names come from `vllm/v1/metrics/loggers.py` and `perf.py`,
vLLM 0.9 to 0.12.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.samples import Sample

from engine.messages import LoadReport
from router.gateway.metrics.collectors import QUEUE
from router.gateway.metrics.families import labelled
from router.gateway.metrics.workers import BLOCK_STATES, BY_PROPOSER, by_reason, loads_of
from router.gateway.versions import Versions

_VLLM_NAMES = {
    "baton_ttft_seconds": ("vllm:time_to_first_token_seconds",),
    "baton_itl_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",  # the name until vLLM 0.10
    ),
    "baton_tpot_seconds": ("vllm:request_time_per_output_token_seconds",),
    "baton_e2e_seconds": ("vllm:e2e_request_latency_seconds",),
    "baton_request_queue_seconds": ("vllm:request_queue_time_seconds",),
    "baton_request_decode_seconds": ("vllm:request_decode_time_seconds",),
    "baton_request_inference_seconds": ("vllm:request_inference_time_seconds",),
    "baton_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "baton_request_generation_tokens": ("vllm:request_generation_tokens",),
    "baton_request_max_generation_tokens": ("vllm:request_max_num_generation_tokens",),
    "baton_prompt_tokens": ("vllm:prompt_tokens",),
    "baton_generation_tokens": ("vllm:generation_tokens",),
    "baton_prefix_lookup_tokens": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "baton_prefix_hit_tokens": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
}
_STAGES, _PREFILL = "baton_stage_seconds", {"stage": "prefill_compute"}
_PREFILL_TIME = "vllm:request_prefill_time_seconds"
_FINISHED, _SUCCESS = "baton_finished_choices", "vllm:request_success"
_OF_WORKERS = {  # by a worker's count: vLLM's name and help text
    "flops": ("vllm:estimated_flops_per_gpu", "Estimated floating-point operations"),
    "read_bytes": ("vllm:estimated_read_bytes_per_gpu", "Estimated bytes read from memory"),
    "preempted": ("vllm:num_preemptions", "Sequences that lost their memory to others"),
}
_USAGE_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_USED_STATES = ("owned", "leased", "in_flight")


def vllm_families(counted: Sequence[Metric], versions: Versions) -> Iterator[Metric]:
    """Yields all series for which vLLM has an equivalent, under vLLM's names."""
    labels = {"model_name": versions.model_name}
    for metric in counted:
        for name in _VLLM_NAMES.get(metric.name, ()):
            yield labelled(metric, labels, name=name)
        if metric.name == _STAGES:
            yield labelled(_picked(metric, _PREFILL), labels, name=_PREFILL_TIME)
        elif metric.name == _FINISHED:
            renamed = _renamed(metric, "reason", "finished_reason")
            yield labelled(renamed, labels, name=_SUCCESS)
    loads = loads_of(versions)
    running = sum(load.running_seqs for _, load in loads)
    queued = sum(s.value for metric in counted if metric.name == QUEUE for s in metric.samples)
    waiting = queued + sum(load.waiting_seqs for _, load in loads)
    gauges = (
        ("vllm:num_requests_running", "Sequences in running batches", running),
        ("vllm:num_requests_waiting", "Requests waiting", waiting),
    )
    for name, text, value in gauges:
        yield labelled(GaugeMetricFamily(name, text, value), labels)
    for name, (_, vllm_name, text) in BY_PROPOSER.items():
        counts = (by_reason(load, name).values() for _, load in loads)
        total = sum(map(sum, counts))
        yield labelled(CounterMetricFamily(f"vllm:spec_decode_{vllm_name}", text, total), labels)
    for metric in _of_workers(loads):
        yield labelled(metric, labels)


def _of_workers(loads: Sequence[tuple[tuple[str, str], LoadReport]]) -> Iterator[Metric]:
    """Yields the series that have a value for each worker."""
    for name in _USAGE_NAMES:
        usage = GaugeMetricFamily(name, "Share of KV blocks in use, 0 to 1", labels=["engine"])
        for (worker, _), load in loads:
            total = sum(getattr(load, f"{state}_blocks") for state in BLOCK_STATES)
            used = sum(getattr(load, f"{state}_blocks") for state in _USED_STATES)
            usage.add_metric([worker], used / total if total else 0.0)
        yield usage
    for count, (name, text) in _OF_WORKERS.items():
        family = CounterMetricFamily(name, text, labels=["engine"])
        for (worker, _), load in loads:
            if count in load.counters or count == "preempted":
                family.add_metric([worker], load.counters.get(count, 0.0))
        yield family


def _picked(metric: Metric, wanted: Mapping[str, str]) -> Metric:
    """Returns the series that have the `wanted` labels, without these labels."""
    picked = Metric(metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        if wanted.items() <= sample.labels.items():
            rest = {name: text for name, text in sample.labels.items() if name not in wanted}
            picked.samples.append(Sample(sample.name, rest, sample.value))
    return picked


def _renamed(metric: Metric, ours: str, theirs: str) -> Metric:
    """Returns a copy of a metric with one label renamed."""
    copy = Metric(metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        rest = {theirs if name == ours else name: text for name, text in sample.labels.items()}
        copy.samples.append(Sample(sample.name, rest, sample.value))
    return copy

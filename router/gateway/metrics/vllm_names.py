"""Series that mean what a vLLM series means, under vLLM's name, so that dashboards work."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from router.gateway.metrics.collectors import QUEUE
from router.gateway.metrics.families import labelled
from router.gateway.metrics.workers import BY_PROPOSER, by_reason, loads_of
from router.gateway.versions import Versions

_VLLM_NAMES = {
    "baton_ttft_seconds": "vllm:time_to_first_token_seconds",
    "baton_itl_seconds": "vllm:inter_token_latency_seconds",
    "baton_e2e_seconds": "vllm:e2e_request_latency_seconds",
    "baton_prompt_tokens": "vllm:prompt_tokens",
    "baton_generation_tokens": "vllm:generation_tokens",
}


def vllm_families(counted: Sequence[Metric], versions: Versions) -> Iterator[Metric]:
    """The series that mean what vLLM's mean, under vLLM's names."""
    labels = {"model_name": versions.model_name}
    for metric in counted:
        if metric.name in _VLLM_NAMES:
            yield labelled(metric, labels, name=_VLLM_NAMES[metric.name])
    loads = [load for _, load in loads_of(versions)]
    running = sum(load.running_seqs for load in loads)
    queued = sum(s.value for metric in counted if metric.name == QUEUE for s in metric.samples)
    waiting = queued + sum(load.waiting_seqs for load in loads)
    gauges = (
        ("vllm:num_requests_running", "Sequences in running batches", running),
        ("vllm:num_requests_waiting", "Requests waiting", waiting),
    )
    for name, text, value in gauges:
        yield labelled(GaugeMetricFamily(name, text, value), labels)
    for name, (_, vllm_name, text) in BY_PROPOSER.items():
        counts = (by_reason(load, name).values() for load in loads)
        total = sum(map(sum, counts))
        yield labelled(CounterMetricFamily(f"vllm:spec_decode_{vllm_name}", text, total), labels)

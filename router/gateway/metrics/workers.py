"""The workers' load reports and the router's predictions for workers, as families of samples.

A worker's load report has counts, with keys "name" or "name:reason". A count is exported as
`baton_worker_<name>_total`. Counts of speculation are exported under other names:

    drafted:<proposer>    tokens that a proposer drafted         baton_draft_tokens_total
    accepted:<proposer>   drafted tokens that the model kept     baton_accepted_tokens_total
    accepted_len:<n>      drafts of which n tokens were kept     baton_accepted_length

Tokens per step are `baton_worker_step_tokens_total` over `baton_worker_steps_total`. Gauges of the
worker's process are exported as `baton_worker_<name>`.

Stores of KV are not exported here: see `router.gateway.metrics.stores`.
"""

import re
from collections.abc import Iterator, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric

from engine.messages import LoadReport, Role, WorkerId
from router.gateway.metrics.families import counter, gauge
from router.port import RouterStatus, WorkerStatus

ACCEPTED_LENGTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
BY_PROPOSER = {  # by name in a load report: exported name, vLLM's name, help text
    "drafted": ("draft_tokens", "num_draft_tokens", "Tokens proposed to the model"),
    "accepted": ("accepted_tokens", "num_accepted_tokens", "Proposed tokens that were kept"),
}
_ACCEPTED_LEN = "accepted_len"
COUNTER_TEXTS = {  # by name in a load report: help text
    "bad_messages": "Messages of other workers that could not be read",
    "busy_seconds": "Time in steps; its rate is the share of time in which the worker computes",
    "computed_prompt_tokens": "Tokens of prompts computed here, not found in caches",
    "copies_dropped": "Copies of KV given up for sequences that needed the memory",
    "cpu_seconds": "CPU time of the process",
    "dropped_reads": "Reads of other workers that were not served",
    "exposed_seconds": "Time of KV transfers that prefill did not hide",
    "failed_fetches": "Blocks that could not be fetched, by reason",
    "fallbacks": "Slower ways taken, by reason",
    "flops": "Estimated floating-point operations of the model",
    "handed_over": "Sequences that went on in another worker",
    "held_steps": "Steps that waited a moment for an event about to come",
    "kept_blocks": "Blocks that were cached here when a sequence arrived",
    "leases_ended": "Ends of leases, by reason",
    "pending_rows": "Rows planned before their token was known",
    "preempted": "Sequences that lost their memory to others",
    "prefix_offers": "Answers to requests for a cached prefix",
    "private_builds": "Native code compiled for this process alone",
    "offered_blocks": "Blocks that were leased to stores of KV, which asked for them",
    "pulled_blocks": "Blocks pulled from other workers",
    "pulled_bytes": "Bytes pulled from other workers",
    "pulled_prefix_blocks": "Blocks of prompts pulled instead of computed",
    "pulls_done": "Complete KV transfers to this worker",
    "pulls_failed": "KV transfers to this worker that failed, by reason",
    "read_bytes": "Estimated bytes of weights and KV that steps read",
    "refused_connections": "Connections refused, by reason",
    "refused_sessions": "Sessions refused, by reason",
    "reread_blocks": "Blocks asked for again, since they did not arrive",
    "served_reads": "Reads that other workers finished over NIXL",
    "slow_sinks": "Workers that read too slowly",
    "spec_steps": "Steps with drafted tokens",
    "step_tokens": "Tokens that decode steps made",
    "steps": "Steps that decode",
    "stuck": "Sequences given back since no memory came free while nothing ran",
    "transfer_seconds": "Time in which blocks were on their way to this worker",
    "unsent_messages": "Messages to other workers that could not be sent",
    "void_rows": "Rows computed for sequences that had ended meanwhile",
}
GAUGE_TEXTS = {
    "loop_lag_seconds": "Longest delay of the worker's event loop in the last second",
    "max_fds": "Files that the worker may have open",
    "open_fds": "Files that the worker has open",
    "peak_bytes_per_second": "Peak of memory bandwidth, as configured",
    "peak_flops_per_second": "Peak of computation, as configured",
    "resident_memory_bytes": "Memory of the worker's process",
}
WORKER = ("worker", "role")
BLOCK_STATES = ("free", "cached", "owned", "leased", "in_flight")


def computing(port: RouterStatus) -> dict[WorkerId, WorkerStatus]:
    """Returns the workers of `port` without the stores, which have sessions too."""
    found = port.workers().items()
    return {name: status for name, status in found if status.role is not Role.STORE}


def loads_of(port: RouterStatus) -> list[tuple[tuple[str, str], LoadReport]]:
    """Returns the last load report of each worker that sent one, with the labels (worker, role)."""
    return [
        ((str(worker_id), status.role.value), status.load)
        for worker_id, status in computing(port).items()
        if status.load is not None
    ]


def worker_families(port: RouterStatus) -> Iterator[Metric]:
    """Yields blocks, sequences, leases, counters and gauges of all workers."""
    loads = loads_of(port)
    blocks = [
        ((*worker, state), getattr(load, f"{state}_blocks"))
        for worker, load in loads
        for state in BLOCK_STATES
    ]
    yield gauge("baton_worker_blocks", "KV blocks by state", (*WORKER, "state"), blocks)
    for name, text in (
        ("waiting_seqs", "Sequences waiting in the worker"),
        ("running_seqs", "Sequences in its running batch"),
        ("open_leases", "Leases that other workers may pull under"),
    ):
        counts = [(worker, getattr(load, name)) for worker, load in loads]
        yield gauge(f"baton_worker_{name}", text, WORKER, counts)
    yield from _speculation(loads)
    yield from _worker_counters(loads)
    for name in sorted({name for _, load in loads for name in load.gauges}):
        text = GAUGE_TEXTS.get(name, "Measured by the worker")
        given = [(worker, load.gauges[name]) for worker, load in loads if name in load.gauges]
        yield gauge(f"baton_worker_{metric_name(name)}", text, WORKER, given)


def forecast_families(port: RouterStatus) -> Iterator[Metric]:
    """Yields the predictions for each worker. Each gateway process learns its own predictions."""
    forecasts = [
        ((str(worker_id), status.role.value), status.forecast)
        for worker_id, status in computing(port).items()
    ]
    for name, text, what in (
        ("wait", "Until the worker has computed the prompts that it was given", "wait_s"),
        ("tpot", "Predicted decode step of all sequences of the worker", "tpot_s"),
    ):
        times_s = [(worker, getattr(forecast, what)) for worker, forecast in forecasts]
        known = [(worker, time_s) for worker, time_s in times_s if time_s is not None]
        yield gauge(f"baton_worker_predicted_{name}_seconds", text, WORKER, known)
    errors = [
        ((*worker, work), error)
        for worker, forecast in forecasts
        for work in ("prefill", "decode", "pull")
        if (error := getattr(forecast.errors, work)) is not None
    ]
    text = "Recent error of predictions for workers of this class"
    yield gauge("baton_cost_error_ratio", text, (*WORKER, "work"), errors)


def by_reason(load: LoadReport, name: str) -> dict[str, float]:
    """Returns the counts with this name in a worker's report, by reason."""
    prefix = f"{name}:"
    counts = load.counters.items()
    return {key.removeprefix(prefix): n for key, n in counts if key.startswith(prefix)}


def _speculation(loads: list[tuple[tuple[str, str], LoadReport]]) -> Iterator[Metric]:
    for name, (our_name, _, text) in BY_PROPOSER.items():
        counts = [
            ((*worker, proposer), count)
            for worker, load in loads
            for proposer, count in by_reason(load, name).items()
        ]
        yield counter(f"baton_{our_name}", text, (*WORKER, "proposer"), counts)
    lengths = HistogramMetricFamily(
        "baton_accepted_length", "Tokens kept of one draft", labels=WORKER
    )
    for worker, load in loads:
        by_len = {int(n): count for n, count in by_reason(load, _ACCEPTED_LEN).items()}
        if by_len:
            num_tokens = sum(n * count for n, count in by_len.items())
            lengths.add_metric(worker, _cumulative(by_len), num_tokens)
    yield lengths


def _cumulative(counts: Mapping[int, float]) -> list[tuple[str, float]]:
    """Returns the cumulative count for each bound of the histogram, in Prometheus' form."""
    bounds = [
        (str(float(bound)), sum(count for n, count in counts.items() if n <= bound))
        for bound in ACCEPTED_LENGTH_BUCKETS
    ]
    return [*bounds, ("+Inf", sum(counts.values()))]


def _worker_counters(loads: list[tuple[tuple[str, str], LoadReport]]) -> Iterator[Metric]:
    """Yields all counts of workers except counts of speculation. A reason becomes a label."""
    by_name: dict[str, list[tuple[tuple[str, str], str, float]]] = {}
    for worker, load in loads:
        for key, value in load.counters.items():
            name, _, reason = key.partition(":")
            if name in BY_PROPOSER or name == _ACCEPTED_LEN:
                continue
            by_name.setdefault(metric_name(name), []).append((worker, reason, value))
    for name, counts in sorted(by_name.items()):
        labels = (*WORKER, "reason") if any(reason for _, reason, _ in counts) else WORKER
        text = COUNTER_TEXTS.get(name, "Counted by the worker")
        rows = [((*worker, reason)[: len(labels)], value) for worker, reason, value in counts]
        yield counter(f"baton_worker_{name}", text, labels, rows)


def metric_name(name: str) -> str:
    """Returns a name in which only characters remain that Prometheus allows."""
    return re.sub("[^a-zA-Z0-9_]", "_", name).removesuffix("_total")

"""The spans of one choice, from its timeline. Pure.

A stage starts when the stage before ends, so the times of all stages follow from their durations.
The order is: route, queue, prefill, hand-over of KV, decode. The transfer of KV overlaps with
prefill. The transfer ends when all KV is at the decode worker, and starts `kv_transfer_s` seconds
earlier.
"""

from typing import NamedTuple

from router.machine.requests import Timeline

Attributes = dict[str, str | int | float]


class StageSpan(NamedTuple):
    """One child span of a request's span. Times are seconds on the gateway's clock."""

    name: str
    begin_s: float
    end_s: float
    attributes: Attributes


def stage_spans(timeline: Timeline, received_s: float, end_s: float) -> list[StageSpan]:
    """Returns the spans of a choice that was received at `received_s` and ended at `end_s`.

    A choice that ended early has spans only for the stages that it reached.
    """
    routed_s = received_s + timeline.route_s
    placed_s = routed_s + timeline.queue_s
    started_s = placed_s + timeline.prefill_queue_s
    first_s = started_s + timeline.prefill_compute_s
    spans = [
        StageSpan("route", received_s, routed_s, {}),
        StageSpan("queue", routed_s, placed_s, {}),
    ]
    if timeline.prefill_worker:
        attributes: Attributes = {
            "baton.worker": timeline.prefill_worker,
            "baton.queue_s": timeline.prefill_queue_s,
            "baton.cached_tokens": timeline.num_cached_tokens,
        }
        decision = timeline.decision
        if timeline.prefix_pull_s is not None and decision is not None:
            attributes["baton.prefix_pull_s"] = timeline.prefix_pull_s
            attributes["baton.prefix_from"] = decision.pulled_from or ""
            attributes["baton.prefix_medium"] = decision.pulled_medium or "worker"
        spans.append(StageSpan("prefill", placed_s, first_s, attributes))
    ready_s = first_s + (timeline.kv_wait_s or 0.0)
    if timeline.kv_transfer_s is not None:
        attributes = {
            "baton.source": timeline.prefill_worker,
            "baton.worker": timeline.decode_worker,
            "baton.exposed_s": timeline.kv_exposed_s or 0.0,
        }
        begin_s = max(ready_s - timeline.kv_transfer_s, received_s)
        spans.append(StageSpan("pull", begin_s, ready_s, attributes))
    if timeline.first_step_s is not None:
        attributes = {
            "baton.worker": timeline.decode_worker,
            "baton.queue_s": timeline.decode_queue_s or 0.0,
            "baton.moves": timeline.moves,
            **({} if timeline.moved_why is None else {"baton.moved_why": timeline.moved_why}),
            "baton.drafted_tokens": timeline.num_drafted_tokens,
            "baton.accepted_tokens": timeline.num_accepted_tokens,
        }
        spans.append(StageSpan("decode", ready_s, max(end_s, ready_s), attributes))
    return spans

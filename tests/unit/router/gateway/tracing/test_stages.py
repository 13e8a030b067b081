"""The spans of a choice, computed from its timeline."""

import pytest
from msgspec.structs import replace

from router.gateway.tracing.stages import stage_spans
from router.machine.requests import Timeline
from router.policies.base import Decision

WHOLE = Timeline(
    route_s=1.0,
    queue_s=2.0,
    prefill_queue_s=3.0,
    prefill_compute_s=4.0,
    kv_wait_s=0.5,
    decode_queue_s=0.25,
    first_step_s=0.25,
    kv_transfer_s=2.0,
    kv_exposed_s=0.5,
    prefill_worker="worker-0",
    decode_worker="worker-1",
)


def times(spans):
    return {span.name: (span.begin_s, span.end_s) for span in spans}


def test_stages_follow_each_other_and_the_pull_overlaps():
    assert times(stage_spans(WHOLE, 100.0, 120.0)) == {
        "route": (100.0, 101.0),
        "queue": (101.0, 103.0),
        "prefill": (103.0, 110.0),
        "pull": (108.5, 110.5),
        "decode": (110.5, 120.0),
    }


def test_spans_name_their_workers():
    found = {span.name: span.attributes for span in stage_spans(WHOLE, 100.0, 120.0)}
    assert found["prefill"]["baton.worker"] == "worker-0"
    assert found["pull"]["baton.source"] == "worker-0"
    assert found["decode"]["baton.worker"] == "worker-1"


def test_the_pull_of_a_prefix_names_where_it_came_from():
    decision = Decision("slo", "", "worker-0", "worker-1", 1, pulled_from="store-v1")
    decision = replace(decision, pulled_medium="disk")
    pulled = replace(WHOLE, prefix_pull_s=0.25, decision=decision)
    prefill = stage_spans(pulled, 100.0, 120.0)[2]
    assert prefill.attributes["baton.prefix_pull_s"] == 0.25
    assert prefill.attributes["baton.prefix_from"] == "store-v1"
    assert prefill.attributes["baton.prefix_medium"] == "disk"


def test_a_request_that_was_never_placed_has_no_worker():
    early = Timeline(route_s=1.0, queue_s=2.0, prefill_queue_s=0.0, prefill_compute_s=0.0)
    assert list(times(stage_spans(early, 100.0, 103.0))) == ["route", "queue"]


@pytest.mark.parametrize("end_s", [0.0, 100.0, 120.0])
def test_no_span_ends_before_it_begins(end_s):
    assert all(span.begin_s <= span.end_s for span in stage_spans(WHOLE, 100.0, end_s))

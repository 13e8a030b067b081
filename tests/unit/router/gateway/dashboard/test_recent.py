"""Recently finished requests: the recorded fields, and the stage blamed for a missed bound."""

from types import SimpleNamespace

import pytest

from engine.messages import FinishReason, Limits, RequestId, Sampling
from router.gateway.dashboard.recent import (
    DEFAULT_BOUND_S,
    HUNG_AFTER,
    MAX_REQUESTS,
    RecentRequests,
    missed_stage,
)
from router.gateway.dashboard.records import Bounds
from router.gateway.versions import Tallies
from router.machine.requests import Cancelled, Failed, Finished, Rejected, Request, Timeline
from router.policies.base import Decision

BOUNDS = Bounds(ttft_s=1.0, tpot_s=0.1)
DONE = Finished(FinishReason.STOP)


def line(**fields):
    stages = {"route_s": 0.1, "queue_s": 0.0, "prefill_queue_s": 0.0, "prefill_compute_s": 0.1}
    return Timeline(**{**stages, "prefill_worker": "p0", "decode_worker": "d0", **fields})


def ended(outcome=DONE, *, timeline=None, last_s=11.0, num_tokens=11, tokens=range(200), **fields):
    request = Request(
        RequestId("r"), tuple(tokens), Sampling(), Limits(300), received_s=10.0, **fields
    )
    return SimpleNamespace(
        shown_id="shown",
        version="v1",
        request=request,
        outcome=outcome,
        timeline=timeline or line(),
        last_s=last_s,
        num_tokens=num_tokens,
    )


@pytest.mark.parametrize(
    ("stages", "tpot_s", "stage"),
    [
        ({}, 0.05, ""),
        ({"queue_s": 2.0}, 0.05, "queue"),
        ({"prefill_compute_s": 2.0, "queue_s": 1.0}, 0.05, "prefill_compute"),
        ({}, 0.2, "decode_steps"),
        ({"kv_wait_s": 0.5, "decode_queue_s": 0.1}, 0.2, "kv_wait"),
        ({"queue_s": 2.0}, 0.2, "queue"),
    ],
)
def test_a_miss_is_charged_to_the_longest_stage(stages, tpot_s, stage):
    timeline = line(**stages)
    ttft_s = timeline.route_s + timeline.queue_s + timeline.prefill_compute_s
    assert missed_stage(timeline, ttft_s, tpot_s, BOUNDS) == stage


def test_without_bounds_nothing_is_missed():
    assert missed_stage(line(queue_s=99.0), 99.0, 99.0, Bounds()) == ""


def test_a_request_brings_its_own_bounds():
    recent = RecentRequests(BOUNDS)
    recent.record(ended(timeline=line(queue_s=0.5), deadline_s=10.3))
    recent.record(ended(timeline=line(queue_s=0.5)))
    assert [each.missed for each in recent.requests] == ["queue", ""]


@pytest.mark.parametrize(
    ("outcome", "told", "missed"),
    [
        (DONE, ("finished", "stop"), ""),
        (Failed("no worker"), ("failed", "no worker"), "failed"),
        (Rejected("full", 1.0), ("rejected", "full"), "failed"),
        (Cancelled(), ("cancelled", ""), ""),
        (None, ("cancelled", ""), ""),
    ],
)
def test_outcomes_have_names_and_reasons(outcome, told, missed):
    recent = RecentRequests(BOUNDS)
    recent.record(ended(outcome))
    kept = recent.requests[0]
    assert ((kept.outcome, kept.reason), kept.missed) == (told, missed)


def test_cancelled_and_background_requests_do_not_count():
    recent = RecentRequests(BOUNDS)
    recent.record(ended(None))
    recent.record(ended(is_background=True))
    assert recent.totals.ended == 0
    assert len(recent.requests) == 2


def test_a_sample_has_the_requests_that_ended_since_the_last_sample():
    recent = RecentRequests(BOUNDS)
    recent.record(ended())
    recent.record(ended(timeline=line(queue_s=5.0)))
    first = recent.sample(1.0, queue=3, in_flight=4, answer_tokens=50)
    second = recent.sample(2.0, queue=0, in_flight=0, answer_tokens=50)
    assert (first.ended, first.good, first.missed) == (2, 1, {"queue": 1})
    assert (first.answer_tokens, first.prompt_tokens) == (50, 400)
    assert (second.ended, second.missed, second.answer_tokens) == (0, {}, 0)
    assert second.number == first.number + 1


def test_times_follow_from_the_timeline_and_the_last_token():
    recent = RecentRequests(BOUNDS)
    recent.record(ended())
    kept = recent.requests[0]
    assert kept.ttft_s == pytest.approx(0.2)
    assert kept.tpot_s == pytest.approx(0.08)
    assert kept.e2e_s == pytest.approx(1.0)


def test_an_answer_runs_until_its_end_is_noted():
    recent, over = RecentRequests(BOUNDS), ended()
    recent.running[over.request.request_id] = over
    assert [each.shown_id for each in recent.running.values()] == ["shown"]
    recent.record(over)
    assert not recent.running


def test_an_answer_without_a_token_for_many_bounds_hangs_and_counts_as_late():
    tallies = Tallies()
    recent, over = RecentRequests(BOUNDS, tallies), ended(None, last_s=12.0)
    recent.running[over.request.request_id] = over
    assert tallies.hung(12.0 + HUNG_AFTER * 1.0) == {}
    assert tallies.hung(12.1 + HUNG_AFTER * 1.0) == {"v1": 1}
    recent.record(over)  # the client disconnects
    assert tallies.hung(99.0) == {}
    assert (tallies.of("v1").ended, tallies.of("v1").late) == (1, 1)
    assert recent.totals.ended == 0


def test_a_refused_request_counts_as_late_for_its_version():
    tallies = Tallies()
    RecentRequests(BOUNDS, tallies).record(ended(Rejected("no time", 1.0)))
    assert (tallies.of("v1").failed, tallies.of("v1").late) == (0, 1)


def test_without_a_bound_an_answer_may_be_silent_for_longer():
    recent = RecentRequests(Bounds())
    recent.running[RequestId("r")] = ended(last_s=0.0)
    assert recent.hung(10.0 + HUNG_AFTER * DEFAULT_BOUND_S) == {}
    assert recent.hung(10.1 + HUNG_AFTER * DEFAULT_BOUND_S) == {"v1": 1}


def test_pulled_prefixes_count_as_hits_of_a_peer():
    recent = RecentRequests(BOUNDS)
    decision = Decision("slo", "why", "p0", "d0", 1, pulled_from="p1", num_pulled_tokens=64)
    recent.record(ended(timeline=line(num_cached_tokens=100, decision=decision)))
    assert (recent.hits.local, recent.hits.peer, recent.hits.prompt_tokens) == (36, 64, 200)


def test_a_prefix_that_could_not_be_pulled_is_no_hit_of_a_peer():
    recent = RecentRequests(BOUNDS)
    decision = Decision("slo", "why", "p0", "d0", 1, 36, pulled_from="p1", num_pulled_tokens=64)
    recent.record(ended(timeline=line(num_cached_tokens=36, decision=decision)))
    assert (recent.hits.local, recent.hits.peer) == (36, 0)


def test_the_unbounded_cache_knows_each_prompt_of_its_salt():
    recent = RecentRequests(BOUNDS)
    recent.record(ended())
    assert recent.hits.infinite == 0
    recent.record(ended())
    assert recent.hits.infinite == 192  # counted in full units of 64 tokens
    recent.record(ended(salt=b"of another key"))
    assert recent.hits.infinite == 192


def test_requests_are_bounded():
    recent = RecentRequests(BOUNDS)
    for _ in range(MAX_REQUESTS + 10):
        recent.record(ended())
    assert len(recent.requests) == MAX_REQUESTS
    assert recent.requests[-1].number == MAX_REQUESTS + 10

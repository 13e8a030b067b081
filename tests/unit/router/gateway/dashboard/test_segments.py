"""The segments of a request's history: attempts in their workers' lanes, and gaps between them."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.gateway.dashboard.records import Segment, Spent, segments_of, spent_of
from router.machine.requests import Stay, Timeline

FIRST = Stay("p0", "d0", 1.0, 1.5, 2.0, 2.2, 2.5, 10.0)
SECOND = Stay("p0", "d1", 17.7, 18.0, 19.0, 19.0, 19.5)
RUNNING = Stay("p0", "d0", 1.0, 1.5, 2.0, 2.2, 2.5)


def line(*stays, **fields):
    return Timeline(0.5, 0.5, 0.5, 0.5, stays=stays, **fields)


def in_lane(segments, lane):
    return [(each.stage, each.start_s, each.end_s) for each in segments if each.row == lane]


def test_an_attempt_is_in_the_lanes_of_its_own_workers():
    segments = segments_of(line(RUNNING), 5.0, is_over=False)
    assert in_lane(segments, "router") == [("queue", 0.5, 1.0)]
    assert in_lane(segments, "p0") == [("prefill_queue", 1.0, 1.5), ("prefill_compute", 1.5, 2.0)]
    assert in_lane(segments, "d0") == [
        ("kv_wait", 2.0, 2.2),
        ("decode_queue", 2.2, 2.5),
        ("decode_steps", 2.5, 5.0),
    ]


def test_nothing_is_drawn_in_a_worker_after_it_died():
    segments = segments_of(line(FIRST, SECOND), 25.0, is_over=False)
    assert max(each.end_s for each in segments if each.row == "d0") == 10.0
    assert in_lane(segments, "router") == [("queue", 0.5, 1.0), ("queue", 10.0, 17.7)]
    assert in_lane(segments, "d1")[-1] == ("decode_steps", 19.5, 25.0)


def test_a_request_whose_worker_died_waits_in_the_router_until_now():
    segments = segments_of(line(FIRST), 17.7, is_over=False)
    assert in_lane(segments, "router")[-1] == ("queue", 10.0, 17.7)
    assert in_lane(segments_of(line(FIRST), 10.0, is_over=True), "router") == [("queue", 0.5, 1.0)]


@pytest.mark.parametrize(
    ("stay", "lane", "last"),
    [
        (Stay("p0", "d0", 1.0), "p0", ("prefill_queue", 1.0, 9.0)),
        (Stay("p0", "d0", 1.0, 2.0), "p0", ("prefill_compute", 2.0, 9.0)),
        (Stay("p0", "d0", 1.0, 2.0, 3.0), "d0", ("kv_wait", 3.0, 9.0)),
        (Stay("p0", "d0", 1.0, 2.0, 3.0, 4.0), "d0", ("decode_queue", 4.0, 9.0)),
        (Stay("p0", "d0", 1.0, 2.0, 3.0, 4.0, 5.0), "d0", ("decode_steps", 5.0, 9.0)),
        (Stay("p0", "d0", 1.0, None, None, None, None, 4.0), "p0", ("prefill_queue", 1.0, 4.0)),
    ],
)
def test_an_attempt_is_in_the_stage_that_it_reached(stay, lane, last):
    assert in_lane(segments_of(line(stay), 9.0, is_over=False), lane)[-1] == last


def test_a_moved_answer_is_not_prefilled_again():
    moved = Stay("d0", "d1", 10.0, None, 10.0, 10.3, 10.4)
    segments = segments_of(line(FIRST, moved), 12.0, is_over=False)
    assert not any(each.stage.startswith("prefill") and each.row == "d0" for each in segments)
    assert in_lane(segments, "d1")[-1] == ("decode_steps", 10.4, 12.0)
    assert in_lane(segments, "router") == [("queue", 0.5, 1.0)]


def test_two_attempts_at_once_leave_no_gap():
    first = Stay("p0", "d0", 1.0, 1.5, 9.0, 9.0, 9.1)
    hedge = Stay("p1", "d0", 4.0, 4.5, None, None, None, 9.0)
    segments = segments_of(line(hedge, first), 12.0, is_over=False)
    assert in_lane(segments, "router") == [("queue", 0.5, 1.0)]
    assert in_lane(segments, "p1")[-1] == ("prefill_compute", 4.5, 9.0)


def test_a_stall_is_a_gap_in_the_steps():
    segments = segments_of(line(RUNNING), 20.0, [(4.0, 11.7), (19.0, 20.0)], is_over=False)
    assert in_lane(segments, "d0")[2:] == [
        ("decode_steps", 2.5, 4.0),
        ("stalled", 4.0, 11.7),
        ("decode_steps", 11.7, 19.0),
        ("stalled", 19.0, 20.0),
    ]


def test_a_stall_that_was_seen_just_before_a_death_lasted_until_then():
    segments = segments_of(line(FIRST, SECOND), 25.0, [(6.0, 9.3)], is_over=False)
    assert in_lane(segments, "d0")[-1] == ("stalled", 6.0, 10.0)
    assert in_lane(segments, "d1")[-1] == ("decode_steps", 19.5, 25.0)


def test_a_request_that_was_never_placed_was_in_the_queue():
    assert segments_of(line(), 9.0, is_over=True) == [Segment("router", "queue", 0.5, 1.0)]
    assert segments_of(None, 9.0, is_over=True) == []


def test_a_transfer_that_prefill_hid_is_in_the_lane_of_its_sink():
    timeline = line(RUNNING, kv_transfer_s=0.5, kv_exposed_s=0.2)
    (hidden,) = (s for s in segments_of(timeline, 5.0, is_over=False) if s.stage == "kv_hidden")
    assert (hidden.row, hidden.start_s, hidden.end_s) == ("d0", 1.7, 2.0)


def test_the_time_of_each_stage_is_summed():
    spent = spent_of(segments_of(line(RUNNING), 20.0, [(4.0, 11.0)], is_over=False))
    assert spent == Spent(pytest.approx(1.5), 0.5, pytest.approx(10.5), 7.0)


times = st.floats(0.0, 100.0)


@st.composite
def attempts(draw):
    """Returns consecutive attempts; any stage of an attempt may be missing."""
    found, at_s = [], 0.5
    for number in range(draw(st.integers(0, 4))):
        stamps = [at_s := at_s + draw(st.floats(0.0, 3.0)) for _ in range(6)]
        reached = draw(st.integers(1, 5))
        stages = [*stamps[:reached], *[None] * (5 - reached)]
        found.append(Stay("p0", f"d{number}", *stages, stamps[-1]))
    return found


@settings(max_examples=40)
@given(attempts(), st.lists(st.tuples(times, times), max_size=4), st.booleans())
def test_segments_of_successive_attempts_never_overlap(stays, stalls, is_over):
    end_s = max((each.ended_s for each in stays), default=0.5) + 1.0
    ordered = [(start, start + length) for start, length in sorted(stalls)]
    segments = segments_of(line(*stays), end_s, ordered, is_over=is_over)
    shown = sorted((s for s in segments if s.stage != "kv_hidden"), key=lambda s: s.start_s)
    for one, two in pairwise(shown):
        assert one.end_s <= two.start_s
    assert all(0.5 <= each.start_s < each.end_s <= end_s for each in shown)

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.stream import SseEvent, SseParser

FEW = settings(max_examples=20)  # a unit test may take 50 ms

STREAM = (
    b": keep-alive\r\n\r\n"
    b'data: {"a": "\xc3\xa9"}\n\n'
    b"event: error\rdata: one\rdata: two\r\r"
    b"id: 7\nretry: 5\nnonsense\n\n"
    b"data:no space\r\n\r\n"
    b"data: [DONE]\n\n"
)
EVENTS = [
    SseEvent(b'{"a": "\xc3\xa9"}'),
    SseEvent(b"one\ntwo", kind=b"error"),
    SseEvent(b"no space"),
    SseEvent(b"[DONE]"),
]


def parse(*pieces):
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@FEW
@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_events_do_not_depend_on_where_the_network_cuts(cuts):
    ends = sorted({0, len(STREAM), *cuts})
    pieces = [STREAM[start:end] for start, end in pairwise(ends)]
    assert parse(*pieces) == EVENTS


@FEW
@given(st.sampled_from([b"\n", b"\r", b"\r\n"]), st.lists(st.integers(0, 9), max_size=8))
def test_all_three_line_ends_mean_the_same(end, numbers):
    stream = b"".join(b"data: %d%s%s" % (number, end, end) for number in numbers)
    assert [event.data for event in parse(stream)] == [b"%d" % number for number in numbers]


def test_an_event_is_handed_out_as_soon_as_its_blank_line_ends():
    parser = SseParser()
    assert parser.feed(b"data: x\r\n\r") == [SseEvent(b"x")]
    assert parser.feed(b"\n") == []


@pytest.mark.parametrize("tail", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r"])
def test_finish_hands_out_an_event_that_lacks_its_blank_line(tail):
    parser = SseParser()
    assert parser.feed(tail) == []
    assert parser.finish() == [SseEvent(b"[DONE]")]
    assert parser.finish() == []

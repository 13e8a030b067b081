"""Frames are decoded unchanged from a stream, however the stream is split into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ProtocolError
from engine.messages import MAX_FRAME_BYTES
from engine.net.framing import BEAT, FAREWELL, HEAD_BYTES, FrameReader, head_of

frames = st.lists(st.binary(max_size=40), max_size=8)


def stream_of(sent: list[bytes]) -> bytes:
    return b"".join(head_of(frame) + frame for frame in sent)


@given(frames, st.lists(st.integers(0, 400)))
def test_frames_come_whole_and_in_order_from_any_pieces(sent, cuts):
    stream, reader, got = stream_of(sent), FrameReader(), []
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    for begin, end in pairwise(edges):
        got += reader.feed(stream[begin:end])
    assert got == sent
    assert not reader.has_ended


@given(frames, st.binary(max_size=20))
def test_nothing_comes_after_the_farewell(sent, rest):
    reader = FrameReader()
    assert reader.feed(stream_of(sent) + FAREWELL + rest) == sent
    assert reader.has_ended
    assert reader.feed(rest) == []


def test_a_beat_is_a_frame_without_bytes():
    assert FrameReader().feed(head_of(BEAT)) == [BEAT]


def test_a_frame_that_is_too_long_is_refused_at_its_head():
    with pytest.raises(ProtocolError, match="too long"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(HEAD_BYTES, "little"))
    with pytest.raises(ProtocolError, match="too long"):
        head_of(bytes(MAX_FRAME_BYTES + 1))

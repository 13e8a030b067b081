"""Messages between the ranks of a worker."""

import socket
import struct

import msgspec
import pytest

from deploy.ranks.frames import LENGTH, MAX_BYTES, FrameSocket, FromRank, RankCounters, ToRank
from engine.errors import ProtocolError
from engine.messages import LeaseId, SeqId
from engine.worker.blocks import BlockId
from engine.worker.events import GrowLease, LeaseEnded, PullFailed, StartPull


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FrameSocket(ours), FrameSocket(theirs)


@pytest.mark.parametrize(
    "order",
    [GrowLease(LeaseId("l"), (BlockId(3), BlockId(1))), StartPull(SeqId("s"), ((0, BlockId(5)),))],
)
def test_orders_arrive_as_they_were_sent(pair, order):
    ours, theirs = pair
    ours.send(order)
    assert msgspec.msgpack.decode(theirs.receive(), type=ToRank) == order


@pytest.mark.parametrize(
    "report",
    [
        PullFailed(SeqId("s"), "why", (1, 2)),
        LeaseEnded(LeaseId("l"), "released"),
        RankCounters({"pulled_blocks": 3}),
    ],
)
def test_reports_arrive_as_they_were_sent(pair, report):
    ours, theirs = pair
    theirs.send(report)
    assert msgspec.msgpack.decode(ours.receive(), type=FromRank) == report


def test_the_end_of_a_rank_is_no_message(pair):
    ours, theirs = pair
    theirs.send(RankCounters({}))
    theirs.close()
    assert ours.receive() is not None
    assert ours.receive() is None
    ours.close()
    assert ours.receive() is None


def test_a_message_that_breaks_off_is_none():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(LENGTH.pack(100) + b"half")
        theirs.shutdown(socket.SHUT_WR)
        assert FrameSocket(ours).receive() is None


def test_a_message_beyond_all_sizes_is_an_error():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(LENGTH.pack(MAX_BYTES + 1))
        with pytest.raises(ProtocolError):
            FrameSocket(ours).receive()


def test_a_silent_second_is_noticed_and_a_late_message_still_arrives():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        late = FrameSocket(theirs)
        receiver = FrameSocket(ours, on_idle=lambda: late.send(RankCounters({"n": 1.0})))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 5000))
        frame = receiver.receive()
        assert msgspec.msgpack.decode(frame, type=FromRank) == RankCounters({"n": 1.0})

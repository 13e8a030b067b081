"""Lanes of streams: which tokens go through them, and when they close."""

from socket import socketpair

import pytest

from engine.messages import Tokens, encode_frame
from router.edge.exchange import NO_SOCKET
from router.gateway.answers.batching import TextBatch
from router.gateway.metrics.histograms import Buckets
from router.text.native.library import NativeText
from router.text.native.step import BatchedText, NativeVocabulary

LONG = b"a" * 2**22


class SocketPipe:
    """A pipe over a socket; what goes past the socket is kept."""

    def __init__(self, socket: int) -> None:
        self.is_ready = True
        self.descriptor = socket
        self.coded: list[bytes] = []

    def write(self, data: bytes) -> None:
        raise AssertionError("all parts are coded")

    def socket(self) -> int:
        return NO_SOCKET if self.coded else self.descriptor

    def write_coded(self, data: bytes) -> None:
        self.coded.append(data)

    def cut(self) -> None:
        self.is_ready = False

    def flush(self) -> None:
        """Nothing waits."""


class Counts:
    """The counters of `GatewayMetrics` that a batch changes."""

    num_generation_tokens = num_batched_tokens = 0


@pytest.fixture
def sockets():
    ours, theirs = socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def vocabulary():
    return NativeVocabulary({0: LONG, 1: b"b", 2: b"c"}, 3, frozenset())


def answer(vocabulary):
    return BatchedText(
        NativeText(),
        vocabulary,
        frame=(b"", b""),
        end_ids=(),
        min_tokens=0,
        gaps=Buckets((1.0,)),
        shows_special=False,
    )


async def test_tokens_of_a_lane_come_behind_those_that_came_before(sockets, vocabulary):
    counts = Counts()
    batch, text = TextBatch(counts), answer(vocabulary)
    pipe = SocketPipe(sockets[0].fileno())
    batch.add((text, pipe), (1,), 0.0)
    assert batch.open_lane("s.0", (text, pipe))
    frame = encode_frame([Tokens("s.0", [2]), Tokens("other.0", [1])])
    assert batch.take_frame(frame, 1.0) == [1]
    assert sockets[1].recv(100) == b'3\r\n"b"\r\n3\r\n"c"\r\n'
    assert (counts.num_generation_tokens, counts.num_batched_tokens) == (2, 2)
    batch.close_lane("s.0")
    assert batch.take_frame(frame, 2.0) is None


@pytest.mark.parametrize("in_frame", [True, False])
async def test_a_full_socket_closes_the_lanes_of_its_pipe(sockets, vocabulary, in_frame):
    batch, text = TextBatch(Counts()), answer(vocabulary)
    pipe = SocketPipe(sockets[0].fileno())
    assert batch.open_lane("s.0", (text, pipe))
    if in_frame:
        assert batch.take_frame(encode_frame([Tokens("s.0", [0])]), 0.0) == ()
    else:
        batch.add((text, pipe), (0,), 0.0)
        batch.flush()
    [rest] = pipe.coded
    assert LONG.endswith(rest.removesuffix(b'"\r\n'))
    assert batch.take_frame(encode_frame([Tokens("s.0", [1])]), 1.0) is None
    assert not batch.open_lane("s.0", (text, pipe))  # as long as the rest waits
    pipe.coded.clear()
    assert batch.open_lane("s.0", (text, pipe))


async def test_a_frame_with_an_unknown_token_is_left_to_python(sockets, vocabulary, caplog):
    batch = TextBatch(Counts())
    text = answer(NativeVocabulary({}, 2, frozenset()))
    assert batch.open_lane("s.0", (text, SocketPipe(sockets[0].fileno())))
    assert batch.take_frame(encode_frame([Tokens("s.0", [1])]), 0.0) is None
    assert "a frame is left to Python" in caplog.text

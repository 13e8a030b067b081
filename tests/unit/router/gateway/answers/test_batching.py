"""The fast path of streams: which tokens are taken from frames, and for how long."""

from contextlib import suppress
from socket import socketpair

import pytest

from engine.messages import Tokens, encode_frame
from router.edge.exchange import NO_SOCKET
from router.gateway.answers.batching import FastPath, TextBatch
from router.gateway.metrics.series import Buckets
from router.text.native.step import BatchedText, NativeVocabulary
from router.text.native.structs import NativeText

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


class RunningAnswer:
    """The only choice of a stream that is open, its stream, and its request."""

    index, num_tokens = 0, 1

    def __init__(self, vocabulary, pipe) -> None:
        self.events = self
        self.pipe = pipe
        self._vocabulary = vocabulary

    def batched(self, frame):
        return BatchedText(
            NativeText(),
            self._vocabulary,
            frame=frame,
            end_ids=(),
            min_tokens=0,
            gaps=Buckets((1.0,)),
            shows_special=False,
        )

    def frame_of(self, choice):
        return b"", b""

    def offer_frames(self, taker):
        return "s.0"


def path_of(batch, vocabulary, socket) -> tuple[FastPath, RunningAnswer]:
    answer = RunningAnswer(vocabulary, SocketPipe(socket.fileno()))
    return FastPath(batch, answer, answer, is_alone=True), answer


def read_all(socket) -> None:
    socket.setblocking(False)
    with suppress(BlockingIOError):
        while socket.recv(2**22):
            """Read on."""


def frame_of(*messages) -> bytes:
    return encode_frame([Tokens(*each) for each in messages])


async def test_tokens_of_frames_come_behind_earlier_tokens(sockets, vocabulary):
    counts = Counts()
    batch = TextBatch(counts)
    path, handle = path_of(batch, vocabulary, sockets[0])
    assert path.take((1,), 0.0, handle)
    frame = frame_of(("s.0", [2]), ("other.0", [1]))
    assert batch.take_frame(frame, 1.0) == [1]
    assert sockets[1].recv(100) == b'3\r\n"b"\r\n3\r\n"c"\r\n'
    assert (counts.num_generation_tokens, counts.num_batched_tokens) == (2, 2)
    path.close()
    assert batch.take_frame(frame, 2.0) is None


@pytest.mark.parametrize("in_frame", [True, False])
async def test_nothing_is_taken_from_frames_while_a_socket_is_full(sockets, vocabulary, in_frame):
    batch = TextBatch(Counts())
    path, handle = path_of(batch, vocabulary, sockets[0])
    if in_frame:
        assert path.take((1,), 0.0, handle)
        assert batch.take_frame(frame_of(("s.0", [0])), 0.0) == ()
    else:
        assert path.take((0,), 0.0, handle)
        batch.flush()
    [rest] = path.pipe.coded
    assert LONG.endswith(rest.removesuffix(b'"\r\n'))
    frame = frame_of(("s.0", [1]))
    assert batch.take_frame(frame, 1.0) is None
    assert path.take((1,), 1.0, handle)
    assert batch.take_frame(frame, 1.0) is None  # as long as the rest waits
    batch.flush()
    path.pipe.coded.clear()
    read_all(sockets[1])
    assert path.take((1,), 1.0, handle)
    assert batch.take_frame(frame, 2.0) == ()


async def test_a_frame_with_an_unknown_token_is_left_to_python(sockets, vocabulary, caplog):
    batch = TextBatch(Counts())
    path, handle = path_of(batch, NativeVocabulary({1: b"b"}, 3, frozenset()), sockets[0])
    assert path.take((1,), 0.0, handle)
    assert batch.take_frame(frame_of(("s.0", [2])), 0.0) is None
    assert "a frame is left to Python" in caplog.text

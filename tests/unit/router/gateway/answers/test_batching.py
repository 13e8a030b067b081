"""Text in C++ compared with the same text in Python, and the tokens that are read from frames."""

import os
from contextlib import ExitStack, suppress
from itertools import compress
from socket import socketpair

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import (
    FinishReason,
    Limits,
    LoadReport,
    Logprobs,
    PrefillDone,
    StepReport,
    Tokens,
    encode_frame,
)
from router.edge.exchange import NO_SOCKET
from router.gateway.answers.batching import FastPath, TextBatch
from router.gateway.metrics.series import Buckets
from router.text.detokenizer import AnswerText, ByteDetokenizer, PlainTextState
from router.text.native import NativeText, NativeVocabulary
from router.text.token_bytes import byte_table
from tests.kits.tokenizers import BYTE_LEVEL, FEW, SPECIAL, VOCAB_SIZE

LONG = b"a" * 2**22
PROMPT_LEN = 10
FRAME = (b'data: {"text":', b"}\n\n")
END = 7
TABLE = byte_table(BYTE_LEVEL) or {}
VOCABULARY = NativeVocabulary(TABLE, VOCAB_SIZE, SPECIAL)
LETTERS = NativeVocabulary({0: LONG, 1: b"b", 2: b"c"}, 3, frozenset())

token_ids = st.lists(st.integers(0, VOCAB_SIZE + 2), max_size=5)
steps = st.lists(st.tuples(st.integers(0, 2), token_ids, st.booleans()), max_size=20)


class SocketPipe:
    """A pipe over a socket. Writes that bypass the socket are recorded."""

    def __init__(self, socket: int = NO_SOCKET) -> None:
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
        """Does nothing: the pipe buffers nothing."""


class Counts:
    """The counters of `GatewayMetrics` that a batch changes."""

    num_generation_tokens = num_batched_tokens = 0


class Running:
    """The handle of a running request."""

    def offer_frames(self, taker):
        return "s.0"


HANDLE = Running()


@pytest.fixture
def batch():
    return TextBatch(Counts())


@pytest.fixture
def sockets():
    ours, theirs = socketpair()
    with ours, theirs:
        yield ours, theirs


def path_of(batch, vocabulary=LETTERS, socket=None) -> FastPath:
    """Returns a C++ path that writes text chunks without framing; no token ends the answer."""
    text = NativeText()
    text.describe(vocabulary, end_ids=(), min_tokens=0, gaps=Buckets((1.0,)), shows_special=False)
    text.surround(b"", b"")
    return FastPath(batch, text, SocketPipe(NO_SOCKET if socket is None else socket.fileno()))


def read_all(socket) -> None:
    socket.setblocking(False)
    with suppress(BlockingIOError):
        while socket.recv(2**22):
            """Read on."""


def frame_of(*messages) -> bytes:
    return encode_frame([Tokens(*each) for each in messages])


class Twin:
    """An answer in Python, and the same answer in C++."""

    def __init__(self, batch: TextBatch, *, shows_special: bool, min_len: int) -> None:
        self.gaps = Buckets((0.5, 1.5, 2.5))
        self.native_gaps = Buckets((0.5, 1.5, 2.5))
        self.state, self.native_state = PlainTextState(), NativeText()
        limits = Limits(max_len=1000, min_len=min_len, stop_token_ids=(END,))
        hidden_ids = frozenset() if shows_special else SPECIAL
        self.text, self.native = (
            AnswerText(
                ByteDetokenizer(TABLE, hidden_ids=hidden_ids, state=state),
                prompt_len=PROMPT_LEN,
                limits=limits,
                stop=(),
                state=state,
            )
            for state in (self.state, self.native_state)
        )
        self.native_state.describe(
            VOCABULARY,
            end_ids=sorted(self.native.hidden_end_ids),
            min_tokens=self.native.min_tokens,
            gaps=self.native_gaps,
            shows_special=shows_special,
        )
        self.native_state.surround(*FRAME)
        self.pipe = SocketPipe()
        self.path = FastPath(batch, self.native_state, self.pipe)

    def chunk_of(self, ids: list[int], now_s: float) -> bytes:
        """Returns what the Python code sends for these tokens."""
        self.gaps.observe(now_s - self.state.last_s)
        self.state.last_s = now_s
        text = self.text.push(ids)
        data = FRAME[0] + msgspec.json.encode(text) + FRAME[1]
        return b"%x\r\n%b\r\n" % (len(data), data) if text else b""

    def check(self) -> None:
        assert self.native_state.num_tokens == self.state.num_tokens
        assert self.native_state.rest == self.state.rest
        assert self.native_state.last_s == self.state.last_s
        for name in ("counts", "total"):
            assert getattr(self.native_gaps, name) == getattr(self.gaps, name)


@FEW
@given(steps, st.booleans(), st.integers(0, 14))
def test_chunks_are_those_of_python_however_tokens_come(steps, shows_special, min_len):
    batch = TextBatch(Counts())
    twins = [Twin(batch, shows_special=shows_special, min_len=min_len) for _ in range(3)]
    expected = [b"", b"", b""]
    added: list[tuple[FastPath, list[int], float]] = []
    for now, (number, ids, is_alone) in enumerate([*steps, (0, [], True)]):
        twin, now_s = twins[number], float(now)
        if is_alone:  # in Python, like the slow path
            if added:
                batch.send(added)
            assert [b"".join(each.pipe.coded) for each in twins] == expected
            added.clear()
            assert twin.native.push(ids) == twin.text.push(ids)
        else:
            added.append((twin.path, ids, now_s))
            expected[number] += twin.chunk_of(ids, now_s)
    for twin in twins:
        twin.check()
        assert twin.native.finish() == twin.text.finish()


# Byte strings that start, cut and continue characters.
EDGES = b"a\x00\x7f\x80\x8f\x90\x9f\xa0\xbf\xc1\xc2\xdf\xe0\xed\xef\xf0\xf4\xf5\xff"
edges = st.lists(st.sampled_from(EDGES), max_size=12).map(bytes)


def sent_text(batch: TextBatch, bytes_by_id: dict[int, bytes]) -> tuple[bytes, bytes]:
    """Returns C++'s JSON for all tokens of a vocabulary, then for the rest of an open character."""
    path = path_of(batch, NativeVocabulary(bytes_by_id, len(bytes_by_id), frozenset()))
    batch.send([(path, list(bytes_by_id), 0.0)])
    return b"".join(path.pipe.coded).partition(b"\r\n")[2].removesuffix(b"\r\n"), path.text.rest


@given(edges | st.binary(), st.lists(st.integers(1, 4)))
def test_any_bytes_become_the_text_that_python_decodes(data, lengths):
    pieces, rest = [], data
    for length in lengths:
        pieces.append(rest[:length])
        rest = rest[length:]
    bytes_by_id = dict(enumerate([*pieces, rest]))
    state = PlainTextState()
    decoder = ByteDetokenizer(bytes_by_id, hidden_ids=frozenset(), state=state)
    text = "".join(decoder.push(number) for number in bytes_by_id)
    found = sent_text(TextBatch(Counts()), bytes_by_id)
    assert found == (msgspec.json.encode(text) if text else b"", state.rest)


def test_all_characters_are_escaped_as_in_python(batch):
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert sent_text(batch, {0: every.encode()})[0] == msgspec.json.encode(every)


def test_a_full_socket_takes_a_part_and_nothing_behind_it(batch, sockets):
    """One stream has two choices, the first with a long text; another stream follows."""
    ours, theirs = sockets
    our_other, their_other = socketpair()
    with our_other, their_other:
        first, second = (path_of(batch, socket=ours) for _ in range(2))
        other = path_of(batch, socket=our_other)
        batch.send([(first, (0,), 0.0), (second, (1,), 0.0), (other, (1,), 0.0)])
        ours.close()
        sent = b"".join(iter(lambda: theirs.recv(2**20), b""))
        assert sent
        assert [sent + first.pipe.coded[0]] == [b"%x\r\n" % (2**22 + 2) + b'"' + LONG + b'"\r\n']
        assert second.pipe.coded == [b'3\r\n"b"\r\n']
        assert their_other.recv(100) == b'3\r\n"b"\r\n'
        assert not other.pipe.coded


def test_what_a_closed_socket_does_not_take_is_kept(batch, sockets):
    sockets[1].close()
    path = path_of(batch, socket=sockets[0])
    batch.send([(path, (1,), 0.0)])
    assert path.pipe.coded == [b'3\r\n"b"\r\n']


# ---------------------------------------------------------------- frames

SCORE = Logprobs(-1.0, 1, (1,), (-1.0,))
others = st.sampled_from(
    [
        Tokens("s0.0", [1], FinishReason.STOP),
        Tokens("s0.0", [1], logprobs=[SCORE]),
        Tokens("s0.0", [1], num_drafted=1),
        Tokens("s0.0", []),
        Tokens("unknown.0", [1]),
        PrefillDone("s0.0", 1, None),
        LoadReport(1, 2, 3, 4, 5, 6, 7, 2**40, steps=[StepReport(0.5, num_rows=1)]),
    ]
)
plain = st.builds(
    Tokens,
    st.integers(0, 2).map(lambda number: f"s{number}.0"),
    st.lists(st.integers(0, VOCAB_SIZE + 70_000), min_size=1, max_size=20),
)


@FEW
@given(st.lists(st.lists(plain | others, max_size=20), max_size=5))
def test_tokens_in_frames_become_the_chunks_of_python(frames):
    batch = TextBatch(Counts())
    twins = {f"s{i}.0": Twin(batch, shows_special=False, min_len=0) for i in range(3)}
    pairs = {seq_id: socketpair() for seq_id in twins}
    expected = dict.fromkeys(twins, b"")
    with ExitStack() as stack:
        for seq_id, twin in twins.items():
            ours, theirs = map(stack.enter_context, pairs[seq_id])
            theirs.setblocking(False)
            twin.pipe.descriptor = ours.fileno()
            batch.open(seq_id, twin.path)
        for now, messages in enumerate(frames):
            held = set[str]()  # sequences that have other messages in this frame
            is_taken = []
            for each in messages:
                seq_id = getattr(each, "seq_id", "")
                is_plain = isinstance(each, Tokens) and each == Tokens(seq_id, each.token_ids)
                if not (is_plain and each.token_ids):
                    held.add(seq_id)
                is_taken.append(seq_id in twins and seq_id not in held)
            left = batch.take_frame(encode_frame(messages), float(now))
            assert (left is None) == (not any(is_taken))
            if left is not None:
                assert list(left) == [i for i, here in enumerate(is_taken) if not here]
            for message in compress(messages, is_taken):
                ids = message.token_ids
                expected[message.seq_id] += twins[message.seq_id].chunk_of(ids, float(now))
        for seq_id, (_, theirs) in pairs.items():
            assert (theirs.recv(2**20) if expected[seq_id] else b"") == expected[seq_id]
            assert not twins[seq_id].pipe.coded
            twins[seq_id].check()


@given(st.binary() | st.lists(plain | others, min_size=1).map(encode_frame), st.integers(0, 200))
def test_a_frame_that_breaks_off_is_left_to_python(frame, end):
    batch = TextBatch(Counts())
    ours, theirs = socketpair()
    with ours, theirs:
        path = path_of(batch, socket=ours)
        batch.open("s0.0", path)
        assert batch.take_frame(frame[: min(end, len(frame) - 1)], 0.0) is None
    assert path.text.num_tokens == 0


def test_chunks_that_a_socket_does_not_take_end_the_reading_of_frames(batch, sockets):
    path = path_of(batch, socket=sockets[0])
    batch.open("s.0", path)
    frame = frame_of(("s.0", [0]), ("s.0", [1]))
    assert batch.take_frame(frame, 0.0) == ()
    rest, chunk = path.pipe.coded
    assert (LONG + b'"\r\n').endswith(rest)
    assert chunk == b'3\r\n"b"\r\n'
    assert path.seq_id is None
    assert batch.take_frame(frame, 0.0) is None


def test_no_token_goes_to_another_socket_with_the_same_descriptor(batch):
    ours, theirs = socketpair()
    other, their_other = socketpair()
    with theirs, other, their_other:
        their_other.setblocking(False)
        path = path_of(batch, socket=ours)
        descriptor = ours.fileno()
        batch.open("s.0", path)
        ours.close()
        assert os.dup2(other.fileno(), descriptor) == descriptor
        assert batch.take_frame(frame_of(("s.0", [1])), 0.0) == ()
        os.close(descriptor)
        assert path.pipe.coded == [b'3\r\n"b"\r\n']
        with pytest.raises(BlockingIOError):
            their_other.recv(1)


async def test_tokens_of_frames_come_behind_earlier_tokens(sockets):
    counts = Counts()
    batch = TextBatch(counts)
    path = path_of(batch, socket=sockets[0])
    batch.add(path, (1,), 0.0, HANDLE)
    frame = frame_of(("s.0", [2]), ("other.0", [1]))
    assert batch.take_frame(frame, 1.0) == [1]
    assert sockets[1].recv(100) == b'3\r\n"b"\r\n3\r\n"c"\r\n'
    assert (counts.num_generation_tokens, counts.num_batched_tokens) == (2, 2)
    batch.release(path)
    assert batch.take_frame(frame, 2.0) is None


async def test_frames_are_read_again_once_the_rest_is_sent(batch, sockets):
    path = path_of(batch, socket=sockets[0])
    batch.add(path, (0,), 0.0, HANDLE)
    batch.flush()
    frame = frame_of(("s.0", [1]))
    batch.add(path, (1,), 1.0, HANDLE)
    assert batch.take_frame(frame, 1.0) is None  # None while the rest of the text waits
    batch.flush()
    path.pipe.coded.clear()
    read_all(sockets[1])
    batch.add(path, (1,), 1.0, HANDLE)
    assert batch.take_frame(frame, 2.0) == ()

"""Text in C++ against the same text in Python, token by token."""

import os
from contextlib import ExitStack
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
from router.gateway.metrics.series import Buckets
from router.text.detokenizer import AnswerText, ByteDetokenizer, PlainTextState
from router.text.native.step import BatchedText, NativeVocabulary, TextSteps
from router.text.native.structs import NativeText
from router.text.token_bytes import byte_table
from tests.kits.tokenizers import BYTE_LEVEL, FEW, SPECIAL, VOCAB_SIZE

PROMPT_LEN = 10
FRAME = (b'data: {"text":', b"}\n\n")
_table = byte_table(BYTE_LEVEL)
assert _table is not None
TABLE = _table
END = 7

token_ids = st.lists(st.integers(0, VOCAB_SIZE + 2), max_size=5)
steps = st.lists(st.tuples(st.integers(0, 2), token_ids, st.booleans()), max_size=20)


def chunks_of(batch: TextSteps, added: list[tuple[BatchedText, list[int], float]]) -> list[bytes]:
    """The chunk of each addition, none of which is sent."""
    texts, token_ids, came_s = zip(*added, strict=True) if added else ((), (), ())
    rests = dict(batch.take(texts, token_ids, came_s, [-1] * len(added)))
    assert b"" not in rests.values()
    return [rests.get(place, b"") for place in range(len(added))]


class Twin:
    """An answer in Python, and the same one in C++."""

    def __init__(self, vocabulary: NativeVocabulary, *, shows_special: bool, min_len: int) -> None:
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
        self.batched = BatchedText(
            self.native_state,
            vocabulary,
            frame=FRAME,
            end_ids=sorted(self.native.hidden_end_ids),
            min_tokens=self.native.min_tokens,
            gaps=self.native_gaps,
            shows_special=shows_special,
        )

    def chunk_of(self, ids: list[int], now_s: float) -> bytes:
        """What Python sends for these tokens."""
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
    vocabulary, batch = NativeVocabulary(TABLE, VOCAB_SIZE, SPECIAL), TextSteps()
    twins = [Twin(vocabulary, shows_special=shows_special, min_len=min_len) for _ in range(3)]
    expected: list[bytes] = []
    added: list[tuple[BatchedText, list[int], float]] = []
    for now, (number, ids, is_alone) in enumerate(steps):
        twin, now_s = twins[number], float(now)
        if is_alone:  # in Python, as in the slow path
            assert chunks_of(batch, added) == expected
            expected.clear()
            added.clear()
            assert twin.native.push(ids) == twin.text.push(ids)
        else:
            added.append((twin.batched, ids, now_s))
            expected.append(twin.chunk_of(ids, now_s))
    assert chunks_of(batch, added) == expected
    for twin in twins:
        twin.check()
        assert twin.native.finish() == twin.text.finish()


# Bytes at which characters begin, break off and go on.
EDGES = b"a\x00\x7f\x80\x8f\x90\x9f\xa0\xbf\xc1\xc2\xdf\xe0\xed\xef\xf0\xf4\xf5\xff"
edges = st.lists(st.sampled_from(EDGES), max_size=12).map(bytes)


@given(edges | st.binary(), st.lists(st.integers(1, 4)))
def test_any_bytes_become_the_text_that_python_decodes(data, lengths):
    pieces, rest = [], data
    for length in lengths:
        pieces.append(rest[:length])
        rest = rest[length:]
    pieces.append(rest)
    bytes_by_id = dict(enumerate(pieces))
    state = PlainTextState()
    decoder = ByteDetokenizer(bytes_by_id, hidden_ids=frozenset(), state=state)
    text = "".join(decoder.push(number) for number in bytes_by_id)
    native = NativeText()
    batched = BatchedText(
        native,
        NativeVocabulary(bytes_by_id, len(pieces), frozenset()),
        frame=(b"", b""),
        end_ids=(),
        min_tokens=0,
        gaps=Buckets((1.0,)),
        shows_special=False,
    )
    [chunk] = chunks_of(TextSteps(), [(batched, list(bytes_by_id), 0.0)])
    assert chunk.partition(b"\r\n")[2].removesuffix(b"\r\n") == (
        msgspec.json.encode(text) if text else b""
    )
    assert native.rest == state.rest


def bare_text(vocabulary):
    """Text in chunks without a frame, of an answer that no token ends."""
    return BatchedText(
        NativeText(),
        vocabulary,
        frame=(b"", b""),
        end_ids=(),
        min_tokens=0,
        gaps=Buckets((1.0,)),
        shows_special=False,
    )


def test_all_characters_are_escaped_as_in_python():
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    data = every.encode()
    bytes_by_id = {0: data}
    batched = bare_text(NativeVocabulary(bytes_by_id, 1, frozenset()))
    [chunk] = chunks_of(TextSteps(), [(batched, [0], 0.0)])
    assert chunk.partition(b"\r\n")[2][:-2] == msgspec.json.encode(every)


def test_a_full_socket_takes_a_part_and_nothing_behind_it():
    """Two choices of one stream, of which the first has a long text, and another stream."""
    bytes_by_id = {0: b"a" * 2**22, 1: b"b"}
    vocabulary = NativeVocabulary(bytes_by_id, 2, frozenset())
    first, second, other = (bare_text(vocabulary) for _ in range(3))
    (ours, theirs), (our_other, their_other) = socketpair(), socketpair()
    with ours, theirs, our_other, their_other:
        places = [ours.fileno(), ours.fileno(), our_other.fileno()]
        texts, token_ids = (first, second, other), ((0,), (1,), (1,))
        rests = TextSteps().take(texts, token_ids, (0.0, 0.0, 0.0), places)
        (place, rest), (next_place, chunk) = rests
        ours.close()
        sent = b"".join(iter(lambda: theirs.recv(2**20), b""))
        assert (place, next_place) == (0, 1)
        assert sent + rest == b"%x\r\n" % (2**22 + 2) + b'"' + bytes_by_id[0] + b'"\r\n'
        assert sent
        assert chunk == b'3\r\n"b"\r\n'
        assert their_other.recv(100) == chunk


def test_what_a_closed_socket_does_not_take_is_returned():
    bytes_by_id = {0: b"a"}
    batched = bare_text(NativeVocabulary(bytes_by_id, 1, frozenset()))
    ours, theirs = socketpair()
    theirs.close()
    with ours:
        rests = TextSteps().take((batched,), ((0,),), (0.0,), [ours.fileno()])
        assert rests == [(0, b'3\r\n"a"\r\n')]


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
    vocabulary, batch = NativeVocabulary(TABLE, VOCAB_SIZE, SPECIAL), TextSteps()
    twins = {f"s{i}.0": Twin(vocabulary, shows_special=False, min_len=0) for i in range(3)}
    pairs = {seq_id: socketpair() for seq_id in twins}
    expected = dict.fromkeys(twins, b"")
    with ExitStack() as stack:
        for number, (seq_id, twin) in enumerate(twins.items()):
            ours, theirs = map(stack.enter_context, pairs[seq_id])
            theirs.setblocking(False)
            assert batch.open_stream(number, seq_id.encode(), twin.batched, ours.fileno())
        for now, messages in enumerate(frames):
            held = set[str]()  # sequences with other news in this frame
            is_taken = []
            for each in messages:
                seq_id = getattr(each, "seq_id", "")
                is_plain = isinstance(each, Tokens) and each == Tokens(seq_id, each.token_ids)
                if not (is_plain and each.token_ids):
                    held.add(seq_id)
                is_taken.append(seq_id in twins and seq_id not in held)
            taken = batch.take_frame(
                encode_frame(messages), float(now), lambda _, token: vocabulary.learn(token)
            )
            assert (taken is None) == (not any(is_taken))
            if taken is not None:
                assert list(taken.left) == [i for i, here in enumerate(is_taken) if not here]
                assert not taken.rests
            for message in compress(messages, is_taken):
                ids = message.token_ids
                expected[message.seq_id] += twins[message.seq_id].chunk_of(ids, float(now))
        for seq_id, (_, theirs) in pairs.items():
            assert (theirs.recv(2**20) if expected[seq_id] else b"") == expected[seq_id]
            twins[seq_id].check()


@given(st.binary() | st.lists(plain | others, min_size=1).map(encode_frame), st.integers(0, 200))
def test_a_frame_that_breaks_off_is_left_to_python(frame, end):
    vocabulary, batch = NativeVocabulary({0: b"a"}, 1, frozenset()), TextSteps()
    text = bare_text(vocabulary)
    ours, theirs = socketpair()
    with ours, theirs:
        assert batch.open_stream(1, b"s0.0", text, ours.fileno())
        broken = frame[: min(end, len(frame) - 1)]
        assert batch.take_frame(broken, 0.0, lambda _, token: vocabulary.learn(token)) is None
    assert text.state.num_tokens == 0


def test_a_lane_returns_the_bytes_that_do_not_fit():
    bytes_by_id = {0: b"a" * 2**22, 1: b"b"}
    vocabulary, batch = NativeVocabulary(bytes_by_id, 2, frozenset()), TextSteps()
    text = bare_text(vocabulary)
    ours, theirs = socketpair()
    with ours, theirs:
        assert batch.open_stream(5, b"s.0", text, ours.fileno())
        frame = encode_frame([Tokens("s.0", [0]), Tokens("s.0", [1])])
        taken = batch.take_frame(frame, 0.0, lambda _, token: vocabulary.learn(token))
        assert taken is not None
        (number, rest), (next_number, chunk) = taken.rests
        batch.close_stream(b"s.0")
        assert batch.take_frame(frame, 0.0, lambda *_: None) is None
        ours.close()
        sent = b"".join(iter(lambda: theirs.recv(2**20), b""))
        assert (number, next_number) == (5, 5)
        assert sent
        assert sent + rest == b"%x\r\n" % (2**22 + 2) + b'"' + bytes_by_id[0] + b'"\r\n'
        assert chunk == b'3\r\n"b"\r\n'


def test_a_lane_never_sends_to_another_socket_with_its_descriptor():
    vocabulary, batch = NativeVocabulary({0: b"a"}, 1, frozenset()), TextSteps()
    text = bare_text(vocabulary)
    ours, theirs = socketpair()
    other, their_other = socketpair()
    with theirs, other, their_other:
        their_other.setblocking(False)
        descriptor = ours.fileno()
        assert batch.open_stream(1, b"s.0", text, descriptor)
        ours.close()
        for number in range(2):
            frame = encode_frame([Tokens("s.0", [0])])
            taken = batch.take_frame(frame, 0.0, lambda _, token: vocabulary.learn(token))
            assert taken is not None
            assert taken.rests == [(1, b'3\r\n"a"\r\n')]
            if not number:
                assert os.dup2(other.fileno(), descriptor) == descriptor
        os.close(descriptor)
        with pytest.raises(BlockingIOError):
            their_other.recv(1)

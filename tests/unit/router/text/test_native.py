"""Text in C++ against the same text in Python, token by token."""

from socket import socketpair

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Limits
from router.gateway.metrics.histograms import Buckets
from router.text.detokenizer import AnswerText, ByteDetokenizer, PlainTextState
from router.text.native.library import NativeText
from router.text.native.step import BatchedText, NativeVocabulary, TextSteps
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
    rests = dict(batch.take(added, [-1] * len(added)))
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
        added = [(first, (0,), 0.0), (second, (1,), 0.0), (other, (1,), 0.0)]
        (place, rest), (next_place, chunk) = TextSteps().take(added, places)
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
        assert TextSteps().take([(batched, (0,), 0.0)], [ours.fileno()]) == [(0, b'3\r\n"a"\r\n')]

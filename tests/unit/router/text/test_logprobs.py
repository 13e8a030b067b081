"""Log-probability entries stay with the text that their tokens begin, however text is cut."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Limits, Logprobs
from router.inbox.json_parts import encode_lazy, json_parts
from router.text.logprobs import ChatLogprobs, CompletionLogprobs, ScoredText, prompt_logprobs
from router.text.token_bytes import TokenBytes
from tests.kits.tokenizers import (
    BYTE_FALLBACK,
    BYTE_LEVEL,
    FEW,
    SPECIAL,
    VOCAB_SIZE,
    byte_answer,
    fallback_ids,
    short,
)

LEVEL_BYTES = TokenBytes(BYTE_LEVEL)
FALLBACK_BYTES = TokenBytes(BYTE_FALLBACK)


def scored_answer(ids: list[int], stop: list[str], batch: int):
    """Returns the produced text and entries, and whether a stop string was found."""
    answer = byte_answer(stop, Limits(max_len=10_000))
    scored = ScoredText(answer)
    parts = []
    for at in range(0, len(ids), batch):
        piece = ids[at : at + batch]
        parts.append(scored.push(piece, [Logprobs(-float(at + i), 1) for i in range(len(piece))]))
        if answer.stopped:
            break
    parts.append(scored.finish())
    return parts, answer.stopped


some_ids = st.one_of(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    st.text("ab€", max_size=12).map(lambda t: BYTE_LEVEL.encode(t, add_special_tokens=False).ids),
)


@FEW
@given(some_ids, st.lists(short, max_size=2), st.integers(1, 7))
def test_however_tokens_are_batched_the_same_entries_come_out_in_order(ids, stop, batch):
    parts, stopped = scored_answer(ids, stop, batch)
    entries = [entry for _, some in parts for entry in some]
    singly, _ = scored_answer(ids, stop, 1)
    assert entries == [entry for _, some in singly for entry in some]
    assert [token_id for token_id, _ in entries] == ids[: len(entries)]
    assert [scores.logprob for _, scores in entries] == [-float(i) for i in range(len(entries))]
    assert stopped or len(entries) == len(ids)


@FEW
@given(some_ids, st.lists(short, max_size=2))
def test_the_entries_spell_the_text_up_to_a_token_that_was_cut(ids, stop):
    parts, stopped = scored_answer(ids, stop, 1)
    text = "".join(text for text, _ in parts)
    shown_ids = [i for _, some in parts for i, _ in some if i not in SPECIAL]
    spelled = BYTE_LEVEL.decode(shown_ids)
    assert spelled.startswith(text) if stopped else spelled == text
    # without the text of the last token, the entries would not cover the text
    if stopped and shown_ids:
        assert len(BYTE_LEVEL.decode(shown_ids[:-1]).rstrip("\ufffd")) < max(len(text), 1)


@FEW
@given(some_ids, st.lists(short, max_size=2))
def test_entries_never_come_before_the_text_that_their_token_begins(ids, stop):
    parts, _ = scored_answer(ids, stop, 1)
    shown, tokens_before = "", []
    for text, entries in parts[:-1]:
        shown += text
        for token_id, _ in entries:
            start = BYTE_LEVEL.decode(tokens_before).rstrip("\ufffd")
            assert len(start) < len(shown) or token_id in SPECIAL
            tokens_before.append(token_id)


# ---------------------------------------------------------------- bytes of tokens


@FEW
@given(st.text("aé€😀 \n", max_size=20))
def test_the_bytes_of_byte_level_tokens_are_those_of_the_text(text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    assert b"".join(map(LEVEL_BYTES, ids)) == text.encode()


def test_a_byte_level_token_in_the_middle_of_a_character_keeps_its_bytes():
    ids = BYTE_LEVEL.encode("😀", add_special_tokens=False).ids
    assert [LEVEL_BYTES(i) for i in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_fallback_tokens_are_bytes_and_words_begin_with_a_space():
    ids = [BYTE_FALLBACK.token_to_id("▁the"), *fallback_ids("€"), BYTE_FALLBACK.token_to_id("b")]
    assert [FALLBACK_BYTES(i) for i in ids] == [b" the", b"\xe2", b"\x82", b"\xac", b"b"]


def test_special_tokens_are_their_names_and_unknown_ids_are_nothing():
    assert [LEVEL_BYTES(0), LEVEL_BYTES(10**6)] == [b"<s>", b""]


# ---------------------------------------------------------------- shapes built from objects

# two tokens have the same bytes
BYTES = [b"a", b"b", b"\xe2", 'é"'.encode(), b"\x00\n", b"", b"<|x|>", b"a"]
logprobs = st.floats(-50, 0) | st.just(-math.inf)
scores_of = st.lists(st.tuples(st.integers(0, 7), logprobs), max_size=6).map(
    lambda top: (tuple(i for i, _ in top), tuple(p for _, p in top))
)
entries = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.builds(lambda p, top: Logprobs(p, 3, *top), logprobs, scores_of),
    ),
    max_size=6,
)


def name(i: int) -> str:
    try:
        return BYTES[i].decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in BYTES[i])


def finite(logprob: float) -> float:
    return max(logprob, -9999.0)


def top_of(scores: Logprobs, num: int) -> list[tuple[int, float]]:
    return list(zip(scores.top_ids, scores.top_logprobs, strict=True))[:num]


def chat_shape(entries, num, named):
    def token(i, logprob):
        text = f"token_id:{i}" if named else BYTES[i].decode(errors="replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(BYTES[i])}

    items = [
        token(i, s.logprob) | {"top_logprobs": [token(*pair) for pair in top_of(s, num)]}
        for i, s in entries
    ]
    return {"content": items, "refusal": None}


def completion_shape(entries, num, named):
    def named_token(i):
        return f"token_id:{i}" if named else name(i)

    offsets = [
        len(b"".join(BYTES[i] for i, _ in entries[:at]).decode(errors="replace"))
        for at in range(len(entries))
    ]
    return {
        "tokens": [named_token(i) for i, _ in entries],
        "token_logprobs": [finite(s.logprob) for _, s in entries],
        "top_logprobs": [
            {named_token(j): finite(p) for j, p in [*top_of(s, num), (i, s.logprob)]}
            for i, s in entries
        ],
        "text_offset": offsets,
    }


def prompt_shape(entries, num):
    found = []
    for i, s in entries:
        ranked = [(i, s.logprob, s.rank)]
        ranked += [(j, p, rank) for rank, (j, p) in enumerate(top_of(s, num), start=1)]
        found.append(
            {
                str(j): {
                    "logprob": finite(p),
                    "rank": rank,
                    "decoded_token": BYTES[j].decode(errors="replace"),
                }
                for j, p, rank in ranked
            }
        )
    return found


@given(entries, st.integers(0, 5), st.booleans())
def test_the_json_of_a_chats_entries_equals_the_json_of_their_objects(entries, num, named):
    shape = ChatLogprobs(BYTES.__getitem__, num, ids_for_names=named).shape(entries)
    assert encode_lazy(shape) == msgspec.json.encode(chat_shape(entries, num, named))


@given(
    entries.filter(lambda some: all(i not in (2, 3) for i, _ in some)),
    st.sampled_from([0, 2, 5]),
    st.booleans(),
)
def test_the_json_of_a_completions_entries_equals_the_json_of_their_objects(entries, num, named):
    shape = CompletionLogprobs(BYTES.__getitem__, num, ids_for_names=named).shape(entries)
    assert encode_lazy(shape) == msgspec.json.encode(completion_shape(entries, num, named))


@given(entries, st.integers(0, 5))
def test_the_json_of_a_prompts_entries_equals_the_json_of_their_objects(entries, num):
    items = prompt_logprobs([(1, None), *entries], BYTES.__getitem__, num)
    plain = msgspec.json.encode([None, *prompt_shape(entries, num)])
    assert b"".join(json_parts(items)) == plain

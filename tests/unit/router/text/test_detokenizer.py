"""Text from tokens equals decoding all at once, wherever characters and stop strings are cut."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.messages import Limits
from router.text.detokenizer import (
    MAX_PENDING_TOKENS,
    ContextDetokenizer,
    Detokenizer,
    StopFinder,
)
from router.text.token_bytes import byte_table
from tests.kits.tokenizers import (
    BYTE_FALLBACK,
    BYTE_LEVEL,
    FEW,
    SPECIAL,
    TOKEN_OF_BYTE,
    VOCAB_SIZE,
    by_bytes,
    byte_answer,
    byte_level_tokenizer,
    fallback_ids,
    short,
)


def by_context(tokenizer: Tokenizer, prompt_ids: tuple[int, ...] = ()) -> Detokenizer:
    return ContextDetokenizer(tokenizer, prompt_ids=prompt_ids, hidden_ids=SPECIAL)


BOTH = pytest.mark.parametrize("way", [by_context, by_bytes])


def stream(
    tokenizer: Tokenizer, ids: list[int], prompt_ids: tuple[int, ...] = (), way: Any = by_context
) -> list[str]:
    detokenizer = way(tokenizer, prompt_ids)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@BOTH
@FEW
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
def test_any_tokens_streamed_equal_the_same_tokens_decoded_at_once(way, ids):
    assert "".join(stream(BYTE_LEVEL, ids, way=way)) == BYTE_LEVEL.decode(
        ids, skip_special_tokens=True
    )


broken = st.sampled_from([b"\xf0", b"\xe2", b"\x9f", b"\x82", b"\xac", b"\xff"])


@BOTH
@FEW
@given(st.lists(broken, min_size=MAX_PENDING_TOKENS, max_size=4 * MAX_PENDING_TOKENS))
def test_long_runs_of_broken_bytes_equal_the_same_bytes_decoded_at_once(way, run):
    ids = [TOKEN_OF_BYTE[byte] for byte in run]
    assert "".join(stream(BYTE_LEVEL, ids, way=way)) == b"".join(run).decode(errors="replace")


@BOTH
@FEW
@given(st.text("aé€😀 ", max_size=30))
def test_valid_text_needs_no_flush_and_never_shows_half_a_character(way, text):
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    *pieces, rest = stream(BYTE_LEVEL, ids, way=way)
    assert ("".join(pieces), rest) == (text, "")


@FEW
@given(st.lists(st.sampled_from(["▁", "▁a", "b", "▁the", "é", "😀", "\n"]), max_size=20))
def test_byte_fallback_streamed_equals_decoded_at_once(words):
    known = [(word, BYTE_FALLBACK.token_to_id(word)) for word in words]
    ids = [i for word, known_id in known for i in ([known_id] if known_id else fallback_ids(word))]
    assert "".join(stream(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


@BOTH
def test_a_character_that_the_prompt_begins_is_shown_when_the_answer_ends_it(way):
    ids = BYTE_LEVEL.encode("a😀b", add_special_tokens=False).ids
    assert stream(BYTE_LEVEL, ids[3:], tuple(ids[:3]), way=way) == ["", "😀", "b", ""]


def test_bytes_of_added_tokens_equal_the_decoders():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<call me>", "<é>", "€"])
    ids = [tokenizer.token_to_id(name) for name in ("<call me>", "<é>", "€")]
    for some in ([ids[0]], [ids[1]], [ids[2]], ids, [10**6, ids[0]]):
        assert "".join(stream(tokenizer, some, way=by_bytes)) == tokenizer.decode(some)


def test_only_texts_that_are_their_tokens_bytes_have_a_table_of_them():
    assert byte_table(BYTE_FALLBACK) is None


def test_a_broken_byte_in_a_fallback_run_keeps_shown_text():
    ids = [*fallback_ids("€"), BYTE_FALLBACK.token_to_id("<0xFF>"), 5]
    text = "".join(stream(BYTE_FALLBACK, ids))
    assert text.startswith("€\ufffd")
    assert text.endswith("b")


@pytest.mark.parametrize("name", ["</s>", "<0x80>", "▁"])
def test_an_endless_run_of_one_token_keeps_the_window_small(name):
    token_id = BYTE_FALLBACK.token_to_id(name)
    detokenizer = ContextDetokenizer(BYTE_FALLBACK, hidden_ids=SPECIAL)
    for _ in range(200):
        detokenizer.push(token_id)
        assert len(detokenizer._ids) <= 2 * MAX_PENDING_TOKENS


def test_the_first_word_of_a_continuation_keeps_its_space():
    the, a = BYTE_FALLBACK.token_to_id("▁the"), BYTE_FALLBACK.token_to_id("▁a")
    assert stream(BYTE_FALLBACK, [a], prompt_ids=(0, the)) == [" a", ""]
    assert stream(BYTE_FALLBACK, [a]) == ["a", ""]


# ---------------------------------------------------------------- stop strings


def cut_at_first(text: str, stop: list[str]) -> str:
    for end in range(len(text) + 1):
        if found := [s for s in stop if text[:end].endswith(s)]:
            return text[:end].removesuffix(max(found, key=len))
    return text


@FEW
@given(st.lists(st.text("abc", max_size=4), max_size=8), st.lists(short, max_size=3))
def test_a_stop_string_cuts_pieces_where_it_cuts_the_whole(pieces, stop):
    finder = StopFinder(stop)
    shown = ""
    for count, piece in enumerate(pieces, start=1):
        shown += finder.push(piece)
        if finder.found:
            break
        so_far = "".join(pieces[:count])
        held = so_far.removeprefix(shown)
        assert held == "" or any(s.startswith(held) for s in stop)
    else:
        shown += finder.flush()
    assert shown == cut_at_first("".join(pieces), stop)


# ---------------------------------------------------------------- a single answer


def ids_of(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_a_stop_string_cuts_at_the_same_token_however_tokens_are_batched(batch):
    text = byte_answer(["STOP"], Limits(max_len=100))
    ids = ids_of("héSTOPrest")
    shown = "".join(text.push(ids[i : i + batch]) for i in range(0, len(ids), batch))
    assert (shown + text.finish(), text.stopped, text.num_tokens) == ("hé", True, 7)


def test_a_beginning_of_a_stop_string_is_shown_when_nothing_follows():
    text = byte_answer(["STOP"], Limits(max_len=100))
    assert text.push(ids_of("oh ST")) == "oh "
    assert text.finish() == "ST"
    assert not text.stopped


def test_the_token_that_ends_an_answer_is_counted_but_not_shown():
    x, y = ids_of("xy")
    text = byte_answer([], Limits(max_len=100, stop_token_ids=(y,)))
    assert text.push([x, y]) == "x"
    assert text.num_tokens == 2


def test_stop_tokens_and_strings_count_only_from_the_shortest_length_on():
    x, y = ids_of("xy")
    text = byte_answer(["x"], Limits(max_len=100, min_len=12, stop_token_ids=(y,)))
    assert text.push([x, y, y]) == "xy"
    assert text.push([x]) == ""
    assert text.stopped

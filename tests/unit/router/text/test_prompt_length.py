"""Prompts too long to fit are refused before encoding; long prompts are encoded without the GIL."""

import sys
import threading
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from router.inbox.api_errors import ApiError
from router.text.token_bytes import NFC_JOINS, chars_per_token
from router.text.tokenizer import LONGEST_CUT, TextModel
from tests.kits.router.gateway import TOKENIZER, byte_tokenizer

TEXTS = st.text(max_size=200) | st.text("ab cé\u0301\u1100\u1161\u11a8 <|eos|>", max_size=200)


def fallback_tokenizer() -> Tokenizer:
    """Returns a tokenizer like SentencePiece's BPE: a mark before words, bytes for unknown text."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁a", "▁ab"]
    vocab = {name: i for i, name in enumerate(names)}
    merges = [("▁", "a"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


def nfc_tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


BOUNDED = {"bytes": byte_tokenizer(), "fallback": fallback_tokenizer(), "NFC": nfc_tokenizer()}


class Watched:
    """A tokenizer that records the names of the used methods."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> object:
        self.asked.append(name)
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXTS)
def test_no_token_has_more_characters(name, text):
    tokenizer = BOUNDED[name]
    longest = chars_per_token(tokenizer)
    assert longest is not None
    assert len(tokenizer.encode(text, add_special_tokens=False)) * longest >= len(text)


def test_nfc_joins_no_more_characters():
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    joined = [c for c in characters if unicodedata.is_normalized("NFC", c)]
    assert max(len(unicodedata.normalize("NFD", c)) for c in joined) == NFC_JOINS


def test_the_longest_token_counts_added_ones_too():
    assert chars_per_token(TOKENIZER) == len("<|assistant|>")
    assert chars_per_token(fallback_tokenizer()) == len("<0x00>")


def with_part(**parts: object) -> Tokenizer:
    tokenizer = byte_tokenizer()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def swallowing_spaces() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
UNBOUNDED = {
    "a normalizer that strips": with_part(normalizer=normalizers.Strip()),
    "one that replaces a pattern": with_part(normalizer=normalizers.Replace(" ", "")),
    "a splitter that drops spaces": with_part(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTES])
    ),
    "a separator that is removed": with_part(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])
    ),
    "unknown characters": with_part(pre_tokenizer=pre_tokenizers.Digits()),
    "a token that swallows spaces": swallowing_spaces(),
    "words": Tokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]")),
}


@pytest.mark.parametrize("why", UNBOUNDED)
def test_where_text_may_vanish_there_is_no_bound(why):
    assert chars_per_token(UNBOUNDED[why]) is None


def test_a_prompt_of_a_mebibyte_is_refused_before_it_is_tokenised():
    watched = Watched(byte_tokenizer())
    model = TextModel(watched)
    watched.asked.clear()
    with pytest.raises(ApiError, match="1048576 characters") as caught:
        model.encode_text("a" * 2**20, 64)
    assert caught.value.code == "context_length_exceeded"
    assert watched.asked == []
    assert model.encode_text("a" * 64, 64) == [97] * 64
    assert watched.asked == ["encode_batch_fast"]


@pytest.mark.parametrize("name", ["bytes", "words"])
def test_a_text_that_is_cut_or_counted_is_bounded_before_it_is_tokenised(name):
    watched = Watched({**BOUNDED, **UNBOUNDED}[name])
    model = TextModel(watched)
    watched.asked.clear()
    message = f"has {LONGEST_CUT + 1} characters; at most {LONGEST_CUT} are"
    with pytest.raises(ApiError, match=message) as caught:
        model.encode_text(" " * (LONGEST_CUT + 1), 64, may_exceed=True)
    assert caught.value.code == "context_length_exceeded"
    assert watched.asked == []
    assert len(model.encode_text("a " * 64, 64, may_exceed=True)) >= 1


def test_a_prompt_is_bounded_also_without_a_bound_on_characters_per_token():
    model = TextModel(UNBOUNDED["words"])
    assert model.encode_text(" " * 5000, 64) == [0]
    with pytest.raises(ApiError, match=f"at most {LONGEST_CUT} are"):
        model.encode_text(" " * (LONGEST_CUT + 1), 64)


def test_the_bound_on_a_text_that_is_cut_grows_with_the_context():
    model = TextModel(byte_tokenizer())
    model._check_length("a" * (LONGEST_CUT + 1), LONGEST_CUT, "prompt", may_exceed=True)


def test_a_prompt_of_too_many_tokens_is_refused_with_their_number():
    with pytest.raises(ApiError, match="the prompt has 65") as caught:
        TextModel(byte_tokenizer()).encode_text("a" * 65, 64)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_the_interpreter_lock_is_free_while_a_text_is_encoded():
    model = TextModel(byte_tokenizer())
    begun, ended = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        model.encode_text("ab " * 20_000, 100_000)
        ended.set()

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # so a thread loses the GIL only where it releases it
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        begun.wait()
        assert not ended.is_set()
        thread.join()
    finally:
        sys.setswitchinterval(interval_s)


@given(text=TEXTS)
def test_ids_are_those_of_the_plain_call(text):
    assert TextModel(TOKENIZER).encode_text(text, 4096) == TOKENIZER.encode(text).ids


def test_a_token_beyond_the_models_vocabulary_is_refused_by_name():
    model = TextModel(TOKENIZER, vocab_size=258, eos_token_ids=(256, 259))
    assert model.vocab_size == 258
    assert model.eos_token_ids == (256,)
    assert model.encode_text("hi<|eos|>", 64) == [*b"hi", 256]
    with pytest.raises(ApiError, match="which the model's vocabulary does not have"):
        model.encode_text("hi<|user|>", 64)

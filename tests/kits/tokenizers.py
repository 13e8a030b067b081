"""Two small tokenizers, byte-level and with byte fallback, and answers decoded from their bytes."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.messages import Limits
from router.text.detokenizer import AnswerText, ByteDetokenizer, Detokenizer
from router.text.token_bytes import byte_table

FEW = settings(max_examples=20, deadline=None)  # a unit test may take 50 ms
SPECIAL = frozenset({0, 1})


def byte_level_tokenizer() -> Tokenizer:
    """Returns a tokenizer of special tokens, all bytes, and pieces that cut characters anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rng = random.Random(5)
    pieces = ["".join(rng.choices(alphabet, k=rng.choice((2, 3)))) for _ in range(200)]
    names = dict.fromkeys(["<s>", "</s>", *alphabet, *pieces])
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Returns a tokenizer like Llama 2's: words begin with ▁, and text outside the vocabulary
    falls back to bytes.
    """
    words = ["<s>", "</s>", "<unk>", "▁", "▁a", "b", "▁the"]
    names = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
VOCAB_SIZE = BYTE_LEVEL.get_vocab_size()
TOKEN_OF_BYTE = {  # the letter by which ByteLevel writes each byte
    byte: BYTE_LEVEL.token_to_id(letter)
    for byte, letter in zip(
        (b"\xf0", b"\xe2", b"\x9f", b"\x82", b"\xac", b"\xff"), "ðâŁĤ¬ÿ", strict=True
    )
}
short = st.text("ab", min_size=1, max_size=4)


def fallback_ids(text: str) -> list[int]:
    return [BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


def by_bytes(tokenizer: Tokenizer, prompt_ids: tuple[int, ...] = ()) -> Detokenizer:
    table = byte_table(tokenizer)
    assert table is not None
    return ByteDetokenizer(table, prompt_ids=prompt_ids, hidden_ids=SPECIAL)


def byte_answer(stop: list[str], limits: Limits) -> AnswerText:
    return AnswerText(by_bytes(BYTE_LEVEL), prompt_len=10, limits=limits, stop=stop)

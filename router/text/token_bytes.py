"""The bytes of each token, which need not be whole characters, and a bound on its length.

Log-probabilities are reported per token, so tokens must have different texts. But many tokens, when
decoded alone, give the same replacement character. The meaning of a token's name depends on the
tokenizer's decoder:

    ByteLevel     each letter of the name stands for one byte (GPT-2's table)
    ByteFallback  `<0xE2>` is one byte; other names are text with another character for spaces
    others        the token, decoded alone
"""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import count
from typing import Any

import msgspec
from tokenizers import Tokenizer, models

NFC_JOINS = 4  # NFC joins at most this many characters into one

_KEEP_ALL = ("ByteLevel", "Metaspace", "Digits")
_SHORTEN_NOTHING = ("NFD", "Lowercase", "ByteLevel", "Prepend")
_FALLBACK_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_Part = Mapping[str, Any]  # a part of `tokenizer.json`
_FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes by token id, for one tokenizer. Unknown ids, which pad a vocabulary, have no bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        decoders = list(_parts(tokenizer.decoder, "decoders"))
        kinds = {decoder["type"] for decoder in decoders}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_fallback = "ByteFallback" in kinds
        self._spelled = [pair for decoder in decoders for pair in _replacement(decoder)]

    def __call__(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text."""
        if (content := self._added.get(token_id)) is not None:
            return content.encode()
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self._is_byte_level:
            return b"".join(_BYTE_OF_LETTER.get(letter) or letter.encode() for letter in name)
        if self._has_fallback and (match := _FALLBACK_BYTE.fullmatch(name)) is not None:
            return bytes([int(match[1], 16)])
        if not self._spelled:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        for spelling, meaning in self._spelled:
            name = name.replace(spelling, meaning)
        return name.encode()


def byte_table(tokenizer: Tokenizer) -> Mapping[int, bytes] | None:
    """Returns the bytes of each token of a tokenizer with a ByteLevel decoder; otherwise None.

    Each letter of a name stands for a byte. If a letter stands for none, the name itself is the
    text, as in the decoder. The same holds for added tokens.
    """
    decoder = tokenizer.decoder
    if decoder is None or msgspec.json.decode(decoder.__getstate__())["type"] != "ByteLevel":
        return None
    return {token_id: _bytes_of(name) for name, token_id in tokenizer.get_vocab().items()}


def _bytes_of(name: str) -> bytes:
    try:
        return name.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode()


def _parts(part: Any, members: str) -> Iterator[_Part]:
    """Yields a part of `tokenizer.json`, or the members of the part if it is a sequence."""
    if part is not None:
        yield from _flattened(msgspec.json.decode(part.__getstate__()), members)


def _flattened(part: _Part, members: str) -> Iterator[_Part]:
    if part["type"] != "Sequence":
        yield part
    for member in part.get(members, []):
        yield from _flattened(member, members)


def _replacement(decoder: _Part) -> Iterator[tuple[str, str]]:
    """Returns pairs of a text in token names and its meaning, mostly for spaces."""
    if decoder["type"] == "Metaspace":
        yield decoder["replacement"], " "
    if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
        yield decoder["pattern"]["String"], decoder["content"]


def _letters() -> Iterator[tuple[str, bytes]]:
    """Returns each letter's byte: GPT-2 keeps printable bytes; others are letters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = count(256)
    for byte in range(256):
        yield chr(byte if byte in printable else next(others)), bytes([byte])


_BYTE_OF_LETTER = dict(_letters())
# Letters become characters below 256. Other characters below 256 become a greater one.
_BYTES = dict.fromkeys(range(256), 256) | {ord(a): b[0] for a, b in _BYTE_OF_LETTER.items()}
LETTERS = frozenset(_BYTE_OF_LETTER)  # all letters that stand for bytes


# ---------------------------------------------------------------- the length of prompts


def chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Returns the maximum number of characters of one token; None if there is no bound.

    There is a bound only if no text can vanish, so only these parts are accepted:

        normalizer      NFC, NFD, Lowercase, ByteLevel, Prepend, Replace of a string by one as long
        pre-tokenizer   ByteLevel, Metaspace, Digits, Split that keeps its separators
        model           BPE with a token for every byte
        added tokens    all that do not swallow spaces beside them
    """
    normalizers = list(_parts(tokenizer.normalizer, "normalizers"))
    splitters = list(_parts(tokenizer.pre_tokenizer, "pretokenizers"))
    added = tokenizer.get_added_tokens_decoder().values()
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    if not (
        all(map(_shortens_little, normalizers))
        and all(map(_keeps_all, splitters))
        and _knows_all_bytes(tokenizer, [*normalizers, *splitters], vocab)
        and not any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    joins = NFC_JOINS if any(part["type"] == "NFC" for part in normalizers) else 1
    return joins * max(map(len, [*vocab, *(token.content for token in added)]))


def _shortens_little(normalizer: _Part) -> bool:
    """True if the normalizer shortens a text at most as much as NFC does."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"]) >= len(replaced)
    return normalizer["type"] in ("NFC", *_SHORTEN_NOTHING)


def _keeps_all(splitter: _Part) -> bool:
    if splitter["type"] == "Split":
        return bool(splitter["behavior"] != "Removed")
    return splitter["type"] in _KEEP_ALL


def _knows_all_bytes(
    tokenizer: Tokenizer, parts: Collection[_Part], vocab: Collection[str]
) -> bool:
    """True if every byte has a token, so a run of characters never becomes one unknown token."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in parts):
        return all(letter in vocab for letter in LETTERS)
    return model.byte_fallback and all(name in vocab for name in _FALLBACK_NAMES)

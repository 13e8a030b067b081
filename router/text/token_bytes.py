"""The bytes of each token, which need not be whole characters.

Log-probabilities are reported per token, so tokens must have different texts. Many tokens, decoded
alone, give the same replacement character. The meaning of a token's name depends on the tokenizer's
decoder:

    ByteLevel     each letter of the name stands for one byte (GPT-2's table)
    ByteFallback  `<0xE2>` is one byte; other names are text with another character for spaces
    others        the token, decoded alone
"""

import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import msgspec
from tokenizers import Tokenizer

_FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes by token id, for one tokenizer. Unknown ids, which pad a vocabulary, have no bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        decoders = list(_decoders(_decoder_of(tokenizer)))
        kinds = {decoder["type"] for decoder in decoders}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_fallback = "ByteFallback" in kinds
        self._spelled = [pair for decoder in decoders for pair in _replacement(decoder)]

    def __call__(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to a text."""
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
    """Returns the bytes of each token of a tokenizer with a ByteLevel decoder; else None.

    Each letter of a name stands for a byte. If any letter does not, the name is taken literally, as
    in the decoder. This applies to added tokens too.
    """
    decoder = _decoder_of(tokenizer)
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    return {token_id: _bytes_of(name) for name, token_id in tokenizer.get_vocab().items()}


def _bytes_of(name: str) -> bytes:
    try:
        return name.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode()


def _decoder_of(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns the decoder as in `tokenizer.json`, from its pickled state, without vocabulary."""
    decoder = tokenizer.decoder
    return None if decoder is None else msgspec.json.decode(decoder.__getstate__())


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Returns a decoder, or the members if it is a sequence."""
    if decoder is None:
        return
    if decoder["type"] != "Sequence":
        yield decoder
    for member in decoder.get("decoders", []):
        yield from _decoders(member)


def _replacement(decoder: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Returns pairs of a spelling in names and its meaning in text, mostly for spaces."""
    if decoder["type"] == "Metaspace":
        yield decoder["replacement"], " "
    if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
        yield decoder["pattern"]["String"], decoder["content"]


def _letters() -> Iterator[tuple[str, bytes]]:
    """Maps letters to bytes: GPT-2 keeps printable bytes, others are letters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = count(256)
    for byte in range(256):
        yield chr(byte if byte in printable else next(others)), bytes([byte])


_BYTE_OF_LETTER = dict(_letters())
# Letters become characters below 256. Other characters below 256 become a greater one.
_BYTES = dict.fromkeys(range(256), 256) | {ord(a): b[0] for a, b in _BYTE_OF_LETTER.items()}
LETTERS = frozenset(_BYTE_OF_LETTER)  # letters that stand for bytes

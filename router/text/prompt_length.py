"""A bound on the characters per token, found without tokenising.

Pure: reads the parts of a tokenizer. The bound holds only if no text can vanish, so only these
parts are accepted. If there is any other part, there is no bound:

    normalizer      NFC, NFD, Lowercase, ByteLevel, Prepend, Replace of a string by one as long
    pre-tokenizer   ByteLevel, Metaspace, Digits, Split that keeps its separators
    model           BPE with a token for every byte
    added tokens    all that do not swallow spaces beside them
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
from tokenizers import Tokenizer, models

from router.text.token_bytes import LETTERS

NFC_JOINS = 4  # NFC joins at most this many characters into one

_KEEP_ALL = ("ByteLevel", "Metaspace", "Digits")
_SHORTEN_NOTHING = ("NFD", "Lowercase", "ByteLevel", "Prepend")
_FALLBACK_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_Part = Mapping[str, Any]


def chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Returns the maximum number of characters of one token; None if there is no bound."""
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
    """True if a run of characters never becomes a single unknown token."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in parts):
        return all(letter in vocab for letter in LETTERS)
    return model.byte_fallback and all(name in vocab for name in _FALLBACK_NAMES)


def _parts(part: Any, members: str) -> Iterator[_Part]:
    """Returns a normalizer or pre-tokenizer, or the members if it is a sequence."""
    if part is not None:
        yield from _flattened(msgspec.json.decode(part.__getstate__()), members)


def _flattened(part: _Part, members: str) -> Iterator[_Part]:
    if part["type"] != "Sequence":
        yield part
    for member in part.get(members, []):
        yield from _flattened(member, members)

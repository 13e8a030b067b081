"""Guides by token ids: a list of allowed ids, and sequences of ids that must not occur.

These are the rules of vLLM's `allowed_token_ids` and `bad_words`. They are written as a grammar
whose source is JSON, so drafts, batches and hand-overs follow them like any other grammar. A mask
depends only on the answer's last tokens, up to the length of the longest banned sequence.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.errors import GrammarError
from engine.messages import Grammar, GrammarKind

WORD_BITS = 32
NOTHING_LEFT = "no token is left by allowed_token_ids and bad_words"


class TokenRules(msgspec.Struct, frozen=True, array_like=True):
    """`allowed`: the allowed ids; None allows all. `banned`: sequences of ids, none of them
    empty.
    """

    allowed: tuple[int, ...] | None = None
    banned: tuple[tuple[int, ...], ...] = ()

    def grammar(self) -> Grammar:
        """Returns the rules as the `Grammar` of a message."""
        return Grammar(GrammarKind.TOKENS, msgspec.json.encode(self).decode())


def rules_of(grammar: Grammar) -> TokenRules:
    """Parses the rules from a grammar. Raises GrammarError."""
    try:
        rules = msgspec.json.decode(grammar.source, type=TokenRules)
    except msgspec.DecodeError as error:
        raise GrammarError(f"bad rules for tokens: {error}") from error
    if not all(rules.banned):
        raise GrammarError("bad rules for tokens: an empty sequence is banned")
    return rules


class TokenGuide:
    """The state of one answer; implements `engine.grammar.guide.Guide`."""

    def __init__(self, rules: TokenRules, vocab_size: int) -> None:
        # The mask of the rules for single ids. Banned sequences are applied later.
        self._row = _words(rules, vocab_size)
        self._by_last: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for sequence in rules.banned:
            if len(sequence) > 1:
                self._by_last[sequence[-2]].append(sequence)
        self._tail_len = max(map(len, rules.banned), default=1) - 1
        self._tail: list[int] = []  # the last tokens of the answer
        self.fault: str | None = None

    def consume(self, token_id: int) -> None:
        """Advances the guide by the next token."""
        self._tail = self._after(self._tail, token_id)

    def replay(self, answer: Sequence[int]) -> None:
        """Advances the guide by all these tokens, in order."""
        self._tail = list(answer)[-self._tail_len :] if self._tail_len else []

    def num_allowed(self, ahead: Sequence[int]) -> int:
        """Returns the number of leading proposed tokens that the rules allow one after the
        other.
        """
        tail = self._tail
        for count, token_id in enumerate(ahead):
            if not self._allows(token_id) or token_id in self._ends(tail):
                return count
            tail = self._after(tail, token_id)
        return len(ahead)

    def masks(self, ahead: Sequence[int]) -> np.ndarray:
        """Returns masks uint32 [len(ahead) + 1, words], as `engine.grammar.guide.Guide` defines
        them.
        """
        rows = np.repeat(self._row[None], len(ahead) + 1, axis=0)
        tail = self._tail
        for place, row in enumerate(rows):
            for token_id in self._ends(tail):
                row[token_id // WORD_BITS] &= ~np.uint32(1 << token_id % WORD_BITS)
            if place < len(ahead):
                tail = self._after(tail, ahead[place])
        if not rows.any(axis=1).all():
            self.fault = NOTHING_LEFT
            rows[:] = 0
        return rows

    def _allows(self, token_id: int) -> bool:
        word = token_id // WORD_BITS
        return word < len(self._row) and bool(self._row[word] >> (token_id % WORD_BITS) & 1)

    def _ends(self, tail: list[int]) -> set[int]:
        """Returns the ids that would complete a banned sequence as the next token."""
        if not tail:
            return set()
        return {
            sequence[-1]
            for sequence in self._by_last.get(tail[-1], ())
            if tuple(tail[1 - len(sequence) :]) == sequence[:-1]
        }

    def _after(self, tail: list[int], token_id: int) -> list[int]:
        return [*tail, token_id][-self._tail_len :] if self._tail_len else tail


def _words(rules: TokenRules, vocab_size: int) -> np.ndarray:
    """Returns uint32 [words] with the bits of all allowed ids. Sequences of one banned id are
    applied.
    """
    num_words = -(-vocab_size // WORD_BITS)
    bits = np.zeros(num_words * WORD_BITS, dtype=bool)
    ids = [*(rules.allowed or ()), *(sequence[-1] for sequence in rules.banned)]
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise GrammarError("bad rules for tokens: an id is not in the vocabulary")
    bits[slice(0, vocab_size) if rules.allowed is None else list(rules.allowed)] = True
    bits[[sequence[0] for sequence in rules.banned if len(sequence) == 1]] = False
    if not bits.any():
        raise GrammarError(NOTHING_LEFT)
    return np.packbits(bits, bitorder="little").view(np.uint32)

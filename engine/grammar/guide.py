"""What a grammar allows next: the seam between who makes guides and who asks them.

A guide is determined by its grammar and by the tokens of the answer so far, so it can be made again
on any worker. It is asked about tokens that are only proposed without taking note of them.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.errors import GrammarError
from engine.messages import Grammar


class Guide(Protocol):
    """Where one answer stands in its grammar. Used by one thread at a time."""

    def consume(self, token_id: int) -> None:
        """Takes note of the next token of the answer, which the mask allowed."""
        ...

    def num_allowed(self, ahead: Sequence[int]) -> int:
        """How many of these proposed tokens, from the first on, may follow one another."""
        ...

    def masks(self, ahead: Sequence[int]) -> np.ndarray:
        """The ids that may come next, and after each of `ahead`, all of which are allowed.

        uint32 [len(ahead) + 1, words]: id i is allowed if bit i % 32 of word i // 32 is set. Where
        the answer is complete, only tokens that end it are allowed.
        """
        ...

    @property
    def fault(self) -> str | None:
        """Why the answer cannot be continued, if so: following the grammar has become too costly.

        Nothing is allowed then. The sequence is to be given back.
        """
        ...


OpenedGuide = Guide | GrammarError  # what comes of opening one


class Guides(Protocol):
    """Makes guides for one tokenizer."""

    def open(self, grammar: Grammar, answer: Sequence[int], salt: bytes = b"") -> Guide:
        """A guide that has consumed `answer`. Raises GrammarError.

        Compiled grammars are kept for each salt by itself: time tells a tenant nothing of others.
        """
        ...

"""Baton's own guides, driven as the peers are: `python -m bench.lab.schemas.ours baton …`.

A schema is checked as a gateway checks it, in a fork with bounds of time and memory. Then it is
compiled as a worker does it, which is what is timed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.peers.schemas_driver import Matcher, main
from engine.errors import GrammarError
from engine.grammar.child import GrammarVerdict, judged
from engine.grammar.guide import Guide
from engine.grammar.guides import LlGuides
from engine.messages import Grammar, GrammarKind

NAME = "baton"


class BatonCompiler:
    """The guides of one tokenizer."""

    def __init__(self, options: argparse.Namespace) -> None:
        file = Path(options.tokenizer)
        vocab_size = max(Tokenizer.from_file(str(file)).get_vocab().values()) + 1
        facts = (file, vocab_size, [options.eos])
        self.facts: dict[str, object] = {}
        self._facts = facts
        self._guides = LlGuides(file, vocab_size=vocab_size, eos_token_ids=[options.eos])
        self._guides.load()

    def check(self, schema: str) -> None:
        """Raises GrammarError for a schema that a gateway would refuse."""
        result = judged(self._guides, Grammar(GrammarKind.JSON_SCHEMA, schema))
        if result.verdict is not GrammarVerdict.FOLLOWED:
            raise GrammarError(result.message)

    def compile(self, schema: str) -> Callable[[], Matcher]:
        """Compiles a checked schema. Raises GrammarError."""
        grammar = Grammar(GrammarKind.JSON_SCHEMA, schema)
        self._guides.prepare(grammar)
        return lambda: GuideMatcher(self._guides.open(grammar, ()))


class GuideMatcher:
    """The state of a guide along one text."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    def mask(self) -> np.ndarray:
        """The tokens that may come next: uint32 [words]."""
        words: np.ndarray = self._guide.masks(())[0]
        return words

    def accept(self, token_id: int) -> None:
        """Advances by a token that the mask allows."""
        self._guide.consume(token_id)


if __name__ == "__main__":
    main({NAME: BatonCompiler})

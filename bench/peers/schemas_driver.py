"""Drives one engine of JSON schemas for `baton bench schemas`, in that engine's own environment.

    PYTHON bench/peers/schemas_driver.py xgrammar --tokenizer FILE --eos 0

Runs as a script, without Baton. The protocol is `driver.py`'s, with one command:

    in   {"do": "judge", "schema": text, "tests": [[token id, …], …], "num_walks": n, "seed": …}
    out  {"compile_s": …, "masks_us": […], "allowed": [true, …], "walks": [[token id, …], …]}
    out  {"refused": "in one line"}

`compile_s` is the time to the first mask. Each test is a text in JSON, of which it is told whether
the engine allows all of it and an end behind it. A walk takes random tokens of the masks; it is
told only if it comes to an end. All engines are driven alike, with one thread.

Sources: MaskBench, github.com/guidance-ai/jsonschemabench, whose measures these are.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

try:
    from driver import drive, stdout_for_answers  # type: ignore[import-not-found]
except ImportError:  # ours imports this file as a part of its package
    from bench.peers.driver import drive, stdout_for_answers

MAX_WALK = 300  # tokens
END_SHARE, CLOSING_SHARE = 0.5, 0.7  # share of choices in a walk: ends, and closing tokens
CLOSING = set('"}],')  # such tokens consist of these


class Matcher(Protocol):
    """The state of a schema along one text."""

    def mask(self) -> np.ndarray:
        """The tokens that may come next: uint32 [words], a bit for each id."""
        ...

    def accept(self, token_id: int) -> None:
        """Advances by a token that the mask allows."""
        ...


class Compiler(Protocol):
    """One engine with a tokenizer."""

    facts: dict[str, object]

    def check(self, schema: str) -> None:
        """Raises any exception for a schema that is refused. Its time does not count."""
        ...

    def compile(self, schema: str) -> Callable[[], Matcher]:
        """Returns what makes matchers. Raises any exception for a schema that it refuses."""
        ...


class Judge:
    """Answers commands about one engine."""

    def __init__(self, compiler: Compiler, eos: int, closing: Sequence[int]) -> None:
        self.facts = compiler.facts
        self._compiler = compiler
        self._eos = eos
        self._closing = np.array(sorted(closing), dtype=np.int64)

    def judge(
        self, schema: str, tests: list[list[int]], num_walks: int, seed: int
    ) -> dict[str, object]:
        """Compiles a schema, tries it on tests, and walks at random."""
        try:
            self._compiler.check(schema)
            begin_s = time.perf_counter()
            opened = self._compiler.compile(schema)
            opened().mask()
        except Exception as error:  # engines raise different errors for unsupported schemas
            return {"refused": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        compile_s = time.perf_counter() - begin_s
        masks_us: list[float] = []
        rng = random.Random(seed)
        return {
            "compile_s": compile_s,
            "allowed": [self._allows(opened(), tokens, masks_us) for tokens in tests],
            "walks": [self._walk(opened(), rng) for _ in range(num_walks)],
            "masks_us": masks_us,
        }

    def _allows(self, matcher: Matcher, tokens: list[int], masks_us: list[float]) -> bool:
        for token_id in (*tokens, self._eos):
            begin_s = time.perf_counter()
            words = matcher.mask()
            masks_us.append(round(1e6 * (time.perf_counter() - begin_s), 2))
            if not _has(words, token_id):
                return False
            if token_id != self._eos:
                matcher.accept(token_id)
        return True

    def _walk(self, matcher: Matcher, rng: random.Random) -> list[int] | None:
        tokens: list[int] = []
        for _ in range(MAX_WALK):
            words = matcher.mask()
            if _has(words, self._eos) and rng.random() < END_SHARE:
                return tokens
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            allowed = allowed[allowed != self._eos]
            closing = np.intersect1d(allowed, self._closing, assume_unique=True)
            if len(closing) and rng.random() < CLOSING_SHARE:
                allowed = closing
            if not len(allowed):
                return tokens if _has(words, self._eos) else None
            tokens.append(int(allowed[rng.randrange(len(allowed))]))
            matcher.accept(tokens[-1])
        return None


def _has(words: np.ndarray, token_id: int) -> bool:
    return bool(words[token_id // 32] >> (token_id % 32) & 1)


class LlguidanceCompiler:
    """llguidance as its authors measure it: with its own options for JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        import llguidance
        from llguidance import LLTokenizer

        text = Path(options.tokenizer).read_text(encoding="utf-8")
        self.facts: dict[str, object] = {"version": llguidance.__version__}
        self._tokenizer = LLTokenizer(text, eos_token=options.eos)

    def check(self, schema: str) -> None:
        """Does nothing: `compile` refuses."""

    def compile(self, schema: str) -> Callable[[], Matcher]:
        """Raises ValueError."""
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(schema)
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0)
        if compiled.is_error():
            raise ValueError(compiled.get_error())
        num_words = -(-self._tokenizer.vocab_size // 32)
        return lambda: _LlguidanceMatcher(compiled.deep_copy(), num_words)


class _LlguidanceMatcher:
    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher = matcher
        self._words = np.zeros(num_words, dtype=np.uint32)

    def mask(self) -> np.ndarray:
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)


class XgrammarCompiler:
    """XGrammar with free blanks and open objects, as JSON Schema has them."""

    def __init__(self, options: argparse.Namespace) -> None:
        from importlib.metadata import version

        import xgrammar
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(options.tokenizer)
        self._num_ids = max(tokenizer.get_vocab().values()) + 1
        names = [tokenizer.id_to_token(i) or "" for i in range(self._num_ids)]
        info = xgrammar.TokenizerInfo(
            names,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=self._num_ids,
            stop_token_ids=[options.eos],
        )
        self.facts: dict[str, object] = {"version": version("xgrammar")}
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def check(self, schema: str) -> None:
        """Does nothing: `compile` refuses."""

    def compile(self, schema: str) -> Callable[[], Matcher]:
        """Raises RuntimeError."""
        import xgrammar

        compiled = self._compiler.compile_json_schema(
            schema, any_whitespace=True, strict_mode=False
        )
        return lambda: _XgrammarMatcher(xgrammar, compiled, self._num_ids)


class _XgrammarMatcher:
    def __init__(self, xgrammar: Any, compiled: Any, num_ids: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, num_ids)
        self._words: np.ndarray = self._bits.numpy()[0].view(np.uint32)

    def mask(self) -> np.ndarray:
        self._matcher.fill_next_token_bitmask(self._bits)
        return self._words

    def accept(self, token_id: int) -> None:
        self._matcher.accept_token(token_id)


COMPILERS: dict[str, Callable[[argparse.Namespace], Compiler]] = {
    "llguidance": LlguidanceCompiler,
    "xgrammar": XgrammarCompiler,
}


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json, byte-level")
    parser.add_argument("--eos", type=int, required=True)
    return parser.parse_args(arguments)


def closing_tokens(tokenizer_file: str) -> list[int]:
    """The ids of tokens that only close strings, arrays and objects, or go on to the next item."""
    vocabulary = json.loads(Path(tokenizer_file).read_text(encoding="utf-8"))["model"]["vocab"]
    return [token_id for text, token_id in vocabulary.items() if set(text) <= CLOSING]


def main(compilers: dict[str, Callable[[argparse.Namespace], Compiler]] = COMPILERS) -> None:
    """Runs the engine that the command line names."""
    out = stdout_for_answers()
    options = options_of(sys.argv[1:])

    def load() -> Judge:
        return Judge(
            compilers[options.name](options), options.eos, closing_tokens(options.tokenizer)
        )

    drive(load, sys.stdin, out)


if __name__ == "__main__":
    main()

"""Sends hostile grammars to the child process that compiles them: `python -m tests.fuzz.grammars`.

The child must return a verdict for each grammar in bounded time; on a busy machine the verdict may
be BUSY. A finding ends the run with status 1 and prints the grammar's seed; `--first` starts with
that seed. For some of the valid grammars, the fuzzer also writes a random answer.
"""

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from bench.hostile.corpus import TEXTS, WEIRD, count, hostile_lark, hostile_regex, hostile_schema
from engine.errors import GrammarError
from engine.grammar.child import MAX_WALL_S, GrammarToCompile, GrammarVerdict, Vocabulary
from engine.grammar.guides import MAX_SOURCE_LEN, MAX_TOKEN_S
from engine.messages import Grammar, GrammarKind
from router.gateway.requests.grammar_checker import GrammarChild
from tests.kits.grammar_checks import EOS, TOKENIZER, VOCAB_SIZE, bundled_guides
from tests.kits.schemas import allowed_ids, random_schema

VOCABULARY = Vocabulary(str(TOKENIZER), VOCAB_SIZE, EOS)
SLACK_S = 4.0  # time that an answer may take beyond the child's own limit, seconds
MAX_GROWTH_BYTES = 64 * 2**20
FOLLOWED_SHARE = 0.1
SPOILED_SHARE = 0.1
NUM_TOKENS = 60


class Finding(Exception):
    """The checker gave a wrong result."""


def fuzz(first: int, runs: int) -> Counter[str]:
    """Returns how often each verdict was given. Raises Finding."""
    child, counts, floor_bytes = GrammarChild(), Counter[str](), 0
    try:
        for seed in range(first, first + runs):
            rng = random.Random(seed)
            grammar = spoiled_grammar(rng) if rng.random() < SPOILED_SHARE else hostile_grammar(rng)
            if len(grammar.source) > MAX_SOURCE_LEN:
                counts["too long"] += 1
                continue
            begin_s = time.monotonic()
            verdict = child.ask(GrammarToCompile(VOCABULARY, grammar)).verdict
            counts[verdict] += 1
            if verdict is GrammarVerdict.CRASHED:
                raise Finding(f"seed {seed}: {verdict}")
            if time.monotonic() - begin_s > MAX_WALL_S + SLACK_S:
                raise Finding(f"seed {seed} took {time.monotonic() - begin_s:.1f} s")
            if verdict is GrammarVerdict.FOLLOWED and rng.random() < FOLLOWED_SHARE:
                follow(grammar, seed)
            num_bytes = resident_bytes(child.pid)
            floor_bytes = floor_bytes or num_bytes
            if num_bytes - floor_bytes > MAX_GROWTH_BYTES:
                raise Finding(f"seed {seed}: the child grew to {num_bytes} bytes")
    finally:
        child.close()
    return counts


def hostile_grammar(rng: random.Random) -> Grammar:
    """Returns a random hostile grammar of a random kind."""
    match rng.randrange(4):
        case 0:
            return Grammar(GrammarKind.REGEX, hostile_regex(rng, 4))
        case 1:
            return Grammar(GrammarKind.LARK, hostile_lark(rng))
        case 2:
            return Grammar(GrammarKind.JSON_SCHEMA, rng.choice([*TEXTS, "[" * count(rng), "NaN"]))
        case _:
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(hostile_schema(rng)))


def spoiled_grammar(rng: random.Random) -> Grammar:
    """Returns a realistic JSON schema in which one value is replaced, as a grammar."""
    schema = spoiled_schema(random_schema(rng.randrange(1000)), rng)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def spoiled_schema(schema: Any, rng: random.Random) -> Any:
    """Returns the schema with one of its values replaced."""
    if isinstance(schema, dict) and schema and rng.random() < 0.9:
        name = rng.choice(list(schema))
        return {**schema, name: spoiled_schema(schema[name], rng)}
    if isinstance(schema, list) and schema and rng.random() < 0.9:
        place = rng.randrange(len(schema))
        return [*schema[:place], spoiled_schema(schema[place], rng), *schema[place + 1 :]]
    return rng.choice(WEIRD)


def follow(grammar: Grammar, seed: int) -> None:
    """Writes a random answer that the grammar allows. Raises Finding if a token takes too long."""
    rng = np.random.default_rng(seed)
    try:
        guide = bundled_guides().open(grammar, ())
    except GrammarError as error:
        raise Finding(f"seed {seed}: the child could follow it, but {error}") from error
    for _ in range(NUM_TOKENS):
        begin_s = time.thread_time()
        ids = [i for i in allowed_ids(guide.masks(())[0]).tolist() if i not in EOS]
        if time.thread_time() - begin_s > 3 * MAX_TOKEN_S:
            raise Finding(f"seed {seed}: a mask took {time.thread_time() - begin_s:.2f} s")
        if not ids:
            return
        guide.consume(int(rng.choice(ids)))


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Fuzzes, and prints the number of each verdict, or the finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--runs", type=int, default=2000)
    options = parser.parse_args()
    try:
        counts = fuzz(options.first, options.runs)
    except Finding as finding:
        sys.exit(f"finding: {finding}")
    print(", ".join(f"{name}: {count}" for name, count in counts.most_common()))  # noqa: T201


if __name__ == "__main__":
    main()

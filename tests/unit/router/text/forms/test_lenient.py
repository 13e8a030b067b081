"""A lenient grammar allows every valid value, and no other value if it covers the whole schema."""

import json
import random
from functools import cache

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.errors import GrammarError
from engine.grammar.rewriting.finite import finite
from engine.messages import Grammar, GrammarKind
from router.text.forms.lenient import LenientSchema, lenient_grammar
from tests.kits.grammar_checks import EOS, TOKENIZER, VOCAB_SIZE, bundled_guides
from tests.kits.router.forms import allows
from tests.kits.schemas import faults, random_schema, terseness, write_answer

SEEDS = range(40)


@cache
def tokenizer():
    return Tokenizer.from_file(str(TOKENIZER))


@cache
def weights():
    return terseness(
        [tokenizer().decode([i], skip_special_tokens=False) for i in range(VOCAB_SIZE)]
    )


def written(grammar, rng):
    """Returns a random answer under a grammar, or None if it is too long or the grammar is
    refused."""
    try:
        guide = bundled_guides().open(grammar, ())
    except GrammarError:
        return None
    answer = write_answer(guide, weights(), rng, max_tokens=150, eos=list(EOS))
    return None if answer is None else tokenizer().decode(answer, skip_special_tokens=False)


def shuffled(value, rng):
    """Returns the same value with its keys in another order."""
    if isinstance(value, dict):
        entries = [(key, shuffled(each, rng)) for key, each in value.items()]
        rng.shuffle(entries)
        return dict(entries)
    return [shuffled(each, rng) for each in value] if isinstance(value, list) else value


def test_each_valid_value_is_allowed_in_any_order_and_spelling():
    rng, order = np.random.default_rng(0), random.Random(0)
    num_tried = 0
    for seed in SEEDS:
        schema = random_schema(seed)
        text = written(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), rng)
        if text is None:
            continue
        lenient = Grammar(GrammarKind.LARK, lenient_grammar(schema)[0])
        value = shuffled(json.loads(text), order)
        # A text with a pattern has one spelling; other texts may contain escapes.
        is_ascii = "pattern" not in json.dumps(schema)
        for spelled in (
            text,
            json.dumps(value, ensure_ascii=is_ascii),
            json.dumps(value, indent=2, ensure_ascii=is_ascii),
            json.dumps(value, separators=(",", ":"), ensure_ascii=is_ascii),
        ):
            assert allows(lenient, spelled), (seed, spelled)
        num_tried += 1
    assert num_tried > 0.8 * len(SEEDS)


def test_where_all_is_held_each_answer_validates():
    rng = np.random.default_rng(0)
    num_tried = 0
    for seed in SEEDS:
        schema = random_schema(seed)
        source, unheld = lenient_grammar(schema)
        if unheld or finite(schema) is False:
            continue
        text = written(Grammar(GrammarKind.LARK, source), rng)
        if text is not None:
            num_tried += 1
            assert not faults(schema, text), (seed, text)
    assert num_tried > 0.3 * len(SEEDS)


@pytest.mark.parametrize(
    ("schema", "unheld"),
    [
        ({"allOf": [{"type": "string"}]}, []),
        ({"allOf": [{}, {"type": "string"}]}, [".allOf"]),
        ({"type": "object", "patternProperties": {"^x": {}}}, [".patternProperties"]),
        ({"not": {"type": "string"}, "if": {}, "minProperties": 0}, [".not"]),
        ({"oneOf": [{"type": "string"}, {"const": 1}]}, []),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, [".oneOf"]),
        ({"type": "object", "anyOf": [{"required": ["a"]}], "properties": {}}, [".anyOf"]),
        ({"items": {"$ref": "https://x"}}, [".items.$ref"]),
        ({"properties": {"a": 3}}, [".properties.a"]),
        ({"type": "string", "format": "odd"}, []),
        ({"type": "integer", "minimum": 2**70}, [".minimum"]),
        ({"type": "array", "minItems": 3, "maxItems": 2}, [".maxItems"]),
    ],
)
def test_what_is_not_held_is_named(schema, unheld):
    assert LenientSchema(schema, "x").unheld == unheld


def test_bounds_that_contradict_each_other_are_not_enforced():
    source, unheld = lenient_grammar({"type": "array", "minItems": 3, "maxItems": 2})
    assert unheld == [".maxItems"]
    assert allows(Grammar(GrammarKind.LARK, source), "[1]")

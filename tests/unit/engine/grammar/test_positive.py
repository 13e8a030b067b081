"""Rewritten schemas allow nothing that the client's schema forbids, and most of what it allows."""

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from engine.errors import GrammarError
from engine.grammar.disjoint import Disjointness
from engine.grammar.negation import other_texts
from engine.grammar.positive import positive

A, B = {"required": ["a"]}, {"required": ["b"]}
KIND = {
    "x": {"properties": {"kind": {"const": "x"}}},
    "y": {"properties": {"kind": {"const": "y"}}},
}
INTEGERS = {"type": "array", "items": {"type": "integer"}}
TEXTS = {"type": "array", "items": {"type": "string"}}


GONE = {"oneOf", "not", "if", "then", "else", "dependencies", "dependentRequired"}


def allows(schema, value):
    return Draft202012Validator(schema).is_valid(value)


def words(schema):
    """Returns all keywords in a schema, at any depth."""
    return set(re.findall(r'"([^"]*)":', json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["a", None], [1]),
        ({"oneOf": [{"enum": ["a", 1]}, {"const": "b"}]}, ["a", 1, "b"], ["c"]),
        (
            {"oneOf": [{"type": "object", **A}, {"type": "object", **B}]},
            [{"a": 1}],
            [{"a": 1, "b": 1}],
        ),
        (
            {"type": "object", "oneOf": [A, {"required": ["a", "b"]}]},
            [{"a": 1}],
            [{"b": 1}, {"a": 1, "b": 1}],
        ),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, ["four", 1], ["one"]),
        ({"type": "object", "oneOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        ({"oneOf": [KIND["x"], KIND["y"]]}, [{"kind": "x"}, {"kind": "y"}], [{}, {"kind": "z"}]),
        ({"oneOf": [INTEGERS, TEXTS]}, [[1], ["a"]], [[], [1, "a"]]),
        (
            {"oneOf": [{"maximum": 1, "type": "number"}, {"minimum": 2, "type": "number"}]},
            [1, 2],
            [1.5],
        ),
        (
            {"oneOf": [{"const": "green"}, {"type": "string", "pattern": "^#"}]},
            ["green", "#1"],
            ["red"],
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
                "$defs": {"a": {"type": "string"}},
            },
            ["a", None],
            [1],
        ),
        ({"type": "object", "not": {"required": ["a", "b"]}}, [{"a": 1}, {}], [{"a": 1, "b": 1}]),
        ({"not": {"anyOf": [{"type": "null"}, {"const": "a"}]}}, ["b"], [None, "a"]),
        ({"not": {"properties": {"a": {"type": "null"}}}}, [{"a": 1}], [{"a": None}, {}]),
        ({"type": "string", "not": {"minLength": 3}}, ["ab"], ["abc"]),
        ({"type": "number", "not": {"minimum": 3}}, [2], [3]),
        ({"not": {"not": {"type": "null"}}}, [None], [1]),
        ({"type": "boolean", "not": {"const": True}}, [False], [True]),
        (
            {"if": KIND["x"] | {"required": ["kind"]}, "then": A, "else": B},
            [{"kind": "x", "a": 1}, {"kind": "y", "b": 1}, {"b": 1}],
            [{"kind": "x", "b": 1}, {"kind": "y", "a": 1}],
        ),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}}, ["a", 7], ["ab"]),
        ({"then": {"type": "string"}}, [1], []),
        (
            {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
            [{}, {"a": 1, "b": 1}, {"c": 1, "d": 1}],
            [],
        ),
        ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}, 3], [{"a": 1}]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 2]]),
        ({"$ref": "#/parts/a", "parts": {"a": {"not": {"type": "null"}}}}, [1], [None]),
        ({"$ref": "#/parts/a", "parts": {"a": {"items": {"$ref": "#/parts/a"}}}}, [[[]], 1], []),
    ],
)
def test_what_is_rewritten_means_the_same_here(schema, good, bad):
    rewritten = positive(schema)
    known = {name: part for name, part in rewritten.items() if name != "parts"}
    assert words(known).isdisjoint(GONE)
    assert all(allows(rewritten, value) for value in good)
    assert not any(allows(rewritten, value) for value in bad)
    assert all(allows(schema, value) for value in good)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "alternative 0 and alternative 1"),
        ({"oneOf": [{}, {}]}, "oneOf"),
        ({"properties": {"x": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}}}, "#/properties/x"),
        ({"not": {}}, "not"),
        ({"not": {"pattern": "a"}}, "not"),
        ({"if": {"pattern": "a"}, "then": {"maxLength": 3}}, "if"),
    ],
)
def test_what_has_no_positive_form_is_refused_by_name(schema, why):
    with pytest.raises(GrammarError, match=re.escape(why)):
        positive(schema)


def test_formats_are_known_narrower_or_notes():
    def of(name):
        return positive({"type": "string", "format": name})

    assert of("date")["format"] == "date"
    assert of("iri-reference")["allOf"] == [{"format": "uri"}]
    assert of("odd") == {"type": "string"}
    pointer = of("json-pointer")
    assert allows(pointer, "/a~1b/0")
    assert not allows(pointer, "a")


@given(
    st.lists(st.text("ab-]^", max_size=3), min_size=1, max_size=6), st.text("abc-]^", max_size=4)
)
def test_other_texts_are_all_but_these(texts, text):
    assert (re.fullmatch(other_texts(texts), text) is None) is (text in texts)


def test_hostile_alternatives_end():
    branches = [{"properties": {"a": {"$ref": "#"}}, "required": [f"r{i}"]} for i in range(300)]
    with pytest.raises(GrammarError, match="too long"):
        positive({"oneOf": branches})
    doubling = {"allOf": [{"$ref": "#/$defs/a"}] * 50}
    with pytest.raises(GrammarError, match="too many"):
        positive({"not": {"$ref": "#/$defs/a"}, "$defs": {"a": doubling}})


# ---------------------------------------------------------------- random schemas and values

NAMES = ("a", "b", "c")
SCALARS = (None, True, False, -1, 0, 1, 2, 0.5, 1.0, "", "a", "bb")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
NUM_SEEDS = 1500


def random_value(rng, depth=0):
    match rng.randrange(6 if depth < 2 else 4):
        case 4:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
        case 5:
            names = rng.sample(NAMES, rng.randrange(4))
            return {name: random_value(rng, depth + 1) for name in names}
    return rng.choice(SCALARS)


def random_schema(rng, depth=0):
    """Returns a schema of a few keywords. A schema at the maximum depth contains no others."""

    def inner():
        return random_schema(rng, depth + 1)

    def some():
        return [inner() for _ in range(rng.randint(1, 3))]

    def names():
        return rng.sample(NAMES, rng.randrange(3))

    makers = {
        "type": lambda: rng.choice(TYPES),
        "const": lambda: rng.choice(SCALARS),
        "enum": lambda: rng.sample(SCALARS, 2),
        "required": names,
        "minItems": lambda: rng.randrange(3),
        "maxItems": lambda: rng.randrange(3),
        "minLength": lambda: rng.randrange(3),
        "maxLength": lambda: rng.randrange(3),
        "minimum": lambda: rng.randint(-1, 2),
        "exclusiveMaximum": lambda: rng.randint(-1, 2),
        "pattern": lambda: rng.choice(["^a$", "b", "^$"]),
        "dependentRequired": lambda: {rng.choice(NAMES): names()},
    }
    if depth < 3:
        makers |= {
            "properties": lambda: {name: inner() for name in names()},
            "additionalProperties": lambda: rng.choice([False, inner()]),
            "items": inner,
            "oneOf": some,
            "anyOf": some,
            "allOf": some,
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
        }
        if depth:
            makers["$ref"] = lambda: rng.choice(["#/$defs/x", "#/parts/0"])
    return {name: makers[name]() for name in rng.sample(sorted(makers), rng.randint(1, 3))}


def without_references(schema):
    """Expands references, because the library would follow a circle for ever."""
    return json.loads(json.dumps(schema).replace("$ref", "$comment"))


def test_nothing_is_allowed_that_the_schema_forbids():
    num_followed = num_allowed = 0
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        schema, *defined = (random_schema(rng) for _ in range(3))
        x, part = map(without_references, defined)
        document = {**schema, "$defs": {"x": x}, "parts": [part]}
        try:
            rewritten = positive(document)
        except GrammarError:
            continue
        num_followed += 1
        for value in (random_value(rng) for _ in range(8)):
            if allows(rewritten, value):
                num_allowed += 1
                assert allows(document, value), (seed, value)
    assert num_followed > NUM_SEEDS / 2
    assert num_allowed > NUM_SEEDS


def test_no_value_satisfies_two_that_are_apart():
    num_apart = 0
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        one, other = (without_references(random_schema(rng)) for _ in range(2))
        if Disjointness({}).apart(one, other):
            num_apart += 1
            for value in (random_value(rng) for _ in range(10)):
                assert not (allows(one, value) and allows(other, value)), (seed, value)
    assert num_apart > NUM_SEEDS / 20

"""Rewritten keywords allow no additional value, alone and nested."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from engine.errors import GrammarError
from engine.grammar.positive import MAX_DEPENDENT, positive

NAMES = ("a", "b", "c")
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 4),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.sampled_from(["", "a", "ab", "b", "^x"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
names = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)


def one(**keywords):
    return st.fixed_dictionaries(keywords)


simple = st.one_of(
    st.booleans(),
    one(type=types),
    one(type=st.lists(types, min_size=1, max_size=3, unique=True)),
    one(const=scalars),
    one(enum=st.lists(values, min_size=1, max_size=3)),
    one(required=names),
    one(minimum=st.integers(-1, 3)),
    one(exclusiveMaximum=st.integers(-1, 3)),
    one(minLength=st.integers(0, 2)),
    one(maxItems=st.integers(0, 2)),
    one(**{"$ref": st.sampled_from(["#/$defs/d", "#/other/0", "#place"])}),
)


def combined(inner):
    properties = st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=2)
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        one(properties=properties, required=names),
        one(type=st.just("object"), properties=properties, additionalProperties=st.just(False)),
        one(allOf=some),
        one(anyOf=some),
        one(oneOf=some),
        one(oneOf=some, type=types),
        one(**{"not": inner}),
        one(**{"not": inner, "type": types}),
        one(**{"if": inner, "then": inner, "else": inner}),
        one(**{"if": inner, "then": inner}),
        one(dependentRequired=st.dictionaries(st.sampled_from(NAMES), names, max_size=2)),
        one(dependentSchemas=st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)),
        one(propertyNames=st.sampled_from([{"pattern": "^a"}, {"enum": ["a", "b"]}])),
        one(
            type=st.just("array"),
            items=one(enum=st.lists(scalars, min_size=1, max_size=3)),
            uniqueItems=st.booleans(),
        ),
        one(items=inner, minItems=st.integers(0, 1)),
    )


schemas = st.recursive(simple, combined, max_leaves=6)
OTHERS = {"$defs": {"d": {"type": "string"}}, "other": [{"type": "object", "required": ["a"]}]}


def documents():
    anchored = {"anchored": {"$anchor": "place", "minimum": 2}}
    return schemas.map(
        lambda s: {"allOf": [s], "$defs": {**OTHERS["$defs"], **anchored}, "other": OTHERS["other"]}
    )


@settings(max_examples=150, deadline=None)
@given(documents(), st.lists(values, min_size=1, max_size=12))
def test_a_rewritten_schema_allows_nothing_more(document, candidates):
    try:
        result = positive(document)
    except GrammarError:
        return
    original, ours = Draft202012Validator(document), Draft202012Validator(result)
    for value in candidates:
        if ours.is_valid(value):
            assert original.is_valid(value), (value, result)


def check(schema, allowed, forbidden):
    ours = Draft202012Validator(positive(schema))
    assert [value for value in allowed if not ours.is_valid(value)] == []
    assert [value for value in forbidden if ours.is_valid(value)] == []


KIND_A = {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"not": {"enum": ["a", 2, 3]}}, ["b", 1, 2.5, 4], ["a", 2, 3]),
        ({"not": {"exclusiveMinimum": 3}, "type": "number"}, [3], [4]),
        ({"uniqueItems": True, "maxItems": 1, "type": "array"}, [[], [1]], [[1, 1]]),
        ({"uniqueItems": True, "maxItems": 0}, [[], 1], [[1]]),
        ({"uniqueItems": True, "type": "string"}, ["a"], [1]),
        (
            {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True},
            [[], ["x"], ["y", "x"]],
            [["x", "x"], ["z"]],
        ),
        (
            {"type": "array", "items": {"enum": [*range(7)]}, "uniqueItems": True, "minItems": 1},
            [[0, 3, 6], [*range(7)]],
            [[], [1, 1]],
        ),
        ({"items": {"type": "boolean"}, "uniqueItems": True}, [[True, False], 1], [[True, True]]),
        ({"items": {"enum": [1, 1.0, True]}, "uniqueItems": True}, [[1, True]], [[1, 1]]),
        ({"propertyNames": {"pattern": "^a"}, "minProperties": 1}, [{"ab": 1}], [{"b": 1}]),
        ({"propertyNames": {"enum": ["a"]}}, [{"a": 1}, {}, 3], [{"b": 1}]),
        ({"propertyNames": {"type": "string"}}, [{"a": 1}], []),
        (
            {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "null"}},
            [{"a": None}],
            [{"a": 1}, {"b": None}],
        ),
        ({"minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        ({"minimum": 3, "exclusiveMinimum": False}, [3], [2]),
        ({"type": "object", "unevaluatedProperties": False}, [{}], [{"a": 1}]),
        (
            {"additionalProperties": {"type": "null"}, "unevaluatedProperties": False},
            [{"a": None}],
            [],
        ),
        ({"$ref": "#x", "$defs": {"y": {"$anchor": "x", "type": "string"}}}, ["a"], [1]),
        ({"not": {"$ref": "#x"}, "$defs": {"y": {"$anchor": "x", "type": "string"}}}, [1], ["a"]),
        (
            {"$id": "http://a/b", "$ref": "http://a/b#/parts/x", "parts": {"x": {"const": 1}}},
            [1],
            [2],
        ),
    ],
)
def test_what_a_rewritten_schema_allows(schema, allowed, forbidden):
    ours = Draft202012Validator(positive(schema))
    assert [value for value in allowed if not ours.is_valid(value)] == []
    assert [value for value in forbidden if ours.is_valid(value)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a/b": {"uniqueItems": True}}}, "uniqueItems.*#/properties/a~1b"),
        ({"items": {"enum": [*range(500)]}, "uniqueItems": True}, "uniqueItems"),
        ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"propertyNames": False}, "propertyNames"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "propertyNames"),
        ({"dependentRequired": {f"a{i}": ["b"] for i in range(MAX_DEPENDENT + 1)}}, "dependencies"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_by_name_and_place(schema, message):
    with pytest.raises(GrammarError, match=message):
        positive(schema)


def doubling(levels):
    """Returns definitions each of which refers twice to the next one."""
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**defs, f"d{levels}": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"$ref": "#/$defs/d0"}, **doubling(40)},
        {"oneOf": [{"pattern": f"a{i}"} for i in range(300)]},
        {"oneOf": [{"$ref": "#/$defs/d0"}] * 30, **doubling(40)},
    ],
)
def test_hostile_schemas_are_refused_in_bounded_work(schema):
    with pytest.raises(GrammarError):
        positive(schema)

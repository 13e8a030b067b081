"""Closing a strict schema creates no contradiction."""

import pytest

from engine.grammar.json_schemas import closed

A = {"type": "object", "properties": {"a": {}}}
CLOSED_A = {**A, "additionalProperties": False}
REFERENCE = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        ({"properties": {"x": A}}, {"properties": {"x": CLOSED_A}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"$defs": {"a": A}, **REFERENCE}, {"$defs": {"a": CLOSED_A}, **REFERENCE}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
        ({"type": ["object", "null"]}, {"type": ["object", "null"], "additionalProperties": False}),
    ],
)
def test_objects_that_do_not_say_are_closed(schema, expected):
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": 5},
        {"const": A},
        {**A, "additionalProperties": True},
        {"type": "object", "patternProperties": {"^x": {}}},
        {"allOf": [A, {"type": "object", "properties": {"b": {}}}]},
        {**A, "anyOf": [A]},
        {"$defs": {"a": A}, "allOf": [REFERENCE, {"required": ["a"]}]},
    ],
)
def test_others_stay_as_they_are(schema):
    assert closed(schema) == schema

"""Parts of a schema that no finite value satisfies become false."""

import pytest

from engine.grammar.rewriting.finite import finite, is_endless

SELF = {"$ref": "#/$defs/n"}


def of(definition, **schema):
    """Returns the definition `n`, and an object schema that may refer to it, after pruning."""
    found = finite({"$defs": {"n": definition}, **schema})
    return found if found is False else {**found, "$defs": found["$defs"]["n"]}


@pytest.mark.parametrize(
    "definition",
    [
        SELF,
        {"anyOf": [SELF]},
        {"allOf": [{}, SELF]},
        {"type": "object", "required": ["n"], "properties": {"n": SELF}},
        {"type": "array", "minItems": 1, "items": SELF},
        {"oneOf": [{"type": "array", "minItems": 2, "items": SELF}, SELF]},
    ],
)
def test_endless_parts_are_false_where_they_are_used(definition):
    assert of(definition, properties={"a": SELF}) == {"$defs": False, "properties": {"a": False}}
    assert of(definition, **SELF) is False


@pytest.mark.parametrize(
    "definition",
    [
        {"anyOf": [SELF, {"type": "null"}]},
        {"type": "object", "required": ["n"], "properties": {"m": SELF}},
        {"required": ["n"], "properties": {"n": SELF}},
        {"type": "array", "items": SELF},
        {"type": ["object", "null"], "required": ["n"], "properties": {"n": SELF}},
    ],
)
def test_satisfiable_parts_stay(definition):
    found = of(definition, properties={"a": SELF})
    assert found["properties"] == {"a": SELF}
    assert found["$defs"] is not False


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        ({"$defs": {"n": SELF}, **SELF}, True),
        ({"$defs": {"n": SELF}, "properties": {"a": SELF}}, False),
        ({"$ref": "#/$defs/none"}, False),  # a broken reference is an error of another kind
    ],
)
def test_a_schema_is_endless_if_no_finite_value_satisfies_all_of_it(schema, endless):
    assert is_endless(schema) is endless

"""Strings and keys of a schema may contain control characters; no key has two spellings."""

import pytest

from engine.errors import GrammarError
from tests.kits.router.forms import allows, schema

INTEGER_A = {"type": "object", "properties": {"a": {"type": "integer"}}}
OTHER_B = {"properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        ({"enum": ["a\u001bb"]}, r'"a\u001bb"', '"ab"'),
        ({"const": "a\u007fb"}, r'"a\u007fb"', '"ab"'),
        ({"oneOf": [{"const": "\u001b"}, {"const": "\u0001"}]}, r'"\u0001"', '""'),
        ({"const": {"k": ["\u0000"]}}, r'{"k":["\u0000"]}', '{"k":[""]}'),
        ({"type": "string", "maxLength": 1}, r'"\u001B"', r'"\u001b\u001b"'),
        ({"type": "string", "pattern": "^\x1b$"}, r'"\u001b"', '""'),
        (
            {"patternProperties": {r"^a\x1b$": {"type": "null"}}, "additionalProperties": False},
            r'{"a\u001b":null}',
            '{"a":null}',
        ),
        ({**INTEGER_A, "required": ["b"]}, r'{"a":1,"b":"\u001b"}', r'{"b":1,"\u0061":"x"}'),
        (INTEGER_A, r'{"\u001b":"x","aa":2}', r'{"\u0061":"x"}'),
        ({"allOf": [INTEGER_A, OTHER_B]}, '{"a":1,"b":2,"c":"x"}', r'{"\u0061":"x"}'),
        ({**INTEGER_A, "patternProperties": {"^x": {}}}, '{"a":1,"z":2}', r'{"\u0061":"x"}'),
    ],
)
def test_each_text_can_be_written_and_each_key_in_one_spelling(wanted, good, bad):
    wanted = wanted if "properties" not in wanted else {"type": "object", **wanted}
    assert allows(schema(wanted), good)
    assert not allows(schema(wanted), bad)


@pytest.mark.parametrize("held", [{"const": "\u001b"}, {"pattern": r"^\x1b$"}, {"enum": ["\x7f"]}])
def test_a_control_character_that_cannot_be_written_is_refused(held):
    with pytest.raises(GrammarError, match="control character"):
        allows(schema({"allOf": [INTEGER_A, {"properties": {"b": held}}]}), "")

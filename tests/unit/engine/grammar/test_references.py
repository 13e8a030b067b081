"""A reference resolves to the place that it names, and to no other place."""

import pytest

from engine.grammar.references import References

ROOT = {
    "$id": "http://x/y",
    "$defs": {
        "a/b": {"$anchor": "here", "type": "null"},
        "c": [{"id": "#there", "type": "string"}],
        "d": {"$anchor": "twice"},
        "e": {"$anchor": "twice"},
    },
}


@pytest.mark.parametrize(
    ("reference", "pointer"),
    [
        ("#", "#"),
        ("", "#"),
        ("#/$defs/a~1b", "#/$defs/a~1b"),
        ("#/%24defs/c/0", "#/$defs/c/0"),
        ("#here", "#/$defs/a~1b"),
        ("#there", "#/$defs/c/0"),
        ("http://x/y#/$defs/c", "#/$defs/c"),
        ("#twice", None),
        ("#nowhere", None),
        ("http://x/z#/$defs/c", None),
        ("other.json", None),
        (3, None),
    ],
)
def test_a_reference_is_a_pointer(reference, pointer):
    assert References(ROOT).pointer(reference) == pointer


def test_a_target_is_the_value_there_or_none():
    found = References(ROOT)
    assert found.target("#here") is ROOT["$defs"]["a/b"]
    assert found.target("#/$defs/c/0") is ROOT["$defs"]["c"][0]
    assert [found.target(f"#/{place}") for place in ("x", "$defs/c/1", "$defs/c/-1")] == [None] * 3

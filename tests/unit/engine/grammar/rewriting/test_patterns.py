"""Patterns of schemas follow ECMA-262, or are refused by name."""

import pytest

from engine.errors import GrammarError
from engine.grammar.rewriting.patterns import translated
from tests.kits.router.forms import allows, schema


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^.$", "\u0085", r"\r"),
        ("^.$", r"\\", "\u2028"),
        (r"^\s$", "\u00a0", "\u0085"),
        (r"^\s$", "\ufeff", "\u180e"),
        (r"^\S$", "\u0085", "\u00a0"),
        (r"^\d\w$", "1a", "\u0661a"),
        (r"^[\d.]$", "1", "\u0661"),
        (r"^[^\s]$", "\u0085", "\u3000"),
        ("^[a[b]$", "[", "]"),
        ("^[+--]$", ",", "x"),
        ("^[a-z&&[^b]]$", "&]", "c"),
        (r"^[\w-]+$", "a-b", "a.b"),
        ("^[^]$", r"\n", "ab"),
        (r"^[\s\S]*?x$", r"\n\rx", "y"),
        (r"^a\x1bb$", r"a\u001bb", "ab"),
        (r"^\cA\u{1F600}\ud83d\ude00$", r"\u0001😀😀", "ab"),
        (r"^[\b]$", r"\b", "b"),
        ("^a{,3}$", "a{,3}", "a"),
        (r"^(?<y>\d{4})-[\/.]$", "2020-/", "2020--"),
        (r"^a/b\/$", "a/b/", "ab"),
        (r"^\p{L}+$", "éa", "1"),
        (r"^[a-\d]$", "-", "b"),
        ("^}]$", "}]", "}"),
        ("^a|b$", "axx", "cc"),
        (r"^[\]\[\\^-]$", "^", "a"),
    ],
)
def test_a_pattern_means_what_the_standard_says(pattern, good, bad):
    wanted = schema({"type": "string", "pattern": pattern})
    assert allows(wanted, f'"{good}"')
    assert not allows(wanted, f'"{bad}"')


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)", "look-around"),
        ("^(?!x)", "look-around"),
        ("(?<=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"a\b", "word boundary"),
        (r"\B", "word boundary"),
        (r"(a)\1", "back-reference"),
        (r"(?<n>a)\k<n>", "back-reference"),
        ("[]", "empty character class"),
        ("[a", "not closed"),
        ("[z-a]", "empty"),
        (r"\A", "unknown"),
        (r"\ud800", "no character"),
        ("\\", "ends with"),
    ],
)
def test_a_pattern_without_a_translation_is_refused_by_name(pattern, why):
    with pytest.raises(GrammarError, match=why):
        translated(pattern)

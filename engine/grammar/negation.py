"""Expresses the negation of a JSON schema in positive keywords, as far as possible.

    type               the other types
    const, enum        other types, other texts by a pattern, the other of true and false
    required           an object without one of the keys
    properties         an object with a key whose value is wrong
    allOf              one part is not satisfied; anyOf: no part is satisfied
    lengths, bounds    smaller and larger values

A value violates a schema if it violates at least one keyword. So the result is a union of the
negated keywords. Keywords without a known negation are left out, and the result then allows less.

Source: JSON Schema 2020-12, core and validation.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from engine.errors import GrammarError
from engine.grammar.disjoint import (
    FRACTION,
    TYPES,
    Disjointness,
    is_among,
    is_number,
    names_in,
    type_of,
    types_of,
)

MAX_TEXTS = 64  # texts that one negation may exclude
MAX_NUMBERS = 64  # numbers that one negation may exclude
MAX_TEXTS_LEN = 2048  # characters of all excluded texts together
MAX_INSIDE = 8  # nested negations, with the negations that references lead to
MAX_NEGATIONS = 1000  # negations in one document: each may copy a part of the document

Json = Any
Schema = dict[str, Any]


class NoPositiveForm(Exception):
    """Raised for a negation that the compiler's keywords cannot express."""


class Negation:
    """Negates the schemas of one document."""

    def __init__(self, known: Disjointness) -> None:
        self._known = known
        self._num_negated = 0

    def of(self, schema: Json, inside: int = 0) -> Json:
        """Returns a schema whose values do not satisfy `schema`. Raises NoPositiveForm."""
        self._num_negated += 1
        if self._num_negated > MAX_NEGATIONS:
            raise GrammarError("the schema has too many negations")
        if inside > MAX_INSIDE:
            raise NoPositiveForm("it is nested too deeply")
        if schema is False:
            return True
        if not isinstance(schema, dict):
            raise NoPositiveForm("nothing remains")
        found: list[Json] = []
        why = "nothing of it has a positive form"
        for keyword, value in schema.items():
            if keyword in self._COMPLEMENTS:
                try:
                    found += self._COMPLEMENTS[keyword](self, value, inside)
                except NoPositiveForm as error:
                    why = str(error)
        if not found:
            raise NoPositiveForm(why)
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _no_type(self, kinds: Json, _: int) -> list[Json]:
        rest = TYPES - types_of({"type": kinds})
        return [{"type": type_names(rest)}] if type_names(rest) else []

    def _no_values(self, values: Json, _: int) -> list[Json]:
        """Negates `const` and `enum`: other types, other texts, and the boolean that is not
        listed.
        """
        excluded = _list(values)
        found: list[Json] = self._no_type_of(excluded)
        texts = [value for value in excluded if isinstance(value, str)]
        if texts and len(texts) <= MAX_TEXTS and sum(map(len, texts)) <= MAX_TEXTS_LEN:
            found.append({"type": "string", "pattern": f"^({other_texts(texts)})$"})
        numbers = sorted({value for value in excluded if type_of(value) in ("integer", FRACTION)})
        if numbers and len(numbers) <= MAX_NUMBERS:
            found += ({"type": "number", **bounds} for bounds in _beside(numbers))
        flags = [flag for flag in (True, False) if not is_among(flag, excluded)]
        if len(flags) == 1:
            found.append({"enum": flags})  # `enum`, because draft 4 has no `const`
        return found

    def _no_type_of(self, values: list[Json]) -> list[Json]:
        names = type_names(TYPES - types_of({"enum": values}))
        return [{"type": names}] if names else []

    def _no_const(self, value: Json, inside: int) -> list[Json]:
        return self._no_values([value], inside)

    def _no_required(self, names: Json, _: int) -> list[Json]:
        return [{"type": "object", **forbidding(name)} for name in names_in(names)]

    def _no_properties(self, properties: Json, inside: int) -> list[Json]:
        found: list[Json] = []
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            try:
                other = self.of(schema, inside + 1)
            except NoPositiveForm:
                continue
            found.append({"type": "object", "required": [name], "properties": {name: other}})
        return found

    def _no_part(self, parts: Json, inside: int) -> list[Json]:
        """Negates `allOf`: at least one part is not satisfied."""
        found: list[Json] = []
        for part in _list(parts):
            try:
                found.append(self.of(part, inside + 1))
            except NoPositiveForm:
                continue
        return found

    def _no_branch(self, branches: Json, inside: int) -> list[Json]:
        """Negates `anyOf`: no alternative is satisfied."""
        return [{"allOf": [self.of(each, inside + 1) for each in _list(branches)]}]

    def _no_reference(self, reference: Json, inside: int) -> list[Json]:
        return [self.of(self._known.target(reference), inside + 1)]

    def _no_not(self, schema: Json, _: int) -> list[Json]:
        return [schema]

    def _no_least_length(self, count: Json, _: int) -> list[Json]:
        return _shorter("string", "maxLength", count)

    def _no_most_length(self, count: Json, _: int) -> list[Json]:
        return [{"type": "string", "minLength": count + 1}] if is_count(count) else []

    def _no_least_items(self, count: Json, _: int) -> list[Json]:
        return _shorter("array", "maxItems", count)

    def _no_most_items(self, count: Json, _: int) -> list[Json]:
        return [{"type": "array", "minItems": count + 1}] if is_count(count) else []

    def _no_minimum(self, bound: Json, _: int) -> list[Json]:
        return [{"type": "number", "exclusiveMaximum": bound}]

    def _no_maximum(self, bound: Json, _: int) -> list[Json]:
        return [{"type": "number", "exclusiveMinimum": bound}]

    def _no_exclusive_minimum(self, bound: Json, _: int) -> list[Json]:
        return [{"type": "number", "maximum": bound}] if is_number(bound) else []

    def _no_exclusive_maximum(self, bound: Json, _: int) -> list[Json]:
        return [{"type": "number", "minimum": bound}] if is_number(bound) else []

    # The other keywords have no known negation, so the result leaves their values out.
    _COMPLEMENTS: ClassVar[dict[str, Callable[..., list[Json]]]] = {
        "type": _no_type,
        "enum": _no_values,
        "const": _no_const,
        "required": _no_required,
        "properties": _no_properties,
        "allOf": _no_part,
        "anyOf": _no_branch,
        "oneOf": _no_branch,
        "$ref": _no_reference,
        "not": _no_not,
        "minLength": _no_least_length,
        "maxLength": _no_most_length,
        "minItems": _no_least_items,
        "maxItems": _no_most_items,
        "minimum": _no_minimum,
        "maximum": _no_maximum,
        "exclusiveMinimum": _no_exclusive_minimum,
        "exclusiveMaximum": _no_exclusive_maximum,
    }


def _beside(numbers: Sequence[Json]) -> Iterator[Schema]:
    """Returns the ranges before, between and after ascending numbers."""
    yield {"exclusiveMaximum": numbers[0]}
    for low, high in pairwise(numbers):
        yield {"exclusiveMinimum": low, "exclusiveMaximum": high}
    yield {"exclusiveMinimum": numbers[-1]}


def other_texts(texts: Sequence[str]) -> str:
    """Returns a pattern, without anchors, that matches all texts except these."""
    by_first: dict[str, list[str]] = {}
    for text in dict.fromkeys(texts):
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    ways = [] if "" in texts else [""]
    ways += [re.escape(first) + f"({other_texts(rest)})" for first, rest in by_first.items()]
    firsts = "".join(f"\\{c}" if c in "\\]^[-&~" else c for c in by_first)
    ways.append(rf"[^{firsts}][\s\S]*" if firsts else r"[\s\S]+")
    return "|".join(ways)


def forbidding(name: str) -> Schema:
    """Returns a schema that allows all objects without this key, and all values that are not
    objects.
    """
    return {"properties": {name: False}}


def type_names(types: frozenset[str]) -> list[str]:
    """Returns these types as values of the keyword `type`, which cannot name fractions
    alone.
    """
    names = sorted(types - {"integer", "fraction"})
    if {"integer", "fraction"} <= types:
        return [*names, "number"]
    return [*names, "integer"] if "integer" in types else names


def is_count(value: Json) -> bool:
    """True for an integer; false for `True` and `False`, although Python counts them as
    integers.
    """
    return isinstance(value, int) and not isinstance(value, bool)


def _shorter(kind: str, keyword: str, count: Json) -> list[Json]:
    return [{"type": kind, keyword: count - 1}] if is_count(count) and count > 0 else []


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []

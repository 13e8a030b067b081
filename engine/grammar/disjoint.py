"""Proves that no JSON value satisfies two schemas. Sound, but not complete: a proof may be missed.

A schema is read as a conjunction of its own keywords, its parts of `allOf` and the schemas to which
it refers. Two schemas are *apart* if no value satisfies both. The proof covers each type that both
schemas allow. It uses values, ranges, lengths, formats, a property that both schemas require, or a
key that one schema requires and the other forbids.

Source: JSON Schema 2020-12, core and validation.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from engine.errors import GrammarError
from engine.grammar.references import References

MAX_STEPS = 10_000  # schemas that are examined for one document; this takes at most 0.5 s
MAX_INSIDE = 8  # nested schemas, and references in one chain

Json = Any
Schema = dict[str, Any]

_LITERAL = re.compile(r"\^([\w -]*)\$", re.ASCII)  # a pattern that only one text matches
# Longest text that is matched against a pattern. The time of a match may grow fast with the length.
MAX_TEXT_LEN = 64
FRACTION = "fraction"  # the type of numbers that are not integers
TYPES = frozenset({"null", "boolean", "object", "array", "string", "integer", FRACTION})
# Formats that exclude each other: no text has two of them.
_APART = frozenset({"date", "ipv4", "ipv6", "uuid", "email"})


class Facts(NamedTuple):
    """All conditions that each value of one schema must satisfy."""

    parts: tuple[Schema, ...]  # a value must satisfy every part
    types: frozenset[str]

    @property
    def required(self) -> frozenset[str]:
        """Returns the keys that an object must have."""
        return frozenset(name for part in self.parts for name in names_in(part.get("required", [])))

    def values(self) -> list[Json] | None:
        """Returns the allowed values if a part lists them; None otherwise."""
        for part in self.parts:
            if "const" in part:
                return [part["const"]]
            if isinstance(part.get("enum"), list):
                return list(part["enum"])
            literal = _LITERAL.fullmatch(str(part.get("pattern", "")))
            if literal is not None and self.types <= {"string"}:
                return [literal[1]]
        return None

    def excludes(self, text: str) -> bool:
        """True if no part with a pattern can match this text."""
        return any(not _may_match(part.get("pattern"), text) for part in self.parts)

    def of_property(self, name: str) -> Iterator[Json]:
        """Returns the schemas that the value of this key must satisfy."""
        for part in self.parts:
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                yield properties[name]
            elif not part.get("patternProperties") and "additionalProperties" in part:
                yield part["additionalProperties"]

    def names(self, name: str) -> bool:
        """True if a part of the schema mentions the key."""
        return any(name in (part.get("properties") or {}) for part in self.parts)


class Disjointness:
    """Compares pairs of schemas of one document."""

    def __init__(self, root: Json, max_steps: int = MAX_STEPS) -> None:
        self.references = References(root)
        self._max_steps = max_steps
        self._num_steps = 0
        # Keyed by a schema's `id()`. Each entry keeps its schema alive, so that no other schema
        # gets its id.
        self._facts: dict[int, tuple[Json, Facts]] = {}

    def apart(self, one: Json, other: Json, *, inside: int = 0) -> bool:
        """True if there is a proof that no value satisfies both schemas. Raises GrammarError if the
        proof takes too long.
        """
        self._step()
        if one is False or other is False:
            return True
        if inside > MAX_INSIDE:
            return False
        left, right = self.facts(one), self.facts(other)
        types = left.types & right.types
        if not types or self._values_apart(left, right) or self._values_apart(right, left):
            return True
        if self._branches_apart(left, other, inside) or self._branches_apart(right, one, inside):
            return True
        return all(self._apart_as(kind, left, right, inside) for kind in types)

    def facts(self, schema: Json) -> Facts:
        """Returns the conditions that each value of this schema must satisfy."""
        found = self._facts.get(id(schema))
        if found is not None and found[0] is schema:
            return found[1]
        parts: list[Schema] = []
        self._collect(schema, parts, 0)
        types = TYPES
        for part in parts:
            types &= types_of(part)
        facts = Facts(tuple(parts), types)
        self._facts[id(schema)] = (schema, facts)
        return facts

    def target(self, reference: Json) -> Json:
        """Returns the schema at which a reference points; None if the document does not contain
        it.
        """
        return self.references.target(reference)

    def _collect(self, schema: Json, parts: list[Schema], inside: int) -> None:
        """Adds the conditions of a schema. Conditions that this module does not understand are left
        out.
        """
        if not isinstance(schema, dict) or inside > MAX_INSIDE:
            return
        self._step()
        parts.append(schema)
        if "$ref" in schema:
            self._collect(self.target(schema["$ref"]), parts, inside + 1)
        together = schema.get("allOf")
        for part in together if isinstance(together, list) else ():
            self._collect(part, parts, inside + 1)

    def _step(self) -> None:
        self._num_steps += 1
        if self._num_steps > self._max_steps:
            raise GrammarError("comparing the schema's alternatives takes too long")

    def _values_apart(self, one: Facts, other: Facts) -> bool:
        """True if one schema lists all its values, and the other schema allows none of them."""
        values, others = one.values(), other.values()
        if values is None:
            return False
        return not any(
            type_of(value) in other.types
            and (others is None or is_among(value, others))
            and not (isinstance(value, str) and other.excludes(value))
            for value in values
        )

    def _branches_apart(self, one: Facts, other: Json, inside: int) -> bool:
        """True if every alternative of one schema is apart from the other schema."""
        for part in one.parts:
            for keyword in ("anyOf", "oneOf"):
                branches = part.get(keyword)
                if not isinstance(branches, list) or not branches:
                    continue
                if all(self.apart(each, other, inside=inside + 1) for each in branches):
                    return True
        return False

    def _apart_as(self, kind: str, one: Facts, other: Facts, inside: int) -> bool:
        """True if no value of this type satisfies both schemas."""
        parts = (*one.parts, *other.parts)
        match kind:
            case "integer" | "fraction":
                return _ranges_apart(parts)
            case "string":
                formats = {part.get("format") for part in parts if "format" in part}
                return len(formats & _APART) > 1 or _counts_apart(parts, "minLength", "maxLength")
            case "array":
                return self._arrays_apart(one, other, inside)
            case "object":
                names = one.required | other.required
                return any(self._apart_at(name, one, other, inside) for name in sorted(names))
        return False

    def _arrays_apart(self, one: Facts, other: Facts, inside: int) -> bool:
        parts = (*one.parts, *other.parts)
        if _counts_apart(parts, "minItems", "maxItems"):
            return True
        if not any(_is_count(part.get("minItems")) and part["minItems"] > 0 for part in parts):
            return False
        items = [list(_items_of(facts)) for facts in (one, other)]
        return any(self.apart(x, y, inside=inside + 1) for x in items[0] for y in items[1])

    def items_apart(self, one: Json, other: Json) -> bool:
        """True if only an empty array can satisfy both schemas."""
        items = [list(_items_of(self.facts(each))) for each in (one, other)]
        return any(self.apart(x, y) for x in items[0] for y in items[1])

    def key_apart(self, one: Json, other: Json) -> str | None:
        """Returns a key that the first schema mentions, and that no object satisfying both schemas
        can have; None if there is no such key.
        """
        left, right = self.facts(one), self.facts(other)
        names = (name for part in left.parts for name in part.get("properties") or {})
        return next((name for name in names if self._apart_at(name, left, right, 0)), None)

    def _apart_at(self, name: str, one: Facts, other: Facts, inside: int) -> bool:
        """True if no value of this key satisfies both schemas."""
        left, right = list(one.of_property(name)), list(other.of_property(name))
        if any(each is False for each in (*left, *right)):
            return True
        return any(self.apart(x, y, inside=inside + 1) for x in left for y in right)


def types_of(schema: Mapping[str, Json]) -> frozenset[str]:
    """Returns the types that the keywords `type`, `const` and `enum` of a schema allow."""
    kinds = schema.get("type", sorted(TYPES))
    found: set[str] = set()
    for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else TYPES:
        found |= {"integer", FRACTION} if kind == "number" else {kind}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found &= set(map(type_of, values))
    return frozenset(found) & TYPES


def type_of(value: Json) -> str:
    """Returns the type of a value, by its name in TYPES."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else FRACTION
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_among(value: Json, values: list[Json]) -> bool:
    """True if a value is in a list. Equality is JSON's: 1 equals 1.0, but does not equal true."""
    return any(type_of(each) == type_of(value) and each == value for each in values)


def names_in(names: Json) -> list[str]:
    """Returns the elements that are texts, from a list that a client sent."""
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _items_of(facts: Facts) -> Iterator[Json]:
    """Returns the schemas that each item of an array must satisfy."""
    if not any("prefixItems" in part for part in facts.parts):
        for part in facts.parts:
            if isinstance(part.get("items"), dict):
                yield part["items"]


def _may_match(pattern: Json, text: str) -> bool:
    """False if a pattern certainly does not match a text. True in doubt: Python reads some patterns
    differently from ECMA-262.

    Python's `$` also matches before a last line break, so Python's patterns match more texts.
    """
    if not isinstance(pattern, str) or len(text) > MAX_TEXT_LEN or not text.isascii():
        return True
    if _MAY_BE_SLOW.search(pattern) is not None:
        return True
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return True


_MAY_BE_SLOW = re.compile(r"[*+}?]\)|\)[*+{]|\\[1-9]|\\[pP]|\[\[|\(\?")


def _ranges_apart(parts: tuple[Schema, ...]) -> bool:
    least = [(part[name], name) for part in parts for name in _LEAST if is_number(part.get(name))]
    most = [(part[name], name) for part in parts for name in _MOST if is_number(part.get(name))]
    return any(
        low > high or (low == high and (name in _STRICT or other in _STRICT))
        for low, name in least
        for high, other in most
    )


_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_STRICT = ("exclusiveMinimum", "exclusiveMaximum")


def _counts_apart(parts: tuple[Schema, ...], least: str, most: str) -> bool:
    low = max((part[least] for part in parts if _is_count(part.get(least))), default=0)
    high = min((part[most] for part in parts if _is_count(part.get(most))), default=None)
    return high is not None and low > high


def is_number(value: Json) -> bool:
    """True for a number; false for true and false, which are numbers in Python."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

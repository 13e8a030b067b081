"""Rewrites keywords that the schema compiler lacks into keywords that it knows.

The compiler supports unions and intersections, but no negation. `oneOf` contains a negation:
exactly one alternative is satisfied, so none of the others. Here these keywords become positive:

    oneOf              anyOf, if the alternatives are apart, or are made so by forbidding a key or
                       by the negation of the other one
    not                what remains: other types, an absent key, other texts
    if, then, else     (if and then) or (not if, and else)
    dependencies       for each key: it is absent, or what depends on it holds
    format             one that the compiler knows and that allows no more; else a note
    $ref               to a place by its pointer, also where an anchor or the own $id names it

`engine.grammar.keywords` must first have replaced keywords that are only other names.

The result allows nothing that the schema forbids. It may allow less than the schema if a part of a
negation has no positive form. If no part has a positive form, GrammarError names the keyword.

Source: JSON Schema 2020-12, core and validation. That an unknown `format` is a note is in §7.2.1.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any
from urllib.parse import quote

from engine.errors import GrammarError
from engine.grammar.disjoint import Disjointness, types_of
from engine.grammar.keywords import in_known_keywords
from engine.grammar.negation import Negation, NoPositiveForm, forbidding, type_names
from engine.grammar.references import escaped

MAX_INSIDE = 64  # nested schemas; `engine.grammar.json_schemas` checks this bound as well
MAX_DEPENDENT = 8  # keys with dependencies in one object: the compiler tries each combination

Json = Any
Schema = dict[str, Any]

NAMED = ("properties", "patternProperties", "$defs", "definitions")
MANY = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
ONE = ("items", "additionalItems", "additionalProperties")
FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email"),
        *("hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"),
    }
)
# Formats of the standard, each with a schema that allows no texts outside the format.
NARROWER: dict[str, Schema] = {
    "idn-email": {"format": "email"},
    "idn-hostname": {"format": "hostname"},
    "iri": {"format": "uri"},
    "iri-reference": {"format": "uri"},
    "uri-reference": {"format": "uri"},
    "uri-template": {"format": "uri"},
    "json-pointer": {"pattern": "^(/([^/~]|~[01])*)*$"},
    "relative-json-pointer": {"pattern": "^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$"},
}
_BRANCHING = ("if", "then", "else")
_DEPENDENT = ("dependencies", "dependentRequired", "dependentSchemas")


def positive(schema: Json) -> Json:
    """Returns a schema that the compiler knows and that allows nothing that `schema` forbids.

    The caller must have checked the schema's nesting. Raises GrammarError, which names the keyword
    and its place.
    """
    return _Positive(schema).result


class _Positive:
    """One document during its rewriting."""

    def __init__(self, root: Json) -> None:
        self._known = Disjointness(root)
        self._negation = Negation(self._known)
        self._moved: dict[str, str] = {}  # new names of moved definitions, by old pointers
        self.result: Json = self.rewritten(root, "#")
        self._define_moved()

    def _define_moved(self) -> None:
        """Adds definitions for referenced schemas that are at places where the compiler does not
        look.
        """
        found: Schema = {}
        while len(found) < len(self._moved):
            reference, name = list(self._moved.items())[len(found)]
            found[name] = self.rewritten(self._known.target(reference), reference)
        if found:
            defined = self.result.get("$defs", {})
            self.result["$defs"] = {**(defined if isinstance(defined, dict) else {}), **found}

    def rewritten(self, schema: Json, at: str, inside: int = 0) -> Json:
        if not isinstance(schema, dict) or inside > MAX_INSIDE:
            return schema
        schema = in_known_keywords(schema, at)
        self._place_reference(schema)
        if at != "#" and "$id" in schema and not _refers(schema):
            del schema["$id"]  # `$id` is the base of references, but this schema contains none
        together: list[Json] = []  # further schemas that each value must satisfy
        if "if" in schema:
            together.append(self._branched(schema, at))
        for keyword in _BRANCHING:
            schema.pop(keyword, None)
        for keyword in _DEPENDENT:
            together += self._dependent(schema.pop(keyword, None), at)
        if len(together) > MAX_DEPENDENT:
            raise GrammarError(f"more than {MAX_DEPENDENT} keys have dependencies (at {at})")
        if "not" in schema:
            together.append(self._negated(schema.pop("not"), at))
        if isinstance(schema.get("oneOf"), list):
            branches = self._separated(schema.pop("oneOf"), types_of(schema), at)
            together.append({"anyOf": branches})
        self._record_format(schema)
        schema = _with_all(schema, together)
        return {k: self._below(k, value, at, inside) for k, value in schema.items()}

    def _below(self, keyword: str, value: Json, at: str, inside: int) -> Json:
        place = f"{at}/{keyword}"
        if keyword in NAMED and isinstance(value, dict):
            return {
                name: self.rewritten(part, f"{place}/{escaped(name)}", inside + 1)
                for name, part in value.items()
            }
        if keyword in MANY and isinstance(value, list):
            return [self.rewritten(v, f"{place}/{i}", inside + 1) for i, v in enumerate(value)]
        return self.rewritten(value, place, inside + 1) if keyword in ONE else value

    def _place_reference(self, schema: Schema) -> None:
        """Redirects a reference to a new definition if the compiler would not look at the old
        place.
        """
        reference = schema.get("$ref")
        pointer = self._known.references.pointer(reference)
        if pointer is None or pointer == "#":
            return
        schema["$ref"] = reference = quote(pointer, safe="#/~")
        target = self._known.target(reference)
        if not isinstance(target, dict | bool) or _is_at_schema(reference):
            return
        name = self._moved.setdefault(reference, f"moved {len(self._moved)}")
        schema["$ref"] = f"#/$defs/{name}"

    def _record_format(self, schema: Schema) -> None:
        """Removes formats that the compiler does not know."""
        name = schema.get("format")
        if not isinstance(name, str) or name in FORMATS:
            return
        del schema["format"]
        narrower = NARROWER.get(name)
        if narrower is not None and "string" in types_of(schema):
            schema["allOf"] = [*_list(schema.get("allOf")), narrower]

    # ------------------------------------------------------------ oneOf

    def _separated(self, branches: list[Json], around: frozenset[str], at: str) -> list[Json]:
        """Returns the alternatives. Each one excludes the values that another alternative allows.
        Raises GrammarError.

        `around` are the types that the surrounding schema allows.
        """
        branches = [branch for branch in branches if branch is not False]
        narrower: list[list[Json]] = [[] for _ in branches]
        for i, j in combinations(range(len(branches)), 2):
            if self._known.apart(branches[i], branches[j]):
                continue
            for this, that in ((i, j), (j, i)):
                more = self._what_excludes(branches[that], branches[this], around)
                if more is None:
                    more = self._opposite(branches[that], branches[this], around)
                if more is None:
                    why = f"oneOf: a value may satisfy both alternative {i} and alternative {j}"
                    raise GrammarError(f"{why} (at {at})")
                if more and more not in narrower[this]:
                    narrower[this].append(more)
        return [
            {"allOf": [branch, *more]} if more else branch
            for branch, more in zip(branches, narrower, strict=True)
        ]

    def _what_excludes(self, other: Json, one: Json, around: frozenset[str]) -> Schema | None:
        """Returns a further condition for `one`, under which its values are not values of `other`.

        The condition may forbid or require a key of objects, or require an item of arrays. The two
        schemas must share no values of other types. Returns None if no value would be left.
        """
        allowed = self._known.facts(one).types & around
        common = allowed & self._known.facts(other).types
        more: Schema = {}
        left = allowed - common
        if "object" in common and (of_keys := self._of_keys(other, one)) is not None:
            more |= of_keys
            left |= {"object"}
        if "array" in common and self._known.items_apart(one, other):
            more["minItems"] = 1
            left |= {"array"}
        if left == allowed:
            return more
        names = type_names(left)
        return more | {"type": names} if names else None

    def _opposite(self, other: Json, one: Json, around: frozenset[str]) -> Schema | None:
        """Returns the negation of `other`, limited to the types of `one`; None if no value of `one`
        is left.
        """
        try:
            negated = self._negation.of(other)
        except NoPositiveForm:
            return None
        is_union = isinstance(negated, dict) and negated.keys() == {"anyOf"}
        parts = negated["anyOf"] if is_union else [negated]
        allowed = self._known.facts(one).types & around
        left = [
            part for part in parts if part is not False and self._known.facts(part).types & allowed
        ]
        if True in left:
            return {}
        if not left:
            return None
        return left[0] if len(left) == 1 else {"anyOf": left}

    def _of_keys(self, other: Json, one: Json) -> Schema | None:
        """Returns the condition of `_what_excludes` for objects. Prefers to forbid a key that `one`
        does not mention.
        """
        left, right = self._known.facts(one), self._known.facts(other)
        absent = sorted(right.required - left.required, key=lambda name: (left.names(name), name))
        if absent and not left.names(absent[0]):
            return forbidding(absent[0])
        if (needed := self._known.key_apart(one, other)) is not None:
            return {"required": [needed]}
        return forbidding(absent[0]) if absent else None

    # ------------------------------------------------------------ not, if, dependencies

    def _negated(self, schema: Json, at: str) -> Json:
        try:
            return self._negation.of(schema)
        except NoPositiveForm as error:
            raise GrammarError(f"not: {error} (at {at})") from error

    def _branched(self, schema: Schema, at: str) -> Json:
        condition, then, otherwise = (schema.get(name, True) for name in _BRANCHING)
        if then is True and otherwise is True:
            return True
        try:
            no = self._negation.of(condition)
        except NoPositiveForm as error:
            raise GrammarError(f"if: {error} (at {at})") from error
        return {"anyOf": [_both(condition, then), _both(no, otherwise)]}

    def _dependent(self, needed: Json, at: str) -> Iterator[Json]:
        """Rewrites `dependencies`: either the key is absent, or its dependent schema is
        satisfied.
        """
        for name, needs in needed.items() if isinstance(needed, dict) else ():
            if isinstance(needs, list):
                needs = {"required": needs}
            yield {"anyOf": [forbidding(name), needs]}


def _is_at_schema(reference: str) -> bool:
    """True if rewriting leaves all keywords on a reference's path at their places."""
    parts = iter(reference.split("/")[1:])
    for part in parts:
        if part in NAMED or (part in MANY and part not in ("items", "oneOf")):
            next(parts, None)
        elif part not in ONE:
            return False
    return True


def _refers(schema: Json) -> bool:
    """True if a schema contains a reference, at any depth."""
    pending = [schema]
    while pending:
        match pending.pop():
            case dict() as entries:
                if "$ref" in entries or "$dynamicRef" in entries:
                    return True
                pending += entries.values()
            case list() as items:
                pending += items
    return False


def _both(one: Json, other: Json) -> Json:
    parts = [part for part in (one, other) if part is not True]
    return parts[0] if len(parts) == 1 else {"allOf": parts}


def _with_all(schema: Schema, together: Sequence[Json]) -> Schema:
    """Returns the schema, extended by further conditions."""
    parts = [part for part in together if part is not True]
    if len(parts) == 1 and isinstance(parts[0], dict) and not parts[0].keys() & schema.keys():
        return {**schema, **parts[0]}
    return {**schema, "allOf": [*_list(schema.get("allOf")), *parts]} if parts else schema


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []

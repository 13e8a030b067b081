"""Checks JSON Schemas and makes them stricter before they are compiled.

llguidance compiles most of JSON Schema, and refuses most of the other keywords by name. This module
covers the rest, so that every answer that the compiled grammar allows is valid under the schema. It
refuses keywords that the compiler would follow wrongly. It tightens formats that the compiler
follows too loosely. `engine.grammar.positive` must have rewritten alternatives, negations and
conditions before. This module works on decoded JSON, without tokens or the compiler.

It refuses, for these reasons:

- `minProperties` that may need two keys of the client's choosing: a key may occur twice
- references that do not lead to a subschema of the same document: nothing is fetched
- numbers that a double cannot represent, because the compiler rounds them
- `prefixItems` with `additionalItems`, because drafts differ on the meaning of the latter
- patterns with look-around
- control characters in values, where keys of any name would make their escapes ambiguous
- more nesting, references included, than is safe for a compiler's stack
- counts whose square or product bounds the compiler's work: properties, `multipleOf`

Sources: JSON Schema 2020-12, core and validation; RFC 3339 §5.6; llguidance, docs/json_schema.md.
"""

from collections.abc import Iterator
from decimal import Decimal
from math import lcm
from typing import Any
from urllib.parse import quote, unquote

from engine.errors import GrammarError
from engine.grammar.positive import positive
from engine.grammar.rewriting.finite import finite
from engine.grammar.rewriting.key_spelling import KeySpelling
from engine.grammar.rewriting.patterns import translated

MAX_NESTING = 64  # nested subschemas
MAX_DEPTH = 200  # nested subschemas, including those that references lead to
MAX_EXACT_INT = 2**53  # above this number, a double cannot represent every integer
MAX_JSON_NESTING = 200  # nested levels of the JSON document, values included
MAX_PROPERTIES = 1000  # properties of one object: the compiler's work grows with their square
MAX_COMMON_MULTIPLE = 10_000  # the compiler makes a state for each remainder

COMPACT = {"whitespace_flexible": False}  # compiler options for JSON without whitespace

Json = Any
Schema = dict[str, Any]

_OPTIONS = "x-guidance"  # the key of a schema from which the compiler reads its options
# JSON in the forms that models write. With unlimited whitespace a model might never end its answer.
_BLANKS = {"whitespace_pattern": r"( |\n {0,40}|\n\t{0,10})"}
_ONE = ("items", "additionalItems", "additionalProperties")
_MANY = ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_UPPER = ("maximum", "exclusiveMaximum")
_LOWER = ("minimum", "exclusiveMinimum")
_VALUES = ("const", "enum")
_OPENING = {"additionalProperties", "unevaluatedProperties", "patternProperties"}
_SUBSCHEMAS = {"$ref", "allOf", "anyOf", "oneOf"}
_COMBINING = {"$ref", "anyOf", "oneOf", "multipleOf"}

# The compiler's own formats accept 29 February in every year and second 60 in every minute.
_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][48]|[2468]0|[13579][26])00)"
_DATE = rf"({_YEAR}-((0[13-9]|1[0-2])-[0-9]{{2}}|02-([01][0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5]"
_TIGHTER = {"date": f"^{_DATE}$", "time": f"^{_TIME}", "date-time": f"^{_DATE}[tT]{_TIME}"}


def followed(schema: Json) -> Schema:
    """Returns a schema, ready to be compiled, that allows nothing that `schema` forbids.

    Raises GrammarError for keywords that cannot be followed. The compiler reports other errors.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError("a schema must be an object or a boolean")
    if schema is False:
        raise GrammarError("nothing satisfies the schema false")
    check_nesting(schema)
    root: Schema = {} if schema is True else schema
    compact = root.get(_OPTIONS) == COMPACT
    if compact:
        root = {name: value for name, value in root.items() if name != _OPTIONS}
    found = _Rewriting(_satisfiable(positive(root)))
    options = {**(COMPACT if compact else _BLANKS), "json_allowed_escapes": found.escapes}
    return {**found.result, _OPTIONS: options}


def _satisfiable(schema: Schema) -> Schema:
    pruned: Json = finite(schema)
    if not isinstance(pruned, dict):
        raise GrammarError("no finite value satisfies the schema")
    return pruned


def closed(schema: Json) -> Json:
    """Returns the schema with `additionalProperties: false` in each object that does not set it.

    OpenAI requires this key in strict schemas; here it is added. A schema that combines subschemas,
    by `allOf` of several or beside `properties`, is left unchanged: closing a part would contradict
    the others. Schemas that a combined subschema refers to are left unchanged too. The caller must
    have checked the schema's nesting.
    """
    open_ones: set[str] = set()
    _find_combined(schema, open_ones)
    return _closed(schema, "#", open_ones)


def _closed(schema: Json, at: str, open_ones: set[str]) -> Json:
    if not isinstance(schema, dict) or at in open_ones or _combines(schema):
        return schema
    result = dict(schema)
    for keyword, value in schema.items():
        place = f"{at}/{keyword}"
        if keyword in _NAMED and isinstance(value, dict):
            result[keyword] = {
                name: _closed(part, f"{place}/{_escaped(name)}", open_ones)
                for name, part in value.items()
            }
        elif keyword in _MANY and isinstance(value, list):
            result[keyword] = [_closed(v, f"{place}/{i}", open_ones) for i, v in enumerate(value)]
        elif keyword in _ONE:
            result[keyword] = _closed(value, place, open_ones)
    kinds = schema.get("type", "object" if "properties" in schema else ())
    of_object = isinstance(kinds, str | list) and "object" in kinds
    if of_object and not schema.keys() & _OPENING:
        result["additionalProperties"] = False
    return result


def _combines(schema: Schema) -> bool:
    """True if several subschemas describe the keys of the same object."""
    parts = schema.get("allOf")
    several = isinstance(parts, list) and len(parts) > 1
    return several or ("properties" in schema and bool(schema.keys() & _SUBSCHEMAS))


def _find_combined(schema: Json, found: set[str], *, combined: bool = False) -> None:
    """Adds the places of all schemas to which combined subschemas refer."""
    if isinstance(schema, list):
        for part in schema:
            _find_combined(part, found, combined=combined)
    elif isinstance(schema, dict):
        combined |= _combines(schema)
        if combined and isinstance(schema.get("$ref"), str):
            found.add(_pointer(schema["$ref"]))
        for part in schema.values():
            _find_combined(part, found, combined=combined)


def check_nesting(value: Json) -> None:
    """Raises GrammarError if JSON is nested too deeply for recursive functions."""
    level, depth = [value], 0
    while level:
        if depth > MAX_JSON_NESTING:
            raise GrammarError(f"JSON is nested more than {MAX_JSON_NESTING} deep")
        inner: list[Json] = []
        for item in level:
            if isinstance(item, list):
                inner += item
            elif isinstance(item, dict):
                inner += item.values()
        level, depth = inner, depth + 1


class _Rewriting:
    """One document during its rewriting."""

    def __init__(self, root: Schema) -> None:
        if _OPTIONS in root:
            raise _refusal("#", f"{_OPTIONS} is not supported")
        # for each pointer: the subschemas that the compiler compiles after it
        self._children: dict[str, list[str]] = {}
        self._multiples: set[Decimal] = set()
        self._combines = False
        self._keys = KeySpelling(root)
        self.result: Schema = self._rewrite(root, "#", nesting=0)
        self.escapes = self._keys.escapes
        self._check_multiples()
        self._check_references()

    def _rewrite(self, schema: Json, at: str, nesting: int) -> Json:
        if nesting > MAX_NESTING:
            raise GrammarError(f"the schema is nested more than {MAX_NESTING} deep")
        self._children[at] = []
        if not isinstance(schema, dict):
            return schema
        _check_keywords(schema, at)
        if _is_number(schema.get("multipleOf")):
            self._multiples.add(abs(Decimal(str(schema["multipleOf"]))))
        self._combines |= "allOf" in schema or len(_COMBINING & schema.keys()) > 1
        result = {k: self._rewrite_keyword(k, v, at, nesting) for k, v in schema.items()}
        if isinstance(schema.get("$ref"), str):
            self._children[at].append(pointer := _pointer(schema["$ref"]))
            result["$ref"] = quote(pointer, safe="#/~")
        return self._keys.closed(_translated(_tightened(result), at))

    def _rewrite_keyword(self, keyword: str, value: Json, at: str, nesting: int) -> Json:
        if keyword in _NAMED and isinstance(value, dict):
            entries = {name: f"{at}/{keyword}/{_escaped(name)}" for name in value}
            if keyword in ("properties", "patternProperties"):
                self._children[at] += entries.values()
            return {
                name: self._rewrite(value[name], to, nesting + 1) for name, to in entries.items()
            }
        if keyword in _MANY and isinstance(value, list):
            places = [f"{at}/{keyword}/{i}" for i in range(len(value))]
            self._children[at] += places
            return [self._rewrite(v, to, nesting + 1) for v, to in zip(value, places, strict=True)]
        if keyword in _ONE and isinstance(value, dict):
            self._children[at].append(f"{at}/{keyword}")
            return self._rewrite(value, f"{at}/{keyword}", nesting + 1)
        return value

    def _check_multiples(self) -> None:
        """Bounds the states that the compiler creates for `multipleOf`, alone or in combination.

        The compiler multiplies combined values in 32 bits and does not check for overflow.
        """
        places = {m: max(-int(m.as_tuple().exponent), 0) for m in self._multiples if m}
        most = max(places.values(), default=0)
        alone = max((_scaled(m, digits) for m, digits in places.items()), default=0)
        met = lcm(*(_scaled(m, most) for m in places)) if self._combines else 0
        if max(alone, met) > MAX_COMMON_MULTIPLE:
            raise _refusal("#", f"multipleOf leads to more than {MAX_COMMON_MULTIPLE} remainders")

    def _check_references(self) -> None:
        """Checks that each reference leads to a subschema and that references are not nested too
        deeply. Each reference is followed once, as in the compiler.
        """
        seen: set[str] = set()

        def visit(at: str, depth: int) -> None:
            if depth > MAX_DEPTH:
                raise GrammarError(f"the schema's references lead more than {MAX_DEPTH} deep")
            for child in self._children[at]:
                if child in self._children and child not in seen:
                    seen.add(child)
                    visit(child, depth + 1)
                elif child not in self._children:
                    raise GrammarError(f"$ref {child!r} does not lead to a subschema")

        visit("#", 0)


def _check_keywords(schema: Schema, at: str) -> None:
    """Raises GrammarError for keywords that the compiler would accept but ignore."""
    if at != "#" and "$id" in schema:
        raise _refusal(at, "$id is supported at the top only")
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
        raise _refusal(at, f"$ref must begin with '#/', and is {reference!r}")
    if "prefixItems" in schema and "additionalItems" in schema:
        raise _refusal(at, "prefixItems and additionalItems cannot be combined")
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    num_required = len({str(name) for name in required}) if isinstance(required, list) else 0
    if isinstance(least, int) and least > num_required + 1:
        raise _refusal(at, "minProperties may exceed the number of required properties by one only")
    properties = schema.get("properties")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise _refusal(at, f"an object has more than {MAX_PROPERTIES} properties")
    for keyword in _NUMBERS:
        if isinstance(schema.get(keyword), bool):
            raise _refusal(at, f"{keyword} must be a number")
    for keyword in (*_NUMBERS, *_VALUES):
        if any(abs(number) > MAX_EXACT_INT for number in _numbers_in(_clamped(schema, keyword))):
            raise _refusal(at, f"{keyword} holds a number too large to be followed exactly")


def _translated(schema: Schema, at: str) -> Schema:
    """Returns the schema. Its patterns are translated to the compiler's syntax."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _as_compiled(schema["pattern"], at)
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {
            _as_compiled(pattern, at): part for pattern, part in schema["patternProperties"].items()
        }
    return schema


def _as_compiled(pattern: str, at: str) -> str:
    try:
        return translated(pattern)
    except GrammarError as error:
        raise _refusal(at, f"pattern {pattern!r}: {error}") from error


def _tightened(schema: Schema) -> Schema:
    """Returns the schema with exact bounds. A pattern is added to each format that the compiler
    follows too loosely.
    """
    result = {keyword: _clamped(schema, keyword) for keyword in schema}
    if schema.get("uniqueItems") is False:  # false is the only value that has no effect
        del result["uniqueItems"]
    name, others = schema.get("format"), schema.get("allOf", [])
    if isinstance(name, str) and name in _TIGHTER and isinstance(others, list):
        result["allOf"] = [*others, {"pattern": _TIGHTER[name]}]
    return result


def _clamped(schema: Schema, keyword: str) -> Json:
    """Returns a keyword's value. Bounds are clamped to the range of exact integers."""
    value: Json = schema.get(keyword)
    if keyword in _UPPER and _is_number(value) and value > MAX_EXACT_INT:
        return MAX_EXACT_INT
    if keyword in _LOWER and _is_number(value) and value < -MAX_EXACT_INT:
        return -MAX_EXACT_INT
    return value


def _numbers_in(value: Json) -> Iterator[int | float]:
    """Yields the numbers in a value, at any depth. Not recursive, because the depth is unbounded
    here.
    """
    pending = [value]
    while pending:
        match pending.pop():
            case bool():
                pass
            case int() | float() as number:
                yield number
            case list() as items:
                pending += items
            case dict() as entries:
                pending += entries.values()


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaled(number: Decimal, digits: int) -> int:
    """Returns number * 10**digits, cut at a bound. Larger numbers are refused in any case."""
    if number.adjusted() + digits > 10:
        return MAX_COMMON_MULTIPLE + 1
    return int(number.scaleb(digits))


def _pointer(reference: str) -> str:
    """Returns a reference's fragment as a pointer in this module's form."""
    return "#" + "".join(
        "/" + _escaped(part.replace("~1", "/").replace("~0", "~"))
        for part in unquote(reference).split("/")[1:]
    )


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refusal(at: str, why: str) -> GrammarError:
    return GrammarError(f"{why} (at {at})")

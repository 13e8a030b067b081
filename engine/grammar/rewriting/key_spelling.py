"""Decides how strings and keys of a schema may be spelled, so that no key has two spellings. Pure.

JSON can write any character of a key as `\\uXXXX`. The compiler compares keys in their written
form. If an object has named keys and further keys, an escaped spelling of a named key would be
accepted as a further key.

A control character can only be written as an escape. So escapes are allowed where they are
harmless: a pattern describes an object's further keys, in which only control characters may be
escaped. If subschemas of one object are combined, or patterns name keys, no such pattern is
possible. Then no escapes are allowed, and a value with a control character is refused.
"""

import re
from collections.abc import Iterator
from typing import Any

from engine.errors import GrammarError
from engine.grammar.disjoint import names_in, types_of
from engine.grammar.negation import other_texts
from engine.grammar.rewriting.patterns import translated

PLAIN_ESCAPES = 'nrbtf\\"'
MAX_NAMES = 200  # named keys that one pattern can exclude

Json = Any
Schema = dict[str, Any]

_OF_KEYS = ("properties", "patternProperties", "additionalProperties", "required")
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf"}
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_IN_PATTERN = re.compile(r"\\x\{(?:[0-7bef]|1[0-9a-f]|7f)\}")


class KeySpelling:
    """The allowed spellings of strings and keys in answers to one document."""

    def __init__(self, root: Json) -> None:
        nodes = list(_schemas(root))
        self._has_patterns = not any(map(_combines_keys, nodes)) and not any(
            _is_open(node) and ("patternProperties" in node or len(_names(node)) > MAX_NAMES)
            for node in nodes
        )
        self._escapes = self._has_patterns or not any(map(_is_open, nodes))

    @property
    def escapes(self) -> str:
        """Returns the letters that may follow a backslash."""
        return PLAIN_ESCAPES + ("u" if self._escapes else "")

    def closed(self, schema: Schema) -> Schema:
        """Returns the schema. If necessary, a pattern is added that describes the further keys.

        Raises GrammarError for a value that has no allowed spelling.
        """
        if not self._escapes:
            _check_controls(schema)
        if not self._has_patterns or not _is_open(schema):
            return schema
        names, others = _names(schema), schema.get("additionalProperties", True)
        if not names:
            return schema
        properties = schema.get("properties") or {}
        return {
            **schema,
            "properties": {name: properties.get(name, others) for name in names},
            "patternProperties": {translated(f"^({other_texts(names)})$"): others},
            "additionalProperties": False,
        }


def _is_open(schema: Schema) -> bool:
    """True if an object may have both named keys and further keys."""
    is_object = "object" in types_of(schema)
    named = bool(_names(schema)) or bool(schema.get("patternProperties"))
    return is_object and named and schema.get("additionalProperties") is not False


def _names(schema: Schema) -> list[str]:
    properties = schema.get("properties")
    named = list(properties) if isinstance(properties, dict) else []
    return list(dict.fromkeys([*named, *names_in(schema.get("required"))]))


def _combines_keys(schema: Schema) -> bool:
    """True if the compiler must combine this schema's keys with the keys of other schemas."""
    found = schema.keys() & _COMBINING
    together = schema.get("allOf")
    several = isinstance(together, list) and len(together) > 1
    return several or len(found) > 1 or bool(found and any(name in schema for name in _OF_KEYS))


def _schemas(root: Json) -> Iterator[Schema]:
    """Yields all objects of the document. Some of them may be values, which can only forbid
    escapes.
    """
    pending = [root]
    while pending:
        match pending.pop():
            case dict() as schema:
                yield schema
                pending += schema.values()
            case list() as parts:
                pending += parts


def _check_controls(schema: Schema) -> None:
    values = [schema.get("const"), *(schema.get("enum") or ())]
    if any(isinstance(value, str) and _CONTROL.search(value) for value in values):
        raise GrammarError("a control character needs a schema whose objects have no other keys")
    if _CONTROL_IN_PATTERN.search(str(schema.get("pattern", ""))):
        raise GrammarError("a control character needs a schema whose objects have no other keys")

"""Replaces keywords of one schema by keywords that the compiler knows. Pure.

    exclusiveMinimum, exclusiveMaximum    true and false, as draft 4 has them: a bound, or none
    propertyNames       a pattern or an enum of names, where properties are not named otherwise
    uniqueItems         at most one item, or the lists that different values of a short enum make
    unevaluatedX        additionalProperties and items, where nothing else is combined

Source: JSON Schema 2020-12, core and validation; draft 4, validation §5.1.
"""

from itertools import chain, combinations, islice, permutations
from typing import Any

from engine.errors import GrammarError
from engine.grammar.disjoint import is_among, types_of

MAX_LISTS = 256  # lists into which one `uniqueItems` may be expanded

Json = Any
Schema = dict[str, Any]

_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies")
_BOUNDS = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))
_UNEVALUATED = (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items"))
_NOTES = {"type", "title", "description", "$comment"}


def in_known_keywords(schema: Schema, at: str) -> Schema:
    """Returns a schema that is equal or stricter. Raises GrammarError, which names the place."""
    result = dict(schema)
    for exclusive, bound in _BOUNDS:
        if result.get(exclusive) is False:
            del result[exclusive]
        elif result.get(exclusive) is True and bound in result:
            result[exclusive] = result.pop(bound)
    for unevaluated, other in _UNEVALUATED:
        if result.get(unevaluated) is True:
            del result[unevaluated]
        elif result.get(unevaluated) is False and not any(name in result for name in _COMBINING):
            del result[unevaluated]
            result.setdefault(other, False)
    if "propertyNames" in result:
        result = _with_names(result, result.pop("propertyNames"), at)
    if "uniqueItems" in result:
        result = _with_distinct_items(result, result.pop("uniqueItems"), at)
    return result


def _with_names(schema: Schema, names: Json, at: str) -> Schema:
    if "object" not in types_of(schema) or names is True:
        return schema
    keywords = names.keys() - _NOTES if isinstance(names, dict) else {"false"}
    is_plain = not {"properties", "patternProperties"} & schema.keys()
    others = schema.get("additionalProperties", True)
    if isinstance(names, dict) and names.get("type", "string") == "string":
        if not keywords:
            return schema
        if is_plain and keywords == {"pattern"} and isinstance(names["pattern"], str):
            patterns = {names["pattern"]: others}
            return {**schema, "patternProperties": patterns, "additionalProperties": False}
        if is_plain and keywords == {"enum"} and isinstance(names["enum"], list):
            keys = [name for name in names["enum"] if isinstance(name, str)]
            properties = dict.fromkeys(keys, others)
            return {**schema, "properties": properties, "additionalProperties": False}
    raise GrammarError(f"propertyNames must be a pattern or an enum, without properties (at {at})")


def _with_distinct_items(schema: Schema, is_unique: Json, at: str) -> Schema:
    """Lists all allowed arrays. If there are too many, allows only the order in which values are
    given.
    """
    most, least = schema.get("maxItems"), schema.get("minItems", 0)
    at_most = most if isinstance(most, int) and not isinstance(most, bool) else None
    if is_unique is False or "array" not in types_of(schema) or at_most in (0, 1):
        return schema
    values = _values_of_items(schema)
    if values is not None and isinstance(least, int):
        sizes = range(least, min(len(values), at_most or len(values)) + 1)
        for orders in (permutations, combinations):
            arrays = chain.from_iterable(orders(values, size) for size in sizes)
            listed = [list(array) for array in islice(arrays, MAX_LISTS + 1)]
            if listed and len(listed) <= MAX_LISTS:
                others = {"type": ["null", "boolean", "number", "string", "object"]}
                found: Schema = {"anyOf": [{"enum": listed}, others]}
                together = schema.get("allOf")
                return {**schema, "allOf": [*(together or ()), found]}
    raise GrammarError(f"uniqueItems is supported for items of a short enum (at {at})")


def _values_of_items(schema: Schema) -> list[Json] | None:
    """Returns the distinct values that items may have; None if the schema does not list them."""
    items = schema.get("items")
    if not isinstance(items, dict) or "prefixItems" in schema:
        return None
    by_type = {"null": [None], "boolean": [False, True]}
    values = [items["const"]] if "const" in items else items.get("enum")
    if values is None and isinstance(items.get("type"), str):
        values = by_type.get(items["type"])
    if not isinstance(values, list):
        return None
    distinct: list[Json] = []
    for value in values[: MAX_LISTS + 1]:
        if not is_among(value, distinct):
            distinct.append(value)
    return distinct if len(distinct) <= MAX_LISTS else None

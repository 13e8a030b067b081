"""Replaces by `false` the parts of a schema that only an infinite value would satisfy. Pure.

A definition that only refers back to itself allows no value at all. An object that requires an
object like itself allows no finite value. A compiler would follow such a definition forever, or
stop in the middle of an answer. Here both kinds become `false`, which allows the same values: none.
"""

from typing import Any

from engine.errors import GrammarError
from engine.grammar.disjoint import names_in, types_of
from engine.grammar.references import References

Json = Any


def finite(root: Json) -> Json:
    """Returns the schema. Each part that no finite value satisfies is replaced by `false`."""
    return _Finite(root).result


def is_endless(root: Json) -> bool:
    """True if no finite value satisfies the schema. False also for a reference that leads
    nowhere.
    """
    try:
        return finite(root) is False
    except GrammarError:
        return False


class _Finite:
    """One document. Its satisfiable parts are found step by step."""

    def __init__(self, root: Json) -> None:
        self._references = References(root)
        self._nodes: list[dict[str, Json]] = []
        self._find_nodes(root)
        self._endless = {id(node) for node in self._nodes}
        self._settle()
        self.result: Json = self._pruned(root) if self._endless else root

    def _find_nodes(self, root: Json) -> None:
        """Collects all objects of the document, inner objects last. Objects in `enum` are
        harmless.
        """
        pending = [root]
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                self._nodes.append(value)
                pending += value.values()
            elif isinstance(value, list):
                pending += value

    def _settle(self) -> None:
        left = self._nodes[::-1]
        while left:
            still = list[dict[str, Json]]()
            for node in left:
                if self._ends(node):
                    self._endless.discard(id(node))
                else:
                    still.append(node)
            if len(still) == len(left):
                return
            left = still

    def _ends(self, schema: dict[str, Json]) -> bool:
        """True if the parts found so far prove that a finite value satisfies the schema."""
        if "$ref" in schema and not self._is_finite(self._references.target(schema["$ref"])):
            return False
        if not all(map(self._is_finite, _list(schema.get("allOf")))):
            return False
        for keyword in ("anyOf", "oneOf"):
            branches = _list(schema.get(keyword))
            if branches and not any(map(self._is_finite, branches)):
                return False
        return self._structure_ends(schema)

    def _structure_ends(self, schema: dict[str, Json]) -> bool:
        types = types_of(schema)
        properties, least = schema.get("properties"), schema.get("minItems")
        if types == {"object"} and isinstance(properties, dict):
            names = names_in(schema.get("required"))
            return all(self._is_finite(properties.get(name)) for name in names)
        if types == {"array"} and isinstance(least, int) and least > 0:
            return self._is_finite(schema.get("items"))
        return True

    def _is_finite(self, schema: Json) -> bool:
        return id(schema) not in self._endless

    def _pruned(self, value: Json) -> Json:
        if isinstance(value, dict):
            if id(value) in self._endless:
                return False
            return {name: self._pruned(part) for name, part in value.items()}
        return [self._pruned(part) for part in value] if isinstance(value, list) else value


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []

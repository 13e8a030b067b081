"""Rules of arguments, key by key, for forms whose arguments are not one JSON object."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequest
from engine.grammar.disjoint import TYPES, names_in, types_of
from router.text.forms.calling import Calling, Room
from router.text.forms.lenient import MAX_MARKED

MAX_SCHEMAS = 100  # maximum number of subschemas read to find the types of one value
# Keywords that concern all arguments together. Rules of single arguments cannot enforce them.
OF_WHOLE = ("allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "minProperties")


@dataclass(frozen=True, slots=True)
class WrittenArguments:
    """The rules of one function's arguments by key, and the places that they do not enforce."""

    keys: Mapping[str, str]  # for each key, an expression for the key and its value
    rules: Sequence[str]
    unheld: Sequence[str]
    required: Sequence[str]
    other: str | None = None  # expression for keys that the schema does not name

    def begin(self, name: str) -> str:
        """Returns an expression for all arguments. Its rules have this name."""
        return f"{name}::0x0" if self.keys or self.other else '""'

    def members(self, name: str, between: str = "") -> list[str]:
        """Returns rules `NAME` for all arguments, in any order.

        Each argument may occur once; required arguments must occur.
        """
        if not self.keys and not self.other:
            return list(self.rules)
        keys = [*self.required, *(key for key in self.keys if key not in self.required)]
        keys = [key for key in keys if key in self.keys][:MAX_MARKED]
        num_required = min(sum(key in self.required for key in keys), MAX_MARKED)
        ended = f" %if is_ones([0:{num_required}])" if num_required else ""
        rules = list[str]()
        for rule, lead in ((name, ""), (f"{name}_more", between)) if between else ((name, ""),):
            following = f"{name}_more" if between else name
            ways = [f'""{ended}']
            for i, key in enumerate(keys):
                way = f"{lead} {self.keys[key]} {following}::set_bit({i})".strip()
                ways.append(f"{way} %if bit_clear({i})")
            if self.other is not None:
                ways.append(f"{lead} {self.other} {following}::_".strip())
            rules.append(f"{rule}::_: " + "\n  | ".join(ways))
        return [*rules, *self.rules]


def written(
    calling: Calling, arguments_of: Callable[[str, str], WrittenArguments], free: str
) -> Iterator[tuple[str, WrittenArguments]]:
    """Returns the arguments of each function, by name. Without budget, they are `free`."""
    room = Room()
    for i, (name, schema) in enumerate(calling.functions.items()):
        is_read = name in calling.held or (name not in calling.free and room.holds(schema))
        found = arguments_of(name, f"{i}") if is_read else None
        if found is not None and name not in calling.held:
            found = found if room.holds_rules(found.members("", " ")) else None
        yield name, found or WrittenArguments({}, (), ("",), (), free)


def is_open(schema: Mapping[str, Any]) -> bool:
    """True if a function accepts arguments that its schema does not name."""
    return schema.get("additionalProperties", True) is not False


def properties_of(schema: Mapping[str, Any], name: str, *, is_held: bool) -> dict[str, Any]:
    """Returns the schemas of a function's arguments by name.

    Raises InvalidRequest if the tool is strict and such forms cannot enforce its schema.
    """
    found = schema.get("properties") or {}
    unknown = set(names_in(schema.get("required"))) - set(found)
    if is_held and (unknown or schema.get("patternProperties")):
        message = f"tools: {name}: this model's calls need each argument among the properties"
        raise InvalidRequest(message, param="tools")
    return {**found, **dict.fromkeys(sorted(unknown), True)}


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a property's schema after following its references within the document."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, dict) else None
        schema = found
    return schema if isinstance(schema, dict) else {}


def as_json(schema: Any, root: Mapping[str, Any]) -> str:
    """Returns a property's schema in Lark, with the definitions to which it may refer."""
    return "%json " + json.dumps(with_definitions(schema, root), ensure_ascii=False)


def with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a property's schema as a document of its own, with definitions."""
    whole = dict(schema) if isinstance(schema, dict) else {}
    return whole | {name: root[name] for name in ("$defs", "definitions") if name in root}


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the types that a property's value may have, by the names of `types_of`."""
    return _kinds_of(schema, root, {})


def _kinds_of(schema: Any, root: Mapping[str, Any], found: dict[int, Any]) -> frozenset[str]:
    """Returns the types of `kinds_of`. Each schema is read once; until then, any type counts."""
    known = resolved(schema, root)
    if id(known) in found:
        kinds: frozenset[str] = found[id(known)][1]
        return kinds
    found[id(known)] = (known, TYPES)
    kinds = types_of(known)
    for keyword in ("anyOf", "oneOf"):
        branches = known.get(keyword)
        if isinstance(branches, list) and branches and len(found) < MAX_SCHEMAS:
            kinds &= frozenset().union(*(_kinds_of(each, root, found) for each in branches))
    together = known.get("allOf")
    for part in together if isinstance(together, list) and len(found) < MAX_SCHEMAS else ():
        kinds &= _kinds_of(part, root, found)
    found[id(known)] = (known, kinds)
    return kinds

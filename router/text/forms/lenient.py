"""Converts a schema to a lenient grammar: keys in any order, any spelling, if it can be enforced.

Used for arguments of tools without `strict`, if no tool must be called. A model may write keys in
any order, blanks anywhere, and characters with or without escapes. All this is accepted.

    object     named keys in any order and each once, all required ones, other keys if allowed
    array      items, and their number
    string     length; pattern and format, if the compiler supports them
    number     bounds and multiples
    enum       texts in any spelling
    anyOf      alternatives; `oneOf` too, if no value satisfies two

Other keywords are not enforced; `unheld` lists their places. The grammar never forbids a value that
the schema allows.

In keys, letters and digits must not be escaped, so that an escaped spelling of a named key is not
accepted as another key.

Source: JSON Schema 2020-12; RFC 8259; llguidance, docs/parametric.md.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from engine.errors import GrammarError
from engine.grammar.disjoint import Disjointness, names_in
from engine.grammar.json_schemas import COMPACT, MAX_EXACT_INT, followed

MAX_RULES = 1000  # maximum number of rules per schema
MAX_STEPS = 300  # maximum steps to prove that alternatives exclude each other
MAX_INSIDE = 64  # maximum depth of nested values
MAX_MARKED = 62  # maximum number of tracked keys of an object; a rule's parameter has 64 bits
MAX_REPEATS = 1000  # maximum number of items or characters that is enforced

Json = Any
Schema = Mapping[str, Json]

_HEX = "[0-9a-fA-F]"
_PAIR = rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_PLAIN, _SHORT = r'[^"\\\x00-\x1f]', r'\\["\\\/bfnrt]'
_CHAR = rf"{_PLAIN}|{_SHORT}|\\u([0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})|{_PAIR}"
# Without escapes of printable ASCII characters, so that named keys can be recognised.
_KEY_CHAR = (
    rf"{_PLAIN}|{_SHORT}|\\u(00[0189a-fA-F]{_HEX}|0[1-9a-fA-F]{_HEX}{{2}}|"
    rf"[1-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})|{_PAIR}"
)
_INTEGER = "-?(0|[1-9][0-9]*)"
BLANKS = r"( |\r?\n( {0,8}|\t{0,2}))"
RULES = [  # the rules that all schemas of a grammar share
    "gap: GAP?",
    r"GAP: / |\r?\n( {0,40}|\t{0,10})/",  # limited, as endless blanks would be no progress
    "edge: EDGE?",
    f"EDGE: /{BLANKS}/",  # blanks around the parts of a call
    f'STRING: /"({_CHAR})*"/',
    f'KEY: /"({_KEY_CHAR})*"/',
    rf"INTEGER: /{_INTEGER}(\.0)?/",
    rf"NUMBER: /{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
    'anything: "null" | "true" | "false" | NUMBER | STRING | any_list | any_object',
    'any_list: "[" gap (anything gap ("," gap anything gap)*)? "]"',
    'any_object: "{" gap (any_pair gap ("," gap any_pair gap)*)? "}"',
    'any_pair: STRING gap ":" gap anything',
]
_JSON = {"null": '"null"', "boolean": '"true" | "false"', "string": "STRING"}
_PYTHON = {  # the same types, as written in Python
    "null": '"None" | "null"',
    "boolean": '"True" | "False" | "true" | "false"',
    "string": "STRING | PYTHON_STRING",
}
_ESCAPES = {
    '"': '"',
    "\\": "\\\\",
    "/": r"\/",
    "\b": "b",
    "\f": "f",
    "\n": "n",
    "\r": "r",
    "\t": "t",
}
_NOT_PLAIN = re.compile(r"[^0-9A-Za-z_-]")
_OF_STRING = {"minLength", "maxLength", "pattern", "format"}
_OF_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_BOUNDS = _OF_NUMBER - {"multipleOf"}
_OF_OBJECT = {"properties", "required", "additionalProperties"}
_BY_TYPE = {
    "string": _OF_STRING,
    "number": _OF_NUMBER,
    "integer": _OF_NUMBER,
    "object": _OF_OBJECT,
    "array": {"items", "minItems", "maxItems"},
}
_UNHELD = {
    *("allOf", "not", "if", "dependentSchemas", "dependentRequired", "dependencies"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    *("prefixItems", "additionalItems", "contains", "uniqueItems"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
}
# A keyword with one of these values requires nothing.
_NO_DEMAND: tuple[Json, ...] = (None, False, 0, [], {})


class LenientSchema:
    """The rules of one schema. Their names begin with `prefix`. `start` is an expression."""

    def __init__(self, schema: Json, prefix: str, *, is_python: bool = False) -> None:
        self._texts = _PYTHON if is_python else _JSON
        self._known = Disjointness(schema, max_steps=MAX_STEPS)
        self._prefix = prefix
        self._named: dict[int, tuple[Json, str]] = {}  # schema and rule name, by the schema's id
        self._inside = 0  # depth of the value that is being converted
        self.rules: list[str] = []
        self.unheld: list[str] = []
        self.start = self._value(schema, "")
        if self._is_full:
            self.rules, self.unheld, self.start = [], [""], "any_object"

    def _value(self, schema: Json, at: str) -> str:
        """Returns the name of the rule for a schema's values. Repeated schemas share a rule."""
        if not isinstance(schema, dict) or self._inside > MAX_INSIDE or self._is_full:
            if not isinstance(schema, bool):
                self._record(at)
            return "anything"
        if id(schema) in self._named:
            return self._named[id(schema)][1]
        name = f"{self._prefix}_{len(self._named)}"
        self._named[id(schema)] = (schema, name)  # keeps `schema`, so its id stays unique
        self._inside += 1
        self.rules.append(f"{name}: {self._alternatives(schema, at)}")
        self._inside -= 1
        return name

    @property
    def _is_full(self) -> bool:
        return len(self._named) > MAX_RULES

    def _alternatives(self, schema: Schema, at: str) -> str:
        for keyword in sorted(_UNHELD & schema.keys()):
            if schema[keyword] not in _NO_DEMAND and not self._is_only(schema, keyword):
                self._record(f"{at}.{keyword}")
        if "$ref" in schema:
            return self._referred(schema["$ref"], at)
        if self._is_only(schema, "allOf"):
            return self._value(schema["allOf"][0], f"{at}.allOf[0]")
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                found = self._branches(schema, keyword, at)
                if found is not None:
                    return found
                self._record(f"{at}.{keyword}")
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return " | ".join(map(_constant, values)) or "anything"
        return self._by_type(schema, at)

    def _is_only(self, schema: Schema, keyword: str) -> bool:
        """True if `allOf` with a single schema is all that the schema requires."""
        parts = schema.get(keyword)
        others = set().union(
            *_BY_TYPE.values(), {"$ref", "anyOf", "oneOf", "enum", "const", "type"}
        )
        alone = keyword == "allOf" and isinstance(parts, list) and len(parts) == 1
        return alone and not others & schema.keys()

    def _referred(self, reference: Json, at: str) -> str:
        """Returns the rule of a reference's target. Follows a few references to references."""
        target = self._known.target(reference)
        for _ in range(8):
            if not isinstance(target, dict) or "$ref" not in target:
                break
            target = self._known.target(target["$ref"])
        if not isinstance(target, dict) or "$ref" in target:
            self._record(f"{at}.$ref")
            return "anything"
        return self._value(target, f"{at}.$ref")

    def _branches(self, schema: Schema, keyword: str, at: str) -> str | None:
        """Returns an expression for the alternatives; None if the schema has other requirements."""
        branches = schema[keyword]
        demands = set().union(*_BY_TYPE.values(), {"enum", "const", "anyOf", "oneOf"}) - {keyword}
        if not isinstance(branches, list) or demands & schema.keys():
            return None
        if keyword == "oneOf" and not self._are_apart(branches):
            self._record(f"{at}.oneOf")
        kind = {"type": schema["type"]} if "type" in schema else {}
        typed = [
            {**kind, **branch} if isinstance(branch, dict) and kind else branch
            for branch in branches
            if branch is not False
        ]
        values = [self._value(each, f"{at}.{keyword}[{i}]") for i, each in enumerate(typed)]
        return " | ".join(values) or "anything"

    def _are_apart(self, branches: Sequence[Json]) -> bool:
        try:
            return all(self._known.apart(one, other) for one, other in combinations(branches, 2))
        except GrammarError:
            return False

    def _by_type(self, schema: Schema, at: str) -> str:
        kinds = schema.get("type")
        names = [kinds] if isinstance(kinds, str) else kinds
        known = {*_BY_TYPE, "boolean", "null"}
        if names is not None and not (
            isinstance(names, list) and names and known.issuperset(names)
        ):
            self._record(f"{at}.type")
            return "anything"
        if names is None:
            if not set().union(*_BY_TYPE.values()) & schema.keys():
                return "anything"
            names = sorted(known - {"integer"})
        return " | ".join(self._of_type(kind, schema, at) for kind in names)

    def _of_type(self, kind: str, schema: Schema, at: str) -> str:
        match kind:
            case "null":
                return self._texts["null"]
            case "boolean":
                return self._texts["boolean"]
            case "object":
                return self._object(schema, at)
            case "array":
                return self._array(schema, at)
        return self._scalar(kind, schema, at)

    def _scalar(self, kind: str, schema: Schema, at: str) -> str:
        """Returns an expression for a text or a number. llguidance compiles most keywords."""
        held = {name: schema[name] for name in schema if name in _BY_TYPE[kind]}
        held = {name: value for name, value in held.items() if value is not None}
        if kind == "string" and not held.keys() - {"minLength", "maxLength"}:
            low, high = self._bounds(held, "minLength", "maxLength", at)
            is_bounded = low or high is not None
            return f'/"({_CHAR}){_times(low, high)}"/' if is_bounded else self._texts["string"]
        if held and (known := self._followed(kind, held, at)):
            return self._rule("%json " + json.dumps({"type": kind, **known, "x-guidance": COMPACT}))
        return self._texts.get(kind, kind.upper())

    def _followed(self, kind: str, held: Schema, at: str) -> Schema:
        """Returns the keywords that the compiler supports together. They are tested one by one."""
        known: dict[str, Json] = {}
        for name, value in held.items():
            if name in _BOUNDS and type(value) in (int, float) and abs(value) <= MAX_EXACT_INT:
                known[name] = value  # the usual case, which is always supported
                continue
            try:
                followed({"type": kind, **known, name: value})
            except GrammarError:
                self._record(f"{at}.{name}")
            else:
                known[name] = value
        return known

    def _bounds(self, schema: Schema, least: str, most: str, at: str) -> tuple[int, int | None]:
        """Returns both bounds of a repetition. Bounds that cannot be enforced are recorded."""
        low, high = schema.get(least) or 0, schema.get(most)
        counts = [each for each in (low, high) if each is not None]
        if not all(type(each) is int and 0 <= each <= MAX_REPEATS for each in counts):
            self._record(f"{at}.{most if high is not None else least}")
            return 0, None
        if high is not None and low > high:
            self._record(f"{at}.{most}")
            return 0, None
        return low, high

    def _array(self, schema: Schema, at: str) -> str:
        items = schema.get("items", True)
        item = "anything" if "prefixItems" in schema else self._value(items, f"{at}.items")
        low, high = self._bounds(schema, "minItems", "maxItems", at)
        if high == 0 or items is False:
            return '"[" gap "]"'
        more = _times(max(low - 1, 0), None if high is None else high - 1)
        some = f'"[" gap {item} gap ("," gap {item} gap){more} "]"'
        return some if low else f'{some} | "[" gap "]"'

    # ------------------------------------------------------------ objects

    def _object(self, schema: Schema, at: str) -> str:
        """Returns an expression for an object with its keys in any order.

        Bit i of the rule's parameter is set once key i has been written.
        """
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            properties = {}
        required = names_in(schema.get("required"))
        if schema.get("required") is not None and not isinstance(schema["required"], list):
            self._record(f"{at}.required")
        others = schema.get("additionalProperties", True)
        named = [name for name in properties if properties[name] is not False]
        keys = list(dict.fromkeys([*required, *named]))
        if "patternProperties" in schema:
            others = True
        other = None if others is False else self._value(others, f"{at}.additionalProperties")
        pairs = [
            f'{key_of(key)} gap ":" gap '
            + self._value(properties.get(key, others or True), f"{at}.properties.{key}")
            for key in keys
        ]
        if other is not None:
            pairs.append(f'{self._other_key([*keys, *properties])} gap ":" gap {other}')
        return self._members(pairs, min(len(set(required)), MAX_MARKED), other is not None)

    def _members(self, pairs: Sequence[str], num_required: int, is_open: bool) -> str:  # noqa: FBT001
        """Returns an expression for an object of these pairs.

        The first `num_required` pairs are required. If `is_open`, the last pair may repeat.
        """
        if not pairs:
            return '"{" gap "}"'
        marked = min(len(pairs) - is_open, MAX_MARKED)
        name = f"{self._prefix}_m{len(self.rules)}"
        ways = [
            f"{pair} gap {name}_t::set_bit({i}) %if bit_clear({i})"
            if i < marked
            else f"{pair} gap {name}_t::_"
            for i, pair in enumerate(pairs)
        ]
        ended = f" %if is_ones([0:{num_required}])" if num_required else ""
        all_came = is_open or marked < len(pairs)
        goes_on = "" if all_came else f" %if not(is_ones([0:{marked}]))"
        self.rules.append(f"{name}::_: " + "\n  | ".join(ways))
        self.rules.append(f'{name}_t::_: "}}"{ended}\n  | "," gap {name}::_{goes_on}')
        some = f'"{{" gap {name}::0x0'
        return some if num_required else f'{some} | "{{" gap "}}"'

    def _other_key(self, keys: Sequence[str]) -> str:
        if not keys:
            return "KEY"
        name = f"{self._prefix.upper()}_K{len(self.rules)}"
        taken = " | ".join(dict.fromkeys(map(key_of, keys)))
        self.rules.append(f"{name}: KEY & ~({taken})")
        return name

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}_v{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _record(self, at: str) -> None:
        if at not in self.unheld:
            self.unheld.append(at)


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def lenient_grammar(schema: Json) -> tuple[str, Sequence[str]]:
    """Returns the grammar of one value, and the places of the schema that it does not enforce."""
    found = LenientSchema(schema, "v")
    return "\n".join([f"start: {found.start}", *RULES, *found.rules]), found.unheld


def can_be_held(schema: Json) -> bool:
    """True if the compiler supports the schema without changes."""
    try:
        followed(schema)
    except GrammarError:
        return False
    return True


def key_of(text: str) -> str:
    """Returns a key in Lark, in all spellings that do not escape letters and digits."""
    return f'/"{_NOT_PLAIN.sub(lambda found: _spellings(found[0]), text)}"/'


def _spellings(char: str) -> str:
    ways = [] if char < " " or char in '"\\' else [_literal(char)]
    if char in _ESCAPES:
        short = _ESCAPES[char]
        ways.append("\\\\" + (_literal(char) if char in '"\\/' else short))
    units = char.encode("utf-16-be", "surrogatepass")
    codes = (units[i : i + 2].hex() for i in range(0, len(units), 2))
    if not (char.isascii() and " " <= char <= "\x7f") or char in '"\\/':
        ways.append("".join(rf"\\u{_any_case(code)}" for code in codes))
    return ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"


def _literal(char: str) -> str:
    return char if ord(char) > 0xA0 or char.isalnum() else f"\\x{{{ord(char):x}}}"


def _any_case(code: str) -> str:
    return "".join(f"[{c}{c.upper()}]" if c in "abcdef" else c for c in code)


def _constant(value: Json) -> str:
    """Returns an expression for one constant value."""
    match value:
        case str():
            return key_of(value)
        case list():
            items = ' "," gap '.join(f"({_constant(each)}) gap" for each in value)
            return f'"[" gap {items} "]"'
        case dict():
            pairs = (f'{key_of(key)} gap ":" gap ({_constant(v)}) gap' for key, v in value.items())
            return '"{" gap ' + ' "," gap '.join(pairs) + ' "}"'
        case float() if value.is_integer() and abs(value) < 2**53:
            return rf"/{int(value)}(\.0)?/"
        case int() if not isinstance(value, bool):
            return rf"/{value}(\.0)?/"
    return json.dumps(json.dumps(value))

"""Hostile grammars, drawn at random, of shapes that cost a compiler time or memory.

`hostile_grammar(rng)` draws a grammar; `hostile_fields(rng)` draws a request body's fields for one.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from engine.messages import Grammar, GrammarKind
from tests.fuzz.mutation import TEXTS
from tests.kits.schemas import random_schema

MAX_COUNT = 4_000
UNITS = ("\n", " ", "\t", "a[\n", "[", "(", "{", '"\\', "/\\/", "//", "%json", "|", "a: b\n", "\\")
ATOMS = ("a", ".", "[a-z]", "\\d", "(?s:.)", "\\p{L}", "[^x]", "é", "\\w", "b|c", "")
WEIRD: tuple[Any, ...] = (None, True, -1, 0, 0.5, 1e308, 2**70, "", "x", [], {}, [[]], {"": {}})
SPECIAL = ("<|endoftext|>", "<[0-4]>", "<[*]>", "<tool_call>", "<[99999999]>")


def count(rng: random.Random) -> int:
    """Draws a size: mostly small, at times large."""
    return int(MAX_COUNT ** rng.random())


def hostile_regex(rng: random.Random, depth: int = 3) -> str:
    """An expression whose automaton may be large."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(ATOMS)
    inner = hostile_regex(rng, depth - 1)
    match rng.randrange(6):
        case 0:
            return f"({inner}){{{rng.randrange(3)},{count(rng)}}}"
        case 1:
            return f"({inner}){rng.choice('*+?')}"
        case 2:
            return f".*{inner}.{{{count(rng) % 64}}}"
        case 3:
            return "|".join(f"({inner}{i})" for i in range(count(rng) % 200))
        case 4:
            return f"({inner})" * (count(rng) % 50)
        case _:
            return f"{inner}{hostile_regex(rng, depth - 1)}"


def hostile_schema(rng: random.Random, depth: int = 3) -> Any:
    """A JSON schema that multiplies, nests, repeats or is invalid."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice([*WEIRD, {"type": "string", "pattern": hostile_regex(rng, 2)}])
    inner = hostile_schema(rng, depth - 1)
    many = count(rng) if depth == 3 else count(rng) % 20
    makers: tuple[Callable[[], Any], ...] = (
        lambda: {"allOf": [{"multipleOf": rng.randrange(1, 40_000)} for _ in range(many % 6)]},
        lambda: {"anyOf": [{"multipleOf": rng.randrange(1, 40_000)} for _ in range(many % 60)]},
        lambda: {"allOf": [{"pattern": hostile_regex(rng, 2)} for _ in range(many % 50)]},
        lambda: {"anyOf": [inner] * many},
        lambda: {"oneOf": [{"const": i} for i in range(many)]},
        lambda: {"type": "object", "properties": {f"p{i}": inner for i in range(many)}},
        lambda: {"type": "object", "patternProperties": {hostile_regex(rng, 2): inner}},
        lambda: {"type": "array", "items": inner, "minItems": many, "maxItems": 10 * many},
        lambda: {"type": "array", "prefixItems": [inner] * many},
        lambda: {"type": "string", "minLength": many, "maxLength": many**2},
        lambda: {"enum": [f"{i}" * (i % 40) for i in range(many)]},
        lambda: {"const": _nested(many)},
        lambda: {"$defs": {"a": {"anyOf": [inner, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        lambda: {"minimum": rng.random(), "maximum": 10.0 ** (many % 300), "multipleOf": 0.001},
        lambda: _spoiled(random_schema(rng.randrange(1000)), rng),
    )
    return rng.choice(makers)()


def hostile_lark(rng: random.Random) -> str:
    """A grammar in Lark's form: ambiguous, deep, wide, or cut short."""
    many = count(rng)
    expression = hostile_regex(rng)
    makers: tuple[Callable[[], str], ...] = (
        lambda: rng.choice(UNITS) * (30 * many),
        lambda: 'start: "a"\n' + rng.choice(UNITS) * (30 * many),
        lambda: "start: s\ns: s s | s s s | /[a-z]/ | " + json.dumps("a" * (many % 9)),
        lambda: "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(many)) + f'r{many}: "a"',
        lambda: "start: (" + "|".join(f"/{expression}{i}/" for i in range(many % 100)) + ")*",
        lambda: f"start: A\nA: ~/{expression}/ & /{hostile_regex(rng)}/",
        lambda: f"start: {rng.choice(SPECIAL)} A\nA: /{expression}/",
        lambda: "start: " + " ".join(f"%json {json.dumps(hostile_schema(rng, 1))}" for _ in "ab"),
        lambda: f"start: a{{{many}}} | a{{,{many}}}\na: b~{many % 300}\nb: /{expression}/",
        lambda: "start: " + "(" * many + '"a"' + ")" * many,
    )
    source = rng.choice(makers)()
    return source[: rng.randrange(len(source) + 1)] if rng.random() < 0.1 else source


def hostile_grammar(rng: random.Random) -> Grammar:
    """A grammar of any kind."""
    match rng.randrange(4):
        case 0:
            return Grammar(GrammarKind.REGEX, hostile_regex(rng, 4))
        case 1:
            return Grammar(GrammarKind.LARK, hostile_lark(rng))
        case 2:
            return Grammar(GrammarKind.JSON_SCHEMA, rng.choice([*TEXTS, "[" * count(rng), "NaN"]))
        case _:
            return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(hostile_schema(rng)))


def hostile_fields(rng: random.Random) -> dict[str, Any]:
    """Fields of a chat completion's body that ask for such a grammar, in any of the ways."""
    tool = {"name": "f", "parameters": hostile_schema(rng)}
    return rng.choice(
        [
            lambda: {"guided_json": hostile_schema(rng)},
            lambda: {"guided_regex": hostile_regex(rng, 4)},
            lambda: {"guided_grammar": hostile_lark(rng)},
            lambda: {"guided_choice": ["x" * (i % 99) for i in range(3 * count(rng))]},
            lambda: {"structured_outputs": {"json": hostile_schema(rng)}},
            lambda: {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": hostile_schema(rng)},
                }
            },
            lambda: {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"},
        ]
    )()


def _nested(levels: int) -> Any:
    value: Any = []
    for _ in range(min(levels, 900)):
        value = [value]
    return value


def _spoiled(schema: Any, rng: random.Random) -> Any:
    """The schema with one of its values replaced."""
    if isinstance(schema, dict) and schema and rng.random() < 0.9:
        name = rng.choice(list(schema))
        return {**schema, name: _spoiled(schema[name], rng)}
    if isinstance(schema, list) and schema and rng.random() < 0.9:
        place = rng.randrange(len(schema))
        return [*schema[:place], _spoiled(schema[place], rng), *schema[place + 1 :]]
    return rng.choice(WEIRD)

"""Hostile bytes, values, bodies and grammars, for `bench hostile` and for tests. Pure.

with_damage       bytes that are cut, flipped or added
BOMBS             bodies that would become as many objects as possible, of any size
hostile_…         expressions, schemas and grammars that cost a compiler time or memory
hostile_fields    fields of a request's body that ask for one of these
"""

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ATTACKER_KEY, HONEST_KEY = "attacker-key", "honest-key"
MAX_COUNT = 4_000
UNITS = ("\n", " ", "\t", "a[\n", "[", "(", "{", '"\\', "/\\/", "//", "%json", "|", "a: b\n", "\\")
ATOMS = ("a", ".", "[a-z]", "\\d", "(?s:.)", "\\p{L}", "[^x]", "é", "\\w", "b|c", "")
INTEGERS = (-(2**63), -(2**31), -4096, -1, 0, 1, 2, 3, 64, 4097, 2**31, 2**53, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "def", "größe", "日本", "\u202e", "\0", "'", "</s>", "<|im_start|>", "{{", "a" * 99)
WEIRD: tuple[Any, ...] = (None, True, -1, 0, 0.5, 1e308, 2**70, "", "x", [], {}, [[]], {"": {}})
SPECIAL = ("<|endoftext|>", "<[0-4]>", "<[*]>", "<tool_call>", "<[99999999]>")


# A path, and a function from a number of bytes to a body.
SizedBody = tuple[str, Callable[[int], bytes]]


def bearer(key: str) -> dict[str, str]:
    """Returns the header for an API key."""
    return {"Authorization": f"Bearer {key}"}


def with_damage(data: bytes, rng: random.Random) -> bytes:
    """Cuts bytes off, flips bits or adds bytes."""
    damaged = bytearray(data)
    match rng.choice(["cut", "flip", "more"]):
        case "cut":
            del damaged[rng.randint(0, len(damaged)) :]
        case "flip" if damaged:
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        case _:
            place = rng.randint(0, len(damaged))
            damaged[place:place] = rng.randbytes(rng.randint(1, 20))
    return bytes(damaged)


# ---------------------------------------------------------------- bodies


def filled(head: bytes, item: bytes, tail: bytes, num_bytes: int) -> bytes:
    """Returns a body of at most `num_bytes`, with as many items as fit."""
    number = (num_bytes - len(head) - len(tail)) // (len(item) + 1)
    return head + b",".join([item] * number) + tail


def keyed(head: bytes, tail: bytes, num_bytes: int) -> bytes:
    """Returns a body of about `num_bytes`, whose fields all have different names."""
    return head + b",".join(b'"%d":1' % i for i in range(num_bytes // 11)) + tail


def _bomb(path: str, head: bytes, item: bytes, tail: bytes) -> SizedBody:
    return path, partial(filled, head, item, tail)


BOMBS: Mapping[str, SizedBody] = {
    "arrays in an unknown field": _bomb(COMPLETIONS, b'{"x":[', b"[]", b"]}"),
    "nested arrays": _bomb(COMPLETIONS, b'{"x":[', b"[" * 500 + b"]" * 500, b"]}"),
    "an array that never ends": (COMPLETIONS, lambda num_bytes: b'{"x":' + b"[" * num_bytes),
    "unknown fields": (COMPLETIONS, partial(keyed, b"{", b"}")),
    "one field many times": _bomb(COMPLETIONS, b"{", b'"prompt":[]', b"}"),
    "arrays in the prompt": _bomb(COMPLETIONS, b'{"prompt":[', b"[]", b"]}"),
    "texts in the prompt": _bomb(COMPLETIONS, b'{"prompt":[', b'"a"', b"]}"),
    "token ids": _bomb(COMPLETIONS, b'{"prompt":[', b"1", b"]}"),
    "objects in the prompt": _bomb(COMPLETIONS, b'{"prompt":[', b"{}", b"]}"),
    "an object as the prompt": (COMPLETIONS, partial(keyed, b'{"prompt":{', b"}}")),
    "arrays as stops": _bomb(COMPLETIONS, b'{"stop":[', b"[]", b"]}"),
    "texts as stops": _bomb(COMPLETIONS, b'{"stop":[', b'"a"', b"]}"),
    "biases": (COMPLETIONS, partial(keyed, b'{"prompt":"a","logit_bias":{', b"}}")),
    "messages": _bomb(CHAT, b'{"messages":[', b'{"role":"user","content":[]}', b"]}"),
    "parts": _bomb(CHAT, b'{"messages":[{"role":"user","content":[', b'{"type":""}', b"]}]}"),
    "calls": _bomb(CHAT, b'{"messages":[{"role":"user","tool_calls":[', b"{}", b"]}]}"),
    "tools": _bomb(CHAT, b'{"tools":[', b"{}", b"]}"),
}


# ---------------------------------------------------------------- grammars


def count(rng: random.Random) -> int:
    """Draws a size: mostly small, at times large."""
    return int(MAX_COUNT ** rng.random())


def hostile_regex(rng: random.Random, depth: int = 3) -> str:
    """Returns a regular expression whose automaton may be large."""
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
    """Returns a JSON schema that multiplies, nests, repeats or is invalid."""
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
        lambda: {"const": nested(many)},
        lambda: {"$defs": {"a": {"anyOf": [inner, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        lambda: {"minimum": rng.random(), "maximum": 10.0 ** (many % 300), "multipleOf": 0.001},
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


def hostile_fields(rng: random.Random) -> dict[str, Any]:
    """Returns fields of a chat completion's body that request such a grammar, in one of the
    possible forms.
    """
    tool = {"name": "f", "parameters": hostile_schema(rng)}
    ways: tuple[Callable[[], dict[str, Any]], ...] = (
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
    )
    return rng.choice(ways)()


def nested(levels: int) -> Any:
    """Returns nested arrays of at most 900 levels."""
    value: Any = []
    for _ in range(min(levels, 900)):
        value = [value]
    return value

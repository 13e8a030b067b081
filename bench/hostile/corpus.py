"""Hostile bytes, values, bodies and grammars, for `bench hostile` and for tests. Pure.

with_damage       bytes with parts cut off, flipped or added
BOMBS             bodies of any size that parse into as many objects as possible
hostile_…         expressions, schemas and grammars that cost a compiler time or memory
hostile_fields    fields of a request's body that ask for such a constraint
shots             a seeded sequence of requests to the answer endpoints

`shots` starts from valid requests. Most get a few fields with values of another type, size or
depth. In some, bytes are changed; some have grammars that are expensive to compile; a few are
random bytes. Valid requests ask for short answers, so that a wave takes only minutes.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


# A path of the server, and a function that returns a body of the given number of bytes.
SizedBody = tuple[str, Callable[[int], bytes]]


def bearer(key: str) -> dict[str, str]:
    """Returns the HTTP header for an API key."""
    return {"Authorization": f"Bearer {key}"}


def with_damage(data: bytes, rng: random.Random) -> bytes:
    """Returns the bytes after a random change: a part is cut off, bits are flipped, or bytes are
    added.
    """
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
    """Returns a body of at most `num_bytes` with as many items as fit."""
    number = (num_bytes - len(head) - len(tail)) // (len(item) + 1)
    return head + b",".join([item] * number) + tail


def keyed(head: bytes, tail: bytes, num_bytes: int) -> bytes:
    """Returns a body of about `num_bytes` whose fields all have different names."""
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
    """Draws a random size: mostly small, sometimes large."""
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
    """Returns a JSON schema with many products, deep nesting or repetitions, or an invalid one."""
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
    """Returns a grammar in Lark's format: ambiguous, deep, wide, or incomplete."""
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
    """Returns fields of a chat completion's body that request a hostile grammar, in one of the
    API's forms.
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


MAX_TOKENS = 3  # tokens of an answer, unless the change of the request affects its length
LARGE_SHARE = 0.004  # share of bodies with the greatest length that a gateway accepts
LARGE_BYTES = 2**20

Json = Any


@dataclass(frozen=True, slots=True)
class Shot:
    """One hostile request."""

    path: str
    body: bytes
    content_type: str = "application/json"


def shots(num: int, *, seed: int) -> Iterator[Shot]:
    """Yields the first `num` requests of this seed."""
    rng = random.Random(seed)
    for _ in range(num):
        yield _shot(rng)


def _long_text(letter: bytes) -> SizedBody:
    def body(num_bytes: int) -> bytes:
        return b'{"max_tokens":%d,"prompt":"%s"}' % (MAX_TOKENS, letter * num_bytes)

    return COMPLETIONS, body


_LONG_TEXTS = (_long_text(b"a"), _long_text(b" "), _long_text(b"\\n"))


def _shot(rng: random.Random) -> Shot:
    kind = rng.random()
    path, fields = _honest(rng)
    if kind < LARGE_SHARE:
        path, make = rng.choice((*BOMBS.values(), *_LONG_TEXTS))
        return Shot(path, make(LARGE_BYTES))
    if kind < 0.10:
        return Shot(path, rng.randbytes(rng.randrange(300)))
    if kind < 0.25:
        body = _encoded(fields)
        return Shot(path, 2 * body if rng.random() < 0.25 else with_damage(body, rng))
    if kind < 0.35:
        return Shot(path, _encoded(fields | hostile_fields(rng))[:LARGE_BYTES])
    for _ in range(rng.randint(1, 3)):
        _change(fields, rng)
    return Shot(path, _encoded(fields), rng.choice(_CONTENT_TYPES))


def _honest(rng: random.Random) -> tuple[str, dict[str, Json]]:
    fields: dict[str, Json] = {"max_tokens": MAX_TOKENS, "stream": rng.random() < 0.5}
    if rng.random() < 0.5:
        words = " ".join(rng.choice(TEXTS[1:]) for _ in range(rng.randrange(1, 20)))
        return CHAT, fields | {"messages": [{"role": "user", "content": words}]}
    prompt: Json = [rng.randrange(4000) for _ in range(rng.randrange(1, 50))]
    return COMPLETIONS, fields | {"prompt": prompt if rng.random() < 0.5 else "def f(x):"}


def _encoded(fields: Json) -> bytes:
    return json.dumps(fields).encode()


def _change(fields: dict[str, Json], rng: random.Random) -> None:
    """Changes the value of a known or unknown field."""
    name = rng.choice(_FIELDS)
    fields[name] = rng.choice(_VALUES)(rng)
    if rng.random() < 0.1:
        fields[rng.choice(TEXTS) * rng.choice((1, 40))] = rng.choice(_VALUES)(rng)


# ---------------------------------------------------------------- values

_CONTENT_TYPES = ("application/json", "application/json", "text/plain", "multipart/form-data", "x")
_FIELD_TEXT = """
model messages prompt stream stream_options stop max_tokens max_completion_tokens min_tokens
temperature top_p top_k min_p seed ignore_eos stop_token_ids n best_of echo logprobs top_logprobs
prompt_logprobs presence_penalty frequency_penalty repetition_penalty logit_bias user priority
cache_salt slo_ttft_ms slo_tpot_ms response_format structured_outputs guided_json guided_regex
guided_choice guided_grammar tools tool_choice
"""
_FIELDS = tuple(_FIELD_TEXT.split())


def _number(rng: random.Random) -> Json:
    return rng.choice((*INTEGERS, 1e308, 0.5, -0.0, 1e-9))


def _text(rng: random.Random) -> Json:
    return rng.choice(TEXTS) * rng.choice((0, 1, 2, 50))


def _list(rng: random.Random) -> Json:
    return [rng.choice((_number, _text))(rng) for _ in range(rng.choice((0, 1, 3, 200)))]


def _object(rng: random.Random) -> Json:
    return {_text(rng): rng.choice((_number, _text, _list))(rng) for _ in range(rng.randrange(5))}


def _nested(rng: random.Random) -> Json:
    return nested(rng.choice((1, 10, 100, 900)))


def _messages(rng: random.Random) -> Json:
    roles = ("user", "system", "assistant", "tool", "root", "")
    return [
        {"role": rng.choice(roles), "content": rng.choice((_text, _list, _nested))(rng)}
        for _ in range(rng.choice((1, 2, 30)))
    ]


_VALUES: tuple[Callable[[random.Random], Json], ...] = (
    _number,
    _number,
    _text,
    _list,
    _object,
    _nested,
    _messages,
    lambda rng: rng.choice(WEIRD),
)

"""Hostile requests: a seeded sequence of bodies for the answer endpoints. Pure.

A request begins as one that would be answered. Most are changed in a few fields, to values of
another type, size or depth. Some are changed in bytes, some are grammars that are expensive to
compile, a few are random bytes. Unchanged requests ask for short answers, so that a wave takes
minutes.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_TOKENS = 3  # of an answer whose length nothing changed
LARGE_SHARE = 0.004  # of bodies that are as long as a gateway may take
LARGE_BYTES = 2**20

Json = Any


@dataclass(frozen=True, slots=True)
class Shot:
    """One hostile request."""

    path: str
    body: bytes
    content_type: str = "application/json"


def shots(num: int, *, seed: int) -> Iterator[Shot]:
    """The first `num` requests of this seed."""
    rng = random.Random(seed)
    for _ in range(num):
        yield _shot(rng)


def _shot(rng: random.Random) -> Shot:
    kind = rng.random()
    path, fields = _honest(rng)
    if kind < LARGE_SHARE:
        return Shot(path, _large(rng))
    if kind < 0.10:
        return Shot(path, rng.randbytes(rng.randrange(300)))
    if kind < 0.25:
        return Shot(path, _damaged(_encoded(fields), rng))
    if kind < 0.35:
        fields |= rng.choice(_GRAMMARS)(rng)
        return Shot(path, _encoded(fields))
    for _ in range(rng.randint(1, 3)):
        _change(fields, rng)
    return Shot(path, _encoded(fields), rng.choice(_CONTENT_TYPES))


def _honest(rng: random.Random) -> tuple[str, dict[str, Json]]:
    fields: dict[str, Json] = {"max_tokens": MAX_TOKENS, "stream": rng.random() < 0.5}
    if rng.random() < 0.5:
        words = " ".join(rng.choice(_WORDS) for _ in range(rng.randrange(1, 20)))
        return CHAT, fields | {"messages": [{"role": "user", "content": words}]}
    prompt: Json = [rng.randrange(4000) for _ in range(rng.randrange(1, 50))]
    return COMPLETIONS, fields | {"prompt": prompt if rng.random() < 0.5 else "def f(x):"}


def _encoded(fields: Json) -> bytes:
    return json.dumps(fields).encode()


def _change(fields: dict[str, Json], rng: random.Random) -> None:
    """Another value in a field, known or not."""
    name = rng.choice(_FIELDS)
    fields[name] = rng.choice(_VALUES)(rng)
    if rng.random() < 0.1:
        fields[rng.choice(_WORDS) * rng.choice((1, 40))] = rng.choice(_VALUES)(rng)


def _damaged(body: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(body)
    match rng.randrange(4):
        case 0:
            del damaged[rng.randrange(len(damaged)) :]
        case 1:
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        case 2:
            place = rng.randrange(len(damaged))
            damaged[place:place] = rng.randbytes(rng.randint(1, 20))
        case _:
            damaged += bytes(damaged)
    return bytes(damaged)


def _large(rng: random.Random) -> bytes:
    """About a MiB of what a parser, a tokenizer or a template finds dear."""
    match rng.randrange(6):
        case 0:
            return _encoded({"prompt": rng.choice("a \n") * LARGE_BYTES, "max_tokens": MAX_TOKENS})
        case 1:
            return b'{"x":' + b"[" * LARGE_BYTES
        case 2:
            return b'{"prompt":"x","x":[' + b"[]," * (LARGE_BYTES // 3) + b"[]]}"
        case 3:
            message = {"role": "user", "content": ""}
            return _encoded({"messages": [message] * (LARGE_BYTES // 40), "max_tokens": MAX_TOKENS})
        case 4:
            return _encoded({"prompt": [1] * (LARGE_BYTES // 3), "max_tokens": MAX_TOKENS})
    return _encoded({"prompt": "x", "logit_bias": {str(i): 1 for i in range(LARGE_BYTES // 12)}})


# ---------------------------------------------------------------- values

_WORDS = (
    "def",
    "größe",
    "日本",
    "\u202e",
    "\0",
    "'",
    "</s>",
    "<|im_start|>",
    "{{",
    "%json",
    "a" * 99,
)
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
    return rng.choice(
        (0, -1, 1, 2, 7, 2**31, 2**53, 2**63, 2**64, -(2**63), 1e308, 0.5, -0.0, 1e-9)
    )


def _text(rng: random.Random) -> Json:
    return rng.choice(_WORDS) * rng.choice((0, 1, 2, 50))


def _list(rng: random.Random) -> Json:
    return [rng.choice((_number, _text))(rng) for _ in range(rng.choice((0, 1, 3, 200)))]


def _object(rng: random.Random) -> Json:
    return {_text(rng): rng.choice((_number, _text, _list))(rng) for _ in range(rng.randrange(5))}


def _nested(rng: random.Random) -> Json:
    value: Json = rng.choice(([], {}, None, 0))
    for _ in range(rng.choice((1, 10, 100, 900))):
        value = [value] if rng.random() < 0.5 else {"type": value}
    return value


def _messages(rng: random.Random) -> Json:
    roles = ("user", "system", "assistant", "tool", "root", "")
    return [
        {"role": rng.choice(roles), "content": rng.choice((_text, _list, _nested))(rng)}
        for _ in range(rng.choice((1, 2, 30)))
    ]


def _constant(rng: random.Random) -> Json:
    return rng.choice((None, True, False))


_VALUES: tuple[Callable[[random.Random], Json], ...] = (
    _number,
    _number,
    _text,
    _list,
    _object,
    _nested,
    _messages,
    _constant,
)


# ---------------------------------------------------------------- grammars


def _schema(schema: Json) -> dict[str, Json]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    }


def _products(rng: random.Random) -> dict[str, Json]:
    factors = [rng.choice((7, 31, 997, 1009, 65537)) for _ in range(rng.randint(1, 3))]
    return _schema({"type": "integer", "allOf": [{"multipleOf": factor} for factor in factors]})


def _patterns(rng: random.Random) -> dict[str, Json]:
    each = [f"^.*{chr(97 + i % 26)}.{{{rng.randint(1, 20)}}}$" for i in range(rng.randint(1, 40))]
    return _schema({"type": "string", "allOf": [{"pattern": pattern} for pattern in each]})


def _properties(rng: random.Random) -> dict[str, Json]:
    names = [f"p{i}" for i in range(rng.choice((1, 20, 300, 3000)))]
    return _schema({"type": "object", "properties": {name: {"type": "string"} for name in names}})


def _deep(rng: random.Random) -> dict[str, Json]:
    schema: Json = {"type": "string"}
    for _ in range(rng.choice((1, 20, 200, 450))):
        schema = {"type": "object", "properties": {"a": schema}}
    return _schema(schema)


def _references(rng: random.Random) -> dict[str, Json]:
    target = rng.choice(("#", "#/$defs/a", "#/nowhere", "http://localhost/x", "a" * 3000))
    return _schema({"$ref": target, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}})


def _regex(rng: random.Random) -> dict[str, Json]:
    expressions = (
        "(a|a)*b",
        "(a*)*" * rng.randint(1, 50),
        f"(.{{1,{rng.randint(1, 5000)}}}){{1,{rng.randint(1, 5000)}}}",
        "(" * rng.choice((10, 1000)) + "a",
        "[^\\n]*" * rng.randint(1, 300),
        "\\p{L}{1,1000}",
        "(?=a)b",
    )
    return {"guided_regex": rng.choice(expressions)}


def _lark(rng: random.Random) -> dict[str, Json]:
    grammars = (
        "\n" * rng.choice((10, 8000, 32000)),
        'start: "a"' + "\n" * rng.choice((10, 8000, 32000)) + "x",
        "start: " + "(" * rng.choice((10, 1000)) + '"a"',
        "\n".join(f'r{i}: r{i + 1} | "a"' for i in range(rng.choice((10, 1000)))),
        "start: start start | start",
        'start: %json {"type": "integer", "multipleOf": 997}',
        "start: /(.{1,400}){1,400}/",
    )
    return {"guided_grammar": rng.choice(grammars)}


def _choices(rng: random.Random) -> dict[str, Json]:
    return {"guided_choice": [f"{_text(rng)}{i}" for i in range(rng.choice((0, 1, 100, 3000)))]}


_GRAMMARS: tuple[Callable[[random.Random], dict[str, Json]], ...] = (
    _products,
    _patterns,
    _properties,
    _deep,
    _references,
    _regex,
    _lark,
    _choices,
)

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

from bench.hostile.corpus import (
    BOMBS,
    CHAT,
    COMPLETIONS,
    INTEGERS,
    TEXTS,
    WEIRD,
    SizedBody,
    hostile_fields,
    nested,
    with_damage,
)

MAX_TOKENS = 3  # length of an answer if the request's length was not changed
LARGE_SHARE = 0.004  # share of bodies that have the greatest length that a gateway accepts
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

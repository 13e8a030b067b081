"""The requests of `bench chaos`: a function of the seed. Pure.

They cover what must survive a fault: greedy and sampled answers, several choices, penalties and
biases, grammars, log-probabilities, stop strings, both endpoints. Each request has a seed, so that
its answer is fixed. Prompts share prefixes, as an application's prompts do, so caches are used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from bench.client.answers import Endpoint
from bench.common.prompts import WORDS

NUM_PREFIXES = 8
PREFIX_LEN = (32, 128)  # length, in tokens or words, of the prefix that prompts of one group share
OWN_LEN = (8, 256)
OUTPUT_LEN = (64, 384)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One request: a body for an endpoint, and its number of choices."""

    kind: str
    path: str
    body: bytes
    num_choices: int


def chaos_requests(num: int, *, vocab: Sequence[int], model: str, seed: int) -> list[ChaosRequest]:
    """Returns `num` requests, of all kinds."""
    rng = Random(f"{seed}/asks")
    prefixes = [_tokens(rng, vocab, PREFIX_LEN) for _ in range(NUM_PREFIXES)]
    preambles = [_words(rng, PREFIX_LEN) for _ in range(NUM_PREFIXES)]
    made = []
    for _ in range(num):
        kind = rng.choice(list(KINDS))
        fields: Fields = {"seed": rng.randrange(2**31), "max_tokens": rng.randint(*OUTPUT_LEN)}
        fields |= KINDS[kind](rng)
        endpoint = Endpoint.CHAT if kind in CHATS else Endpoint.COMPLETIONS
        if endpoint is Endpoint.CHAT:
            text = f"{rng.choice(preambles)} {_words(rng, OWN_LEN)}"
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = [*rng.choice(prefixes), *_tokens(rng, vocab, OWN_LEN)]
        made.append(
            ChaosRequest(
                kind, endpoint.path, _encoded(fields, model), num_choices=fields.get("n", 1)
            )
        )
    return made


def _greedy(_: Random) -> Fields:
    return {"temperature": 0.0, "ignore_eos": True}


def _sampled(rng: Random) -> Fields:
    return {"temperature": rng.uniform(0.5, 1.2), "top_p": 0.95, "ignore_eos": True}


def _several(rng: Random) -> Fields:
    return {"temperature": 0.9, "n": rng.choice((2, 3)), "ignore_eos": True}


def _penalised(rng: Random) -> Fields:
    return {
        "temperature": 0.8,
        "presence_penalty": rng.uniform(0.2, 1.0),
        "frequency_penalty": rng.uniform(0.2, 1.0),
        "repetition_penalty": 1.1,
        "top_k": 50,
    }


def _scored(_: Random) -> Fields:
    return {"temperature": 0.7, "logprobs": 1, "ignore_eos": True}


def _stopped(_: Random) -> Fields:
    return {"temperature": 1.0, "stop": ["e", "\n"], "min_tokens": 6}


def _schema(_: Random) -> Fields:
    json_schema = {"name": "thing", "schema": SCHEMA}
    return {
        "temperature": 0.8,
        "max_tokens": 64,
        "response_format": {"type": "json_schema", "json_schema": json_schema},
    }


def _pattern(_: Random) -> Fields:
    return {"temperature": 0.8, "guided_regex": r"[a-z]{8,40}( [a-z]{2,9}){12}"}


def _chat(_: Random) -> Fields:
    return {"temperature": 0.7, "top_p": 0.9}


KINDS: Mapping[str, Callable[[Random], Fields]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "several": _several,
    "penalised": _penalised,
    "scored": _scored,
    "stopped": _stopped,
    "schema": _schema,
    "pattern": _pattern,
    "chat": _chat,
}
CHATS = frozenset({"schema", "chat", "penalised"})


def _encoded(fields: Fields, model: str) -> bytes:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode({"model": model, **fields, **options})


def _tokens(rng: Random, vocab: Sequence[int], length: tuple[int, int]) -> list[int]:
    return rng.choices(vocab, k=rng.randint(*length))


def _words(rng: Random, length: tuple[int, int]) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(*length)))

"""The requests of `bench chaos`, and streamed answers as the client received them. Pure.

Requests are a function of the seed. Together they use all features that must survive a fault:
greedy and sampled answers, several choices, penalties and biases, grammars, log-probabilities, stop
strings, both endpoints. Each request has a seed, so that its answer is fixed. Prompts share
prefixes, like prompts of an application, so prefix caches are used.

`StreamReader` turns the received bytes and their arrival times into a `ReceivedStream`: the pieces
of the answer, and how the stream ended. `bench.client.answers` measures latency. This module keeps
all text, also text after the end of an answer; `bench.chaos.checker` judges the text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from bench.client.answers import Endpoint
from bench.client.stream import DONE, ChunkChoice, ChunkLogprobs, SseParser, decode_chunk, shown
from bench.common.prompts import WORDS

NUM_PREFIXES = 8
# range of lengths of the prefix that the prompts of a group share, in tokens or words
PREFIX_LEN = (32, 128)
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
    """One request: its endpoint, its body, and its number of choices."""

    kind: str
    path: str
    body: bytes
    num_choices: int


def chaos_requests(num: int, *, vocab: Sequence[int], model: str, seed: int) -> list[ChaosRequest]:
    """Returns `num` requests. All kinds of requests occur."""
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


@dataclass(frozen=True, slots=True)
class ReceivedPiece:
    """A piece of one choice, from one event. `logprobs` describe its tokens, if they were
    requested.
    """

    at_s: float
    choice: int
    text: str = ""
    finish: str | None = None
    logprobs: tuple[tuple[str, float | None], ...] = ()


@dataclass(frozen=True, slots=True)
class ReceivedUsage:
    """Token counts from the server. Cached tokens are left out, because they depend on earlier
    requests.
    """

    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True, slots=True)
class ReceivedStream:
    """An answer, or the part of it that arrived. `failure` says why the rest is missing."""

    sent_s: float
    ended_s: float
    pieces: tuple[ReceivedPiece, ...] = ()
    usages: tuple[ReceivedUsage, ...] = ()
    num_done: int = 0  # number of end marks in the stream
    num_after_done: int = 0  # number of events after the end mark
    num_attempts: int = 1  # number of times that the router placed the request
    failure: str | None = None
    is_broken: bool = False  # the connection closed before the end of the answer


class StreamReader:
    """Reads one answer. Call `feed` for each piece of the body, then exactly one other method."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._parser = SseParser()
        self._pieces: list[ReceivedPiece] = []
        self._usages: list[ReceivedUsage] = []
        self._num_done = 0
        self._num_after_done = 0
        self._num_attempts = 1
        self._failure: str | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Parses the bytes that arrived at `now_s`."""
        for event in self._parser.feed(data):
            self._add(event.data, now_s)

    def finish(self, now_s: float) -> ReceivedStream:
        """Returns the stream after the connection ended normally."""
        return self._stream(now_s, self._failure, is_broken=False)

    def refuse(self, why: str, now_s: float) -> ReceivedStream:
        """Returns the stream after the server refused the request, or after a timeout."""
        return self._stream(now_s, self._failure or why, is_broken=False)

    def fail(self, why: str, now_s: float) -> ReceivedStream:
        """Returns the stream after the connection broke."""
        return self._stream(now_s, self._failure or why, is_broken=True)

    def _stream(self, now_s: float, failure: str | None, *, is_broken: bool) -> ReceivedStream:
        return ReceivedStream(
            sent_s=self._sent_s,
            ended_s=now_s,
            pieces=tuple(self._pieces),
            usages=tuple(self._usages),
            num_done=self._num_done,
            num_after_done=self._num_after_done,
            num_attempts=self._num_attempts,
            failure=failure,
            is_broken=is_broken,
        )

    def _add(self, data: bytes, now_s: float) -> None:
        if self._num_done and data != DONE:
            self._num_after_done += 1
        if data == DONE:
            self._num_done += 1
            return
        try:
            chunk = decode_chunk(data)
        except msgspec.MsgspecError as error:
            self._failure = self._failure or f"{error}: {shown(data)}"
            return
        if chunk.error is not None:
            self._failure = self._failure or shown(data)
        self._pieces += _pieces(chunk.choices or (), now_s)
        if chunk.usage is not None:
            usage = ReceivedUsage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
            self._usages.append(usage)
        if chunk.baton_timeline is not None:
            attempts = chunk.baton_timeline.get("attempts")
            self._num_attempts = attempts if isinstance(attempts, int) else 1


def _pieces(choices: Sequence[ChunkChoice], now_s: float) -> list[ReceivedPiece]:
    """Returns the pieces of an event. Chunks without content are left out, such as the first chunk
    of a chat, which only has the role.
    """
    pieces = []
    for choice in choices:
        scored = choice.logprobs or ChunkLogprobs()
        logprobs = tuple(zip(scored.tokens, scored.token_logprobs, strict=True))
        if choice.said or logprobs or choice.finish_reason is not None:
            pieces.append(
                ReceivedPiece(now_s, choice.index, choice.said, choice.finish_reason, logprobs)
            )
    return pieces

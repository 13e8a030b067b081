"""Reads recorded loads and makes synthetic ones: arrivals, lengths and shared prefixes of requests.

Traces may have four formats:

    Mooncake   JSON lines of `timestamp` (ms), `input_length`, `output_length`, `hash_ids`; one id
               for each block of 512 prompt tokens; an equal id means an equal prefix up to the end
               of its block
    Azure      CSV with the header TIMESTAMP,ContextTokens,GeneratedTokens; prompts share no prefix
    Baton      JSON lines; the first is {"format": "baton-trace", "version": 1, "block_tokens": n},
               each other line is a request: `arrived_s`, `input_len`, `output_len`, and optionally
               `block_ids` (like Mooncake's `hash_ids`, for blocks of n tokens) and `priority`
    recording  msgpack records of a recording gateway (`router.recording.records`). An answered
               request has the length of its answer; another request has the length that it
               requested. Ids stand for the workers' own blocks of tokens

In memory, traces of all formats have the same form. Every token of a block is the block's id, so
equal ids give equal tokens, and different ids give different tokens.

Sources: Qin et al., Mooncake, FAST 2025 (its traces: github.com/kvcache-ai/Mooncake); Azure's
public LLM inference traces (github.com/Azure/AzurePublicDataset); the moments of `synthetic`,
Mooncake's conversation trace.
"""

import csv
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from heapq import heappop, heappush
from itertools import accumulate, count, islice, pairwise
from pathlib import Path
from random import Random
from typing import TypeVar

import msgspec

from bench.lab.validation.recordings import RecordedRequest, read_run
from engine.errors import ConfigError, ProtocolError
from engine.worker.blocks import BlockHash, hash_block
from router.recording.records import is_recording, records_of

MOONCAKE_BLOCK_TOKENS = 512
FORMAT = "baton-trace"
T = TypeVar("T")
VERSION = 1
MAX_ID = 2**31 - 1  # largest id of a token, and therefore of a block


class TraceError(ConfigError):
    """A trace cannot be read. The message names the line and the reason."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Without `block_ids` its prompt shares no prefix."""

    arrived_s: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. A block id stands for a block of `block_tokens` tokens."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        """Returns the seconds from the start to the last arrival."""
        return self.requests[-1].arrived_s if self.requests else 0.0

    def first(self, num_requests: int) -> "Trace":
        """Returns a trace of the first requests."""
        return replace(self, requests=self.requests[:num_requests])

    def sped_up(self, factor: float) -> "Trace":
        """Returns the same requests at `factor` times the arrival rate."""
        if not factor > 0 or not math.isfinite(factor):
            raise TraceError(f"a trace cannot be sped up by {factor}")
        return replace(
            self, requests=tuple(replace(r, arrived_s=r.arrived_s / factor) for r in self.requests)
        )

    def shortened(self, factor: int) -> "Trace":
        """Returns the trace with all lengths divided by `factor`, rounded up. Shared prefixes stay
        shared.
        """
        if factor < 1 or self.block_tokens % factor:
            fits = next(n for n in range(max(factor, 1), 0, -1) if self.block_tokens % n == 0)
            raise TraceError(
                f"--shorten {factor} does not divide the {self.block_tokens} tokens of a block,"
                f" as {fits} does"
            )
        return replace(
            self,
            block_tokens=self.block_tokens // factor,
            requests=tuple(
                replace(
                    r, input_len=-(-r.input_len // factor), output_len=-(-r.output_len // factor)
                )
                for r in self.requests
            ),
        )


# ---------------------------------------------------------------- tokens


def prompt_tokens(request: TraceRequest, block_tokens: int) -> list[int]:
    """Returns the prompt's tokens. Every token of a block is the block's id."""
    tokens: list[int] = []
    for block_id in request.block_ids:
        tokens += [block_id] * min(block_tokens, request.input_len - len(tokens))
    return tokens


def with_ids(trace: Trace) -> Trace:
    """Returns the trace with new block ids for the prompts that have none."""
    taken = max((i for r in trace.requests for i in r.block_ids), default=0)
    fresh = count(taken + 1)
    requests = [
        r if r.block_ids else replace(r, block_ids=_fresh_ids(r, trace.block_tokens, fresh))
        for r in trace.requests
    ]
    if (following := next(fresh)) > MAX_ID:
        raise TraceError(f"{trace.name}: block id {following - 1} is too large")
    return replace(trace, requests=tuple(requests))


def _fresh_ids(request: TraceRequest, block_tokens: int, fresh: Iterator[int]) -> tuple[int, ...]:
    num_blocks = -(-request.input_len // block_tokens)
    return tuple(next(fresh) for _ in range(num_blocks))


# ---------------------------------------------------------------- reading


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    block_tokens: int


class _Line(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    arrived_s: float
    input_len: int
    output_len: int
    block_ids: list[int] = []
    priority: int = 0


def read_trace(path: Path) -> Trace:
    """Reads a trace from a file in any of the four formats. Its time 0 is the first request.

    Raises TraceError, which names file and line.
    """
    try:
        if is_recording(next(records_of(path), b"")):
            block_tokens, requests = _read_recording(path)
            return Trace(path.name, block_tokens, _from_zero(path, requests))
        lines = path.read_text().splitlines()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    except ProtocolError as error:
        raise TraceError(str(error)) from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not text") from error
    if not lines:
        raise TraceError(f"{path}: empty")
    if FORMAT in lines[0]:
        block_tokens, requests = _read_own(path, lines)
    elif lines[0].lstrip().startswith("{"):
        block_tokens, requests = MOONCAKE_BLOCK_TOKENS, _read_mooncake(path, lines)
    else:
        block_tokens, requests = MOONCAKE_BLOCK_TOKENS, _read_azure(path, lines)
    return Trace(path.name, block_tokens, _from_zero(path, requests))


def write_trace(trace: Trace, path: Path) -> None:
    """Writes a trace in Baton's format."""
    encoder = msgspec.json.Encoder()
    lines = [encoder.encode(_Header(FORMAT, VERSION, trace.block_tokens))]
    lines += [
        encoder.encode(_Line(r.arrived_s, r.input_len, r.output_len, list(r.block_ids), r.priority))
        for r in trace.requests
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(lines) + b"\n")


def _decoded(path: Path, lines: Sequence[str], form: type[T], *, first: int = 1) -> Iterator[T]:
    """Decodes JSON lines. Raises TraceError with the line number; the first line has the number
    `first`.
    """
    decoder = msgspec.json.Decoder(form)
    for number, line in enumerate(lines, start=first):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}:{number}: {error}") from error


def _read_mooncake(path: Path, lines: Sequence[str]) -> list[TraceRequest]:
    requests = []
    for number, read in enumerate(_decoded(path, lines, _MooncakeLine), start=1):
        request = TraceRequest(
            read.timestamp / 1000, read.input_length, read.output_length, tuple(read.hash_ids or ())
        )
        _check(path, number, request, MOONCAKE_BLOCK_TOKENS)
        requests.append(request)
    return requests


def _read_own(path: Path, lines: Sequence[str]) -> tuple[int, list[TraceRequest]]:
    [header] = _decoded(path, lines[:1], _Header)
    if header.format != FORMAT or header.version != VERSION or header.block_tokens < 1:
        raise TraceError(f"{path}:1: {header} is not supported")
    requests = []
    for number, read in enumerate(_decoded(path, lines[1:], _Line, first=2), start=2):
        request = TraceRequest(
            read.arrived_s, read.input_len, read.output_len, tuple(read.block_ids), read.priority
        )
        _check(path, number, request, header.block_tokens)
        requests.append(request)
    return header.block_tokens, requests


def _read_recording(path: Path) -> tuple[int, list[TraceRequest]]:
    try:
        told = read_run(records_of(path))
    except ProtocolError as error:
        raise TraceError(f"{path}: {error}") from error
    sizes = {info.layout.block_size for info in told.workers.values()}
    block_tokens = min(sizes, default=MOONCAKE_BLOCK_TOKENS)
    ids: dict[BlockHash, int] = {}
    requests = [_recorded(asked, block_tokens, ids) for asked in told.asked.values()]
    return block_tokens, requests


def _recorded(asked: RecordedRequest, block_tokens: int, ids: dict[BlockHash, int]) -> TraceRequest:
    """Returns a recorded request with block ids. Prompts with a common prefix share ids."""
    request = asked.request
    prompt, parent = request.token_ids, None
    block_ids: list[int] = []
    for start in range(0, len(prompt), block_tokens):
        parent = hash_block(parent, prompt[start : start + block_tokens], request.salt)
        block_ids.append(ids.setdefault(parent, len(ids)))
    wanted = max(request.limits.max_len - len(prompt), 1)
    is_answered = asked.is_finished or (asked.client_left and asked.times_s)
    output_len = len(asked.times_s) if is_answered else wanted
    return TraceRequest(
        asked.arrived_s, len(prompt), output_len, tuple(block_ids), request.priority
    )


def _read_azure(path: Path, lines: Sequence[str]) -> list[TraceRequest]:
    if lines[0].strip() != "TIMESTAMP,ContextTokens,GeneratedTokens":
        raise TraceError(f"{path}:1: neither JSON nor the header of an Azure trace")
    requests = []
    for number, row in enumerate(csv.reader(lines[1:]), start=2):
        try:
            at, context, generated = row
            # Azure's times have seven decimals of a second, but `fromisoformat` accepts only six.
            whole, _, fraction = at.partition(".")
            arrived_s = datetime.fromisoformat(whole + "+00:00").timestamp() + float(
                f"0.{fraction or 0}"
            )
            request = TraceRequest(arrived_s, int(context), max(int(generated), 1))
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        _check(path, number, request, MOONCAKE_BLOCK_TOKENS)
        requests.append(request)
    return requests


def _check(path: Path, number: int, request: TraceRequest, block_tokens: int) -> None:
    where = f"{path}:{number}"
    if not math.isfinite(request.arrived_s) or request.arrived_s < 0:
        raise TraceError(f"{where}: a request cannot come at {request.arrived_s} s")
    if request.input_len < 1 or request.output_len < 1:
        raise TraceError(
            f"{where}: {request.input_len} tokens in, {request.output_len} out: "
            "both must be positive"
        )
    num_ids = len(request.block_ids)
    if num_ids and num_ids != -(-request.input_len // block_tokens):
        raise TraceError(
            f"{where}: {num_ids} block ids for {request.input_len} tokens in blocks of "
            f"{block_tokens}"
        )
    if not all(0 <= i <= MAX_ID for i in request.block_ids):
        raise TraceError(f"{where}: a block id is not between 0 and {MAX_ID}")


def _from_zero(path: Path, requests: list[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Returns requests in order of arrival, the first at time 0. A recording may be slightly out of
    order.
    """
    if not requests:
        raise TraceError(f"{path}: no requests")
    start_s = min(r.arrived_s for r in requests)
    moved = [replace(r, arrived_s=r.arrived_s - start_s) for r in requests]
    if any(a.arrived_s > b.arrived_s for a, b in pairwise(moved)):
        moved.sort(key=lambda r: r.arrived_s)
    return tuple(moved)


# ---------------------------------------------------------------- made up


@dataclass(frozen=True, slots=True)
class Chat:
    """The shape of a synthetic load: conversations of several turns behind a system prompt.

    Conversations belong to families, and each family has its own system prompt. The n-th family has
    1/n of the first family's conversations. Lengths are log-normal around their medians; `spread`
    is the deviation of the lengths' logarithm.
    """

    rate_per_s: float = 3.4  # requests per second
    mean_turns: float = 3.0
    pause_s: float = 20.0  # mean seconds between two turns of a conversation
    system_tokens: int = 512
    input_tokens: int = 2048  # median number of new prompt tokens of a turn
    output_tokens: int = 256  # median number of answer tokens
    spread: float = 1.0
    families: int = 1


def synthetic(chat: Chat, num_requests: int, rng: Random) -> Trace:
    """Returns a trace of the first requests of `conversations`."""
    requests = tuple(islice(conversations(chat, rng), num_requests))
    return Trace("synthetic", MOONCAKE_BLOCK_TOKENS, requests)


def conversations(chat: Chat, rng: Random) -> Iterator[TraceRequest]:
    """Yields requests of conversations, without end. A turn's prompt contains all earlier turns."""
    block_tokens = MOONCAKE_BLOCK_TOKENS
    num_system_ids = -(-chat.system_tokens // block_tokens)
    shares = [*accumulate(1 / number for number in range(1, chat.families + 1))]
    fresh = count(num_system_ids * chat.families)
    # Future requests of started conversations, by arrival time. Requests before the begin of the
    # next conversation are final, so only few requests are made and never used.
    coming: list[tuple[float, int, TraceRequest]] = []
    places = count()
    starts_s = 0.0
    while True:
        starts_s += rng.expovariate(chat.rate_per_s / chat.mean_turns)
        while coming and coming[0][0] <= starts_s:
            yield heappop(coming)[-1]
        family = bisect_right(shares, rng.random() * shares[-1]) if chat.families > 1 else 0
        ids = tuple(range(family * num_system_ids, (family + 1) * num_system_ids))
        for request in _conversation(chat, starts_s, ids, fresh, rng):
            heappush(coming, (request.arrived_s, next(places), request))


def _conversation(
    chat: Chat, starts_s: float, ids: tuple[int, ...], fresh: Iterator[int], rng: Random
) -> Iterator[TraceRequest]:
    at_s, length = starts_s, chat.system_tokens
    while True:
        length += _log_normal(chat.input_tokens, chat.spread, rng)
        output_len = _log_normal(chat.output_tokens, chat.spread, rng)
        # The last block of the earlier turns was only partly filled, so its id changes.
        full = ids[: (length - 1) // MOONCAKE_BLOCK_TOKENS]
        num_missing = -(-length // MOONCAKE_BLOCK_TOKENS) - len(full)
        ids = full + tuple(next(fresh) for _ in range(num_missing))
        yield TraceRequest(at_s, length, output_len, ids)
        if rng.random() < 1 / chat.mean_turns:
            return
        length += output_len
        at_s += rng.expovariate(1 / chat.pause_s)


def _log_normal(median: int, spread: float, rng: Random) -> int:
    return max(round(median * math.exp(rng.gauss(0.0, spread))), 1)

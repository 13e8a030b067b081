"""Lengths of requests, as options write them, and sessions of requests. Pure.

| option                      | drawn lengths                                                |
|-----------------------------|--------------------------------------------------------------|
| `128`                       | always 128                                                   |
| `uniform:64-256`            | every whole number of the range, equally likely              |
| `lognormal:128,0.8`         | median 128; 0.8 is the deviation of the logarithm            |
| `lognormal:128,0.8,16-2048` | the same, moved to the nearest end of the range if outside   |

Sessions are a function of the plan and its seed. A session is one user or one agent. Its turns
follow each other: each is due `pause_s` after the end of the answer before it, and sends all
earlier turns and answers along. The first turn of a session is due at a time that is fixed before
the load begins. In a closed loop it is due as soon as a client is free.

A turn of an agent has several steps: the model's answer stands for a call of a tool, and the next
step brings the tool's result after the time that the tool took.

Answers of earlier turns come back as the text that the server gave. Prompts of token ids cannot
hold text: there, as many random ids stand for an answer.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from random import Random
from typing import Annotated, Any

import typer

from bench.client.answers import Endpoint
from bench.client.arrivals import arrival_times_s
from bench.common.prompts import WORDS, Messages, Prompt
from bench.simulator.traces import Trace, TraceRequest
from engine.errors import ConfigError

FORMS = "128, uniform:64-256 or lognormal:128,0.8[,16-2048]"
MOST = 10_000_000


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """A distribution of whole numbers in `least … most`.

    Without a `median` it is uniform. With one it is log-normal, with `deviation` of the logarithm.
    """

    least: int
    most: int
    median: int | None = None
    deviation: float = 0.0

    def draw(self, rng: Random) -> int:
        """One length."""
        if self.least == self.most:
            return self.least
        if self.median is None:
            return rng.randint(self.least, self.most)
        # The bound keeps the exponential of a wide distribution finite.
        exponent = min(rng.gauss(0.0, self.deviation), math.log(MOST))
        return min(max(round(self.median * math.exp(exponent)), self.least), self.most)

    @property
    def typical(self) -> float:
        """Mean of a uniform distribution, median of a log-normal one."""
        return (self.least + self.most) / 2 if self.median is None else self.median

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.least)
        if self.median is None:
            return f"uniform:{self.least}-{self.most}"
        return f"lognormal:{self.median},{self.deviation:g},{self.least}-{self.most}"


def fixed(length: int) -> LengthSpread:
    """The distribution that has only this length."""
    return LengthSpread(length, length)


LEN_1, LEN_64, LEN_128 = fixed(1), fixed(64), fixed(128)


def lengths_of(option: str, text: str, *, least: int = 1) -> LengthSpread:
    """Parses a distribution. Raises ConfigError, which names the option."""
    try:
        spread = _parsed(text.strip(), least)
    except ValueError as error:
        raise ConfigError(f"{option}: {text!r} is not {FORMS}") from error
    if not least <= spread.least <= spread.most <= MOST:
        raise ConfigError(f"{option}: lengths must rise, from {least} or more to {MOST} at most")
    if spread.median is not None and not (spread.median >= 1 and 0 < spread.deviation <= 10):
        raise ConfigError(f"{option}: a median of 1 or more and a deviation of 10 at most")
    return spread


def lengths_option(name: str, help_text: str) -> Any:
    """The option of a field that holds lengths."""

    def read(given: str | LengthSpread) -> LengthSpread:  # click also passes the default value
        return given if isinstance(given, LengthSpread) else lengths_of(name, given)

    return typer.Option(name, parser=read, metavar="LENGTHS", help=help_text)


def _parsed(text: str, least: int) -> LengthSpread:
    kind, colon, rest = text.partition(":")
    if not colon:
        return fixed(int(text))
    if kind == "uniform":
        return LengthSpread(*_range(rest))
    if kind != "lognormal":
        raise ValueError(kind)
    median, deviation, *bounds = rest.split(",", 2)
    low, high = _range(bounds[0]) if bounds else (max(least, 1), MOST)
    return LengthSpread(low, high, int(median), float(deviation))


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high)


Symbol = int | str  # an element of a prompt: token ids or words, never mixed
Symbols = Sequence[Symbol]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One request: what it adds to its session, in words or token ids."""

    added: tuple[Symbol, ...]
    output_len: int
    pause_s: float = 0.0  # pause after the previous answer; unused in a first turn
    stand_in: tuple[Symbol, ...] = ()  # token ids in place of the answer, for later turns


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one user. Without `due_s` it begins when a client of a closed loop is free."""

    number: int
    turns: tuple[SessionTurn, ...]
    due_s: float | None = None

    @property
    def has_history(self) -> bool:
        """True if later turns send answers along."""
        return len(self.turns) > 1


@dataclass(frozen=True, slots=True)
class TalkShape:
    """The shape of sessions. One turn of one step is a request without history."""

    turns: Annotated[
        LengthSpread, lengths_option("--turns", "Turns of a session, as a length.")
    ] = LEN_1
    think_s: Annotated[
        float, typer.Option(min=0.0, help="Mean pause before a turn, exponential.")
    ] = 0.0
    steps: Annotated[
        LengthSpread,
        lengths_option("--steps", "Requests of an agent's turn, with tools between them."),
    ] = LEN_1
    tool_s: Annotated[float, typer.Option(min=0.0, help="Mean time of a tool, exponential.")] = 0.0
    tool_len: Annotated[
        LengthSpread, lengths_option("--tool-len", "Tokens of a tool's result.")
    ] = LEN_64

    @property
    def is_single(self) -> bool:
        """True if every session is one request."""
        return self.turns.most == 1 and self.steps.most == 1


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Lengths of user turns and answers. Shared prefixes are part of a session's first turn."""

    input_len: LengthSpread
    output_len: LengthSpread
    shared_prefix_len: int = 0
    num_prefixes: int = 1


@dataclass(frozen=True, slots=True)
class ArrivalShape:
    """Due times of sessions. With `clients` it is a closed loop, and no time is fixed."""

    rate_per_s: float  # requests
    burstiness: float = 1.0
    ramp_to_per_s: float | None = None
    clients: int | None = None


def drawn_sessions(
    num_requests: int,
    lengths: PromptLengths,
    talk: TalkShape,
    vocab: Sequence[int] | None,
    *,
    shape: Random,
    content: Random,
) -> list[Session]:
    """Sessions with `num_requests` requests in all; the last session may end early.

    `shape` draws lengths, turns and pauses, `content` draws words or ids. No due time
    is set. Sessions begin with different symbols while the vocabulary lasts.
    """
    symbols: Symbols = WORDS if vocab is None else vocab
    prefixes = [
        tuple(content.choices(symbols, k=lengths.shared_prefix_len))
        for _ in range(lengths.num_prefixes if lengths.shared_prefix_len else 1)
    ]
    firsts = content.sample(symbols, k=len(symbols))
    sessions: list[Session] = []
    num_left = num_requests
    while num_left > 0:
        number = len(sessions)
        prefix = prefixes[number % len(prefixes)]
        first = (*prefix, firsts[number % len(firsts)])
        turns = _turns(first, lengths, talk, symbols, shape, content, has_ids=vocab is not None)
        session = Session(number, tuple(islice(turns, num_left)))
        sessions.append(session)
        num_left -= len(session.turns)
    return sessions


def _turns(  # noqa: PLR0913 (the shape of a session and two generators)
    first: tuple[Symbol, ...],
    lengths: PromptLengths,
    talk: TalkShape,
    symbols: Symbols,
    shape: Random,
    content: Random,
    *,
    has_ids: bool,
) -> Iterator[SessionTurn]:
    """Turns of one session; the first begins with the symbols `first`."""
    keeps_history = not talk.is_single
    begin = first
    for _ in range(talk.turns.draw(shape)):
        for step in range(talk.steps.draw(shape)):
            spread, mean_s = (
                (talk.tool_len, talk.tool_s) if step else (lengths.input_len, talk.think_s)
            )
            rest = max(spread.draw(shape) - len(begin), 0)
            output_len = lengths.output_len.draw(shape)
            yield SessionTurn(
                added=(*begin, *content.choices(symbols, k=rest)),
                output_len=output_len,
                pause_s=shape.expovariate(1 / mean_s) if mean_s else 0.0,
                stand_in=(
                    tuple(content.choices(symbols, k=output_len))
                    if keeps_history and has_ids
                    else ()
                ),
            )
            begin = ()


def arranged(sessions: Sequence[Session], arrivals: ArrivalShape, rng: Random) -> list[Session]:
    """The sessions with their due times.

    `rate_per_s` counts requests. A session of n requests takes n of them, so sessions begin at the
    rate divided by their mean number of requests.
    """
    if arrivals.clients is not None or not sessions:
        return [*sessions]
    mean = sum(len(session.turns) for session in sessions) / len(sessions)
    ramp_to = arrivals.ramp_to_per_s
    due_s = arrival_times_s(
        arrivals.rate_per_s / mean,
        len(sessions),
        burstiness=arrivals.burstiness,
        rng=rng,
        ramp_to_per_s=None if ramp_to is None else ramp_to / mean,
    )
    return [
        Session(session.number, session.turns, at_s)
        for session, at_s in zip(sessions, due_s, strict=True)
    ]


def replayed(trace: Trace, vocab: Sequence[int] | None, seed: int | str) -> list[Session]:
    """A session of one turn for each request of a trace, at its recorded time.

    Equal block ids give equal symbols, so shared prefixes stay shared. A request without block ids
    shares nothing.
    """
    symbols: Symbols = WORDS if vocab is None else vocab

    @lru_cache(maxsize=4096)  # recent prefixes are the ones that come again
    def block(name: str) -> list[Symbol]:
        return Random(f"{seed}/{name}").choices(symbols, k=trace.block_tokens)

    def prompt(number: int, request: TraceRequest) -> tuple[Symbol, ...]:
        if not request.block_ids:
            own = Random(f"{seed}/own/{number}")
            return tuple(own.choices(symbols, k=request.input_len))
        blocks = (block(f"block/{block_id}") for block_id in request.block_ids)
        return tuple(islice(chain.from_iterable(blocks), request.input_len))

    return [
        Session(
            number,
            (SessionTurn(prompt(number, request), request.output_len),),
            request.arrived_s,
        )
        for number, request in enumerate(trace.requests)
    ]


class Conversation:
    """Makes the prompt of each turn of one session, out of earlier turns and their answers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._messages: Messages = []
        self._ids: list[int] = []
        self._has_ids = False

    def prompt(self, turn: SessionTurn) -> Prompt | Messages:
        """Returns all earlier turns and answers, then this turn."""
        ids = [symbol for symbol in turn.added if isinstance(symbol, int)]
        if ids or self._has_ids:
            self._has_ids = True
            self._ids += ids
            return [*self._ids]
        words = " ".join(str(symbol) for symbol in turn.added)
        self._messages.append({"role": "user", "content": words})
        if self._endpoint is Endpoint.CHAT:
            return [*self._messages]
        return "\n".join(message["content"] for message in self._messages)

    def answered(self, turn: SessionTurn, said: str) -> None:
        """Adds the answer to a turn."""
        if self._has_ids:
            self._ids += (symbol for symbol in turn.stand_in if isinstance(symbol, int))
        else:
            self._messages.append({"role": "assistant", "content": said})

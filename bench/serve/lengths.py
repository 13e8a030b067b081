"""Parses lengths of requests from options, and draws sessions of requests. Pure.

| option                      | drawn lengths                                                |
|-----------------------------|--------------------------------------------------------------|
| `128`                       | always 128                                                   |
| `uniform:64-256`            | every whole number of the range, equally likely              |
| `lognormal:128,0.8`         | median 128; 0.8 is the deviation of the logarithm            |
| `lognormal:128,0.8,16-2048` | the same, clipped to the range                               |

The plan and its seed determine the sessions. A session is one user or one agent. Its turns follow
each other: a turn is due `pause_s` after the end of the previous answer, and its prompt contains
all earlier turns and answers. In an open loop, the due time of a session's first turn is fixed
before the load begins. In a closed loop, the first turn is due as soon as a client is free.

A turn of an agent has several steps. The model's answer represents the call of a tool. After the
tool's time, the next step sends the tool's result.

Later prompts contain earlier answers as the text that the server sent. Prompts of token ids cannot
contain text, so random ids, equally many, replace the answer.
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
    """A distribution of whole numbers from `least` to `most`.

    Without a `median` the distribution is uniform. With a `median` it is log-normal, and
    `deviation` is the deviation of the logarithm.
    """

    least: int
    most: int
    median: int | None = None
    deviation: float = 0.0

    def draw(self, rng: Random) -> int:
        """Draws one length."""
        if self.least == self.most:
            return self.least
        if self.median is None:
            return rng.randint(self.least, self.most)
        # This limit keeps the exponential of a wide distribution finite.
        exponent = min(rng.gauss(0.0, self.deviation), math.log(MOST))
        return min(max(round(self.median * math.exp(exponent)), self.least), self.most)

    @property
    def typical(self) -> float:
        """Returns the mean of a uniform distribution, or the median of a log-normal
        distribution.
        """
        return (self.least + self.most) / 2 if self.median is None else self.median

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.least)
        if self.median is None:
            return f"uniform:{self.least}-{self.most}"
        return f"lognormal:{self.median},{self.deviation:g},{self.least}-{self.most}"


def fixed(length: int) -> LengthSpread:
    """Returns the distribution whose only value is this length."""
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
    """Returns the type of an option whose value is a distribution of lengths."""

    # click also calls this with the default, which is a LengthSpread
    def read(given: str | LengthSpread) -> LengthSpread:
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


Symbol = int | str  # an element of a prompt: a token id or a word, never both in one prompt
Symbols = Sequence[Symbol]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One request. It has the words or token ids that it adds to its session."""

    added: tuple[Symbol, ...]
    output_len: int
    pause_s: float = 0.0  # seconds after the previous answer; unused in a first turn
    stand_in: tuple[Symbol, ...] = ()  # token ids that replace the answer in later prompts


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one user. Without `due_s`, the session begins when a client of a closed loop is
    free.
    """

    number: int
    turns: tuple[SessionTurn, ...]
    due_s: float | None = None

    @property
    def has_history(self) -> bool:
        """Returns True if later turns contain earlier answers."""
        return len(self.turns) > 1


@dataclass(frozen=True, slots=True)
class TalkShape:
    """The numbers of turns and steps in a session, and their pauses. A turn of one step is a
    request without history.
    """

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
        """Returns True if every session is a single request."""
        return self.turns.most == 1 and self.steps.most == 1


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """Lengths of user turns and answers. A shared prefix is part of a session's first turn."""

    input_len: LengthSpread
    output_len: LengthSpread
    shared_prefix_len: int = 0
    num_prefixes: int = 1


@dataclass(frozen=True, slots=True)
class ArrivalShape:
    """The distribution of due times of sessions. With `clients` it is a closed loop, without fixed
    times.
    """

    rate_per_s: float  # requests per second
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
    """Draws sessions with `num_requests` requests in total. The last session may end early.

    `shape` draws lengths, turns and pauses, `content` draws words or ids. No due time is set.
    Sessions begin with different symbols, as long as the vocabulary has enough.
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
    """Draws the turns of one session. The first turn begins with the symbols `first`."""
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
    """Returns the sessions with their due times.

    `rate_per_s` counts requests. So sessions begin at this rate divided by the mean number of
    requests per session.
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
    """Returns a session of one turn for each request of a trace, due at the recorded time.

    Equal block ids give equal symbols, so shared prefixes stay shared. A request without block ids
    shares no prefix.
    """
    symbols: Symbols = WORDS if vocab is None else vocab

    @lru_cache(maxsize=4096)  # prefixes that were used recently are likely to be used again
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
    """Makes the prompts of one session's turns from earlier turns and their answers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._messages: Messages = []
        self._ids: list[int] = []
        self._has_ids = False

    def prompt(self, turn: SessionTurn) -> Prompt | Messages:
        """Returns the prompt: all earlier turns and answers, then this turn."""
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
        """Records the answer to a turn."""
        if self._has_ids:
            self._ids += (symbol for symbol in turn.stand_in if isinstance(symbol, int))
        else:
            self._messages.append({"role": "assistant", "content": said})

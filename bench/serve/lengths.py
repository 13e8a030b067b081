"""Distributions of lengths, as options write them. Pure: the random generator is an argument.

| option                      | drawn lengths                                                |
|-----------------------------|--------------------------------------------------------------|
| `128`                       | always 128                                                   |
| `uniform:64-256`            | every whole number of the range, equally likely              |
| `lognormal:128,0.8`         | median 128; 0.8 is the deviation of the logarithm            |
| `lognormal:128,0.8,16-2048` | the same, moved to the nearest end of the range if outside   |
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import typer

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

"""The mixes of requests of `bench fluid`, named after their tokens in and out. Pure.

A closed loop of a few clients plays each mix. Each client asks again as soon as it has its answer.
They begin one after the other in a ramp before the window. `turning` alternates between the mix of
most prompt tokens and the mix of most output tokens every few seconds.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bench.common.command import values_of
from bench.common.options import check_choices
from engine.errors import ConfigError

TURNING = "turning"
RAMP_S = 5.0
WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class TokenMix:
    """Requests by tokens in and out. With several `phases`, they alternate."""

    name: str
    phases: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return self.name

    def lengths_at(self, elapsed_s: float, phase_s: float) -> tuple[int, int]:
        """Returns the tokens in and out of a request that is sent at this time of the window."""
        return self.phases[int(elapsed_s // phase_s) % len(self.phases)]

    def window_s(self, window_s: float) -> float:
        """Returns the measured part of the mix's loop, which is longer if the mix has several
        phases.
        """
        return window_s * len(self.phases)


def mixes_of(text: str) -> tuple[TokenMix, ...]:
    """Returns the mixes in a text such as "1024/16,64/256,turning". Raises ConfigError."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    steady = values_of(
        "--mixes", ",".join(n for n in names if n != TURNING), _mix, "INPUT/OUTPUT,…,turning"
    )
    if not names:
        raise ConfigError("--mixes: none given")
    if TURNING not in names:
        return steady
    if len(steady) < 2:
        raise ConfigError("--mixes: turning needs two other mixes, between which it turns")
    reading, writing = (of(steady, key=_prompts_share) for of in (max, min))
    return (*steady, TokenMix(TURNING, reading.phases + writing.phases))


def parts_of(text: str | None, known: Collection[str]) -> Sequence[str]:
    """Returns the parts in a text such as "mixes,bound"; all for None. Raises ConfigError."""
    if text is None:
        return [*known]
    parts = values_of("--parts", text, str, "a list")
    check_choices("--parts", parts, known)
    return parts


def starts_s(num_clients: int, ramp_s: float) -> list[float]:
    """Returns when each client of a closed loop begins.

    Clients that begin together may stay synchronised for long: then all prompts come at once, and
    in between all clients decode. This favours mixed workers, and real loads of many clients do not
    behave so.
    """
    return [ramp_s * i / num_clients for i in range(num_clients)]


def _mix(text: str) -> TokenMix:
    input_len, output_len = map(int, text.split("/"))
    if min(input_len, output_len) < 1:
        raise ValueError(text)
    return TokenMix(f"{input_len}+{output_len}", ((input_len, output_len),))


def _prompts_share(mix: TokenMix) -> float:
    [(input_len, output_len)] = mix.phases
    return input_len / output_len

"""What `bench validation` measures: loads, and splits of prefill and decode workers. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from bench.simulator.traces import Trace, TraceRequest

BLOCK_TOKENS = 16
MAX_INPUT, MIN_INPUT = 1500, 32
MAX_OUTPUT, MIN_OUTPUT = 64, 12
QUICK_REQUESTS = 25  # of each run, instead of all: they come in about 5 s


@dataclass(frozen=True, slots=True)
class ValidationLoad:
    """Poisson arrivals, log-normal lengths; some prompts begin like others.

    Lengths are medians; `spread` is the deviation of their logarithm.
    """

    rate_per_s: float
    num_requests: int
    input_tokens: int
    output_tokens: int
    spread: float = 0.7
    share_with_prefix: float = 0.3
    num_prefixes: int = 3
    prefix_tokens: int = 192


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """The loads and repetitions for each split."""

    splits: Sequence[tuple[int, int]] = ((1, 1), (2, 2))
    rate_per_s: float = 5.0  # of the test's load, for a split with one prefill worker
    num_requests: int = 80
    num_calibrating: int = 60
    num_repeats: int = 5
    seed: int = 0

    def load(self, split: tuple[int, int]) -> ValidationLoad:
        """Returns the test load, which is played and simulated."""
        return ValidationLoad(self._rate_per_s(split), self.num_requests, 400, 32)

    def calibration(self, split: tuple[int, int]) -> ValidationLoad:
        """Returns the calibration load: slower, longer prompts, shorter answers, fewer common
        prefixes.
        """
        return ValidationLoad(
            0.8 * self._rate_per_s(split),
            self.num_calibrating,
            500,
            24,
            spread=0.9,
            share_with_prefix=0.1,
        )

    def _rate_per_s(self, split: tuple[int, int]) -> float:
        """Four workers on two cores are not twice as fast as two."""
        return self.rate_per_s * math.sqrt(split[0])


def made(load: ValidationLoad, rng: Random, ids: "count[int]") -> Trace:
    """Returns a trace of a load. Its blocks take the next ids, so traces share no prefix."""
    num_blocks = load.prefix_tokens // BLOCK_TOKENS
    prefixes = [[next(ids) for _ in range(num_blocks)] for _ in range(load.num_prefixes)]
    requests = []
    at_s = 0.0
    for _ in range(load.num_requests):
        at_s += rng.expovariate(load.rate_per_s)
        input_len = _length(load.input_tokens, load.spread, (MIN_INPUT, MAX_INPUT), rng)
        output_len = _length(load.output_tokens, load.spread, (MIN_OUTPUT, MAX_OUTPUT), rng)
        begins = rng.choice(prefixes) if rng.random() < load.share_with_prefix else []
        length = max(input_len, len(begins) * BLOCK_TOKENS + 1)
        own = [next(ids) for _ in range(-(-length // BLOCK_TOKENS) - len(begins))]
        requests.append(TraceRequest(at_s, length, output_len, (*begins, *own)))
    return Trace("validation", BLOCK_TOKENS, tuple(requests))


def _length(middle: int, spread: float, bounds: tuple[int, int], rng: Random) -> int:
    length = round(middle * math.exp(rng.gauss(0.0, spread)))
    return min(max(length, bounds[0]), bounds[1])

"""The loads of `bench validation`. Pure."""

import math
from dataclasses import dataclass
from itertools import count
from random import Random

from bench.simulator.traces import Trace, TraceRequest

BLOCK_TOKENS = 16
MAX_INPUT, MIN_INPUT = 1500, 32
MAX_OUTPUT, MIN_OUTPUT = 64, 12


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

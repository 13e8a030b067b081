"""A made-up load with given means, and a share of each prompt that is cached.

Arrivals are Poisson, lengths log-normal around their means and no longer than four times that.
Prompts continue one of some conversations: they begin with so many blocks of its longest one as
bring the share of the tokens that were seen before to what was asked for. The first of each
conversation is in the first eighth of the trace; what comes after it is what is to be measured.
"""

import math
from itertools import count
from random import Random

from bench.planner.load import LONGEST, ExpectedLoad
from bench.simulator.traces import Trace, TraceRequest

PAUSE_S = 30.0  # between the turns of a conversation, on average
COLD_SHARE = 8  # one request in so many is the first of its conversation


def workload(load: ExpectedLoad, *, num_requests: int, block_tokens: int, rng: Random) -> Trace:
    """So many requests."""
    inputs = _lengths(load.input_tokens, load.spread, num_requests, rng)
    outputs = _lengths(load.output_tokens, load.spread, num_requests, rng)
    num_chains = max(1, min(round(PAUSE_S * load.rate_per_s), num_requests // COLD_SHARE))
    chains: list[tuple[int, ...]] = [()] * num_chains
    fresh = count()
    at_s, num_tokens, num_hits = 0.0, 0, 0
    requests = []
    for index, (input_len, output_len) in enumerate(zip(inputs, outputs, strict=True)):
        at_s += rng.expovariate(load.rate_per_s)
        chain = index if index < num_chains else rng.randrange(num_chains)
        num_tokens += input_len if chains[chain] else 0
        wanted = round((load.prefix_hit * num_tokens - num_hits) / block_tokens)
        shared = chains[chain][: min(max(wanted, 0), (input_len - 1) // block_tokens)]
        num_hits += len(shared) * block_tokens
        num_more = -(-input_len // block_tokens) - len(shared)
        ids = shared + tuple(next(fresh) for _ in range(num_more))
        chains[chain] = max(chains[chain], ids[: input_len // block_tokens], key=len)
        requests.append(TraceRequest(at_s, input_len, output_len, ids))
    return Trace("made up", block_tokens, tuple(requests))


def _lengths(mean: float, spread: float, num: int, rng: Random) -> list[int]:
    drawn = [math.exp(rng.gauss(0.0, spread)) for _ in range(num)]
    for _ in range(2):  # what the longest are cut by, the others are given
        scale = mean * num / math.fsum(drawn)
        drawn = [min(length * scale, LONGEST * mean) for length in drawn]
    return [max(round(length), 1) for length in drawn]

"""A synthetic load with given mean lengths and a given share of cached prompt tokens.

Arrivals are Poisson. Lengths are log-normal around their means, at most four times as long. Each
prompt continues a conversation: it begins with blocks of that conversation's longest prompt. The
number of blocks is chosen so that the share of already seen tokens meets the target. The first
request of each conversation is in the first eighth of the trace; the requests after it are
measured.
"""

import math
from itertools import count
from random import Random

from bench.planner.load import LONGEST, ExpectedLoad
from bench.simulator.traces import Trace, TraceRequest

COLD_SHARE = 8  # one request in COLD_SHARE is the first of its conversation


def workload(load: ExpectedLoad, *, num_requests: int, block_tokens: int, rng: Random) -> Trace:
    """Returns a trace of `num_requests` requests."""
    inputs = _lengths(load.input_tokens, load.spread, num_requests, rng)
    outputs = _lengths(load.output_tokens, load.spread, num_requests, rng)
    num_chains = num_conversations(load, num_requests)
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


def num_conversations(load: ExpectedLoad, num_requests: int) -> int:
    """Returns the conversations of a trace. Few requests hold few, whose turns follow sooner."""
    return max(1, min(round(load.pause_s * load.rate_per_s), num_requests // COLD_SHARE))


def _lengths(mean: float, spread: float, num: int, rng: Random) -> list[int]:
    drawn = [math.exp(rng.gauss(0.0, spread)) for _ in range(num)]
    for _ in range(2):  # the length cut from the longest goes to the others
        scale = mean * num / math.fsum(drawn)
        drawn = [min(length * scale, LONGEST * mean) for length in drawn]
    return [max(round(length), 1) for length in drawn]

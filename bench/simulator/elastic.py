"""A load that turns: phases of two mixes by turns, on pools of fixed sizes and on planned ones.

    reading   long prompts that share nothing, short answers: nearly all work is prefill
    writing   a long shared prefix that is cached soon, few tokens of one's own, long answers:
              nearly all work is decoding

Requests come one by one (Poisson) at a rate that nearly fills the cluster in each mix, if its pools
are right for that mix; from one phase to the next the mix changes at once.

    goodput/best_fixed   requests/s that met both bounds, with the best of the fixed splits
    goodput/planner      the same, where the planner sets the pools, beginning with that best split
    ratio                the one over the other
    react_s              from a turn until the pools stay within a tenth of all workers of what
                         the planner makes of them in that phase; the longest of all turns
    flips, lost          changes of role; requests that failed

The router knows the bounds and refuses who would miss them, with fixed pools as with planned ones;
who is refused is a miss and is not lost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from math import exp
from random import Random

from bench.simulator.traces import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of one kind. Lengths are log-normal around their medians, at most twice that."""

    rate_per_s: float  # for each worker of the cluster
    shared_tokens: int
    input_tokens: int  # beyond what is shared, in the median
    output_tokens: int  # in the median
    spread: float = 0.3


READING = Mix(0.72, 0, 16384, 100)
WRITING = Mix(1.06, 8192, 512, 1500)


@dataclass(frozen=True, slots=True)
class Turns:
    """A load: the mixes by turns, each for so long."""

    num_phases: int
    phase_s: float
    mixes: Sequence[Mix] = (READING, WRITING)

    def trace(self, num_workers: int, seed: int) -> Trace:
        """The requests, as many as so many workers nearly are too few for."""
        rng = Random(seed)
        fresh = count(sum(_num_blocks(mix.shared_tokens) for mix in self.mixes) + 1)
        requests: list[TraceRequest] = []
        for phase, mix in enumerate(islice(cycle(self.mixes), self.num_phases)):
            first_id = sum(
                _num_blocks(m.shared_tokens) for m in self.mixes[: phase % len(self.mixes)]
            )
            shared = range(first_id, first_id + _num_blocks(mix.shared_tokens))
            for at_s in _arrivals(mix.rate_per_s * num_workers, self.phase_s, rng):
                arrived_s = phase * self.phase_s + at_s
                requests.append(_request(mix, arrived_s, tuple(shared), fresh, rng))
        return Trace("turning", MOONCAKE_BLOCK_TOKENS, tuple(requests))


def _arrivals(rate_per_s: float, until_s: float, rng: Random) -> Iterator[float]:
    at_s = rng.expovariate(rate_per_s)
    while at_s < until_s:
        yield at_s
        at_s += rng.expovariate(rate_per_s)


def _request(
    mix: Mix, arrived_s: float, shared: tuple[int, ...], fresh: Iterator[int], rng: Random
) -> TraceRequest:
    own = _length(mix.input_tokens, mix.spread, rng)
    input_len = mix.shared_tokens + own
    ids = shared + tuple(islice(fresh, _num_blocks(own)))
    return TraceRequest(arrived_s, input_len, _length(mix.output_tokens, mix.spread, rng), ids)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // MOONCAKE_BLOCK_TOKENS)


def _length(median: int, spread: float, rng: Random) -> int:
    return min(max(round(median * exp(rng.gauss(0.0, spread))), 2), 2 * median)

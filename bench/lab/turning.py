"""A simulated load that alternates between two mixes of requests. Pure.

    reading   long prompts without common prefixes, short answers: nearly all work is prefill
    writing   a long shared prefix, which is soon cached, a short own part and long answers: nearly
              all work is decoding

Arrivals are Poisson. The rate nearly fills the cluster in each mix, if the pools have the right
sizes for that mix. The mix changes at once from one phase to the next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from math import exp
from random import Random

from bench.simulator.traces import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Requests of one kind. Lengths are log-normal, at most twice their medians."""

    rate_per_s: float  # for each worker of the cluster
    shared_tokens: int
    input_tokens: int  # beyond what is shared, in the median
    output_tokens: int  # in the median
    spread: float = 0.3


READING = RequestMix(0.72, 0, 16384, 100)
WRITING = RequestMix(1.06, 8192, 512, 1500)


@dataclass(frozen=True, slots=True)
class TurningLoad:
    """A load that alternates between mixes, one in each phase."""

    num_phases: int
    phase_s: float
    mixes: Sequence[RequestMix] = (READING, WRITING)

    @property
    def duration_s(self) -> float:
        """Seconds of all phases together."""
        return self.num_phases * self.phase_s

    def trace(self, num_workers: int, seed: int) -> Trace:
        """Returns the requests, which nearly fill a cluster of this size."""
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
    mix: RequestMix, arrived_s: float, shared: tuple[int, ...], fresh: Iterator[int], rng: Random
) -> TraceRequest:
    own = _length(mix.input_tokens, mix.spread, rng)
    input_len = mix.shared_tokens + own
    ids = shared + tuple(islice(fresh, _num_blocks(own)))
    return TraceRequest(arrived_s, input_len, _length(mix.output_tokens, mix.spread, rng), ids)


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // MOONCAKE_BLOCK_TOKENS)


def _length(median: int, spread: float, rng: Random) -> int:
    return min(max(round(median * exp(rng.gauss(0.0, spread))), 2), 2 * median)

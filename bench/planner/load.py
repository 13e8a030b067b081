"""Formulas for the fewest workers that a load needs, and for the workers' utilisation.

Lengths are log-normal around their means. `spread` is the deviation of their logarithm, σ, so that
E[n²] = n²·e^σ² and the 90th percentile is n·e^(1.28σ - σ²/2). A share h of each prompt's tokens is
cached.

    prefill   S = A·chunks + B·(1 - h)·n + C·(1 - h²)·E[n²]; k workers are busy for λ·S / k of the
              time; the wait is an M/G/k queue's after Sakasegawa and Allen-Cunneen, with its
              90th percentile from an exponential tail
    decode    a step takes D + b·(E + F·ctx), and b = λ·(o - 1)·TPOT by Little's law. So TPOT =
              D / (1 - λ·(o - 1)·(E + F·ctx)), but never below one sequence's TPOT. ctx is the mean
              context of a sequence, the prompt and half of the answer, weighted by its duration
    both      prompts take time from decoding: TPOT = D / (1 - λ·S' - λ·(o - 1)·(E + F·ctx)), where
              S' leaves out the fixed cost of a step

The p90 of a pool's concurrent sequences must fit into its memory, and TPOT must be a tenth below
its bound. The formulas leave out bursts, placement, pulls and chunks. So their result is only the
start of a search by simulation.

Sources: Sakasegawa, Annals of the Institute of Statistical Mathematics 29, 1977; Allen-Cunneen, in
Allen, Probability, Statistics, and Queueing Theory, 2nd ed., 1990; Little, 1961.
"""

import math
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Annotated

import typer

from bench.client.load import SloBounds
from bench.planner.pricing import PlannedWorker
from bench.simulator.cluster import SimulatedPools
from bench.simulator.traces import Trace, TraceRequest
from engine.errors import ConfigError

Z90 = 1.2816  # 90 % quantile of the normal distribution
LONGEST = 4  # greatest length of a request, as a multiple of the mean
TPOT_HEADROOM = 0.9


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """A load: requests/s, and their lengths in tokens."""

    rate_per_s: Annotated[float, typer.Option("--rps", help="Requests/s.")]
    input_tokens: Annotated[float, typer.Option("--input", help="Mean prompt tokens of a request.")]
    output_tokens: Annotated[
        float, typer.Option("--output", help="Mean output tokens of a request.")
    ]
    prefix_hit: Annotated[float, typer.Option(help="Share of prompt tokens found cached.")] = 0.0
    spread: Annotated[float, typer.Option(help="Deviation of the logarithm of lengths.")] = 0.5
    pause_s: Annotated[
        float, typer.Option("--pause", help="Mean seconds between the turns of a conversation.")
    ] = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < math.inf:
            raise ConfigError(f"--rps must be above 0, not {self.rate_per_s:g}")
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ConfigError("--input and --output must be at least 1")
        if not 0 <= self.prefix_hit < 1:
            raise ConfigError(f"--prefix-hit must be from 0 to below 1, not {self.prefix_hit:g}")
        if not 0 < self.pause_s < math.inf:
            raise ConfigError(f"--pause must be above 0, not {self.pause_s:g}")
        if not 0 <= self.spread <= 2:
            raise ConfigError(f"--spread must be from 0 to 2, not {self.spread:g}")

    @property
    def variance(self) -> float:
        """Returns the variance of a length, divided by its squared mean."""
        return math.exp(self.spread**2) - 1

    @property
    def input_p90(self) -> float:
        """Returns the prompt tokens that one request in ten exceeds."""
        return self.input_tokens * math.exp(Z90 * self.spread - self.spread**2 / 2)

    @property
    def context_tokens(self) -> float:
        """Returns the mean KV tokens of a running sequence, averaged over time."""
        return self.input_tokens + self.output_tokens * (1 + self.variance) / 2

    @property
    def longest_tokens(self) -> int:
        """Returns the KV tokens of the longest request."""
        return math.ceil(LONGEST * (self.input_tokens + self.output_tokens))

    @property
    def tokens_per_s(self) -> float:
        """Returns the tokens of prompts and answers per second."""
        return self.rate_per_s * (self.input_tokens + self.output_tokens)

    @property
    def decoded_per_s(self) -> float:
        """Returns the decoded tokens per second, which are all tokens of answers except the first
        ones.
        """
        return self.rate_per_s * max(self.output_tokens - 1, 0)


@dataclass(frozen=True, slots=True)
class LatencyFloor:
    """Latencies of one request on an idle worker, which more workers do not improve."""

    ttft_s: float  # p90: one prompt in ten takes longer
    tpot_s: float

    def meets(self, slo: SloBounds) -> bool:
        """Returns True if one request on an idle worker meets both bounds."""
        return slo.hold(self.ttft_s, self.tpot_s)


@dataclass(frozen=True, slots=True)
class PoolEstimate:
    """The sizes of pools by formula. Shares of time and memory are per worker."""

    pools: SimulatedPools
    prefill_busy: float
    ttft_p90_s: float
    tpot_s: float
    running: float  # mean number of running sequences of one decoding worker
    kv_used: float


def floor_of(load: ExpectedLoad, worker: PlannedWorker) -> LatencyFloor:
    """Returns the latencies of one request on an otherwise idle worker."""
    return LatencyFloor(_prefill_s(load, worker, load.input_p90), _step_s(load, worker))


def disaggregated(
    load: ExpectedLoad, worker: PlannedWorker, slo: SloBounds, *, max_workers: int
) -> PoolEstimate | None:
    """Returns the fewest prefill and decode workers; None if more than `max_workers` would be
    needed.
    """
    for prefill in range(1, max_workers):
        busy = load.rate_per_s * prefill_mean_s(load, worker) / prefill
        if busy < 1 and slo.hold(_ttft_p90_s(load, worker, prefill), None):
            break
    else:
        return None
    for decode in range(1, max_workers - prefill + 1):
        found = _estimate(load, worker, SimulatedPools(prefill, decode))
        if _fits(found, worker, slo):
            return found
    return None


def colocated(
    load: ExpectedLoad, worker: PlannedWorker, slo: SloBounds, *, max_workers: int
) -> PoolEstimate | None:
    """Returns the fewest mixed workers; None if more than `max_workers` would be needed."""
    for mixed in range(1, max_workers + 1):
        found = _estimate(load, worker, SimulatedPools(mixed=mixed))
        if _fits(found, worker, slo) and slo.hold(found.ttft_p90_s, None):
            return found
    return None


def prefill_mean_s(load: ExpectedLoad, worker: PlannedWorker) -> float:
    """Returns the mean seconds that a worker needs for one prompt."""
    cost, hit = worker.hardware.prefill, load.prefix_hit
    new = load.input_tokens * (1 - hit)
    chunks = max(new / worker.hardware.chunk_tokens, 1.0)
    squares = load.input_tokens**2 * (1 + load.variance) * (1 - hit**2)
    return cost.fixed_s * chunks + cost.token_s * new + cost.square_s * squares


def _prefill_s(load: ExpectedLoad, worker: PlannedWorker, input_tokens: float) -> float:
    """Returns the seconds that a worker needs for a prompt of this length."""
    cost, cached = worker.hardware.prefill, input_tokens * load.prefix_hit
    squares = input_tokens**2 - cached**2
    return cost.fixed_s + cost.token_s * (input_tokens - cached) + cost.square_s * squares


def _step_s(load: ExpectedLoad, worker: PlannedWorker) -> float:
    """Returns the seconds of a decode step with one sequence."""
    cost = worker.hardware.decode
    return cost.fixed_s + cost.row_s + cost.context_s * load.context_tokens


def _estimate(load: ExpectedLoad, worker: PlannedWorker, pools: SimulatedPools) -> PoolEstimate:
    decode = worker.hardware.decode
    decoding = pools.mixed or pools.decode
    per_token_s = decode.row_s + decode.context_s * load.context_tokens
    prefill_busy = load.rate_per_s * prefill_mean_s(load, worker) / (pools.mixed or pools.prefill)
    idle = 1 - load.decoded_per_s / decoding * per_token_s
    if pools.mixed:
        idle -= load.rate_per_s / decoding * _beside_decoding_s(load, worker)
    alone_s = _step_s(load, worker)
    tpot_s = max(decode.fixed_s / idle, alone_s) if idle > 0 else math.inf
    running = load.decoded_per_s / decoding * tpot_s
    wait_s = tpot_s if pools.mixed else 0.0  # a prompt waits for the end of the running step
    return PoolEstimate(
        pools=pools,
        prefill_busy=prefill_busy,
        ttft_p90_s=_ttft_p90_s(load, worker, pools.mixed or pools.prefill) + wait_s,
        tpot_s=tpot_s,
        running=running,
        kv_used=running * load.context_tokens / worker.kv_tokens,
    )


def _beside_decoding_s(load: ExpectedLoad, worker: PlannedWorker) -> float:
    """Returns the seconds by which a prompt lengthens decode steps on the same worker."""
    hardware = worker.hardware
    saved_s = min(hardware.prefill.fixed_s, hardware.decode.fixed_s)
    return max(prefill_mean_s(load, worker) - saved_s, 0.0)


def _fits(found: PoolEstimate, worker: PlannedWorker, slo: SloBounds) -> bool:
    """Returns True if TPOT and memory have headroom. The number of running sequences is taken as
    Poisson.
    """
    if not slo.hold(None, found.tpot_s) or not math.isfinite(found.running):
        return False
    # a worker has less than one sequence on average, so more workers would not help
    alone = found.running < 1
    if not alone and not slo.hold(None, found.tpot_s / TPOT_HEADROOM):
        return False
    many = found.running + Z90 * math.sqrt(found.running)
    kv_used = found.kv_used * many / max(found.running, 1e-9)
    return many <= max(worker.hardware.max_running, 1) and kv_used <= 1


def _ttft_p90_s(load: ExpectedLoad, worker: PlannedWorker, num_workers: int) -> float:
    """Returns the p90 of wait plus prompt time, which is at least the p90 of a single request."""
    service_s = prefill_mean_s(load, worker)
    busy = load.rate_per_s * service_s / num_workers
    if busy >= 1:
        return math.inf
    own_s = max(service_s, _prefill_s(load, worker, load.input_p90))
    return max(service_s + wait_p90_s(service_s, busy, num_workers, load.variance), own_s)


def wait_p90_s(service_s: float, busy: float, num_workers: int, variance: float) -> float:
    """Returns the wait in an M/G/k queue that one request in ten exceeds. `variance` is in squares
    of `service_s`.
    """
    waits = busy ** (math.sqrt(2 * (num_workers + 1)) - 1)  # probability that a request waits
    if waits <= 0.1:
        return 0.0
    mean_s = service_s * (1 + variance) / (2 * num_workers * (1 - busy))  # mean of waits
    return mean_s * math.log(waits / 0.1)


# ---------------------------------------------------------------- a synthetic load
#
# Arrivals are Poisson. Lengths are log-normal around their means, at most four times as long. Each
# prompt continues a conversation: it begins with blocks of that conversation's longest prompt. The
# number of blocks is chosen so that the share of already seen tokens meets the target. The first
# request of each conversation is in the first eighth of the trace; the requests after it are
# measured.

COLD_SHARE = 8  # one request in COLD_SHARE is the first of its conversation


def workload(load: ExpectedLoad, *, num_requests: int, block_tokens: int, rng: Random) -> Trace:
    """Returns a synthetic trace of `num_requests` requests."""
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
    """Returns the number of conversations of a trace. A short trace has few conversations, so their
    turns follow each other sooner.
    """
    return max(1, min(round(load.pause_s * load.rate_per_s), num_requests // COLD_SHARE))


def _lengths(mean: float, spread: float, num: int, rng: Random) -> list[int]:
    drawn = [math.exp(rng.gauss(0.0, spread)) for _ in range(num)]
    for _ in range(2):  # the excess of the longest prompts is distributed to the others
        scale = mean * num / math.fsum(drawn)
        drawn = [min(length * scale, LONGEST * mean) for length in drawn]
    return [max(round(length), 1) for length in drawn]

"""The closed loops of `bench fluid`, simulated: the same mixes, without the noise of a machine.

No two prompts begin alike, and nothing is bounded. A rate is that of the window, in which a request
counts by the share of its tokens there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice

from bench.elastic_live.plan import answered_per_s
from bench.fluid.plan import RAMP_S, WINDOW_S, TokenMix, starts_s
from bench.simulator.cluster import SimulationSetup, simulate_clients
from bench.simulator.traces import MOONCAKE_BLOCK_TOKENS, TraceRequest
from engine.config import RouterConfig
from router.native.machine import native_machine


@dataclass(frozen=True, slots=True)
class Loops:
    """Closed loops of some clients, one for each mix."""

    mixes: Sequence[TokenMix] = ()
    num_clients: int = 8
    ramp_s: float = RAMP_S
    window_s: float = WINDOW_S
    phase_s: float = 2.5  # of a mix that turns


def requests_per_s(loops: Loops, mix: TokenMix, setup: SimulationSetup, *, seed: int) -> float:
    """Returns the requests/s of a mix in a closed loop on an idle cluster."""
    begin_s, fresh = loops.ramp_s, count(1)
    end_s = begin_s + mix.window_s(loops.window_s)
    later_s = iter(starts_s(loops.num_clients, loops.ramp_s))

    def ask(now_s: float) -> TraceRequest | None:
        if now_s >= end_s:
            return None
        at_s = next(later_s, now_s)
        input_len, output_len = mix.lengths_at(at_s - begin_s, loops.phase_s)
        num_blocks = -(-input_len // MOONCAKE_BLOCK_TOKENS)
        return TraceRequest(at_s, input_len, output_len, tuple(islice(fresh, num_blocks)))

    machine = native_machine(RouterConfig(seed=seed, max_queue=loops.num_clients))
    run = simulate_clients(loops.num_clients, ask, MOONCAKE_BLOCK_TOKENS, setup, machine)
    return answered_per_s((record.times_s for record in run.records), begin_s, end_s)

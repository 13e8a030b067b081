"""The figures of `bench simulator`, and their goals. Pure.

| result              |      |                                                                     |
|---------------------|------|---------------------------------------------------------------------|
| sim/round_robin     | s    | mean TTFT, round-robin: near the peer's, or the two do not compare  |
| sim/ttft_x1, _x2    | s    | mean TTFT of `slo` at the trace's own rate, and at twice that       |
| sim/hit_ratio       |      | cached prompt tokens, as a share of an infinite cache's             |
| sim/goodput         | ×    | the greatest speed-up of the trace with nine of ten requests within |
|                     |      | the bound on TTFT, and nine of ten within that on TPOT              |
| sim/goodput_ratio   |      | ours over the peer's                                                |
| sim/wall_s          | s    | wall time of our `sim/ttft_x1`                                      |

The goodput is that of the best split, on the first requests of the trace. Our router knows the
bounds and refuses early. A refusal is a miss of both bounds.
"""

from bench.common.goals import Goals
from bench.common.report import Peer, Result
from bench.comparison.peer import NAME

GOALS = Goals(
    {
        "sim/ttft_x1": 0.575,
        "sim/ttft_x2": 0.630,
        "sim/hit_ratio": 0.95,
        "sim/goodput_ratio": 1.4,
        "sim/wall_s": 15.0,
    },
    at_most=("sim/ttft_x1", "sim/ttft_x2", "sim/wall_s"),
)


def result_of(name: str, value: float, unit: str, peer: float | None) -> Result:
    """Returns one result, beside the peer's value if there is one."""
    peers = {} if peer is None else {NAME: Peer(peer, value / peer if peer else 0.0)}
    return Result(name=name, value=value, unit=unit, runs=(value,), peers=peers)

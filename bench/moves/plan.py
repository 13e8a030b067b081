"""The plan of one `bench moves`. Pure.

There are a prefill worker and two decode workers. All streams run on one decode worker when that is
flipped to prefill, so all of them move at once. The next repetition moves those of the other.
Further streams may run on the target already, and stay there.

    streams begin ── calm ──> flip ──> it says that it is a prefill worker, and decodes nothing

The figure is the longest gap of each stream after the order. For comparison there is the longest
gap of the same stream in an equally long time before: two cores that five processes share have gaps
of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.common.report import Scalar
from bench.common.shapes import shape_named
from bench.lab.streams import StreamAsk
from engine.errors import ConfigError

OPTIONS: Mapping[str, Scalar] = {"--prefill": 1, "--decode": 2, "--threads": 1}
STAYS = {"BATON_ROUTER__BALANCE": "false"}  # no stream moves before its worker is flipped
CALM_S = 2.0  # streams run this long undisturbed: as long as a flip may take
QUICK_REPEATS = 2


@dataclass(frozen=True, slots=True)
class MovesPlan:
    """One benchmark of moves. `shape` names a checkpoint of random weights."""

    shape: str
    streams: StreamAsk
    num_repeats: int = 6
    seed: int = 0
    num_beside: int = 0  # streams of the same kind that run in the target already


def check(plan: MovesPlan) -> MovesPlan:
    """Returns the plan. Raises ConfigError if a request does not fit the model."""
    num_tokens = plan.streams.input_len + plan.streams.output_len
    if num_tokens > (most := shape_named(plan.shape).max_positions):
        raise ConfigError(f"{num_tokens} tokens are more than {plan.shape} has room for: {most}")
    return plan


def quick(plan: MovesPlan) -> MovesPlan:
    """Once in each direction: under 50 s."""
    return replace(plan, num_repeats=QUICK_REPEATS)


def config_of(plan: MovesPlan) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report."""
    return {
        "shape": plan.shape,
        "streams": plan.streams.at_once,
        "input_len": plan.streams.input_len,
        "output_len": plan.streams.output_len,
        "beside": plan.num_beside,
        "num_repeats": plan.num_repeats,
    }

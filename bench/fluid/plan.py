"""The plan of one `bench fluid` on real deployments. Pure.

Three deployments have two workers of one compute thread each behind one gateway:

    fluid    1 prefill + 1 decode worker; each takes the other's work if it has none of its own
    walled   the same two workers, each with the work of its role only
    mixed    2 workers of both roles

**Mixes.** A closed loop of a few clients plays each mix on each deployment. Each client asks again
as soon as it has its answer. They begin one after the other in a ramp before the window. A mix is
named after its tokens in and out. `turning` alternates between the mix of most prompt tokens and
the mix of most output tokens every few seconds. All deployments are up all the time, all but one
idle. Each repetition plays all mixes in a random order, and each mix on all deployments in a random
order, one after the other. So each ratio is that of neighbours in time.

**Bound.** First the pace of a few streams without prompts is measured on `walled`, and the time of
one prompt. Then a deployment `bound` starts, with fluid pools and `SLACK` times this pace as
`router.slo_tpot_s`. Streams decode there, and on `walled`, without prompts and while prompts
arrive. The prompts are a Poisson process at `LOAD` times the rate of one worker. No two prompts
begin alike, so no cache helps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from bench.common.command import values_of
from bench.common.report import Scalar
from bench.common.shapes import shape_named
from bench.lab.streams import StreamAsk
from engine.errors import ConfigError

SLACK = 1.25  # of the bound over the pace of streams alone
LOAD = 0.8  # of the prompts that one worker computes
TURNING = "turning"
RAMP_S = 5.0
WINDOW_S = 10.0
QUICK_WINDOW_S = 3.0


class FluidDeployment(StrEnum):
    """One `baton serve`."""

    FLUID = "fluid"
    WALLED = "walled"
    MIXED = "mixed"
    BOUND = "bound"


COMPARED = (FluidDeployment.FLUID, FluidDeployment.WALLED, FluidDeployment.MIXED)
WALLS = {"BATON_POOLS__FLUID": "false"}
_SEPARATE: Mapping[str, Scalar] = {"--prefill": 1, "--decode": 1}
POOLS: Mapping[FluidDeployment, Mapping[str, Scalar]] = {  # options of `baton serve`
    FluidDeployment.FLUID: _SEPARATE,
    FluidDeployment.WALLED: _SEPARATE,
    FluidDeployment.MIXED: {"--mixed": 2},
    FluidDeployment.BOUND: _SEPARATE,
}


class FluidPart(StrEnum):
    """A part of the benchmark: mixes on both, bound on this machine, goodput simulated."""

    MIXES = "mixes"
    BOUND = "bound"
    GOODPUT = "goodput"


LIVE_PARTS = frozenset((FluidPart.MIXES, FluidPart.BOUND))
SIMULATED_PARTS = frozenset((FluidPart.MIXES, FluidPart.GOODPUT))


class BoundSetting(StrEnum):
    """Where streams decode in the second part, and whether prompts arrive."""

    BOUND_IDLE = "bound_idle"
    BOUND = "bound"
    WALLED_IDLE = "walled_idle"
    WALLED = "walled"

    @property
    def deployment(self) -> FluidDeployment:
        """Returns the deployment of the streams."""
        return FluidDeployment(self.removesuffix("_idle"))

    @property
    def has_prompts(self) -> bool:
        """True if prompts arrive."""
        return not self.endswith("_idle")


@dataclass(frozen=True, slots=True)
class TokenMix:
    """Requests by tokens in and out. With several `phases`, they alternate."""

    name: str
    phases: tuple[tuple[int, int], ...]

    def lengths_at(self, elapsed_s: float, phase_s: float) -> tuple[int, int]:
        """Returns the tokens in and out of a request that is sent at this time of the window."""
        return self.phases[int(elapsed_s // phase_s) % len(self.phases)]

    def window_s(self, window_s: float) -> float:
        """Returns the measured part of its loop: so long for each of its phases."""
        return window_s * len(self.phases)


@dataclass(frozen=True, slots=True)
class FluidPlan:
    """One benchmark. `shape` names a checkpoint of random weights."""

    shape: str
    mixes: tuple[TokenMix, ...]
    streams: StreamAsk
    prompts: StreamAsk
    parts: frozenset[FluidPart] = LIVE_PARTS
    num_clients: int = 8
    ramp_s: float = RAMP_S
    window_s: float = WINDOW_S
    phase_s: float = 2.5  # of a mix that turns
    num_repeats: int = 6
    seed: int = 0


def mixes_of(text: str) -> tuple[TokenMix, ...]:
    """Returns the mixes in a text such as "1024/16,64/256,turning". Raises ConfigError."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    steady = values_of(
        "--mixes", ",".join(n for n in names if n != TURNING), _mix, "INPUT/OUTPUT,…,turning"
    )
    if TURNING not in names:
        return _checked(steady)
    if len(steady) < 2:
        raise ConfigError("--mixes: turning needs two other mixes, between which it turns")
    reading = max(steady, key=lambda mix: mix.phases[0][0] / mix.phases[0][1])
    writing = min(steady, key=lambda mix: mix.phases[0][0] / mix.phases[0][1])
    return _checked((*steady, TokenMix(TURNING, reading.phases + writing.phases)))


def parts_of(text: str | None, known: frozenset[FluidPart]) -> frozenset[FluidPart]:
    """Returns the parts in a text such as "mixes,bound"; all for None. Raises ConfigError."""
    if text is None:
        return known
    parts = frozenset(values_of("--parts", text, FluidPart, f"a list of {','.join(FluidPart)}"))
    if not parts or parts - known:
        raise ConfigError(f"--parts must be out of {', '.join(sorted(known))}, here: {text!r}")
    return parts


def check(plan: FluidPlan) -> FluidPlan:
    """Returns the plan. Raises ConfigError if a request does not fit the model."""
    context_len = shape_named(plan.shape).max_positions
    asked = [lengths for mix in plan.mixes for lengths in mix.phases]
    asked += [(one.input_len, one.output_len) for one in (plan.streams, plan.prompts)]
    for input_len, output_len in asked:
        if input_len + output_len > context_len:
            raise ConfigError(
                f"{input_len} tokens in and {output_len} out are more than {plan.shape} has room"
                f" for: {context_len}"
            )
    return plan


def quick(plan: FluidPlan) -> FluidPlan:
    """Once, in short windows, the first and the last steady mix, without bounds: under a minute."""
    steady = [mix for mix in plan.mixes if len(mix.phases) == 1]
    return replace(
        plan,
        mixes=tuple(dict.fromkeys((steady[0], steady[-1]))),
        parts=frozenset({FluidPart.MIXES}),
        ramp_s=1.0,
        window_s=min(plan.window_s, QUICK_WINDOW_S),
        num_repeats=1,
    )


def starts_s(num_clients: int, ramp_s: float) -> list[float]:
    """Returns when each client of a closed loop begins.

    Clients that begin together may stay in step for long: then all prompts come at once, and in
    between all decode. This favours mixed workers, and no load of many clients is like that.
    """
    return [ramp_s * i / num_clients for i in range(num_clients)]


def order_of(plan: FluidPlan, repeat: int) -> list[tuple[TokenMix, FluidDeployment]]:
    """Returns all mixes with all deployments, in the repetition's own order."""
    rng = Random(f"{plan.seed}/order/{repeat}")
    mixes = rng.sample(plan.mixes, k=len(plan.mixes))
    return [(mix, each) for mix in mixes for each in rng.sample(COMPARED, k=len(COMPARED))]


def stream_order_of(plan: FluidPlan, repeat: int) -> list[BoundSetting]:
    """Returns all settings of the second part, in the repetition's own order."""
    settings = [*BoundSetting]
    Random(f"{plan.seed}/streams/{repeat}").shuffle(settings)
    return settings


def bound_s(pace_s: float) -> float:
    """Returns the bound on TPOT for streams that have this TPOT without prompts."""
    return SLACK * pace_s


def config_of(plan: FluidPlan, measured: Mapping[str, float]) -> dict[str, Scalar]:
    """The plan as a flat mapping for the report; `measured` is what the second part came from."""
    found: dict[str, Scalar] = {
        "shape": plan.shape,
        "weights": "int8",
        "threads": 1,
        "mixes": _names(plan.mixes),
        "parts": ",".join(sorted(plan.parts)),
        "clients": plan.num_clients,
        "ramp_s": plan.ramp_s,
        "window_s": plan.window_s,
        "phase_s": plan.phase_s,
        "num_repeats": plan.num_repeats,
    }
    for kind, one in (("streams", plan.streams), ("prompts", plan.prompts)):
        found |= {f"{kind}_input_len": one.input_len, f"{kind}_output_len": one.output_len}
    return {
        **found,
        "streams_at_once": plan.streams.at_once,
        "prompts_load": LOAD,
        "bound_slack": SLACK,
        **measured,
    }


def _mix(text: str) -> TokenMix:
    input_len, output_len = map(int, text.split("/"))
    if min(input_len, output_len) < 1:
        raise ValueError(text)
    return TokenMix(f"{input_len}+{output_len}", ((input_len, output_len),))


def _checked(mixes: Sequence[TokenMix]) -> tuple[TokenMix, ...]:
    if not mixes:
        raise ConfigError("--mixes: none given")
    return tuple(mixes)


def _names(mixes: Sequence[TokenMix]) -> str:
    return ",".join(mix.name for mix in mixes)

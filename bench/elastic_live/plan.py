"""What one `bench elastic-live` is asked to do, and what its runs came to. Pure.

One real deployment of a few workers of one thread, whose pools are set anew before each run: to a
fixed split, or to even pools and the planner on. In each run the same load comes, which turns:

    reading   long prompts that share nothing, short answers: prefill workers are scarce
    writing   short prompts, long answers: decode workers are

Rates and bounds are set by what this machine was measured to do right before, in a closed loop that
leaves no worker of the scarce kind idle: each mix comes at `LOAD` of what all workers but one
answer, and a request may take `SLACK` times what it took then. Settings take turns in an order of
their own in each repetition, so that the hour of the machine is the same for all.

The router is given no bounds and refuses nobody: who waits too long has missed them, and pools
alone make the difference. So the planner knows neither bound that it is scored by: what waits it
holds against `router.planning.planner.NO_BOUND_TTFT_S`, what decodes against places and memory.

What two cores can show: workers share them, and two that compute fill them, so that a third of the
same kind adds nothing. Hence three workers: whichever split is fixed, in one of the mixes a single
worker does what two could. How much more two do than one is measured too: where that is little,
pools make little difference.

    scaling/…      what all workers but one answer of a mix, over what one does
    goodput/…      requests/s that met both bounds: best fixed split, planner, each split
    ratio          with the planner over the best fixed split of the same repetition
    attainment/…   the same as shares of all requests
    flips          changes of role in a planned run
    refused, lost  answered 429, which is a miss; ended in any other way than an answer
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

from bench.client.answers import Answer
from bench.client.arrivals import arrival_times_s
from bench.client.load import SloBounds
from bench.common.report import Scalar

MAX_RUNNING = 4  # places of a decode worker
AHEAD = 2  # prompts that each prefill worker has of a closed loop
LOAD = 0.85
SLACK = 4.0
COOL_DOWN_S = 3.0


@dataclass(frozen=True, slots=True)
class LiveMix:
    """Requests of one kind, in tokens."""

    name: str
    input_len: int
    output_len: int


READING = LiveMix("reading", 768, 8)
WRITING = LiveMix("writing", 64, 96)
MIXES = (READING, WRITING)


@dataclass(frozen=True, slots=True)
class LivePlan:
    """All that is to be measured. `shape` names a checkpoint of random weights; `splits` are how
    many workers prefill, of all.
    """

    shape: str
    num_workers: int
    splits: Sequence[int]
    num_phases: int
    phase_s: float
    num_repeats: int = 1
    seed: int = 0

    @property
    def settings(self) -> list[int | None]:
        """A split each; None is the planner's."""
        return [*self.splits, None]

    @property
    def duration_s(self) -> float:
        """Of one run's load."""
        return self.num_phases * self.phase_s


def quick(plan: LivePlan) -> LivePlan:
    """Once, with one turn, against one split: about two minutes."""
    return replace(
        plan,
        splits=(plan.num_workers // 2,),
        num_phases=2,
        phase_s=min(plan.phase_s, 8.0),
        num_repeats=1,
    )


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """Requests/s that were answered in a closed loop, of each mix: by one worker of the scarce
    kind, and by `num_workers`, all but one.
    """

    num_workers: int
    one: Mapping[LiveMix, float]
    most: Mapping[LiveMix, float]

    @property
    def slo(self) -> SloBounds:
        """The bounds that requests should meet."""
        prompt_s = self.num_workers / self.most[READING]
        token_s = self.num_workers * MAX_RUNNING / (self.most[WRITING] * WRITING.output_len)
        return SloBounds(SLACK * prompt_s, SLACK * token_s)

    def rate_per_s(self, mix: LiveMix) -> float:
        """Requests/s of the load."""
        return LOAD * self.most[mix]


def num_at_once(mix: LiveMix, num_workers: int) -> int:
    """Requests of a closed loop that leaves none of so many scarce workers idle."""
    return num_workers * (AHEAD if mix is READING else MAX_RUNNING)


def answered_per_s(answers: Iterable[Answer], begin_s: float, end_s: float) -> float:
    """Requests/s in that window: of each answer the share whose chunks came in it."""
    num = sum(
        sum(begin_s <= at_s < end_s for at_s in answer.chunk_times_s) / len(answer.chunk_times_s)
        for answer in answers
    )
    return num / (end_s - begin_s)


def name_of(plan: LivePlan, setting: int | None) -> str:
    """Of a setting, in results."""
    return "planner" if setting is None else f"fixed_{setting}+{plan.num_workers - setting}"


def order_of(plan: LivePlan, repeat: int) -> list[int | None]:
    """All settings, in that repetition's own order."""
    order = plan.settings
    Random(f"{plan.seed}/order/{repeat}").shuffle(order)
    return order


def load_of(plan: LivePlan, pace: MeasuredPace, repeat: int) -> Iterator[tuple[float, LiveMix]]:
    """When each request of a run is due, and what it is: the same in all settings."""
    rng = Random(f"{plan.seed}/load/{repeat}")
    for phase, mix in enumerate(islice(cycle(MIXES), plan.num_phases)):
        rate_per_s = pace.rate_per_s(mix)
        num_requests = round(rate_per_s * plan.phase_s)
        for at_s in arrival_times_s(rate_per_s, num_requests, burstiness=1.0, rng=rng):
            if at_s < plan.phase_s:
                yield phase * plan.phase_s + at_s, mix


def config_of(plan: LivePlan, pace: MeasuredPace) -> Mapping[str, Scalar]:
    """The plan as a report records it: flat."""
    return {
        "shape": plan.shape,
        "workers": plan.num_workers,
        "splits": ",".join(map(str, plan.splits)),
        "phases": plan.num_phases,
        "phase_s": plan.phase_s,
        "load": LOAD,
        "slack": SLACK,
        "repeats": plan.num_repeats,
        "ttft_bound_s": pace.slo.ttft_s,
        "tpot_bound_s": pace.slo.tpot_s,
        "router_bounds": "unset",
        "max_running": MAX_RUNNING,
        "cool_down_s": COOL_DOWN_S,
        "reading_per_s": pace.rate_per_s(READING),
        "writing_per_s": pace.rate_per_s(WRITING),
    }

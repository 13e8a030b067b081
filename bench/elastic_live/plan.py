"""What `bench elastic-live` measures: an alternating load on a real deployment. Pure.

The deployment has a few workers of one thread. Its pools are set before each run: to a fixed split,
or to even pools with the planner on. In each run the same load alternates between two mixes:

    reading   long prompts without common prefixes, short answers: prefill workers are scarce
    writing   short prompts, long answers: decode workers are scarce

Rates and bounds follow from a measurement on the same machine just before. A closed loop keeps all
workers of the scarce role busy. Each mix then arrives at `LOAD` times the rate of all workers but
one. A request may take `SLACK` times its time in the closed loop. Each repetition has its own order
of settings, so that drifts of the machine affect all settings.

The router gets no bounds and refuses nothing: a request that waits too long has missed them. So
only the pools make a difference. The planner does not know the bounds either. It compares waiting
prompts with `router.planning.planner.NO_BOUND_TTFT_S`, and decoding with places and memory.

Limits of two cores: two computing workers fill them, and a third one of the same role adds nothing.
Hence three workers: with each fixed split, one mix has a single worker where two could work. How
much two add over one is measured too. If that is little, pools make little difference.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

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
    """All that is measured. `shape` names a checkpoint of random weights; `splits` are how
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
        """All splits, and None for the planner."""
        return [*self.splits, None]

    @property
    def duration_s(self) -> float:
        """Seconds of one run's load."""
        return self.num_phases * self.phase_s


def quick(plan: LivePlan) -> LivePlan:
    """Returns a plan of one run with two phases against one split: about two minutes."""
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
    """Returns the size of a closed loop that keeps these workers busy."""
    return num_workers * (AHEAD if mix is READING else MAX_RUNNING)


def answered_per_s(answers: Iterable[Sequence[float]], begin_s: float, end_s: float) -> float:
    """Returns requests/s in a window; each answer counts by the share of its chunks in it.

    `answers` are the times of their chunks.
    """
    num = sum(sum(begin_s <= at_s < end_s for at_s in times) / len(times) for times in answers)
    return num / (end_s - begin_s)


def name_of(plan: LivePlan, setting: int | None) -> str:
    """Returns the name of a setting in results."""
    return "planner" if setting is None else f"fixed_{setting}+{plan.num_workers - setting}"


def order_of(plan: LivePlan, repeat: int) -> list[int | None]:
    """Returns all settings, in the repetition's own order."""
    order = plan.settings
    Random(f"{plan.seed}/order/{repeat}").shuffle(order)
    return order


def load_of(plan: LivePlan, pace: MeasuredPace, repeat: int) -> Iterator[tuple[float, LiveMix]]:
    """Yields the time and mix of each request; the same for all settings."""
    rng = Random(f"{plan.seed}/load/{repeat}")
    for phase, mix in enumerate(islice(cycle(MIXES), plan.num_phases)):
        rate_per_s = pace.rate_per_s(mix)
        num_requests = round(rate_per_s * plan.phase_s)
        for at_s in arrival_times_s(rate_per_s, num_requests, burstiness=1.0, rng=rng):
            if at_s < plan.phase_s:
                yield phase * plan.phase_s + at_s, mix


def config_of(plan: LivePlan, pace: MeasuredPace) -> Mapping[str, Scalar]:
    """The plan as a flat mapping for the report."""
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

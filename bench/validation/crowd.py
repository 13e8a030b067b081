"""Workers that share the cores of one machine: how long their steps take beside one another.

A step is work: seconds on a core of its own. A worker computes with one thread, and the gateway is
busy with what decoding workers tell it. While more threads want to run than there are cores, all
have equal shares of them, as schedulers of operating systems give them out: with n threads on c
cores each runs at c / n of its pace. Whoever begins or ends changes the pace of all others at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from bench.simulator.clock import Future, Rank
from bench.simulator.hardware import HardwareProfile, StepPrice
from engine.messages import ComputePrompt, FirstToken, ToWorker


@dataclass(frozen=True, slots=True)
class Chances:
    """What is not always the same: one of these at a time, by chance, all as likely.

    `prompt` and `first_token` are what such messages to workers take longer than others, seconds,
    in rows by the number of workers that are busy; the last row is for more, too. Who has to be
    woken up waits longer where others have the cores. `prefill` and `decode` are how many times as
    long as usual steps take: those that compute prompts, and those that only decode. The latter are
    in the order in which they were seen, and some in a row are taken at a time: after a message
    that came late the next ones follow at once, and only together they took long or did not.
    """

    prompt: Sequence[Sequence[float]] = ()
    first_token: Sequence[Sequence[float]] = ()
    prefill: Sequence[float] = ()
    decode: Sequence[float] = ()
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.prompt or self.first_token or self.prefill or self.decode)


NO_CHANCES = Chances()
IN_A_ROW = 16  # decode steps, on average


def pace(cores: int | None, demand: float) -> float:
    """Of its own pace that a thread has where so many want to run at once, as a share."""
    return 1.0 if cores is None or demand <= cores else cores / demand


@dataclass(slots=True, eq=False)
class _Step:
    """A step that runs. What is left of it is work."""

    left_s: float
    demand: float  # cores
    on_end: Callable[[], None]
    planned_s: float | None = None  # when it ends, if nobody begins or ends before


class Crowd:
    """All workers of a machine, and the steps that run."""

    def __init__(
        self, hardware: HardwareProfile, future: Future, chances: Chances = NO_CHANCES
    ) -> None:
        self._hardware = hardware
        self._future = future
        self._chances = chances
        self._rng = Random(chances.seed)
        self._places: dict[str, int] = {}  # of each worker, among the chances of decode steps
        self._steps: dict[str, _Step] = {}
        self._settled_s = 0.0  # until then what is left of steps is known

    @property
    def watches(self) -> bool:
        """Whether it has to be told of each step."""
        return self._hardware.cores is not None or bool(self._chances)

    def begin(
        self, worker_id: str, step: StepPrice, seconds: float, on_end: Callable[[], None]
    ) -> None:
        """A worker begins a step of so much work; `on_end` is called when that is done."""
        seconds *= self._ratio(worker_id, step)
        demand = 1 + (self._hardware.gateway_load if step.num_rows else 0.0)
        self._settle()
        self._steps[worker_id] = _Step(seconds, demand, on_end)
        self._plan_ends()

    def _ratio(self, worker_id: str, step: StepPrice) -> float:
        if step.num_new:
            return self._rng.choice(self._chances.prefill or (1.0,))
        ratios = self._chances.decode or (1.0,)
        place = self._places.get(worker_id, len(ratios)) + 1
        if place >= len(ratios) or self._rng.random() < 1 / IN_A_ROW:
            place = self._rng.randrange(len(ratios))
        self._places[worker_id] = place
        return ratios[place]

    def delay_s(self, message: ToWorker) -> float:
        """What a message that is sent now takes longer than others."""
        table: Sequence[Sequence[float]] = ()
        if isinstance(message, ComputePrompt):
            table = self._chances.prompt
        elif isinstance(message, FirstToken):
            table = self._chances.first_token
        if not table:
            return 0.0
        return self._rng.choice(table[min(len(self._steps), len(table) - 1)])

    def _settle(self) -> None:
        """Takes off what was computed since the last time."""
        now_s = self._future.now_s
        done_s = (now_s - self._settled_s) * self._pace()
        for step in self._steps.values():
            step.left_s -= done_s
        self._settled_s = now_s

    def _plan_ends(self) -> None:
        own_pace = self._pace()
        for worker_id, step in self._steps.items():
            end_s = self._settled_s + max(step.left_s, 0.0) / own_pace
            if end_s != step.planned_s:
                step.planned_s = end_s
                self._future.plan(end_s, Rank.STEP_END, self._on_end, (worker_id, step, end_s))

    def _pace(self) -> float:
        return pace(self._hardware.cores, sum(step.demand for step in self._steps.values()))

    def _on_end(self, planned: tuple[str, _Step, float]) -> None:
        worker_id, step, end_s = planned
        if self._steps.get(worker_id) is not step or step.planned_s != end_s:
            return  # it was planned anew
        self._settle()
        del self._steps[worker_id]
        self._plan_ends()
        step.on_end()

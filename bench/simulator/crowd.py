"""Simulates workers that share the cores of one machine and slow each other down.

The work of a step is given in seconds of one core. A worker computes with one thread, and decoding
workers also cause work in the gateway. If there are more runnable threads than cores, all threads
get equal shares, which is what operating systems do. With n threads on c cores, each thread runs at
c / n of its speed. Each start or end of a step changes the speed of all others at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from bench.simulator.hardware import HardwareProfile, StepPrice
from bench.simulator.transfers import Future, Rank
from engine.messages import ComputePrompt, FirstToken, ToWorker


@dataclass(frozen=True, slots=True)
class Chances:
    """Measured variations of delays and prices. The simulation draws from them at random, with
    equal probability.

    `prompt` and `first_token` are extra seconds of messages to workers. They have a row for each
    number of busy workers; the last row also applies to more workers. A thread that must wake up
    waits longer if other threads use the cores. `prefill` and `decode` are factors on the price of
    a step with prompts, and of a step that only decodes. `decode` is in the order of measurement,
    and several consecutive factors are drawn together: after a late message the next messages
    follow at once, so single factors would be misleading.
    """

    prompt: Sequence[Sequence[float]] = ()
    first_token: Sequence[Sequence[float]] = ()
    prefill: Sequence[float] = ()
    decode: Sequence[float] = ()
    seed: int = 0

    def __bool__(self) -> bool:
        return bool(self.prompt or self.first_token or self.prefill or self.decode)


NO_CHANCES = Chances()
IN_A_ROW = 16  # mean number of consecutive factors of decode steps that are drawn together


def core_share(cores: int | None, demand: float) -> float:
    """Returns the share of a core that each thread gets if the threads demand this number of
    cores.
    """
    return 1.0 if cores is None or demand <= cores else cores / demand


@dataclass(slots=True, eq=False)
class _Step:
    """A running step, with its remaining work."""

    left_s: float
    demand: float  # number of cores that the step would use
    on_end: Callable[[], None]
    # planned end of the step; changes when another step begins or ends
    planned_s: float | None = None


class Crowd:
    """All workers of a machine, and their running steps."""

    def __init__(
        self, hardware: HardwareProfile, future: Future, chances: Chances = NO_CHANCES
    ) -> None:
        self._hardware = hardware
        self._future = future
        self._chances = chances
        self._rng = Random(chances.seed)
        self._places: dict[str, int] = {}  # index of each worker's next factor in `chances.decode`
        self._steps: dict[str, _Step] = {}
        self._settled_s = 0.0  # the time to which `left_s` of all steps refers
        self.varies = bool(chances)  # True: messages have random delays
        # True: each step must be simulated separately, so steps cannot be skipped.
        self.watches = hardware.cores is not None or self.varies

    def start(
        self, worker_id: str, step: StepPrice, seconds: float, on_end: Callable[[], None]
    ) -> None:
        """Begins a step with `seconds` of work. Calls `on_end` at the step's end."""
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
        """Returns the random extra seconds of a message that is sent at this moment."""
        table: Sequence[Sequence[float]] = ()
        if isinstance(message, ComputePrompt):
            table = self._chances.prompt
        elif isinstance(message, FirstToken):
            table = self._chances.first_token
        if not table:
            return 0.0
        return self._rng.choice(table[min(len(self._steps), len(table) - 1)])

    def _settle(self) -> None:
        """Subtracts the work that was done since the last call."""
        now_s = self._future.now_s
        done_s = (now_s - self._settled_s) * self._share()
        for step in self._steps.values():
            step.left_s -= done_s
        self._settled_s = now_s

    def _plan_ends(self) -> None:
        own_share = self._share()
        for worker_id, step in self._steps.items():
            end_s = self._settled_s + max(step.left_s, 0.0) / own_share
            if end_s != step.planned_s:
                step.planned_s = end_s
                self._future.plan(end_s, Rank.STEP_END, self._on_end, (worker_id, step, end_s))

    def _share(self) -> float:
        return core_share(self._hardware.cores, sum(step.demand for step in self._steps.values()))

    def _on_end(self, planned: tuple[str, _Step, float]) -> None:
        worker_id, step, end_s = planned
        if self._steps.get(worker_id) is not step or step.planned_s != end_s:
            return  # a new end has been planned
        self._settle()
        del self._steps[worker_id]
        self._plan_ends()
        step.on_end()

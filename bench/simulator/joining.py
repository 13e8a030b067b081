"""A decode worker that joins a simulated cluster under load, and how soon it has its share.

`Evenness` samples the sequences of each decode worker, from just before the join on. The figures
compare the fullest worker with the emptiest one:

| result             | unit |                                                                    |
|--------------------|------|--------------------------------------------------------------------|
| join/ratio_before  |      | most over least sequences when the worker has joined               |
| join/ratio_after   |      | the same, `AFTER_S` later                                          |
| join/balance       | s    | until the ratio was first below `EVEN`; absent if it never was     |
| join/moved         |      | sequences that moved                                               |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.common.report import Figure
from router.machine.machine import RouterMachine

EVERY_S = 0.1
AFTER_S = 10.0
EVEN = 1.5


@dataclass(slots=True)
class Evenness:
    """The sequences of decode workers over time, since a worker joined at `began_s`."""

    began_s: float
    samples: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def sample(self, machine: RouterMachine, now_s: float) -> None:
        """Records the number of sequences of each decode worker."""
        workers = machine.view.workers.values()
        nums = tuple(worker.num_decodes for worker in workers if worker.info.role.decodes)
        self.samples.append((now_s, nums))


def ratio(nums: Sequence[int]) -> float:
    """Returns the most over the least sequences of a worker; zero counts as one."""
    return max(*nums, 1) / max(min(nums), 1)


def join_figures(evenness: Evenness | None, num_moved: int) -> dict[str, Figure]:
    """Returns the figures of the table above; none if no worker joined."""
    if evenness is None or not evenness.samples:
        return {}
    samples = evenness.samples
    after_s = evenness.began_s + AFTER_S
    _, last = min(samples, key=lambda one: abs(one[0] - after_s))
    even_s = next((at_s for at_s, nums in samples if ratio(nums) < EVEN), math.nan)
    figures = {
        "join/ratio_before": Figure(ratio(samples[0][1]), ""),
        "join/ratio_after": Figure(ratio(last), ""),
        "join/moved": Figure(num_moved, ""),
    }
    if not math.isnan(even_s):
        figures["join/balance"] = Figure(even_s - evenness.began_s, "s")
    return figures

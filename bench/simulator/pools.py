"""Simulates changes of pools: a decode worker that joins under load, and flips by the planner.

From just before the join, `Evenness` samples the number of sequences of each decode worker. The
figures compare the worker with the most sequences and the worker with the least:

| result             | unit |                                                                    |
|--------------------|------|--------------------------------------------------------------------|
| join/ratio_before  |      | most over least sequences when the worker has joined               |
| join/ratio_after   |      | most over least sequences, `AFTER_S` after the join                |
| join/balance       | s    | from the join until the ratio is first below `EVEN`; absent: never |
| join/moved         |      | sequences that moved                                               |

`SimulatedPlanner` calls `router.planning.planner` regularly and sends the flips that it decides.
The planner decides which worker flips to which role, as in a real deployment. A worker counts in
the pool of the role that it was ordered to have. It counts as changing until the machine has
received its new role. At the first tick, the cool-down after the last change of the pools is over,
because the load begins on a deployment that already runs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.common.report import Figure
from engine.messages import Role, SetRole, WorkerId
from router.machine.machine import RouterMachine
from router.planning.demand import members
from router.planning.planner import Planner, PlannerRules, PoolPlan, PoolSizes, flips

SAMPLED_EVERY_S = 0.1
AFTER_S = 10.0
EVEN = 1.5


@dataclass(slots=True)
class Evenness:
    """The numbers of sequences of decode workers over time. A worker joined at `began_s`."""

    began_s: float
    samples: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def sample(self, machine: RouterMachine, now_s: float) -> None:
        """Records the number of sequences of each decode worker."""
        workers = machine.view.workers.values()
        nums = tuple(worker.num_decodes for worker in workers if worker.info.role.decodes)
        self.samples.append((now_s, nums))


def ratio(nums: Sequence[int]) -> float:
    """Returns the most over the least sequences of any worker. Zero sequences count as one."""
    return max(*nums, 1) / max(min(nums), 1)


def join_figures(evenness: Evenness | None, num_moved: int) -> dict[str, Figure]:
    """Returns the figures of the table in this module's docstring; empty if no worker joined."""
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


EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedDecision:
    """A decision of the planner, its time, and the pools at that time."""

    at_s: float
    pools: PoolSizes
    plan: PoolPlan

    @property
    def num_flips(self) -> int:
        """Returns the number of workers that are ordered to change their role."""
        return abs(self.plan.prefill - self.pools.prefill)


class SimulatedPlanner:
    """Calls the planner with the machine's view of the workers."""

    def __init__(self, rules: PlannerRules, machine: RouterMachine) -> None:
        self._rules = rules
        self._planner: Planner | None = None  # made at the first tick
        self._machine = machine
        self._told: dict[WorkerId, Role] = {}
        self.decisions: list[SimulatedDecision] = []

    def tick(self, now_s: float) -> Iterator[tuple[WorkerId, SetRole]]:
        """Yields the changes of roles that the planner orders at this time."""
        pools = self._pools()
        self._planner = self._planner or self._at_rest(pools, now_s)
        plan = self._planner.decide(self._machine.demand.observe(now_s), pools, now_s)
        self.decisions.append(SimulatedDecision(now_s, pools, plan))
        for worker_id, role in flips(plan, members(self._machine.view, self._told)):
            self._told[worker_id] = role
            yield worker_id, SetRole(role)

    def _at_rest(self, pools: PoolSizes, now_s: float) -> Planner:
        planner = Planner(self._rules)
        planner.decide(None, pools, now_s - self._rules.cool_down_s)
        return planner

    def _pools(self) -> PoolSizes:
        workers = self._machine.view.workers
        infos = [worker.info for worker in workers.values()]
        roles = [self._told.get(info.worker_id, info.role) for info in infos]
        return PoolSizes(
            roles.count(Role.PREFILL),
            roles.count(Role.DECODE),
            num_changing=sum(r is not i.role for r, i in zip(roles, infos, strict=True)),
            kv_tokens=min(i.num_blocks * i.layout.block_size for i in infos),
            max_running=min(i.max_running for i in infos),
        )

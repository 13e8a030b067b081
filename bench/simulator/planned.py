"""Runs the planner of pools in the simulator: ticks it and sends its flips.

`router.planning.planner` decides which worker flips to which role, as in a real deployment. A
worker counts in the pool that it was told to join. It counts as changing until the machine has
heard of its new role. At the first tick the pools have stood for a cool-down: the load comes to a
running deployment, not to a starting one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.messages import Role, SetRole, WorkerId
from router.machine.machine import RouterMachine
from router.planning.demand import members
from router.planning.planner import Planner, PlannerRules, PoolPlan, PoolSizes, flips

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedDecision:
    """A plan of the planner, its time, and the pools that it was made for."""

    at_s: float
    pools: PoolSizes
    plan: PoolPlan

    @property
    def num_flips(self) -> int:
        """Workers that are told to change their role."""
        return abs(self.plan.prefill - self.pools.prefill)


class SimulatedPlanner:
    """Asks the planner about the machine's workers."""

    def __init__(self, rules: PlannerRules, machine: RouterMachine) -> None:
        self._rules = rules
        self._planner: Planner | None = None  # until the first tick
        self._machine = machine
        self._told: dict[WorkerId, Role] = {}
        self.decisions: list[SimulatedDecision] = []

    def tick(self, now_s: float) -> Iterator[tuple[WorkerId, SetRole]]:
        """Yields the role changes that workers are told now."""
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

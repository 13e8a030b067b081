"""Connects the planner to live pools: makes its input, gives its orders, records its decisions.

`router.planning.planner` computes the number of workers of each pool from all gateways' reports. A
proposal that changes something is given as an order, like an operator's order.
`deploy.pools.workers.reconcile` then chooses the worker to flip, start or retire.

Each model has a planner. All planners have the same bounds, and share the room.

An operator may give orders while the planner is on. The planner continues from the ordered pools.
It does not undo an operator's order before the planner's cool-down is over. The cool-down restarts
when the controller starts or the planner is switched on, because earlier orders are unknown then.

If the planner wants more workers than fit, the launcher must request room for `room_for` workers,
at most `pools.max_workers`. The request is withdrawn once the planner is off, even if an earlier
controller made the request.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from operator import add

import msgspec

from deploy.pools.formats import formats_of
from deploy.pools.machine import PoolMachine
from deploy.pools.orders import OrderRefused, SetPools
from deploy.pools.workers.record import PoolWorker, WorkerState
from engine.config import Config, PlannerMode
from engine.control import MAIN_LINE, GatewayReport, Pools, Version
from engine.messages import Role, Welcome, WorkerId
from router.planning import planner
from router.planning.planner import Planner, PlannerRules, PoolPlan

MAX_DECISIONS = 200
SPLIT_ROLES = (Role.PREFILL, Role.DECODE)
_PRESENT = (WorkerState.SERVING, WorkerState.FLIPPING)


class DecisionOutcome(StrEnum):
    """What happened to a proposal."""

    DONE = "done"  # ordered; the pools' history has the steps that followed
    ONLY_TOLD = "only told"  # only reported, because of a dry run
    REFUSED = "refused"


class DecisionKind(StrEnum):
    """The kind of change that a proposal makes."""

    FLIP = "flip"  # the total stays, and workers take other roles
    GROW = "grow"
    SHRINK = "shrink"
    ROOM = "room"  # the pools stay, and only the requested number of nodes changes


@dataclass(frozen=True, slots=True)
class PlannerDecision:
    """A proposal of the planner that would change the pools or the requested room.

    `num_workers` is the wanted total. If `after` has fewer workers, there is no room for the others
    yet.
    """

    number: int
    at_s: float
    mode: PlannerMode
    before: Pools
    after: Pools
    num_workers: int
    outcome: DecisionOutcome
    why_refused: str
    reasons: tuple[str, ...]
    model: str = MAIN_LINE  # line of the planned model

    def __str__(self) -> str:
        changes = [
            f"{role} {self.before.of(role)} → {self.after.of(role)}"
            for role in SPLIT_ROLES
            if self.before.of(role) != self.after.of(role)
        ]
        if self.num_workers != self.after.total:
            changes.append(f"room for {self.num_workers} workers")
        refusal = f" ({self.why_refused})" if self.why_refused else ""
        model = f"{self.model}: " if self.model else ""
        return f"{model}{', '.join(changes)}: {self.outcome}{refusal}"

    @property
    def changes_something(self) -> bool:
        """True if the decision would change the pools or the requested room."""
        return self.after != self.before or self.num_workers != self.after.total

    @property
    def kind(self) -> DecisionKind:
        """The kind of change."""
        more = self.after.total - self.before.total
        if more:
            return DecisionKind.GROW if more > 0 else DecisionKind.SHRINK
        return DecisionKind.FLIP if self.after != self.before else DecisionKind.ROOM

    @property
    def what(self) -> tuple[object, ...]:
        """The decision without its time and reasons, to detect a repetition."""
        pools = self.before, self.after, self.num_workers
        return self.mode, *pools, self.outcome, self.why_refused


def rules_of(config: Config) -> PlannerRules:
    """Returns the planner's bounds and times, as configured."""
    bounds, router = msgspec.structs.asdict(config.planner), config.router
    limits = (bounds["max_workers"], config.pools.max_workers)
    if None not in limits:
        bounds["max_workers"] = min(limits)  # the planner never requests more room than this
    return PlannerRules(**bounds, ttft_s=router.slo_ttft_s, tpot_s=router.slo_tpot_s)


class Planning:
    """Runs each model's planner while planning is on or in a dry run. Keeps the decisions."""

    def __init__(
        self,
        machine: PoolMachine,
        rules: PlannerRules,
        *,
        order: Callable[[SetPools], None],
        max_workers: int | None = None,
        took_over: bool = False,
    ) -> None:
        """`order` may raise OrderRefused. `max_workers` limits the requested room for all roles.

        `took_over`: an earlier controller ran, and may have requested room.
        """
        self._machine = machine
        self._rules = rules
        self._order = order
        self._max_workers = max_workers
        self._may_have_asked = took_over and rules.max_workers is not None
        self._planners: dict[str, Planner] = {}  # by line; empty while planning is off
        self._needs: dict[str, int] = {}  # by line: workers for which room is requested
        self._num_decisions = 0
        self.reasons: tuple[str, ...] = ()  # reasons of the latest proposal, even without a change
        self.room_for: int | None = None  # requested room in workers of all roles; None: no request
        self.decisions: deque[PlannerDecision] = deque(maxlen=MAX_DECISIONS)
        self.counts: Counter[tuple[DecisionKind, DecisionOutcome]] = Counter()

    def follow(self, rules: PlannerRules, max_workers: int | None) -> None:
        """From now on plans by these rules.

        If the rules differ from the previous ones, past observations are dropped.
        """
        if (rules, max_workers) != (self._rules, self._max_workers):
            self._rules, self._max_workers = rules, max_workers
            self._remove()

    def check(self, mode: PlannerMode) -> None:
        """Raises OrderRefused if the planner cannot plan the present pools."""
        formats = formats_of(self._machine.intent.current)
        held, wanted = formats[Role.PREFILL], formats[Role.DECODE]
        if mode is not PlannerMode.OFF and held != wanted:
            raise OrderRefused(
                f"prefill workers hold KV as {held}, decode workers as {wanted}: "
                "none can be flipped, so there is nothing to plan"
            )

    def tick(
        self,
        reports: Sequence[GatewayReport | None],
        workers: Mapping[WorkerId, Welcome],
        now_s: float,
    ) -> list[PlannerDecision]:
        """Plans each model, and returns the new decisions. Called about once a second.

        `reports` has an entry for each gateway: None for a silent gateway. `workers` has the
        workers' introductions.
        """
        intent, mode = self._machine.intent, self._machine.intent.planner
        lines = self._lines()
        has_split = any(_is_split(intent.of_line(line)[0].pools) for line in lines)
        if self._may_have_asked and not (mode is PlannerMode.ON and has_split):
            self.room_for = 0
        if mode is PlannerMode.OFF:
            self._remove()
            self.reasons = ()
            return []
        reasons, found = [], []
        for line in lines:
            said, decision = self._planned(line, reports, workers, now_s)
            name = f"{intent.of_line(line)[0].model_name}: " if len(lines) > 1 else ""
            reasons += [f"{name}{reason}" for reason in said]
            if decision is not None:
                found.append(decision)
        self.reasons = tuple(reasons)
        return found

    def _planned(
        self,
        line: str,
        reports: Sequence[GatewayReport | None],
        workers: Mapping[WorkerId, Welcome],
        now_s: float,
    ) -> tuple[tuple[str, ...], PlannerDecision | None]:
        """Plans one line. Returns the reasons of the proposal, and the decision if it is new."""
        versions = self._machine.intent.of_line(line)
        why_not = _why_not_planned(versions)
        if why_not is not None:  # earlier observations will not apply later
            self._planners.pop(line, None)
            return (f"nothing: {why_not}",), None
        seen = [report.seen[line] for report in reports if report and line in report.seen]
        pools = pools_of(self._machine, workers, versions[0], num_gateways=len(reports))
        own = self._planners.setdefault(line, Planner(self._rules))
        plan = own.decide(reduce(add, seen) if seen else None, pools, now_s)
        return plan.reasons, None if plan.is_held else self._decided(
            versions[0], plan, pools, now_s
        )

    def _decided(
        self, version: Version, plan: PoolPlan, pools: planner.PoolSizes, now_s: float
    ) -> PlannerDecision | None:
        intent, before = self._machine.intent, version.pools
        after = msgspec.structs.replace(  # workers that are missing now stay wanted
            before,
            prefill=before.prefill + plan.prefill - pools.prefill,
            decode=before.decode + plan.decode - pools.decode,
        )
        num_workers = before.total + plan.nodes - pools.total
        beside = len(intent.drained) + intent.num_wanted - before.total
        if self._max_workers is not None:
            num_workers = max(min(num_workers, self._max_workers - beside), after.total)
        outcome, why = DecisionOutcome.ONLY_TOLD, ""
        if intent.planner is PlannerMode.ON:
            if self._rules.max_workers is not None:
                self._ask_for_room(version.line, num_workers)
            outcome, why = self._ordered(version, after)
        decision = PlannerDecision(
            self._num_decisions + 1,
            now_s,
            mode=intent.planner,
            before=before,
            after=after,
            num_workers=num_workers,
            outcome=outcome,
            why_refused=why,
            reasons=plan.reasons,
            model=version.line,
        )
        return self._kept(decision) if decision.changes_something else None

    def _ask_for_room(self, line: str, num_workers: int) -> None:
        """Records the room that a line needs. Requests the room that all lines need together."""
        intent = self._machine.intent
        self._needs[line] = num_workers
        wanted = {each: sum(v.pools.total for v in intent.of_line(each)) for each in self._lines()}
        total = sum(self._needs.get(each, number) for each, number in wanted.items())
        self.room_for, self._may_have_asked = total + len(intent.drained), True

    def _lines(self) -> list[str]:
        return list(dict.fromkeys(version.line for version in self._machine.intent.versions))

    def _remove(self) -> None:
        self._planners.clear()
        self._needs.clear()

    def _ordered(self, version: Version, after: Pools) -> tuple[DecisionOutcome, str]:
        if after != version.pools:
            try:
                self._order(SetPools(after, version=version.name, why="planned"))
            except OrderRefused as refusal:
                return DecisionOutcome.REFUSED, str(refusal)
        return DecisionOutcome.DONE, ""

    def _kept(self, decision: PlannerDecision) -> PlannerDecision | None:
        """Records a decision. Returns None if it repeats the last decision.

        A proposal that is refused, or made in a dry run, is repeated each second. An order counts
        as new in any case.
        """
        is_order = decision.outcome is DecisionOutcome.DONE and decision.after != decision.before
        of_model = (each for each in reversed(self.decisions) if each.model == decision.model)
        last = next(of_model, None)
        if not is_order and last is not None and decision.what == last.what:
            return None
        self._num_decisions += 1
        self.decisions.append(decision)
        self.counts[decision.kind, decision.outcome] += 1
        return decision


def _is_split(pools: Pools) -> bool:
    return bool(pools.prefill or pools.decode)


def _why_not_planned(versions: Sequence[Version]) -> str | None:
    """Returns the reason why a line cannot be planned now. None if the line can be planned."""
    current = versions[0]
    if current.asleep is not None:
        return "it sleeps"
    if not _is_split(current.pools):
        return "mixed workers are not split, and there are no others"
    if len(versions) > 1:
        names = ", ".join(version.name for version in versions)
        return f"several versions have workers ({names})"
    formats = formats_of(current)
    held, wanted = formats[Role.PREFILL], formats[Role.DECODE]
    return None if held == wanted else f"prefill workers hold KV as {held}, decode ones as {wanted}"


def pools_of(
    machine: PoolMachine,
    workers: Mapping[WorkerId, Welcome],
    current: Version,
    *,
    num_gateways: int,
) -> planner.PoolSizes:
    """Returns a version's pools as the planner's input.

    A worker that was ordered but does not exist yet counts as changing.
    """
    wanted = current.pools
    known = [worker for worker in machine.workers.values() if worker.version == current.name]
    there = Counter(worker.target for worker in known)
    absent = Counter(worker.target for worker in known if worker.state not in _PRESENT)
    missing = sum(max(wanted.of(role) - there[role], 0) for role in SPLIT_ROLES)
    names = {worker.worker_id for worker in known}
    infos = [info for name, info in workers.items() if name in names]
    of_others = machine.intent.num_wanted - wanted.total
    return planner.PoolSizes(
        prefill=there[Role.PREFILL],
        decode=there[Role.DECODE],
        num_changing=missing + sum(map(_is_changing, known)),
        kv_tokens=min((i.num_blocks * i.layout.block_size for i in infos), default=0),
        max_running=min((i.max_running for i in infos), default=0),
        num_gateways=num_gateways,
        absent_prefill=absent[Role.PREFILL],
        absent_decode=absent[Role.DECODE],
        room=machine.limits.max_workers - wanted.mixed - len(machine.intent.drained) - of_others,
    )


def _is_changing(worker: PoolWorker) -> bool:
    """True if a worker is still starting, leaving, or taking another role."""
    if worker.target in SPLIT_ROLES:
        serves = worker.state is WorkerState.SERVING and worker.is_connected
        return not serves or worker.role is not worker.target
    return worker.leaves or worker.target is None

"""The number of prefill and decode workers, from measured demand and costs.

About once a second the planner gets the demand that gateways measured (`Observation`) and the
number of workers (`PoolSizes`). It returns the sizes that the pools should have (`PoolPlan`), with
reasons in numbers. It only proposes. Its caller carries out a proposal, and chooses the workers.

    prefill   rate of prompts / BUSY + what waits / PATIENCE of the bound on TTFT
    decode    (E·b + F·kv) / (t - D), so that a step of b sequences that are evenly spread takes t,
              PACE of the bound on TPOT; or what their KV needs, if that is more workers

A prompt counts as predicted seconds of one worker, without its cached part. Sequences count if they
run, wait for a decode worker, or are predicted to arrive within `horizon_s`. The predicted number
is the present number plus its slope or, if larger, its approach to rate · length · t (Little).
Lengths of answers are known only at their ends, but the number of sequences is always known.

*Flips first.* One proposal grows a pool and shrinks the other, so the total stays the same. Workers
flip only if a pool is short, and only until both pools are equally short or equally idle. An idle
worker that the other pool does not need stays. A decode pool never shrinks below the workers that
its present sequences need for their TPOT. As these sequences end, the other pool gets more workers.

*Cost of a flip.* Sequences move, prompts are returned, and a worker starts in its new pool with a
cold cache. So a flip must reduce the greater shortage by `least_gain`. No worker flips back within
`cool_down_s`, and at most half of a pool flips at once.

*Nodes after.* If both pools together lack workers for `grow_after_s`, the planner asks for more. If
they need fewer for `shrink_after_s`, it gives some back. Each worker is added or removed where this
leaves the smallest shortage.

*What it does not do.* It decides nothing while a change is in progress, until a deadline. A worker
that has not started by then still counts towards the target size, not as capacity. It decides
nothing while reports are missing, until gateways were silent for so long that they count as idle.
It never reads its old proposals, only the pools: an operator may change them at any time, and that
counts as any other change. If the total is outside of its bounds, it is corrected only when the
pools have not changed for `cool_down_s`. Growth of the total restarts the time for
`shrink_after_s`; shrinking restarts the time for `grow_after_s`.

Pure and deterministic: time is an argument, and future load is unknown.

Sources: Dynamo's planner (`dynamo/planner/core`): capacity from rate and from queue, prediction,
hysteresis; a full budget is kept by one proposal for both pools (dynamo#12428, #14231), a worker
that never comes must not stop it (#14251), nor an edit by hand (#4420). Little, 1961.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf

from engine.config import PlannerConfig
from engine.control import by_number
from engine.demand import Observation
from engine.messages import Role, WorkerId

BUSY = 0.85  # maximum share of a prefill worker's time for prompts
PATIENCE = 0.5  # share of the TTFT bound in which waiting prompts should be computed
PACE = 0.95  # maximum share of the TPOT bound for a step
MEMORY = 0.95  # maximum share of a worker's KV memory in use
NO_BOUND_TTFT_S = 2.0  # used in place of a missing TTFT bound
IDLE = 0.7  # share of use below which workers can be given back
SOON_S, LATER_S = 5.0, 15.0  # spans of the mean rates; prompts use the larger mean


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The present workers, by the role that they have or were last told to take.

    Mixed and drained workers are not counted.
    """

    prefill: int
    decode: int
    num_changing: int = 0  # workers whose start, stop or flip is not complete
    kv_tokens: int = 0  # KV capacity of one worker, in tokens
    max_running: int = 0  # maximum number of sequences of one worker
    num_gateways: int = 1  # number of gateways that should report
    absent_prefill: int = 0  # workers of `prefill` that do not serve yet; also in `num_changing`
    absent_decode: int = 0
    room: int | None = None  # maximum number of workers; None: the present number

    @property
    def total(self) -> int:
        """The number of workers of both pools."""
        return self.prefill + self.decode

    @property
    def num_absent(self) -> int:
        """The number of workers of both pools that do not serve yet."""
        return self.absent_prefill + self.absent_decode

    @property
    def present(self) -> "PoolSizes":
        """The workers that serve now, and the room for them."""
        return replace(
            self,
            prefill=self.prefill - self.absent_prefill,
            decode=self.decode - self.absent_decode,
            room=None if self.room is None else self.room - self.num_absent,
        )


class PlannerRules(PlannerConfig, frozen=True):
    """The planner's settings, and further rules. Times are in seconds."""

    ttft_s: float | None = None  # bounds that requests should meet; None: no bound
    tpot_s: float | None = None
    least_gain: float = 0.1  # minimum share of the greater shortage that a flip must remove
    horizon_s: float = 10.0
    change_timeout_s: float = 30.0
    silence_s: float = 30.0

    def __post_init__(self) -> None:
        """Checks nothing, as `pools.max_workers` may be below the bounds of the planner."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The sizes that the pools should have, and the reasons.

    `nodes` is the wanted total of workers. `prefill + decode` is this total, limited by the room.
    If nothing can be decided now, the sizes stay the same and `is_held` is True.
    """

    prefill: int
    decode: int
    nodes: int
    reasons: tuple[str, ...]
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """The workers that each pool needs, in fractions.

    `holding` is the number of decode workers that keep the TPOT of the present sequences.
    """

    prefill: float
    decode: float
    holding: float
    coming: float  # number of sequences predicted at the horizon

    def pressure(self, prefill: int, decode: int) -> float:
        """Returns needed / present workers of the shorter pool; above 1 if workers are missing."""
        return max(self.prefill / max(prefill, 0.5), self.decode / max(decode, 0.5))


class Planner:
    """Decides the pool sizes. Keeps only recent observations, and when the pools changed."""

    def __init__(self, rules: PlannerRules) -> None:
        self._rules = rules
        self._seen: deque[tuple[float, Observation]] = deque()
        self._sizes: tuple[int, int] | None = None  # sizes of the pools at the last decision
        self._changed_s = -inf  # time at which the sizes last changed
        self._grew_s = {Role.PREFILL: -inf, Role.DECODE: -inf}
        self._changing_since_s: float | None = None
        self._silent_since_s: float | None = None
        self._lacking_since_s: float | None = None
        self._idle_since_s: float | None = None

    def decide(self, seen: Observation | None, pools: PoolSizes, now_s: float) -> PoolPlan:
        """Decides the sizes of the pools. `seen` is None if no gateway has reported."""
        self._record(seen, pools, now_s)
        held = self._held(seen, pools, now_s)
        if held is not None or seen is None:
            why_held = (f"nothing: {held}",)
            return PoolPlan(pools.prefill, pools.decode, pools.total, why_held, is_held=True)
        here = pools.present
        needs = self._needs(seen, here, now_s)
        prefill, why = self._split(needs, here, now_s)
        nodes, why_nodes = self._nodes(needs, here, now_s)
        total = here.total if here.room is None else min(nodes, max(here.room, here.total))
        prefill = self._resized(prefill, needs, here.total, total)
        return PoolPlan(
            prefill + pools.absent_prefill,
            total - prefill + pools.absent_decode,
            nodes + pools.num_absent,
            (*_reasons(seen, here, needs), why, why_nodes),
        )

    # ------------------------------------------------------------ when not to decide

    def _record(self, seen: Observation | None, pools: PoolSizes, now_s: float) -> None:
        """Records the observation, and a change of the pools from any cause."""
        sizes = pools.prefill, pools.decode
        if sizes != self._sizes:
            self._resize(self._sizes or (0, 0), sizes, now_s)
        self._sizes = sizes
        if seen is not None:
            self._seen.append((now_s, seen))
        while self._seen and now_s - self._seen[0][0] > LATER_S:
            self._seen.popleft()

    def _resize(self, old: tuple[int, int], new: tuple[int, int], now_s: float) -> None:
        """Records new sizes of the pools. The first sizes count as growth of both pools."""
        self._changed_s = now_s
        self._changing_since_s = None  # each change has a deadline of its own
        for role, before, after in zip(self._grew_s, old, new, strict=True):
            if after > before:
                self._grew_s[role] = now_s
        if sum(new) > sum(old):
            self._idle_since_s = None
        elif sum(new) < sum(old):
            self._lacking_since_s = None

    def _held(self, seen: Observation | None, pools: PoolSizes, now_s: float) -> str | None:
        """Returns the reason to decide nothing now, or None."""
        rules = self._rules
        num_silent = pools.num_gateways - (0 if seen is None else seen.num_gateways)
        self._silent_since_s = _since(self._silent_since_s, num_silent > 0, now_s)
        self._changing_since_s = _since(self._changing_since_s, pools.num_changing > 0, now_s)
        if seen is None:
            return "no gateway reports"
        if pools.total == 0:
            return "there is no worker"
        for what, since_s, timeout_s in (
            (f"{num_silent} gateways are silent", self._silent_since_s, rules.silence_s),
            (
                f"{pools.num_changing} workers are changing",
                self._changing_since_s,
                rules.change_timeout_s,
            ),
        ):
            if since_s is not None and now_s - since_s < timeout_s:
                return f"{what}, for {now_s - since_s:.1f} of {timeout_s:g} s"
        return None

    # ------------------------------------------------------------ needs

    def _needs(self, seen: Observation, pools: PoolSizes, now_s: float) -> Needs:
        rules = self._rules
        rates = [self._mean(now_s, s, lambda one: one.prefill_s_per_s) for s in (SOON_S, LATER_S)]
        waiting_s = seen.waiting_s(pools.prefill)
        prefill = max(rates) / BUSY + waiting_s / (PATIENCE * (rules.ttft_s or NO_BOUND_TTFT_S))
        coming = self._coming(seen, now_s)
        share = coming / seen.num_decoding if seen.num_decoding else 0.0
        later = replace(
            seen,
            num_decoding=ceil(coming),
            context_tokens=ceil(seen.context_tokens * share),
            reserved_tokens=ceil(seen.reserved_tokens * share),
        )
        holding = _decoders(seen, pools, rules.tpot_s)
        return Needs(prefill, _decoders(later, pools, rules.tpot_s), holding, coming)

    def _mean(self, now_s: float, over_s: float, of: Callable[[Observation], float]) -> float:
        values = [of(seen) for at_s, seen in self._seen if now_s - at_s < over_s]
        return sum(values) / max(len(values), 1)

    def _coming(self, seen: Observation, now_s: float) -> float:
        """Predicts the number of decoding sequences at the horizon, at least the present number."""
        horizon_s, number = self._rules.horizon_s, seen.num_decoding
        then_s, then = next(item for item in self._seen if now_s - item[0] <= SOON_S)
        slope = (number - then.num_decoding) / (now_s - then_s) if now_s > then_s else 0.0
        return max(number + max(slope, 0.0) * horizon_s, self._approached(seen, now_s))

    def _approached(self, seen: Observation, now_s: float) -> float:
        """Predicts the number of sequences at the horizon, if answers keep their mean length."""
        bound_s = self._rules.tpot_s
        requests_per_s = self._mean(now_s, SOON_S, lambda one: one.requests_per_s)
        tokens_per_s = self._mean(now_s, SOON_S, lambda one: one.output_tokens_per_s)
        if bound_s is None or requests_per_s <= 0 or tokens_per_s <= 0:
            return 0.0
        final, stay_s = tokens_per_s * bound_s, tokens_per_s / requests_per_s * bound_s
        return final + (seen.num_decoding - final) * exp(-self._rules.horizon_s / stay_s)

    # ------------------------------------------------------------ decisions

    def _split(self, needs: Needs, pools: PoolSizes, now_s: float) -> tuple[int, str]:
        """Returns the number of present workers that should prefill, and the reason."""
        here, total = pools.prefill, pools.total
        fewest, most = self._limits(total)
        if fewest > most:
            return here, f"no flip: the limits leave no choice for {total} workers"
        if not fewest <= here <= most:
            inside = min(max(here, fewest), most)
            bounds = f"{fewest} to {most} may prefill"
            if not self._is_cool(now_s):
                return here, f"no flip yet: {bounds}, but {self._changed(now_s)}"
            return inside, f"{abs(inside - here)} flips: {bounds}"
        present = needs.pressure(here, pools.decode)
        if present <= 1.0:
            return here, f"no flip: neither pool is short, {present:.2f} of the fuller is needed"
        kept = min(ceil(needs.holding), pools.decode)
        lowest = max(fewest, here - max(here // 2, 1))
        highest = max(min(most, here + max(pools.decode // 2, 1), total - kept), lowest)
        best = min(
            range(lowest, highest + 1),
            key=lambda number: (needs.pressure(number, total - number), abs(number - here)),
        )
        gain = 1 - needs.pressure(best, total - best) / present
        shortage = f"{gain:.0%} of a shortage of {present:.2f}"
        if gain < self._rules.least_gain:
            return here, f"no flip: it would gain {shortage}, {kept} hold what decodes"
        giver = Role.DECODE if best > here else Role.PREFILL
        cooled_s = now_s - self._grew_s[giver]
        if cooled_s < self._rules.cool_down_s:
            return here, f"no flip: it would gain {shortage}, but {giver} grew {cooled_s:.1f} s ago"
        return best, f"{abs(best - here)} flips from {giver}: they gain {shortage}"

    def _is_cool(self, now_s: float) -> bool:
        """True if the pools have not changed for long enough to be brought within the bounds."""
        return now_s - self._changed_s >= self._rules.cool_down_s

    def _changed(self, now_s: float) -> str:
        return f"the pools changed {now_s - self._changed_s:.1f} s ago"

    def _limits(self, total: int) -> tuple[int, int]:
        """Returns the minimum and the maximum number of prefill workers among `total` workers."""
        rules = self._rules
        fewest = rules.min_prefill
        if rules.max_decode is not None:
            fewest = max(fewest, total - rules.max_decode)
        most = total - rules.min_decode
        if rules.max_prefill is not None:
            most = min(most, rules.max_prefill)
        return fewest, most

    def _nodes(self, needs: Needs, pools: PoolSizes, now_s: float) -> tuple[int, str]:
        """Returns the wanted number of workers in all, and the reason."""
        rules = self._rules
        wanted = ceil(needs.prefill) + ceil(needs.decode)
        if rules.max_workers is None:
            return pools.total, f"{wanted} workers are needed in all"
        least, most = (bound - pools.num_absent for bound in self._bounds(rules.max_workers))
        if not least <= pools.total <= most:
            bounds = f"there are to be {least} to {most}"
            if not self._is_cool(now_s):
                return pools.total, f"{pools.total} nodes: {bounds}, but {self._changed(now_s)}"
            nodes = min(max(pools.total, least), most)
            return nodes, f"{nodes} nodes: {bounds}"
        self._lacking_since_s = _since(self._lacking_since_s, wanted > pools.total, now_s)
        idle = wanted < IDLE * pools.total
        self._idle_since_s = _since(self._idle_since_s, idle, now_s)
        for since_s, after_s in (
            (self._lacking_since_s, rules.grow_after_s),
            (self._idle_since_s, rules.shrink_after_s),
        ):
            if since_s is not None and now_s - since_s >= after_s:
                room = ceil(wanted / IDLE) if idle else wanted
                nodes = max(min(room, most), least)
                return nodes, f"{nodes} nodes: {wanted} are needed, for {now_s - since_s:.0f} s"
        return pools.total, f"{pools.total} nodes: {wanted} are needed"

    def _bounds(self, max_total: int) -> tuple[int, int]:
        """Returns the minimum and the maximum number of workers of both pools together."""
        rules = self._rules
        if rules.max_prefill is not None and rules.max_decode is not None:
            max_total = min(max_total, rules.max_prefill + rules.max_decode)
        least = max(rules.min_workers, rules.min_prefill + rules.min_decode)
        return min(least, max_total), max_total

    def _resized(self, prefill: int, needs: Needs, before: int, total: int) -> int:
        """Returns the number of prefill workers among `total`, if it was `prefill` of `before`."""
        fewest, most = self._limits(total)
        low, high = sorted((prefill, max(prefill + total - before, 0)))
        low = min(max(low, fewest), high)
        return min(
            range(low, max(min(high, most), low) + 1),
            key=lambda number: (needs.pressure(number, total - number), abs(number - prefill)),
        )


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:  # noqa: FBT001
    """Returns the time from which a condition has held; None if it does not hold now."""
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _decoders(seen: Observation, pools: PoolSizes, bound_s: float | None) -> float:
    """Returns the decode workers that running and waiting sequences need for their TPOT and KV."""
    num_seqs = seen.num_decoding + seen.num_queued
    need = 0.0
    if pools.kv_tokens:
        need = (seen.reserved_tokens + seen.queued_tokens) / (MEMORY * pools.kv_tokens)
    if pools.max_running:
        need = max(need, num_seqs / pools.max_running)
    cost = seen.decode_cost
    if cost is None or bound_s is None or bound_s * PACE <= cost.fixed_s:
        return need
    context_tokens = seen.context_tokens + seen.queued_tokens
    grows_s = cost.row_s * num_seqs + cost.context_s * context_tokens
    return max(need, grows_s / (bound_s * PACE - cost.fixed_s))


def _reasons(seen: Observation, pools: PoolSizes, needs: Needs) -> tuple[str, str]:
    """Returns the need of each pool in words, with the numbers behind it."""
    cost = seen.decode_cost
    pace = "unknown"
    if cost is not None:
        num = max(pools.decode, 1)
        grows_s = cost.row_s * seen.num_decoding + cost.context_s * seen.context_tokens
        pace = f"{1000 * (cost.fixed_s + grows_s / num):.1f} ms"
    return (
        f"prefill needs {needs.prefill:.1f} of {pools.prefill}: {seen.requests_per_s:.1f} "
        f"requests/s are {seen.prefill_s_per_s:.2f} s/s, "
        f"{seen.waiting_s(pools.prefill):.2f} s wait",
        f"decode needs {needs.decode:.1f} of {pools.decode}, now {needs.holding:.1f}: "
        f"{seen.num_decoding} sequences, soon {needs.coming:.0f}, {seen.num_queued} wait; "
        f"a token takes {pace}",
    )


# ---------------------------------------------------------------- workers to flip


def order_of_leaving(worker_id: WorkerId, work_tokens: float) -> tuple[float, tuple[str, int, str]]:
    """Returns the sort key of a worker in its pool: workers with the least key leave first.

    These are the workers with the fewest tokens to move or to give back. The controller uses the
    same order.
    """
    return work_tokens, by_number(worker_id)


@dataclass(frozen=True, slots=True)
class FlipCandidate:
    """A worker of a pool. A flip would move or give back `work_tokens`."""

    worker_id: WorkerId
    role: Role
    work_tokens: float


def flips(plan: PoolPlan, members: Sequence[FlipCandidate]) -> list[tuple[WorkerId, Role]]:
    """Returns the workers that must flip for a plan, all at once, each with its new role."""
    num = plan.prefill - sum(member.role is Role.PREFILL for member in members)
    giver, taker = (Role.DECODE, Role.PREFILL) if num > 0 else (Role.PREFILL, Role.DECODE)
    givers = sorted(
        (m for m in members if m.role is giver),
        key=lambda m: order_of_leaving(m.worker_id, m.work_tokens),
    )
    return [(member.worker_id, taker) for member in givers[: abs(num)]]

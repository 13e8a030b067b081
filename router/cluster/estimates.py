"""A gateway's predictions of its workers' times, in seconds, from its own observations.

There are two models. The first is a rate over all workers: seconds per computed token, per pulled
byte, per decode step. Once a class of workers was observed with different sizes of work, the second
model is used for it: the formulas of `engine.worker.costs`. Without an observation there is no
prediction. Pulls are the exception: their initial guess lets the first prompts after a restart be
pulled from a store.

Prompts are timed from their first chunk to their first token. Workers report the times of their
pulls and of decode steps. Stores themselves measure how long reading lower media takes.

Fitting costs time. For a well-known class, only one in `EVERY` observations is used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.demand import DecodeCost
from engine.messages import Role, StepReport
from engine.worker.costs import (
    CostErrors,
    LoadCost,
    OnlineCosts,
    PrefillCost,
    PullCost,
    WorkerCosts,
)
from router.cluster.view import WorkerView

# The fixed seconds of a pull: the offer, its answer, the connection and the confirmation. Each of
# these may wait for the end of a worker's step.
PULL_OVERHEAD_S = 0.02

FIRST_PULL_BYTES_PER_S = 1e9  # a guess before the first pull, for a network of 10 Gbit/s
# Guesses of fixed seconds and bytes/s, before a store has measured its lower media: a slow disk,
# and distant objects. A wrong guess should cause needless computing, not a long wait.
FIRST_LOADS = {"disk": (0.02, 200e6), "object": (0.5, 25e6)}
FIRST_OFFER_S = 0.1  # seconds until a worker answers during a step; a guess before the first offer
RATE_MEMORY = 0.9  # factor on the weight of earlier observations, per observation
ENOUGH = 12  # minimum number of observations before formulas are used
SPREAD = 3.0  # minimum ratio of the largest size to the smallest
EVERY = 8  # one in EVERY observations of a well-known class is used
WELL_KNOWN = 64

WorkerClass = tuple[Role, int, int]


def worker_class(worker: WorkerView) -> WorkerClass:
    """Returns the class of a worker. Workers of one role and size are assumed to be alike."""
    info = worker.info
    return info.role, info.num_blocks, info.max_running


@dataclass(slots=True)
class Rate:
    """Seconds per unit of work: a quotient of two sums. Older observations have a lower weight."""

    _seconds: float = 0.0
    _units: float = 0.0

    def observe(self, units: float, seconds: float) -> None:
        """Records that `units` of work took `seconds`. Zero units are ignored."""
        if units > 0:
            self._seconds = RATE_MEMORY * self._seconds + seconds
            self._units = RATE_MEMORY * self._units + units

    @property
    def s_per_unit(self) -> float | None:
        """Seconds per unit; None before the first observation."""
        return self._seconds / self._units if self._units else None


@dataclass(slots=True)
class _Sizes:
    """The number of observations since the last reset, and the range of their sizes."""

    num_forgotten: int = 0  # number of resets of the fit
    number: int = 0
    least: float = field(default=float("inf"))
    most: float = 0.0

    def record(self, size: float) -> bool:
        """Records an observation of this size. Returns True if the observation should be fitted."""
        self.number += 1
        self.least, self.most = min(self.least, size), max(self.most, size)
        return self.number <= WELL_KNOWN or self.number % EVERY == 0

    @property
    def are_enough(self) -> bool:
        return self.number >= ENOUGH and self.most >= SPREAD * self.least


class Estimates:
    """The predictions of one gateway. None means that nothing was measured yet."""

    def __init__(self, prior: WorkerCosts | None = None) -> None:
        """`prior` has the formulas for classes that were not observed enough yet."""
        self._prior = prior or WorkerCosts()
        self._online = OnlineCosts()
        self._prefill_rate = Rate()  # seconds per token
        self._pull_rate = Rate()  # seconds per byte
        self._step_rate = Rate()  # seconds per step
        self._offer_s = FIRST_OFFER_S
        self.version = 0  # increases whenever costs change
        self._sizes: dict[tuple[str, WorkerClass], _Sizes] = {}
        # Caches that each observation clears.
        self._alike: dict[tuple[str, WorkerClass], WorkerClass | None] = {}
        self._decode_costs: dict[WorkerClass, DecodeCost | None] = {}
        self._pull_costs: dict[WorkerClass, PullCost] = {}

    # ------------------------------------------------------------ observations

    def observe_prefill(
        self, worker: WorkerView, num_tokens: int, *, num_cached: int, seconds: float
    ) -> None:
        """Records a prompt's time in seconds, from its first chunk to its first token."""
        num_computed = num_tokens - num_cached
        if num_computed <= 0 or seconds <= 0:
            return
        self.version += 1
        self._prefill_rate.observe(num_computed, seconds)
        if self._is_taken("prefill", worker, num_computed):
            squares = num_tokens**2 - num_cached**2
            sample = StepReport(seconds, num_computed, squares)
            self._online.observe_step(worker_class(worker), sample)

    def observe_pull(self, worker: WorkerView, num_blocks: int, *, seconds: float) -> None:
        """Records a pull of `num_blocks` blocks. `seconds` is zero if its time is unknown."""
        if num_blocks <= 0 or seconds <= 0:
            return
        self.version += 1
        num_bytes = num_blocks * worker.info.layout.block_bytes
        self._pull_rate.observe(num_bytes, seconds)
        if self._is_taken("pull", worker, num_blocks):
            self._online.observe_pull(
                worker_class(worker), num_blocks=num_blocks, num_bytes=num_bytes, seconds=seconds
            )

    def observe_offer(self, seconds: float) -> None:
        """Records the time in which a worker with prompts answered a request for an offer."""
        self._offer_s += (1 - RATE_MEMORY) * (seconds - self._offer_s)

    def observe_steps(self, worker: WorkerView, steps: Sequence[StepReport]) -> None:
        """Records reported steps without prompts. `observe_prefill` times prompts as a whole."""
        self.version += bool(steps)
        for step in steps:
            decodes = step.num_rows > 0 and not step.num_prefill_tokens
            if decodes:
                self._step_rate.observe(1, step.seconds)
            if decodes and self._is_taken("decode", worker, step.num_context_tokens):
                sample = StepReport(
                    step.seconds,
                    num_rows=step.num_rows,
                    num_context_tokens=step.num_context_tokens,
                )
                self._online.observe_step(worker_class(worker), sample)

    def _is_taken(self, kind: str, worker: WorkerView, size: float) -> bool:
        for found in (self._alike, self._decode_costs, self._pull_costs):
            found.clear()
        return self._of(kind, worker).record(size)

    def _of(self, kind: str, worker: WorkerView) -> _Sizes:
        """Returns the observed sizes of a worker's class.

        A formula that was fitted to one size predicts no other size well.
        """
        key = kind, worker_class(worker)
        sizes = self._sizes.get(key)
        num_forgotten = self._online.num_forgotten(*key)
        if sizes is None or sizes.num_forgotten != num_forgotten:
            sizes = self._sizes[key] = _Sizes(num_forgotten)
        return sizes

    def _known(self, kind: str, worker: WorkerView) -> WorkerClass | None:
        """Returns the class whose formula is used for a worker: its own, or that of a similar
        machine.

        Workers rarely do the work of another role, but the workers of that role always do.
        """
        key = kind, worker_class(worker)
        if key not in self._alike:
            self._alike[key] = self._find(kind, worker)
        return self._alike[key]

    def _find(self, kind: str, worker: WorkerView) -> WorkerClass | None:
        own = worker_class(worker)
        if self._of(kind, worker).are_enough:
            return own
        others = [known for of, known in self._sizes if of == kind and known[2] == own[2]]
        alike = [known for known in others if self._sizes[kind, known].are_enough]
        return max(alike, key=lambda known: self._sizes[kind, known].number, default=None)

    # ------------------------------------------------------------ predictions

    def prefill_cost(self, worker: WorkerView) -> PrefillCost | None:
        """Returns the formula for a worker's prompts."""
        known = self._known("prefill", worker)
        if known is not None:
            return self._online.costs(known).prefill
        if self._prior.prefill is not None:
            return self._prior.prefill
        token_s = self._prefill_rate.s_per_unit
        return None if token_s is None else PrefillCost(0.0, token_s)

    def pull_cost(self, worker: WorkerView) -> PullCost:
        """Returns the formula for pulls by a worker, timed from the request for the blocks."""
        known = self._pull_costs.get(key := worker_class(worker))
        if known is None:
            bare = self._online.costs(key).pull if self._of("pull", worker).are_enough else None
            bare = bare or self._prior.pull
            if bare is None:
                byte_s = self._pull_rate.s_per_unit or 1 / FIRST_PULL_BYTES_PER_S
                bare = PullCost(0.0, 0.0, 1 / max(byte_s, 1e-15))
            known = PullCost(bare.fixed_s + PULL_OVERHEAD_S, bare.block_s, bare.bytes_per_s)
            self._pull_costs[key] = known
        return known

    def load_cost(self, store: WorkerView, medium: str) -> LoadCost:
        """Returns the formula for a store's reads of a lower medium, which may be a guess."""
        gauges = {} if store.load is None else store.load.gauges
        fixed_s = gauges.get(f"load_fixed_s:{medium}", math.nan)
        block_s = gauges.get(f"load_block_s:{medium}", math.nan)
        if 0 <= fixed_s < math.inf and 0 <= block_s < math.inf:
            return LoadCost(fixed_s, block_s)
        guessed_s, bytes_per_s = FIRST_LOADS[medium]
        return LoadCost(guessed_s, store.info.layout.block_bytes / bytes_per_s)

    def decode_cost(self, worker: WorkerView) -> DecodeCost | None:
        """Returns the formula for a worker's decode steps."""
        key = worker_class(worker)
        if key not in self._decode_costs:
            known, cost = self._known("decode", worker), self._prior.decode
            step_s = self._step_rate.s_per_unit
            if known is not None:
                cost = self._online.costs(known).decode
            elif cost is None and step_s is not None:
                cost = DecodeCost(step_s, 0.0, 0.0)
            self._decode_costs[key] = cost
        return self._decode_costs[key]

    def prefill_s(self, worker: WorkerView, num_tokens: int, num_cached: int) -> float | None:
        """Predicts the seconds to compute a prompt with `num_cached` leading tokens cached."""
        cost = self.prefill_cost(worker)
        return None if cost is None else cost.seconds(num_tokens, num_cached)

    def any_prefill_s(self, num_tokens: int) -> float | None:
        """Predicts the seconds to compute `num_tokens` on any worker."""
        if self._prior.prefill is not None:
            return self._prior.prefill.seconds(num_tokens)
        token_s = self._prefill_rate.s_per_unit
        return None if token_s is None else token_s * num_tokens

    def pull_s(self, worker: WorkerView, num_tokens: int) -> float:
        """Predicts the seconds to request and pull `num_tokens` in full blocks to this worker."""
        num_blocks = worker.info.layout.num_blocks_for(num_tokens)
        num_bytes = num_blocks * worker.info.layout.block_bytes
        return self.pull_cost(worker).seconds(num_blocks, num_bytes)

    def load_s(self, store: WorkerView, medium: str, num_blocks: int) -> float:
        """Predicts the seconds in which a store reads `num_blocks` blocks of a lower medium."""
        return self.load_cost(store, medium).seconds(num_blocks)

    def offer_s(self) -> float:
        """Predicts the seconds until a worker with prompts answers a request for an offer."""
        return self._offer_s

    def step_s(self, worker: WorkerView, num_seqs: int, context_tokens: int) -> float | None:
        """Predicts the seconds of a decode step with these numbers of sequences and tokens."""
        cost = self.decode_cost(worker)
        return None if cost is None else cost.seconds(num_seqs, context_tokens)

    def errors(self, worker: WorkerView) -> CostErrors:
        """Returns the recent prediction errors of the formulas for this worker's class."""
        return self._online.errors(worker_class(worker))

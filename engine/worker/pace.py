"""Limits the prompt tokens of a step, so that they do not delay the step's decoding sequences.

A worker of one pool may do work of the other pool (fluid pools). If it computes prompts together
with decoding sequences, the prompts are cut into chunks. A step must not take longer than

    the least TPOT bound of these sequences, and
    `stretch` times the step without prompts, if some of them have no bound.

The predicted duration of a step is, for b sequences with kv tokens of context, and chunks of
prompts from p to n:

    max(A, D) + B·Σ(n - p) + C·Σ(n² - p²) + E·b + F·kv

with the costs of `engine.worker.costs`, learned from this worker. The fixed parts A and D are
mostly the time in which weights are read, which is needed only once for both kinds of rows.

A prompt always makes some progress, even if the sequences alone exceed their bound.

Mixed workers do not use these limits: only `chunk_tokens` limits their chunks. A step without
decoding sequences has no limit either.

Pure. Source: chunks that fit a bound on the time between tokens, Sarathi-Serve, OSDI 2024.
"""

from collections.abc import Sequence
from math import inf, sqrt

from engine.messages import StepReport
from engine.worker.batch import Row
from engine.worker.costs import OnlineCosts, PrefillCost

FIRST_TOKENS = 16  # most prompt tokens of a step while the cost of prompts is unknown
LEAST_TOKENS = 4  # minimum chunk, in tokens, when the step has no time left
# Target, as a share of the limit. The rest is a reserve for hand-overs, and for predictions that
# are too short.
KEPT = 0.9
EAGER = 32  # all of the first steps of each kind are learned; later one step in `EVERY`
EVERY = 8
_CLASS = "this worker"


class StepPace:
    """Predicts the durations of this worker's steps. Owned by the thread that runs steps."""

    def __init__(self, stretch: float) -> None:
        self.stretch = stretch
        self._costs = OnlineCosts()
        self._num_seen = {False: 0, True: 0}  # number of steps, by `decodes_only`
        self._rows: Sequence[Row] = ()  # decode rows of the step that is being planned
        # Seconds that are left for prompts in this step; None: not computed yet.
        self._left_s: float | None = None
        self._has_prompt = False

    def start(self, rows: Sequence[Row]) -> None:
        """Begins the plan of a step with these decode rows. Without decode rows there is no
        limit.
        """
        self._rows, self._left_s, self._has_prompt = rows, None, False

    def most_tokens(self, start: int) -> int | None:
        """Returns the longest chunk, in tokens, of a prompt from `start` on; None if there is no
        limit.
        """
        if not self._rows:
            return None
        cost = self._costs.costs(_CLASS).prefill
        least = FIRST_TOKENS if cost is None else LEAST_TOKENS
        if self._has_prompt:
            least = 0
        if cost is None:
            return least
        if self._left_s is None:
            self._left_s = self._room_s(cost)
        return max(_tokens_in(self._left_s, cost, start), least)

    def add(self, start: int, num_tokens: int) -> None:
        """Subtracts the predicted time of a chunk that was added to the step."""
        self._has_prompt = True
        cost = self._costs.costs(_CLASS).prefill
        if self._left_s is not None and cost is not None:
            self._left_s -= cost.seconds(start + num_tokens, start) - cost.fixed_s

    def _room_s(self, cost: PrefillCost) -> float:
        """Returns the seconds by which prompt chunks may lengthen the planned step."""
        decode = self._costs.costs(_CLASS).decode
        if decode is None:
            return 0.0
        num_context = sum([row.end for row in self._rows])
        plain_s = decode.seconds(len(self._rows), num_context)
        bounds_s = [row.tpot_s for row in self._rows]
        limit_s = min((bound_s for bound_s in bounds_s if bound_s is not None), default=inf)
        if None in bounds_s:
            limit_s = min(limit_s, self.stretch * plain_s)
        return KEPT * limit_s - plain_s - max(cost.fixed_s - decode.fixed_s, 0.0)

    def wants(self, *, decodes_only: bool) -> bool:
        """True if the duration of the step that has just ended should be learned."""
        self._num_seen[decodes_only] += 1
        number = self._num_seen[decodes_only]
        return number <= EAGER or number % EVERY == 0

    def learn(self, step: StepReport) -> None:
        """Learns from the duration of a step."""
        self._costs.observe_step(_CLASS, step)


def _tokens_in(left_s: float, cost: PrefillCost, start: int) -> int:
    """Returns the largest n, in tokens, such that B·n + C·((start + n)² - start²) <= `left_s`."""
    if left_s <= 0:
        return 0
    linear_s, square_s = cost.token_s + 2 * cost.square_s * start, cost.square_s
    if square_s * left_s <= 1e-9 * linear_s * linear_s:
        return int(left_s / linear_s) if linear_s > 0 else 1 << 30
    return int((sqrt(linear_s * linear_s + 4 * square_s * left_s) - linear_s) / (2 * square_s))

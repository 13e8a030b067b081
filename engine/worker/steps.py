"""Measures the steps of a worker: their work, samples for gateways, and steps that hang.

**Work.** Floating-point operations and bytes read, divided by time and by the machine's peaks, give
model flops utilisation (MFU) and the use of memory bandwidth. Only work that users benefit from is
counted: the target model's work, without rejected drafted tokens and without the draft model.

    flops       2 · weights · tokens  +  4 · attention · (pairs of a token and one in its context)
    bytes       weights once a step   +  K and V of all contexts

The head's weights are counted for rows that choose a token.

**Samples.** Gateways learn costs from reports of steps: decode steps without drafts, and prompt
chunks, measured by the runner. Steps with drafts, and prompts whose log-probabilities are
requested, are not reported, because their number of tokens does not determine their cost.

**Watch.** The step loop iterates at least once a second, so a longer iteration is a long step.
Another thread watches the loop. Only this watch detects a step that hangs, because the worker's
other threads continue and its sessions stay open. The first steps of each kind may compile code, so
they may take longer, and are reported as early steps. Time in which the whole process was stopped
is not counted.

Sources: Williams et al., "Roofline", CACM 2009; Chowdhery et al., PaLM, 2022, appendix B (MFU).
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from engine.errors import StepStuck
from engine.messages import StepReport, StillStepping
from engine.net.silence import Silence
from engine.worker.batch import BatchPlan, Row
from engine.worker.pace import StepPace

MAX_STEPS_OF_A_KIND = 8  # samples per report and kind of steps; there are two kinds
LONG_STEP_S = 2.0  # steps that run longer are reported
NUM_FIRST_STEPS = 32  # number of early steps of each kind
FIRST_STEPS_FACTOR = 2.0


class ModelSizes(msgspec.Struct, frozen=True):
    """The sizes of a model that determine the work of a step."""

    layer_weights: float  # weights used for each token; of experts, only the chosen ones
    head_weights: float
    attention_size: float  # query heads times head_dim, summed over layers
    weights_bytes: float
    kv_token_bytes: float


class StepEffort:
    """Sums of work and time over all steps of a worker. Owned by the step thread."""

    def __init__(self, sizes: ModelSizes | None) -> None:
        """Without `sizes`, only time and prompt tokens are counted."""
        self._sizes = sizes
        self._flops = self._read_bytes = self._busy_s = 0.0
        self._num_prompt_tokens = 0

    def record(self, rows: Sequence[Row], seconds: float) -> None:
        """Adds the work and time of a step that has run."""
        self._busy_s += seconds
        tokens = pairs = contexts = chosen = 0
        for row in rows:
            start, num = row.start, len(row.token_ids)
            tokens += num
            pairs += num * start + num * (num + 1) // 2
            contexts += start + num
            chosen += row.sampling is not None
            if num > 1:
                self._num_prompt_tokens += num
        sizes = self._sizes
        if sizes is not None:
            matrices = sizes.layer_weights * tokens + sizes.head_weights * chosen
            self._flops += 2 * matrices + 4 * sizes.attention_size * pairs
            self._read_bytes += sizes.weights_bytes + sizes.kv_token_bytes * contexts

    def counters(self) -> dict[str, float]:
        """Returns the sums since the worker's start, for load reports."""
        found = {"busy_seconds": self._busy_s, "computed_prompt_tokens": self._num_prompt_tokens}
        if self._sizes is not None:
            found |= {"flops": self._flops, "read_bytes": self._read_bytes}
        return found


class _Sample(msgspec.Struct):
    """A sample of the steps of one kind since the last report, spread evenly over these steps."""

    steps: list[StepReport] = []
    stride: int = 1
    num_passed: int = 0


class StepSamples:
    """Samples, since the last report, of the steps that only decode and of all other steps."""

    def __init__(self, pace: StepPace | None) -> None:
        """`pace` learns the durations of some steps."""
        self._pace = pace
        self._samples = {True: _Sample(), False: _Sample()}  # key: True for steps that only decode

    def record(self, decoding: Sequence[Row], chunks: Sequence[Row], seconds: float) -> None:
        """Adds a due step to the sample for reports, and to the steps from which `pace` learns.

        Most steps are due for neither, and cost only this check.
        """
        sample, pace = self._samples[not chunks], self._pace
        sample.num_passed += 1
        is_kept = sample.num_passed >= sample.stride
        is_learned = pace is not None and pace.wants(decodes_only=not chunks)
        if not (is_kept or is_learned):
            return
        step = _report_of(decoding, chunks, seconds)
        if step is not None and is_kept:
            sample.num_passed = 0
            sample.steps.append(step)
            if len(sample.steps) > MAX_STEPS_OF_A_KIND:
                sample.steps = sample.steps[::2]
                sample.stride *= 2
        if step is not None and is_learned and pace is not None:
            pace.learn(step)

    def pop_all(self) -> list[StepReport]:
        """Returns the sampled steps and clears the samples."""
        steps = self._samples[True].steps + self._samples[False].steps
        self._samples = {True: _Sample(), False: _Sample()}
        return steps


def _report_of(decoding: Sequence[Row], chunks: Sequence[Row], seconds: float) -> StepReport | None:
    """Returns the report of a step; None if the report's numbers do not determine the step's
    duration.
    """
    num_context = num_new = squares = 0
    for row in decoding:
        if row.draft or row.num_to_draft or row.draft_token_ids:
            return None
        num_context += row.start + len(row.token_ids)
    for row in chunks:
        if row.scored:
            return None
        num_tokens = len(row.token_ids)
        num_new += num_tokens
        squares += (2 * row.start + num_tokens) * num_tokens  # end² - start²
    return StepReport(seconds, num_new, squares, len(decoding), num_context)


class StepWatch:
    """Detects long steps. The step thread calls `tick` and `start`, another thread calls
    `check`.
    """

    def __init__(self, timeout_s: float | None, now_s: float) -> None:
        """A step longer than `timeout_s` counts as stuck. With None, no step counts as stuck."""
        self._timeout_s = timeout_s
        self._silence = Silence(now_s)
        self._num_ticks = 0
        self._num_ticks_seen = 0
        # Number of steps that were started, by the kinds of their rows.
        self._num_steps: Counter[frozenset[str]] = Counter()
        self._is_early = True

    def tick(self) -> None:
        """Records that the step loop has started an iteration."""
        self._num_ticks += 1

    def start(self, plan: BatchPlan) -> None:
        """Records that a step has started in this iteration."""
        kinds = set()  # rows of one kind usually run the same code
        for row in plan.rows:
            has_draft = row.draft or row.num_to_draft
            kinds.add("verify" if has_draft else "chunk" if len(row.token_ids) > 1 else "decode")
        kind = frozenset(kinds)
        self._is_early = self._num_steps[kind] < NUM_FIRST_STEPS
        self._num_steps[kind] += 1

    def check(self, now_s: float) -> StillStepping | None:
        """Returns the seconds for which the present step has run, if it is long; None otherwise.

        Must be called about once a second. Raises StepStuck.
        """
        is_early = self._is_early  # read before the ticks, because a step may start meanwhile
        if self._num_ticks != self._num_ticks_seen:
            self._silence.broken()
            self._num_ticks_seen = self._num_ticks
        lasted_s = self._silence.check(now_s)
        if self._timeout_s is not None:
            factor = FIRST_STEPS_FACTOR if is_early else 1.0
            if lasted_s > factor * self._timeout_s:
                raise StepStuck(lasted_s)
        return None if lasted_s <= LONG_STEP_S else StillStepping(lasted_s, is_early)

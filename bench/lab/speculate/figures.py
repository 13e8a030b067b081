"""Computes the results of `bench speculate` from its measured times. Pure.

| result                                | unit     |                                               |
|---------------------------------------|----------|-----------------------------------------------|
| speedup/draft_b1, draft_b8            | ×        | the lowest over models, greedy and sampled    |
| speedup/ngram_repeat_b1               | ×        | the lowest over both models                   |
| speedup/worst                         | ×        | the lowest of all cells                       |
| identical_share, identical_share/fp32 | share    | requests with equal tokens in all modes       |
| identical_share/cells                 | share    | timed answers with equal tokens in all modes  |
| speedup/<cell>                        | ×        | tokens/s over tokens/s without speculation    |
| predicted/<cell>                      | ×        | from acceptance and times of single passes    |
| decode/<cell>                         | tokens/s | decoded tokens of the whole batch             |
| tokens_per_pass/<cell>                | tokens   | gained by one sequence in one step            |
| expected_per_pass/<cell>              | tokens   | expected for these drafts by mean acceptance  |
| drafted/<cell>                        | tokens   | verified for one sequence in one step         |
| mean_acceptance/<cell>                | share    | accepted, of tokens after accepted tokens     |
| acceptance/<drafter>_p<i>             | share    | accepted, of tokens at place i of a draft     |
| expected_acceptance/<drafter>_p<i>    | share    | the mean acceptance to the power of i         |
| outside/<cell>                        | %        | share of the time outside the runner          |
| background/cpu                        | %        | share of cores used by other programs         |

A <cell> is <setup>_<workload>/<mode>_b<batch>, a <drafter> <setup>_<workload>_<mode>. The limit of
a promised result (`GOALS`) is the promised value.

Expected values follow from a model: a drafted token after accepted tokens is accepted with
probability α, at any place. Then a draft of d tokens yields 1 + α + … + α^d tokens, and place i is
accepted with α^i. The predicted speed uses α of the run, and times of single passes: of the target
for each number of drafted tokens, and of the draft. It does not include scheduling.

Source: Leviathan et al., Fast inference from transformers via speculative decoding, ICML 2023.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec

from bench.common.background import busy_results, busy_warning
from bench.common.report import Figure, Result, result_of, results_of
from bench.lab.speculate.plan import (
    CALIBRATED_LENS,
    GOALS,
    Cell,
    PromptKind,
    SpeculatePlan,
)
from engine.config import Speculate


class BatchRun(msgspec.Struct, frozen=True):
    """The decoding of a batch for a while, as `bench.lab.speculate.worker` reports it."""

    seconds: float
    outside_s: float  # seconds outside the runner
    num_tokens: int
    # For each step: seconds, rows, verified draft tokens, passes of the draft model.
    steps: list[tuple[float, int, int, int]]
    drafts: list[tuple[int, int, int]]  # (drafted, accepted, number of rows with these counts)
    answers: list[list[int]]

    @property
    def speed(self) -> float:
        """Returns the tokens per second of the batch."""
        return self.num_tokens / self.seconds

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of all steps."""
        return sum(rows for _, rows, _, _ in self.steps)


class Passes(msgspec.Struct, frozen=True):
    """Seconds of single passes, timed alone, for drafts of `CALIBRATED_LENS` tokens."""

    plain_s: float
    verify_s: list[float]
    draft_s: list[float]


@dataclass(frozen=True, slots=True)
class RunKey:
    """The setup, workload, mode and batch size of a run."""

    thing: str  # names of setup and workload
    batch: int
    mode: Speculate


@dataclass(slots=True)
class SpeculateMeasured:
    """All measurements of the study."""

    # runs in order of the repetitions
    runs: dict[RunKey, list[BatchRun]] = field(default_factory=dict)
    # single passes by setup and batch size
    passes: dict[tuple[str, int], Passes] = field(default_factory=dict)
    # share of requests with equal tokens in all modes, by weights
    identical: dict[str, float] = field(default_factory=dict)
    background: list[float] = field(default_factory=list)
    num_compared: int = 0  # number of timed answers that were compared
    num_same: int = 0


def joined(runs: Sequence[BatchRun]) -> BatchRun:
    """Joins consecutive batches into one run."""
    return BatchRun(
        seconds=sum(run.seconds for run in runs),
        outside_s=sum(run.outside_s for run in runs),
        num_tokens=sum(run.num_tokens for run in runs),
        steps=[step for run in runs for step in run.steps],
        drafts=[draft for run in runs for draft in run.drafts],
        answers=[answer for run in runs for answer in run.answers],
    )


def is_same(answer: Sequence[int], other: Sequence[int]) -> bool:
    """Returns True if two answers have equal tokens up to the end of the shorter answer."""
    length = min(len(answer), len(other))
    return [*answer[:length]] == [*other[:length]]


def mean_acceptance(drafts: Sequence[tuple[int, int, int]]) -> float | None:
    """Returns α: the accepted share of the tokens that were verified after accepted tokens only."""
    tried = sum(min(accepted + 1, drafted) * rows for drafted, accepted, rows in drafts)
    kept = sum(accepted * rows for _, accepted, rows in drafts)
    return kept / tried if tried else None


def acceptance_by_position(drafts: Sequence[tuple[int, int, int]]) -> list[tuple[float, int]]:
    """Returns the accepted share and the number of drafted tokens, for each place in a draft."""
    kept: Counter[int] = Counter()
    total: Counter[int] = Counter()
    for drafted, accepted, rows in drafts:
        for place in range(1, drafted + 1):
            total[place] += rows
            kept[place] += rows if place <= accepted else 0
    return [(kept[place] / total[place], total[place]) for place in sorted(total)]


def expected_tokens(acceptance: float, drafted: float) -> float:
    """Returns the expected tokens of a row with a draft of this length."""
    if acceptance == 1:
        return drafted + 1
    return float((1 - acceptance ** (drafted + 1)) / (1 - acceptance))


def expected_total(drafts: Sequence[tuple[int, int, int]], acceptance: float) -> float:
    """Returns the expected tokens of all rows together."""
    return sum(rows * expected_tokens(acceptance, drafted) for drafted, _, rows in drafts)


def predicted_s(run: BatchRun, passes: Passes) -> float:
    """Returns the predicted seconds of a run: the sum of its passes, timed alone."""
    return sum(
        _target_s(passes, verified / rows) + _between(passes.draft_s, num_passes)
        for _, rows, verified, num_passes in run.steps
    )


def predicted_speedup(run: BatchRun, passes: Passes) -> float:
    """Returns the predicted speed-up: expected tokens per predicted second, over tokens per second
    of plain passes with one token per row.
    """
    acceptance = mean_acceptance(run.drafts) or 0.0
    tokens = expected_total(run.drafts, acceptance)
    plain_s = run.num_rows / len(run.steps) / passes.plain_s  # tokens per second without drafts
    return tokens / predicted_s(run, passes) / plain_s


def results(plan: SpeculatePlan, measured: SpeculateMeasured) -> tuple[Result, ...]:
    """Returns all results, in the order of the table in this module's docstring."""
    cells = [cell for setup in plan.setups_of() for cell in plan.cells_of(setup)]
    by_cell = [
        result
        for cell in cells
        for mode in cell.setup.modes
        for result in results_of(_figures(cell, mode, measured))
    ]
    by_cell.sort(key=lambda result: _ORDER.index(result.name.partition("/")[0]))
    places = [result for cell in cells[:: len(plan.sizes)] for result in _positions(cell, measured)]
    named = [*_named(cells, by_cell), *_identical(measured)]
    return (*map(_with_goal, named), *by_cell, *places, *busy_results(measured.background))


def warnings(measured: SpeculateMeasured) -> list[str]:
    """Returns facts that a reader needs before trusting the results."""
    lines = busy_warning(measured.background)
    if measured.num_same < measured.num_compared:
        differ = measured.num_compared - measured.num_same
        lines.append(f"{differ} of {measured.num_compared} timed answers differ between modes")
    return lines


_ORDER = (
    "speedup",
    "predicted",
    "decode",
    "tokens_per_pass",
    "expected_per_pass",
    "drafted",
    "mean_acceptance",
    "outside",
)


def _figures(cell: Cell, mode: Speculate, measured: SpeculateMeasured) -> list[dict[str, Figure]]:
    """Returns the figures of each repetition, by name."""
    key = RunKey(cell.thing, cell.batch, mode)
    plain = measured.runs[replace(key, mode=Speculate.OFF)]
    passes = measured.passes[cell.setup.name, cell.batch]
    name = cell.name(mode)
    found = []
    for run, base in zip(measured.runs[key], plain, strict=True):
        figures = {
            f"decode/{name}": Figure(run.speed, "tokens/s"),
            f"outside/{name}": Figure(100 * run.outside_s / run.seconds, "%"),
        }
        if mode is not Speculate.OFF:
            figures |= _drafting(name, run, passes)
            figures[f"speedup/{name}"] = Figure(run.speed / base.speed, "×")
        found.append(figures)
    return found


def _drafting(name: str, run: BatchRun, passes: Passes) -> dict[str, Figure]:
    acceptance = mean_acceptance(run.drafts)
    expected = expected_total(run.drafts, acceptance or 0.0)
    drafted = sum(drafted * rows for drafted, _, rows in run.drafts)
    figures = {
        f"predicted/{name}": Figure(predicted_speedup(run, passes), "×"),
        f"tokens_per_pass/{name}": Figure(run.num_tokens / run.num_rows, "tokens"),
        f"expected_per_pass/{name}": Figure(expected / run.num_rows, "tokens"),
        f"drafted/{name}": Figure(drafted / run.num_rows, "tokens"),
    }
    if acceptance is not None:
        figures[f"mean_acceptance/{name}"] = Figure(acceptance, "share")
    return figures


def _positions(cell: Cell, measured: SpeculateMeasured) -> Iterator[Result]:
    """Returns the acceptance at each place of a draft, over all batches."""
    for mode in cell.setup.modes:
        runs = [
            run
            for key, found in measured.runs.items()
            if (key.thing, key.mode) == (cell.thing, mode)
            for run in found
        ]
        drafts = [draft for run in runs for draft in run.drafts]
        acceptance = mean_acceptance(drafts)
        if acceptance is None:
            continue
        for place, (share, _) in enumerate(acceptance_by_position(drafts), start=1):
            name = f"{cell.thing}_{mode}_p{place}"
            yield result_of(f"acceptance/{name}", [share], "share")
            yield result_of(f"expected_acceptance/{name}", [acceptance**place], "share")


def _named(cells: Sequence[Cell], by_cell: Sequence[Result]) -> Iterator[Result]:
    """Returns the lowest cell for each promised result."""
    speedups = {r.name.partition("/")[2]: r for r in by_cell if r.name.startswith("speedup/")}
    agreeing = [cell for cell in cells if cell.setup.agrees]
    fresh = [cell for cell in agreeing if cell.workload.kind is not PromptKind.REPEAT]
    repeating = [cell for cell in agreeing if cell.workload.kind is PromptKind.REPEAT]
    groups = {
        "speedup/draft_b1": [c.name(Speculate.DRAFT) for c in fresh if c.batch == 1],
        "speedup/draft_b8": [c.name(Speculate.DRAFT) for c in fresh if c.batch == 8],
        "speedup/ngram_repeat_b1": [c.name(Speculate.NGRAM) for c in repeating if c.batch == 1],
        "speedup/worst": list(speedups),
    }
    for name, members in groups.items():
        if members:
            lowest = min((speedups[member] for member in members), key=lambda r: r.value)
            yield replace(lowest, name=name)


def _identical(measured: SpeculateMeasured) -> tuple[Result, ...]:
    figures = {
        "identical_share" if weights == "int8" else f"identical_share/{weights}": share
        for weights, share in measured.identical.items()
    }
    if measured.num_compared:
        figures["identical_share/cells"] = measured.num_same / measured.num_compared
    return results_of([{name: Figure(share, "share") for name, share in figures.items()}])


def _with_goal(result: Result) -> Result:
    goal = GOALS.get(result.name)
    return result if goal is None else result.limited(goal)


def _target_s(passes: Passes, drafted: float) -> float:
    """Returns the seconds of a pass of the target with `drafted` tokens per row."""
    return _between(passes.verify_s, drafted)


def _between(times_s: Sequence[float], length: float) -> float:
    """Returns the time for drafts of `length` tokens, interpolated between the timed lengths."""
    points = [*zip(CALIBRATED_LENS, times_s, strict=True)]
    for (low, low_s), (high, high_s) in pairwise(points):
        if length <= high:
            return low_s + (high_s - low_s) * (length - low) / (high - low)
    return points[-1][1]

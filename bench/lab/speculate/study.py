"""Measures speculation. Each setup has a process, in which the modes run in turn.

A speed-up compares two modes of one process in one repetition. Both modes get the same prompts, one
right after the other. The order changes with each batch, so other load on the machine affects all
modes alike. Before the first measurement, every cell runs once.

Answers are compared too. Each request is answered in all modes, with int8 weights and with fp32
weights. For int8 weights, Baton promises that no token differs.
"""

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
from rich.console import Console

from bench.common.background import BusyWatch
from bench.common.command import Say
from bench.common.report import Report
from bench.common.shapes import cached_pair
from bench.common.tables import print_pivot, print_results
from bench.lab.experiment import Findings
from bench.lab.speculate.figures import (
    BatchRun,
    Passes,
    RunKey,
    SpeculateMeasured,
    is_same,
    joined,
    results,
    warnings,
)
from bench.lab.speculate.plan import (
    BUNDLED,
    CALIBRATED_LENS,
    MAX_DRAFT_TOKENS,
    MOST_REPEATED,
    MOST_ROUNDS,
    NUM_PROMPTS,
    PROMPT_LEN,
    Cell,
    PromptKind,
    SpeculatePlan,
    SpeculateSetup,
    SpeculateWorkload,
    identity_asks,
    order_of_modes,
    prompts_for,
    random_prompts,
    repeating_asks,
    text_prompts,
)
from bench.lab.speculate.worker import CoreAsk, CoreOptions
from bench.processes.driven import Answer, Driven
from deploy.base.defaults import BUNDLED_DRAFT, BUNDLED_MODEL
from engine.config import Speculate, WeightFormat
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.messages import Sampling

LOAD_TIMEOUT_S = 300.0
JOB_TIMEOUT_S = 300.0
WARM_UP = -1  # repetition number of the warm-up
LONGEST_PROMPT = 512
IDENTITY_WEIGHTS = {WeightFormat.INT8: KVFormat.INT8, WeightFormat.FP32: KVFormat.FP32}

Asks = Mapping[SpeculateWorkload, Sequence[CoreAsk]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculateStudy(SpeculatePlan):
    """Measure what speculation gains and costs, and that it changes no token."""

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises DrivenFailed and ConfigError."""
        if find_spec("torch") is None:
            raise ConfigError("torch is not installed: pip install 'baton-serve[worker]'")
        measured = measure(self, say)
        return Findings(results(self, measured), warnings(measured))

    def show(self, console: Console, report: Report) -> None:
        """Prints the promised results, then tables with the medians of all cells and of all draft
        places.
        """
        cells = [result for result in report.results if result.name.count("/") == 2]
        places = [r for r in report.results if "acceptance/" in r.name and r not in cells]
        others = [r for r in report.results if r not in cells and r not in places]
        print_results(console, replace(report, results=tuple(others)))
        for grid in filter(None, (cells, places)):
            medians = tuple(replace(result, runs=(result.value,)) for result in grid)
            print_pivot(console, replace(report, results=medians))


def measure(plan: SpeculatePlan, say: Say) -> SpeculateMeasured:
    """Carries out the plan and returns all measurements. Raises DrivenFailed and ConfigError."""
    measured = SpeculateMeasured()
    for setup in plan.setups_of():
        _measure_setup(plan, setup, measured, say)
    for weights, kv_format in _identity_weights(plan).items():
        if plan.identity and weights not in measured.identical:
            say(f"loading: {BUNDLED}, {weights}")
            with _worker(plan, BUNDLED_MODEL, BUNDLED_DRAFT, weights, kv_format) as (worker, facts):
                _compare(plan, worker, facts, weights, measured, say)
    return measured


def _measure_setup(
    plan: SpeculatePlan, setup: SpeculateSetup, measured: SpeculateMeasured, say: Say
) -> None:
    say(f"loading: {setup.name}")
    target, draft = _checkpoints(plan, setup)
    with _worker(plan, target, draft, plan.weights, plan.kv_format) as (worker, facts):
        for batch in plan.sizes:
            answer = worker.ask(
                "passes",
                timeout_s=JOB_TIMEOUT_S,
                batch=batch,
                context_len=PROMPT_LEN + plan.tokens // 2,
                lens=CALIBRATED_LENS,
            )
            measured.passes[setup.name, batch] = msgspec.convert(answer, Passes)
        asks = _asks_of(plan, setup, worker, facts)
        for workload in setup.workloads:
            worker.ask("prime", timeout_s=JOB_TIMEOUT_S, asks=msgspec.to_builtins(asks[workload]))
        if setup.shape is None and plan.identity:
            _compare(plan, worker, facts, plan.weights, measured, say)
        busy = BusyWatch(lambda: [worker.session or 0])
        for repeat in range(WARM_UP, plan.repeat):
            turn = "warming up" if repeat == WARM_UP else f"repetition {repeat + 1}"
            say(f"{setup.name}: {turn} of {plan.repeat}")
            with nullcontext() if repeat == WARM_UP else busy.repetition():
                for cell in plan.cells_of(setup):
                    _measure_cell(plan, cell, worker, asks[cell.workload], repeat, measured)
        measured.background += busy.shares


def _measure_cell(
    plan: SpeculatePlan,
    cell: Cell,
    worker: Driven,
    asks: Sequence[CoreAsk],
    repeat: int,
    measured: SpeculateMeasured,
) -> None:
    """Measures one cell in every mode, for one repetition."""
    found: dict[Speculate, list[BatchRun]] = {mode: [] for mode in cell.setup.modes}
    plain_s = 0.0
    for round_ in range(MOST_ROUNDS):
        turn = repeat * MOST_ROUNDS + round_
        chosen = msgspec.to_builtins([asks[i] for i in prompts_for(cell, len(asks), turn=turn)])
        for mode in order_of_modes(cell.setup.modes, turn):
            answer = worker.ask("decode", timeout_s=JOB_TIMEOUT_S, mode=mode, asks=chosen)
            found[mode].append(msgspec.convert(answer, BatchRun))
        plain_s += found[Speculate.OFF][-1].seconds
        if repeat == WARM_UP:
            return
        if plain_s >= plan.least_s:
            break
    plain = joined(found[Speculate.OFF])
    for mode, runs in found.items():
        run = joined(runs)
        measured.runs.setdefault(RunKey(cell.thing, cell.batch, mode), []).append(run)
        measured.num_compared += len(run.answers)
        measured.num_same += sum(map(is_same, run.answers, plain.answers))


def _asks_of(plan: SpeculatePlan, setup: SpeculateSetup, worker: Driven, facts: Answer) -> Asks:
    """Returns the requests of each workload."""
    if setup.shape is None:
        prompts = _texts(plan)
    else:
        prompts = random_prompts(facts["vocab_size"], plan.num_prompts, plan.seed)
    asks: dict[SpeculateWorkload, Sequence[CoreAsk]] = {}
    for workload in setup.workloads:
        if workload.kind is PromptKind.REPEAT:
            asks[workload] = _repeating(plan, worker, prompts, facts)
        else:
            asks[workload] = [
                CoreAsk(prompt, plan.tokens, Sampling(workload.temperature, seed=plan.seed + i))
                for i, prompt in enumerate(prompts)
            ]
    return asks


def _texts(plan: SpeculatePlan) -> list[list[int]]:
    return text_prompts(BUNDLED_MODEL / "tokenizer.json", plan.num_prompts, plan.seed)


def _identity_weights(plan: SpeculatePlan) -> Mapping[WeightFormat, KVFormat]:
    """Returns the weights with which answers are compared. A quick run uses only the promised
    weights.
    """
    if plan.is_quick:
        return {WeightFormat.INT8: IDENTITY_WEIGHTS[WeightFormat.INT8]}
    return IDENTITY_WEIGHTS


def _repeating(
    plan: SpeculatePlan, worker: Driven, prompts: Sequence[list[int]], facts: Answer
) -> list[CoreAsk]:
    greedy = Sampling(temperature=0.0)
    first = [CoreAsk(prompt, MOST_REPEATED, greedy) for prompt in prompts]
    return repeating_asks(
        prompts,
        _answers(worker, Speculate.OFF, first),
        end_token_ids=facts["eos_token_ids"],
        num_tokens=plan.tokens,
        seed=plan.seed,
    )


def _compare(
    plan: SpeculatePlan,
    worker: Driven,
    facts: Answer,
    weights: WeightFormat,
    measured: SpeculateMeasured,
    say: Say,
) -> None:
    """Returns the share of requests to the bundled models that have equal answers in all modes."""
    say(f"comparing answers: {weights}")
    ends = facts["eos_token_ids"]
    asks = identity_asks(_texts(plan), plan.identity, end_token_ids=ends, seed=plan.seed)
    plain, *others = (_answers(worker, mode, asks) for mode in Speculate)
    same = [all(answer == a for a in rest) for answer, *rest in zip(plain, *others, strict=True)]
    measured.identical[weights] = statistics.mean(same)


def _answers(worker: Driven, mode: Speculate, asks: Sequence[CoreAsk]) -> list[list[int]]:
    told = worker.ask(
        "generate", timeout_s=JOB_TIMEOUT_S, mode=mode, asks=msgspec.to_builtins(asks)
    )
    return msgspec.convert(told["answers"], list[list[int]])


def _checkpoints(plan: SpeculatePlan, setup: SpeculateSetup) -> tuple[Path, Path]:
    """Returns the folders of target and draft."""
    if setup.shape is None:
        return BUNDLED_MODEL, BUNDLED_DRAFT
    pair = cached_pair(setup.shape, plan.seed)
    return pair.target, pair.draft if setup.agrees else pair.stranger


@contextmanager
def _worker(
    plan: SpeculatePlan, target: Path, draft: Path, weights: WeightFormat, kv_format: KVFormat
) -> Iterator[tuple[Driven, Answer]]:
    """Starts a process with these models. Returns it with the facts that it reports."""
    options = CoreOptions(
        target=str(target),
        draft=str(draft),
        weights=weights,
        kv_format=kv_format,
        num_threads=plan.num_threads,
        kv_tokens=_kv_tokens(plan),
        max_draft_tokens=MAX_DRAFT_TOKENS,
    )
    command = [
        sys.executable,
        "-m",
        "bench.lab.speculate.worker",
        msgspec.json.encode(options).decode(),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(plan.num_threads)}
    with Driven(str(target), command, environment) as worker:
        worker.start()
        if target == BUNDLED_MODEL:
            _texts(plan)  # reads the corpus, which takes seconds, while the process loads
        yield worker, worker.ready(LOAD_TIMEOUT_S)


def _kv_tokens(plan: SpeculatePlan) -> int:
    """Returns the KV tokens for all prompts, which stay cached, and for the sequences of the
    largest batch.
    """
    cached = 3 * NUM_PROMPTS * (2 * PROMPT_LEN + MOST_REPEATED)
    running = max(*plan.sizes, 64) * LONGEST_PROMPT
    return cached + running

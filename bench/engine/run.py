"""Measures our engine and its peers: starts their processes, gives jobs to each in turn, ends them.

Every engine is a process of its own, with the same number of threads. Our engine has one process
for each format of weights. Only one engine works at a time. Before the first measurement, all
engines are loaded and have run the jobs once. Then all engines do a job, one after the other,
before the next job. The order is reversed with each repetition, so that other load on the machine
affects all engines alike. The machine's ceilings are measured right before and right after each job
of our engine.
"""

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from rich.console import Console

from bench.common.background import BusyWatch
from bench.common.command import Say, say_nothing
from bench.common.options import environment_of_peers
from bench.common.plots import plot_bars
from bench.common.report import Missing, Report, notes_on
from bench.common.roofline import Ceilings, ModelMemory, ModelSize, model_size
from bench.common.shapes import cached_checkpoint
from bench.common.tables import print_results
from bench.engine.jobs import EngineJob, limits_of, prompts_of
from bench.engine.plan import EnginePeer, EnginePlan, jobs_of, kv_format_of, warm_up_jobs
from bench.engine.results import (
    EngineMeasured,
    JobKey,
    JobTime,
    OurMemory,
    Repetition,
    check_limits,
    results,
    step_bytes,
    warnings,
)
from bench.lab.experiment import Findings
from bench.processes.driven import Answer, Driven, DrivenFailed
from engine.config import WeightFormat
from engine.errors import CheckpointError, ConfigError
from engine.model.loading.files import read_json

LOAD_TIMEOUT_S = 600.0  # vLLM compiles for one minute or more
JOB_TIMEOUT_S = 300.0
IDLE_CHECK_S = 0.3
SETTLE_S = 0.3  # Intel's OpenMP threads spin for 0.2 s after their work
WARM_UP = -1  # repetition number of the warm-up; its prompts are used by no other repetition
DRIVER = Path(__file__).parents[1] / "peers" / "driver.py"


@dataclass(slots=True)
class Contest:
    """The engines that are running, by name. An engine that fails is removed, if it is a peer."""

    ours: dict[str, Driven]
    peers: dict[str, Driven]
    ceilings: Driven | None
    # None: the model is not a dense decoder, so results have no limits
    size: ModelSize | None = None
    # memory of our engines by format of weights
    memory: dict[str, ModelMemory] = field(default_factory=dict)
    failed: list[Missing] = field(default_factory=list)

    def engines(self, job: EngineJob, repeat: int) -> list[Driven]:
        """Returns the engines that do a job, in the order of this repetition."""
        engines = [*self.ours.values(), *(self.peers.values() if job.for_peers else ())]
        return engines[::-1] if repeat % 2 else engines

    def sessions(self) -> list[int]:
        """Returns the session ids of all running engine processes."""
        engines = (*self.ours.values(), *self.peers.values(), self.ceilings)
        return [engine.session for engine in engines if engine is not None and engine.session]

    def ceilings_beside(self, engine: Driven, job: EngineJob) -> Ceilings | None:
        """Returns the machine's peaks, measured for a job of our engine. None for a job of a peer,
        or if there is no ceiling probe.
        """
        memory = self.memory.get(engine.name)
        if self.ceilings is None or self.size is None or memory is None:
            return None
        answer = self.ceilings.ask(
            "measure", timeout_s=JOB_TIMEOUT_S, read_bytes=step_bytes(job, self.size, memory)
        )
        return msgspec.convert(answer, Ceilings)

    def drop(self, peer: Driven, error: DrivenFailed) -> None:
        """Removes a failed peer. Raises the error if the engine is ours."""
        if self.peers.pop(peer.name, None) is None:
            raise error
        peer.close()
        self.failed.append(Missing(error.name, error.reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStudy(EnginePlan):
    """Measure prefill and decode of the engine alone, beside this machine's limits and peers."""

    def measure(self, say: Say) -> Findings:
        """Runs the benchmark. Raises ConfigError, and DrivenFailed if our own engine fails."""
        measured = measure(self, say)
        config = notes_on(measured.versions, measured.failed)
        return Findings(results(self, measured), warnings(measured), config=config)

    def show(self, console: Console, report: Report) -> None:
        """Prints the results. Raises CeilingExceeded if a result is above its limit."""
        print_results(console, report)
        check_limits(report.results)

    def plot(self, report: Report, found: Findings, path: Path) -> None:
        """Draws a panel for each kind of job, with bars for our formats and for peers, and with
        limits.
        """
        panels: dict[str, dict[str, float]] = {}
        limits: dict[str, dict[str, float]] = {}
        speeds = {result.name: result for result in report.results}
        for job in jobs_of(self):
            bars = panels.setdefault(_panel(job), {})
            marks = limits.setdefault(_panel(job), {})
            for weights in self.formats:
                speed = speeds[f"{job.name}/{weights}"]
                name = _bar(job, weights)
                bars[name] = speed.value
                if speed.limit is not None:
                    marks[name] = speed.limit
            for weights in self.formats:
                peers = speeds[f"{job.name}/{weights}"].peers
                bars |= {name: peer.value for name, peer in peers.items()}
        title = f"{self.title}; lines are limits\n{report.hardware.cpu}, commit {report.commit}"
        plot_bars(panels, path, title=title, limits=limits)


def _panel(job: EngineJob) -> str:
    """Returns the title of a job's panel. A job with peers has its own panel. Other jobs of the
    same kind and batch share a panel.
    """
    if job.for_peers:
        return f"{job.name}, tokens/s"
    name = f"decode, batch {job.num_sequences}" if job.num_steps else "prefill by length"
    return f"{name}, tokens/s"


def _bar(job: EngineJob, weights: str) -> str:
    return weights if job.for_peers else f"{weights}, {job.context_len}"


def measure(plan: EnginePlan, say: Say = say_nothing) -> EngineMeasured:
    """Carries out the plan. Raises ConfigError, and DrivenFailed if our own engine fails."""
    checkpoint = plan.checkpoint or cached_checkpoint(plan.shape, plan.seed)
    size = model_size(checkpoint)
    vocab_size = _vocab_size(checkpoint, plan)
    with ExitStack() as stack:
        contest = Contest(
            ours={w: stack.enter_context(_ours(plan, w, checkpoint)) for w in plan.formats},
            peers={p.name: stack.enter_context(_peer(plan, p, checkpoint)) for p in plan.peers},
            ceilings=stack.enter_context(_ceilings(plan)),
            size=size,
        )
        facts = _load_all(contest, say)
        for job in warm_up_jobs(plan):
            say(f"warming up: {job.name}")
            _round(contest, job, vocab_size, seed=plan.seed, repeat=WARM_UP)
        repetitions, busy = [], BusyWatch(contest.sessions)
        for repeat in range(plan.repeat):
            say(f"repetition {repeat + 1} of {plan.repeat}")
            _settle()
            with busy.repetition(idle_s=IDLE_CHECK_S):
                repetitions.append(_repetition(contest, plan, vocab_size, repeat))
        return EngineMeasured(
            size=size,
            ours={w: _described(contest.ours[w], facts[w]) for w in plan.formats},
            repetitions=tuple(repetitions),
            background=tuple(busy.shares),
            versions={p.name: facts[p.name]["version"] for p in plan.peers if p.name in facts},
            failed=tuple(contest.failed),
        )


def _load_all(contest: Contest, say: Say) -> dict[str, Answer]:
    """Loads our engines one by one, because their load times are measured, then all peers at once.

    Returns the facts that each engine reports.
    """
    facts = {}
    _load_ceilings(contest, say)
    for engine in contest.ours.values():
        say(f"loading: {engine.name}")
        engine.start()
        facts[engine.name] = engine.ready(LOAD_TIMEOUT_S)
        contest.memory[engine.name] = _memory(facts[engine.name])
    peers = list(contest.peers.values())
    for peer in peers:
        peer.start()
    for peer in peers:
        say(f"loading: {peer.name}")
        try:
            facts[peer.name] = peer.ready(LOAD_TIMEOUT_S)
        except DrivenFailed as error:
            contest.drop(peer, error)
    return facts


def _load_ceilings(contest: Contest, say: Say) -> None:
    """Starts the ceiling probe. If the probe cannot run (no compiler, another processor), results
    have no limits.
    """
    assert contest.ceilings is not None
    say(f"loading: {contest.ceilings.name}")
    contest.ceilings.start()
    try:
        contest.ceilings.ready(LOAD_TIMEOUT_S)
    except DrivenFailed as error:
        contest.failed.append(Missing(error.name, error.reason))
        contest.ceilings = None


def _repetition(contest: Contest, plan: EnginePlan, vocab_size: int, repeat: int) -> Repetition:
    samples: dict[JobKey, JobTime] = {}
    for job in jobs_of(plan):
        samples |= _round(contest, job, vocab_size, seed=plan.seed, repeat=repeat)
    return Repetition(samples)


def _round(
    contest: Contest, job: EngineJob, vocab_size: int, *, seed: int, repeat: int
) -> dict[JobKey, JobTime]:
    """Runs one job on each of its engines, one after the other."""
    prompts = prompts_of(job, vocab_size, seed=seed, repeat=repeat)
    samples = {}
    for engine in contest.engines(job, repeat):
        _settle()
        try:
            before = contest.ceilings_beside(engine, job)
            sample = _sample(engine, job, prompts)
        except DrivenFailed as error:
            contest.drop(engine, error)
            continue
        if before is not None:
            _settle()
            after = contest.ceilings_beside(engine, job) or before
            sample = replace(sample, ceilings=before.or_higher(after))
        samples[engine.name, job.name] = sample
    return samples


def _sample(engine: Driven, job: EngineJob, prompts: Sequence[Sequence[int]]) -> JobTime:
    if not job.prefills_all:
        answer = engine.ask(
            "decode_at",
            timeout_s=JOB_TIMEOUT_S,
            prompt=prompts[0],
            num_sequences=job.num_sequences,
            num_steps=job.num_steps,
        )
        return JobTime(answer["decode_s"], (), answer["outside_forward_s"])
    answer = engine.ask(
        "generate", timeout_s=JOB_TIMEOUT_S, prompts=prompts, num_steps=job.num_steps
    )
    return JobTime(
        seconds=answer["decode_s"] if job.num_steps else answer["prefill_s"],
        first_tokens=tuple(tokens[0] for tokens in answer["answers"]),
        outside_forward_s=answer.get("outside_forward_s"),
    )


def _ours(plan: EnginePlan, weights: WeightFormat, checkpoint: Path) -> Driven:
    command = [sys.executable, "-m", "bench.engine.ours", weights, kv_format_of(plan, weights)]
    options = _options(plan, checkpoint, jobs_of(plan), variant=weights)
    return Driven(weights, [*command, *options], {**os.environ, **_threads(plan)})


def _peer(plan: EnginePlan, peer: EnginePeer, checkpoint: Path) -> Driven:
    jobs = [job for job in jobs_of(plan) if job.for_peers]
    options = _options(plan, checkpoint, jobs, variant=peer.variant)
    environment = environment_of_peers() | _threads(plan)
    openmp = peer.python.parent.parent / "lib" / "libiomp5.so"
    # vLLM's documentation recommends to preload OpenMP
    if peer.driver == "vllm" and openmp.exists():
        environment["LD_PRELOAD"] = str(openmp)
    return Driven(peer.name, [str(peer.python), str(DRIVER), peer.driver, *options], environment)


def _ceilings(plan: EnginePlan) -> Driven:
    command = [sys.executable, "-m", "bench.engine.ceilings", str(plan.num_threads)]
    return Driven("ceilings", command, {**os.environ, **_threads(plan)})


def _options(
    plan: EnginePlan, checkpoint: Path, jobs: Sequence[EngineJob], *, variant: str
) -> list[str]:
    """Returns the command-line options that all drivers accept."""
    fixed = {"--checkpoint": checkpoint, "--variant": variant, "--threads": plan.num_threads}
    limits = limits_of([*jobs, *warm_up_jobs(plan)])
    return [str(text) for pair in (fixed | limits).items() for text in pair]


def _threads(plan: EnginePlan) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(plan.num_threads)}


def _described(engine: Driven, facts: Answer) -> OurMemory:
    memory = engine.ask("memory", timeout_s=JOB_TIMEOUT_S)
    return OurMemory(
        memory=_memory(facts),
        resident_bytes=memory["resident_bytes"],
        load_s=facts["load_s"],
        warm_up_s=facts["warm_up_s"],
    )


def _memory(facts: Answer) -> ModelMemory:
    return ModelMemory(facts["weights_bytes"], facts["kv_token_bytes"])


def _vocab_size(checkpoint: Path, plan: EnginePlan) -> int:
    """Returns the size of the vocabulary. Raises ConfigError if the plan's contexts exceed the
    model's.
    """
    config = read_json(checkpoint, "config.json")
    assert isinstance(config, dict)  # `model_size` has checked the type
    longest = limits_of(jobs_of(plan))["--max-len"]
    if longest > config.get("max_position_embeddings", longest):
        raise ConfigError(f"contexts of {longest} tokens are longer than the model's")
    if not isinstance(config.get("vocab_size"), int):
        raise CheckpointError(f"{checkpoint / 'config.json'}: vocab_size is missing")
    return int(config["vocab_size"])


def _settle() -> None:
    """Waits until the last engine's threads sleep. After their work they spin for a while."""
    threading.Event().wait(SETTLE_S)

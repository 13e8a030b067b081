"""Computes the results of `bench engine` from its measured times. Pure.

| result                            | unit     |                                                |
|-----------------------------------|----------|------------------------------------------------|
| <job>/<weights>                   | tokens/s | limit: the roofline of the ceilings            |
| <job>_compute/<weights>           | GFLOP/s  | limit: peaks for matrices and attention        |
| <job>_bandwidth/<weights>         | GB/s     | reads of weights and KV; limit: read bandwidth |
| decode_b32_overhead/<weights>     | %        | share of step time outside the forward pass    |
| memory_weights/, memory_resident/ | MiB      | matrices in memory; the process after all jobs |
| kv_token/<weights>                | B        | KV of one token, with scales and padding       |
| load/, warm_up/<weights>          | s        |                                                |
| ceiling/read, fp32, int8, bf16    |          | measured peaks, from which limits are computed |
| background/cpu                    | %        | share of all cores that other programs used    |
| same_tokens/<engine>              | %        | first tokens that equal our fp32 engine's      |

A peer's `value` is the median of its own runs, `ratio` ours over theirs.

The arithmetic ceilings are the highest values of the whole run: other load on the machine only
lowers them, by half within seconds. Read bandwidth depends on how much of the weights fits into
caches. So each of our samples has its own bandwidth ceiling, the higher of two: one measured right
before the sample, one right after. A result above its limit shows that a ceiling is wrong, so such
a run fails (`check_limits`).
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

from bench.common.background import busy_results, busy_warning
from bench.common.report import Figure, Missing, Result, result_of, results_of
from bench.common.roofline import (
    Ceilings,
    ModelMemory,
    ModelSize,
    Work,
    decode_work,
    least_time_s,
    prefill_work,
)
from bench.engine.jobs import EngineJob
from bench.engine.plan import EnginePlan, is_comparable, jobs_of, kv_format_of
from engine.config import WeightFormat
from engine.errors import BatonError

OVERHEAD_JOB = "decode_b32"
REFERENCE = "fp32"
# A result may exceed its limit by this share, since the clock may change between job and ceilings.
TOLERATED = 0.05

JobKey = tuple[str, str]  # engine and job


Formats = tuple[str, str]  # formats of the weights and of the KV


class CeilingExceeded(BatonError):
    """A result is above its limit, so the measured ceiling must be wrong."""


@dataclass(frozen=True, slots=True)
class JobTime:
    """The seconds that one engine needed for one job in one repetition."""

    seconds: float
    first_tokens: tuple[int, ...] = ()
    outside_forward_s: float | None = None
    # peaks measured right before and after the job; None: not measured
    ceilings: Ceilings | None = None


@dataclass(frozen=True, slots=True)
class Repetition:
    """The times of all jobs in one repetition. Each engine did each job once."""

    samples: Mapping[JobKey, JobTime]


@dataclass(frozen=True, slots=True)
class OurMemory:
    """Memory and start-up times of our engine with one format of weights."""

    memory: ModelMemory
    resident_bytes: float
    load_s: float
    warm_up_s: float


@dataclass(frozen=True, slots=True)
class EngineMeasured:
    """All measurements of one run of `bench engine`."""

    size: ModelSize | None  # None: the model is not a dense decoder, so results have no limits
    ours: Mapping[WeightFormat, OurMemory]
    repetitions: tuple[Repetition, ...]
    # share of the CPU that other programs used, for each repetition
    background: tuple[float, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # versions of the peers by engine
    failed: tuple[Missing, ...] = ()


def results(plan: EnginePlan, measured: EngineMeasured) -> tuple[Result, ...]:
    """Returns all results, in the order of the table in this module's docstring."""
    measured = _with_highest_peaks(measured)
    found: list[Result] = []
    for weights, ours in measured.ours.items():
        for job in jobs_of(plan):
            found += _job_results(plan, measured, job, weights)
        found += _facts(weights, ours)
    found += results_of(
        [
            _peaks(sample.ceilings)
            for repetition in measured.repetitions
            for sample in repetition.samples.values()
            if sample.ceilings is not None
        ]
    )
    return (*found, *busy_results(measured.background), *_same_tokens(measured))


def _with_highest_peaks(measured: EngineMeasured) -> EngineMeasured:
    samples = [s for repetition in measured.repetitions for s in repetition.samples.values()]
    ceilings = [sample.ceilings for sample in samples if sample.ceilings is not None]
    if not ceilings:
        return measured
    highest = reduce(Ceilings.or_higher, ceilings)

    def with_highest(sample: JobTime) -> JobTime:
        if sample.ceilings is None:
            return sample
        read = sample.ceilings.read_bytes_per_s
        return replace(sample, ceilings=replace(highest, read_bytes_per_s=read))

    repetitions = [
        Repetition({key: with_highest(sample) for key, sample in repetition.samples.items()})
        for repetition in measured.repetitions
    ]
    return replace(measured, repetitions=tuple(repetitions))


def check_limits(found: Sequence[Result]) -> None:
    """Raises CeilingExceeded, which names the results, if any result is above its limit."""
    above = [r for r in found if r.of_limit is not None and r.of_limit > 1 + TOLERATED]
    if above:
        names = ", ".join(f"{r.name} ({r.of_limit:.0%})" for r in above)
        raise CeilingExceeded(f"above what this machine was measured to allow: {names}")


def warnings(measured: EngineMeasured) -> list[str]:
    """Returns a line for each reason not to trust the results."""
    return [*(failed.warning for failed in measured.failed), *busy_warning(measured.background)]


def work_of(job: EngineJob, size: ModelSize, memory: ModelMemory) -> Work:
    """Returns the least work of a job. A prefill counts as one step, so it reads the weights
    once.
    """
    if not job.num_steps:
        return prefill_work(size, memory, [job.context_len] * job.num_sequences)
    return reduce(add, _steps(job, size, memory))


def limit_s(
    job: EngineJob, size: ModelSize, ours: ModelMemory, ceilings: Ceilings, formats: Formats
) -> float:
    """Returns the least seconds of a job, as the sum of the least seconds of its steps."""
    if not job.num_steps:
        return least_time_s(work_of(job, size, ours), ceilings, *formats)
    return sum(least_time_s(step, ceilings, *formats) for step in _steps(job, size, ours))


def step_bytes(job: EngineJob, size: ModelSize, memory: ModelMemory) -> int:
    """Returns the bytes that the last step of a job reads. A prefill counts as one step."""
    if not job.num_steps:
        return int(work_of(job, size, memory).read_bytes)
    *_, last = _steps(job, size, memory)
    return int(last.read_bytes)


def _steps(job: EngineJob, size: ModelSize, memory: ModelMemory) -> Iterator[Work]:
    for step in range(1, job.num_steps + 1):
        yield decode_work(size, memory, [job.context_len + step] * job.num_sequences)


def _job_results(
    plan: EnginePlan, measured: EngineMeasured, job: EngineJob, weights: WeightFormat
) -> Iterator[Result]:
    samples = _samples(measured, (weights, job.name))
    runs = [job.num_tokens / sample.seconds for sample in samples]
    speed = result_of(f"{job.name}/{weights}", runs, "tokens/s")
    speed = speed.beside(_peers(plan, measured, job, weights))
    ceilings = [sample.ceilings for sample in samples if sample.ceilings is not None]
    size, memory = measured.size, measured.ours[weights].memory
    if size is None or len(ceilings) < len(samples):
        yield speed
    else:
        formats = (weights, kv_format_of(plan, weights))
        least_s = [limit_s(job, size, memory, each, formats) for each in ceilings]
        yield speed.limited_each([job.num_tokens / seconds for seconds in least_s])
        yield from _rates(job, work_of(job, size, memory), samples, formats)
    if job.name == OVERHEAD_JOB:
        outside = [
            100 * sample.outside_forward_s / sample.seconds
            for sample in samples
            if sample.outside_forward_s is not None
        ]
        if outside:
            yield result_of(f"{job.name}_overhead/{weights}", outside, "%")


def _rates(
    job: EngineJob, work: Work, samples: Sequence[JobTime], formats: Formats
) -> Iterator[Result]:
    """Returns the results in flops/s and, for decode jobs, in bytes/s."""
    in_registers = replace(work, read_bytes=0.0)
    ceilings = [sample.ceilings for sample in samples if sample.ceilings is not None]
    peaks = [work.flops / least_time_s(in_registers, each, *formats) for each in ceilings]
    weights = formats[0]
    yield _rate(f"{job.name}_compute/{weights}", Figure(work.flops, "GFLOP/s"), samples, peaks)
    if job.num_steps:
        amount = Figure(work.read_bytes, "GB/s")
        peaks = [each.read_bytes_per_s for each in ceilings]
        yield _rate(f"{job.name}_bandwidth/{weights}", amount, samples, peaks)


def _rate(name: str, amount: Figure, samples: Sequence[JobTime], limits: Sequence[float]) -> Result:
    """Returns `amount` per second, in units of 10⁹, with its limits."""
    runs = [amount.value / sample.seconds / 1e9 for sample in samples]
    return result_of(name, runs, amount.unit).limited_each([limit / 1e9 for limit in limits])


def _peers(
    plan: EnginePlan, measured: EngineMeasured, job: EngineJob, weights: str
) -> dict[str, float]:
    """Returns the tokens per second of the comparable peers that did this job."""
    found = {}
    for peer in plan.peers:
        samples = _samples(measured, (peer.name, job.name))
        if samples and is_comparable(weights, peer.variant):
            median_s = statistics.median(sample.seconds for sample in samples)
            found[peer.name] = job.num_tokens / median_s
    return found


def _facts(weights: str, ours: OurMemory) -> tuple[Result, ...]:
    facts = {
        f"memory_weights/{weights}": Figure(ours.memory.weights_bytes / 2**20, "MiB"),
        f"memory_resident/{weights}": Figure(ours.resident_bytes / 2**20, "MiB"),
        f"kv_token/{weights}": Figure(ours.memory.kv_token_bytes, "B"),
        f"load/{weights}": Figure(ours.load_s, "s"),
        f"warm_up/{weights}": Figure(ours.warm_up_s, "s"),
    }
    return results_of([facts])


def _peaks(ceilings: Ceilings) -> dict[str, Figure]:
    return {
        "ceiling/read": Figure(ceilings.read_bytes_per_s / 1e9, "GB/s"),
        "ceiling/fp32": Figure(ceilings.fp32_flops_per_s / 1e9, "GFLOP/s"),
        "ceiling/int8": Figure(ceilings.int8_flops_per_s / 1e9, "GOP/s"),
        "ceiling/bf16": Figure(ceilings.bf16_flops_per_s / 1e9, "GFLOP/s"),
    }


def _same_tokens(measured: EngineMeasured) -> tuple[Result, ...]:
    """Returns, for each engine, the percentage of first tokens that equal our fp32 engine's first
    tokens.
    """
    runs = []
    for repetition in measured.repetitions:
        chosen = {
            engine: sample.first_tokens
            for (engine, job), sample in repetition.samples.items()
            if job == "prefill"
        }
        expected = chosen.pop(REFERENCE, ())
        runs.append(
            {
                f"same_tokens/{engine}": Figure(100 * _share_equal(tokens, expected), "%")
                for engine, tokens in chosen.items()
                if expected
            }
        )
    return results_of(runs)


def _share_equal(found: Sequence[int], expected: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(found, expected, strict=True)) / len(expected)


def _samples(measured: EngineMeasured, key: JobKey) -> list[JobTime]:
    return [r.samples[key] for r in measured.repetitions if key in r.samples]

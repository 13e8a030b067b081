"""The figures of `bench fluid` on real deployments, its goals and its warnings. Pure.

| result                 | unit  |                                                               |
|------------------------|-------|---------------------------------------------------------------|
| fluid/MIX              |       | requests/s of `fluid` over those of the better of the others  |
| requests/MIX/…         | 1/s   | answered in the window                                        |
| ttft_p50/…, ttft_p99/… | ms    | of the requests that were sent in the window                  |
| tpot_p50/…             | ms    | of the same                                                   |
| itl_p99/MIX/…          | ms    | between two chunks, in the window                             |
| busy_least/…, busy_most/… | % of a core | CPU time of the least and the most busy worker       |
| itl_ratio/bound        |       | p99 of gaps with prompts over that without; the same /walled  |
| itl_p50/…, itl_p99/…   | ms    | between two chunks of the streams                             |
| prompts/…              | 1/s   | answered beside the streams                                   |
| prompt_ttft_p50/…      | ms    | of these                                                      |
| failed                 |       | requests without an answer                                    |
| background/cpu         | %     | of all cores, what was neither ours nor the servers'          |

A request that lies partly in a window counts by the share of its chunks there. The better one of
`walled` and `mixed` is that of the greater median over all repetitions. Each ratio is that of one
repetition.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.client.answers import Answer, Failure
from bench.client.load import kinds_of
from bench.common.background import busy_results, busy_warning
from bench.common.goals import Goals
from bench.common.report import Figure, Result, results_of
from bench.common.stats import percentile
from bench.elastic_live.plan import answered_per_s
from bench.fluid.plan import COMPARED, BoundSetting, FluidDeployment
from bench.lab.streams import TOKENS_PER_CHUNK, gaps_within, window_of

GOALS = Goals({"fluid/*": 0.95, "itl_ratio/bound": 1.3}, at_most=("itl_ratio/*",))


@dataclass(frozen=True, slots=True)
class MixRun:
    """One mix on one deployment. All times in seconds, of one clock."""

    mix: str
    deployment: FluidDeployment
    repeat: int
    begin_s: float
    end_s: float
    results: tuple[Answer | Failure, ...]  # all, also those from before the window
    busy: tuple[float, ...] = ()  # cores that each worker used in the window
    others_share: float | None = None  # of all cores

    @property
    def answers(self) -> list[Answer]:
        """The complete answers."""
        return [result for result in self.results if isinstance(result, Answer)]

    @property
    def requests_per_s(self) -> float:
        """Requests/s that were answered in the window."""
        times_s = (answer.chunk_times_s for answer in self.answers)
        return answered_per_s(times_s, self.begin_s, self.end_s)


@dataclass(frozen=True, slots=True)
class StreamsRun:
    """Streams on one deployment, with prompts or without."""

    setting: BoundSetting
    repeat: int
    streams: tuple[Answer, ...]  # of at least three chunks
    prompts: tuple[Answer | Failure, ...] = ()
    others_share: float | None = None

    @property
    def gaps_s(self) -> list[float]:
        """Between the chunks of all streams, while all decode."""
        return gaps_within(self.streams, window_of(self.streams))


FluidRun = MixRun | StreamsRun


def results(runs: Sequence[FluidRun]) -> tuple[Result, ...]:
    """Every result; the ratios first."""
    mixes = [run for run in runs if isinstance(run, MixRun)]
    streams = [run for run in runs if isinstance(run, StreamsRun)]
    num_failed = sum(isinstance(result, Failure) for result in _all_of(runs))
    return (
        *results_of([_ratios(mixes, repeat) for repeat in _repeats(mixes)]),
        *results_of([_stream_ratios(streams, repeat) for repeat in _repeats(streams)]),
        *results_of([_mix_figures(mixes, repeat) for repeat in _repeats(mixes)]),
        *results_of([_stream_figures(streams, repeat) for repeat in _repeats(streams)]),
        *results_of([{"failed": Figure(num_failed, "")}]),
        *busy_results([run.others_share for run in runs if run.others_share is not None]),
    )


def warnings(runs: Sequence[FluidRun]) -> list[str]:
    """Facts that a reader should know before trusting the results."""
    found = list(_all_of(runs))
    lines = [f"failed: {kind}" for kind in kinds_of([f for f in found if isinstance(f, Failure)])]
    lines += busy_warning(run.others_share or 0.0 for run in runs)
    answers = [answer for answer in found if isinstance(answer, Answer)]
    num_tokens = sum(answer.num_output_tokens for answer in answers)
    num_chunks = sum(len(answer.chunk_times_s) for answer in answers)
    if num_tokens > TOKENS_PER_CHUNK * num_chunks:
        lines.append(f"{num_tokens / num_chunks:.2f} tokens came in a chunk: gaps are of chunks")
    num_cached = sum(answer.num_cached_tokens or 0 for answer in answers)
    if num_cached:
        lines.append(f"{num_cached} tokens of prompts were cached: another --seed asks anew")
    return lines


def rivals_of(runs: Sequence[MixRun]) -> dict[str, FluidDeployment]:
    """Returns the better of the other deployments for each mix, by its median."""
    medians: dict[tuple[str, FluidDeployment], float] = {}
    for mix in dict.fromkeys(run.mix for run in runs):
        for deployment in COMPARED:
            found = [r.requests_per_s for r in runs if (r.mix, r.deployment) == (mix, deployment)]
            if found:
                medians[mix, deployment] = statistics.median(found)
    others = [each for each in COMPARED if each is not FluidDeployment.FLUID]
    return {
        mix: max(others, key=lambda each: medians.get((mix, each), 0.0))
        for mix in dict.fromkeys(mix for mix, _ in medians)
    }


# ---------------------------------------------------------------- one repetition


def _ratios(runs: Sequence[MixRun], repeat: int) -> dict[str, Figure]:
    rates = {(run.mix, run.deployment): run.requests_per_s for run in runs if run.repeat == repeat}
    pairs = {
        mix: (rates.get((mix, FluidDeployment.FLUID)), rates.get((mix, rival)))
        for mix, rival in rivals_of(runs).items()
    }
    return {
        f"fluid/{mix}": Figure(ours / theirs, "")
        for mix, (ours, theirs) in pairs.items()
        if ours is not None and theirs
    }


def _stream_ratios(runs: Sequence[StreamsRun], repeat: int) -> dict[str, Figure]:
    p99_s = {run.setting: percentile(run.gaps_s, 99) for run in runs if run.repeat == repeat}
    pairs = {
        BoundSetting.BOUND: BoundSetting.BOUND_IDLE,
        BoundSetting.WALLED: BoundSetting.WALLED_IDLE,
    }
    return {
        f"itl_ratio/{loaded}": Figure(p99_s[loaded] / p99_s[idle], "")
        for loaded, idle in pairs.items()
        if loaded in p99_s and p99_s.get(idle)
    }


def _mix_figures(runs: Sequence[MixRun], repeat: int) -> dict[str, Figure]:
    """The figures of a repetition, by what they tell; mixes and deployments in a fixed order."""
    by_run = {
        (run.mix, run.deployment): figures_of(run)
        for mix in dict.fromkeys(run.mix for run in runs)
        for deployment in COMPARED
        for run in runs
        if (run.repeat, run.mix, run.deployment) == (repeat, mix, deployment)
    }
    things = dict.fromkeys(thing for figures in by_run.values() for thing in figures)
    return {
        f"{thing}/{mix}/{deployment}": figures[thing]
        for thing in things
        for (mix, deployment), figures in by_run.items()
        if thing in figures
    }


def figures_of(run: MixRun) -> dict[str, Figure]:
    """Returns the figures of one mix on one deployment."""
    figures = {"requests": Figure(run.requests_per_s, "1/s")}
    sent = [one for one in run.answers if run.begin_s <= one.sent_s < run.end_s]
    gaps_s = gaps_within(run.answers, (run.begin_s, run.end_s))
    samples_s = {
        "ttft": ((50, 99), [one.ttft_s for one in sent]),
        "tpot": ((50,), [one.tpot_s for one in sent if one.tpot_s is not None]),
        "itl": ((99,), gaps_s),
    }
    for name, (ranks, values_s) in samples_s.items():
        if values_s:
            figures |= {f"{name}_p{q}": Figure(1e3 * percentile(values_s, q), "ms") for q in ranks}
    if run.busy:
        figures["busy_least"] = Figure(100 * min(run.busy), "%")
        figures["busy_most"] = Figure(100 * max(run.busy), "%")
    return figures


def _stream_figures(runs: Sequence[StreamsRun], repeat: int) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for setting in BoundSetting:
        for run in runs:
            if (run.repeat, run.setting) == (repeat, setting):
                figures |= {f"{name}/{setting}": one for name, one in _of_streams(run).items()}
    return figures


def _of_streams(run: StreamsRun) -> dict[str, Figure]:
    begin_s, end_s = window_of(run.streams)
    figures = {f"itl_p{q}": Figure(1e3 * percentile(run.gaps_s, q), "ms") for q in (50, 99)}
    answered = [
        one
        for one in run.prompts
        if isinstance(one, Answer) and begin_s <= one.chunk_times_s[0] <= end_s
    ]
    if run.setting.has_prompts:
        figures["prompts"] = Figure(len(answered) / (end_s - begin_s), "1/s")
    if answered:
        ttft_s = statistics.median(one.ttft_s for one in answered)
        figures["prompt_ttft_p50"] = Figure(1e3 * ttft_s, "ms")
    return figures


def _repeats(runs: Sequence[FluidRun]) -> list[int]:
    return sorted({run.repeat for run in runs})


def _all_of(runs: Sequence[FluidRun]) -> Iterator[Answer | Failure]:
    for run in runs:
        yield from run.results if isinstance(run, MixRun) else (*run.streams, *run.prompts)

"""The figures of `bench interference`. Pure.

| result                    | unit      |                                                       |
|---------------------------|-----------|-------------------------------------------------------|
| itl_p50, itl_p99, itl_max | ms        | between two chunks of a stream                        |
| prompts_per_s             | 1/s       | that were answered                                    |
| ttft                      | ms        | median of the prompts                                 |
| cpu_gateway, cpu_client   | %         | of one core                                           |
| cpu_others                | %         | of all cores, what was neither ours nor the servers'  |

Each name is followed by `/` and the setting. Gaps and prompts are those of a run's window: from
when all streams decode until the first of them ends. The peer of a p99
is the setting that it is compared with; `ratio` is this p99 over that of the peer.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.client.answers import Answer, Failure
from bench.client.load import kinds_of
from bench.common.background import busy_warning
from bench.common.report import Figure, Result, results_of
from bench.common.stats import percentile
from bench.interference.plan import PoolSetting

TOKENS_PER_CHUNK = 1.002  # with more, gaps are those between chunks, not tokens
LEAST_LOADED = 0.9  # share of a window in which prompts have to be under way

HELD_AGAINST = {
    PoolSetting.DISAGGREGATED: PoolSetting.IDLE,
    PoolSetting.COLOCATED: PoolSetting.DISAGGREGATED,
}
PROMISES = {PoolSetting.DISAGGREGATED: "at most 1.3", PoolSetting.COLOCATED: "at least 2"}


@dataclass(frozen=True, slots=True)
class InterferenceRun:
    """One run of one setting. All times in seconds, of one clock."""

    setting: PoolSetting
    streams: tuple[Answer, ...]  # of at least three chunks
    prompts: tuple[Answer, ...]  # the load
    wall_s: float
    gateway_cpu_s: float
    client_cpu_s: float
    others_share: float | None = None  # of all cores
    failures: tuple[Failure, ...] = ()  # of the load

    @property
    def window_s(self) -> tuple[float, float]:
        """From the second chunk of the last stream to begin until the first stream's end."""
        return window_of(self.streams)

    @property
    def gaps_s(self) -> list[float]:
        """Between the chunks of all streams, in the window."""
        return gaps_within(self.streams, self.window_s)

    @property
    def loaded_share(self) -> float:
        """Share of the window in which any prompt was open."""
        begin_s, end_s = self.window_s
        under_way_s, until_s = 0.0, begin_s
        for prompt in sorted(self.prompts, key=lambda prompt: prompt.sent_s):
            last_s = min(prompt.chunk_times_s[-1], end_s)
            under_way_s += max(0.0, last_s - max(prompt.sent_s, until_s))
            until_s = max(until_s, last_s)
        return under_way_s / (end_s - begin_s)


def window_of(streams: Sequence[Answer]) -> tuple[float, float]:
    """From the second chunk of the last stream to begin until the first stream's end."""
    begin_s = max(stream.chunk_times_s[1] for stream in streams)
    return begin_s, min(stream.chunk_times_s[-1] for stream in streams)


def gaps_within(streams: Sequence[Answer], window_s: tuple[float, float]) -> list[float]:
    """Gaps between the chunks of these answers that lie in the window."""
    begin_s, end_s = window_s
    return [
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.chunk_times_s)
        if begin_s <= earlier and later <= end_s
    ]


def results(runs: Sequence[InterferenceRun]) -> tuple[Result, ...]:
    """Every result: one row of the table above after the other, in each the settings."""
    figures = [figures_of(run) for setting in PoolSetting for run in runs if run.setting is setting]
    found = results_of(figures)
    medians = {result.name: result.value for result in found}
    things = dict.fromkeys(_parts(result)[0] for result in found)
    ordered = sorted(found, key=lambda result: list(things).index(_parts(result)[0]))
    return tuple(_held_against(result, medians) for result in ordered)


def figures_of(run: InterferenceRun) -> dict[str, Figure]:
    """Returns the figures of one run."""
    gaps_ms = [1e3 * gap_s for gap_s in run.gaps_s]
    begin_s, end_s = run.window_s
    answered = [p for p in run.prompts if begin_s <= p.chunk_times_s[0] <= end_s]
    figures = {
        "itl_p50": Figure(percentile(gaps_ms, 50), "ms"),
        "itl_p99": Figure(percentile(gaps_ms, 99), "ms"),
        "itl_max": Figure(max(gaps_ms), "ms"),
        "prompts_per_s": Figure(len(answered) / (end_s - begin_s), "1/s"),
        "cpu_gateway": Figure(100 * run.gateway_cpu_s / run.wall_s, "%"),
        "cpu_client": Figure(100 * run.client_cpu_s / run.wall_s, "%"),
    }
    if answered:
        figures["ttft"] = Figure(1e3 * statistics.median(p.ttft_s for p in answered), "ms")
    if run.others_share is not None:
        figures["cpu_others"] = Figure(100 * run.others_share, "%")
    return {f"{name}/{run.setting}": figure for name, figure in figures.items()}


def promises(found: Sequence[Result]) -> list[str]:
    """Returns the ratio of each p99 to its peer, beside the promised one."""
    return [
        f"p99 of gaps, {setting}: {peer.ratio:.2f} × {name} (promised: {PROMISES[setting]})"
        for result in found
        for name, peer in result.peers.items()
        if (setting := _parts(result)[1])
    ]


def warnings(runs: Sequence[InterferenceRun]) -> list[str]:
    """Facts that a reader should know before trusting the results."""
    lines = [f"failed: {kind}" for kind in kinds_of([f for run in runs for f in run.failures])]
    lines += busy_warning(run.others_share or 0.0 for run in runs)
    streams = [stream for run in runs for stream in run.streams]
    num_tokens = sum(stream.num_output_tokens for stream in streams)
    num_chunks = sum(len(stream.chunk_times_s) for stream in streams)
    if num_tokens > TOKENS_PER_CHUNK * num_chunks:
        lines.append(f"{num_tokens / num_chunks:.2f} tokens came in a chunk: gaps are of chunks")
    loaded = [run.loaded_share for run in runs if run.setting is not PoolSetting.IDLE]
    if loaded and min(loaded) < LEAST_LOADED:
        lines.append(f"prompts were under way for only {min(loaded):.0%} of a run")
    num_cached = sum(prompt.num_cached_tokens or 0 for run in runs for prompt in run.prompts)
    if num_cached:
        lines.append(f"{num_cached} tokens of prompts were cached: another --seed asks anew")
    return lines


def _held_against(result: Result, medians: Mapping[str, float]) -> Result:
    thing, setting = _parts(result)
    other = HELD_AGAINST.get(setting)
    theirs = medians.get(f"{thing}/{other}")
    if thing != "itl_p99" or not theirs:
        return result
    return result.beside({str(other): theirs})


def _parts(result: Result) -> tuple[str, PoolSetting]:
    thing, _, setting = result.name.partition("/")
    return thing, PoolSetting(setting)

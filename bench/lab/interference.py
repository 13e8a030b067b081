"""Measures how much prompts delay running streams, with separate prefill workers or mixed workers.

A few streams decode. In two of three arms a client also sends long prompts, one after the other:

    idle            1 prefill + 1 decode worker, streams only
    disaggregated   the same two workers, streams and prompts
    colocated       2 mixed workers with chunked prefill (default chunks), streams and prompts

The comparison is fair: both deployments have one gateway and two workers with one compute thread
each, and get the same requests. Prompts that are sent one by one arrive as fast as one worker
computes them, so the prefill worker is saturated. In the colocated deployment, the prompts can
alternate between two workers. The rate of prompts is reported with every p99.

Both deployments run all the time, and one is idle. In all runs a stream gets the same number of
tokens, so percentiles are over equally many gaps with equally long contexts. Prompts request one
token by default, so no KV is handed over. If prompts request more tokens, the decode worker pulls
their KV and decodes them together with the streams.

| result                    | unit      |                                                       |
|---------------------------|-----------|-------------------------------------------------------|
| itl_p50, itl_p99, itl_max | ms        | between two chunks of a stream                        |
| prompts_per_s             | 1/s       | prompts that were answered                            |
| ttft                      | ms        | median of the prompts                                 |
| cpu_gateway, cpu_client   | %         | of one core                                           |
| cpu_others                | %         | share of all cores that other programs used           |

Each name is followed by `/` and the arm. Only gaps and prompts in a run's window count. The window
begins when all streams decode, and ends when the first stream ends. The peer of a p99 is the p99 of
another arm; `ratio` is the p99 over the peer's.
"""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random
from typing import Annotated, ClassVar, Self

import typer
import uvloop

from bench.client.answers import Answer, Failure
from bench.client.load import RequestsFailed
from bench.client.stream import http_session
from bench.common.command import RepeatOption, Say
from bench.common.prompts import plain_token_ids
from bench.common.report import Figure, Result, Scalar
from bench.common.stats import percentile
from bench.lab.experiment import (
    Experiment,
    Findings,
    ShapeOption,
    check_lengths,
    held_against,
    results_by_arm,
    rounds,
)
from bench.lab.streams import (
    REQUEST_TIMEOUT_S,
    WARM_UP_TOKENS,
    BesideRun,
    LiveServer,
    StreamAsk,
    answer_warnings,
    bodies,
    linked_checkpoint,
    live_server,
    measured_beside,
    our_sessions,
)
from bench.processes.deployment import ServedDeployment, serving

QUICK_STREAM_LEN = 128
LEAST_LOADED = 0.9  # share of a window in which a prompt has to be in flight
IDLE, APART, TOGETHER = ARMS = ("idle", "disaggregated", "colocated")
POOLS: Mapping[str, Mapping[str, Scalar]] = {  # options of `baton serve` for each deployment
    APART: {"--prefill": 1, "--decode": 1},
    TOGETHER: {"--mixed": 2},
}
PEERS = {f"itl_p99/{APART}": IDLE, f"itl_p99/{TOGETHER}": APART}
PROMISES = {APART: "at most 1.3", TOGETHER: "at least 2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceStudy(Experiment):
    """Measure how much long prompts hold up running streams, prefill apart from decode or not."""

    NAME: ClassVar = "interference"
    QUICK: ClassVar = "Once, with short streams."

    shape: ShapeOption = "88m"
    streams: Annotated[int, typer.Option(min=1, help="Streams that run at once.")] = 4
    stream_input: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 64
    stream_output: Annotated[int, typer.Option(min=8, help="Output tokens of each.")] = 320
    load_at_once: Annotated[int, typer.Option(min=1, help="Loading prompts under way.")] = 1
    load_input: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 1024
    load_output: Annotated[int, typer.Option(min=1, help="Tokens that each is answered by.")] = 1
    repeat: RepeatOption = 5

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        return (
            f"{self.streams} streams of {self.shape}, two workers of one thread,"
            f" prompts of {self.load_input} tokens back to back: {self.repeat} ×"
        )

    def quick(self) -> Self:
        """Returns a study with one run of short streams, which takes under 50 s."""
        return replace(self, stream_output=min(self.stream_output, QUICK_STREAM_LEN), repeat=1)

    def __post_init__(self) -> None:
        """Raises ConfigError if a request exceeds the model's context."""
        load = (self.load_input, self.load_output)
        check_lengths(self.shape, (self.stream_input, self.stream_output), load)

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises ServerFailed, RequestsFailed, StreamsApart and
        ServerUnreachable.
        """
        runs = self.runs(say)
        found = results(runs)
        return Findings(found, warnings(runs), promises(found))

    def runs(self, say: Say) -> list[BesideRun]:
        """Runs all arms in each repetition."""
        with ExitStack() as stack:
            checkpoint = stack.enter_context(linked_checkpoint(self.shape, seed=self.seed))
            vocab = plain_token_ids(checkpoint)
            served = {}
            for name, pools in POOLS.items():
                say(f"starting: {name}")
                options = {**pools, "--threads": 1}
                served[name] = stack.enter_context(serving(checkpoint, options))
            runs: list[BesideRun] = uvloop.run(self._runs(served, vocab, say))
        return runs

    async def _runs(
        self, served: Mapping[str, ServedDeployment], vocab: Sequence[int], say: Say
    ) -> list[BesideRun]:
        async with http_session(REQUEST_TIMEOUT_S) as session:
            servers = {name: await live_server(one, session) for name, one in served.items()}
            for name in served:
                say(f"warming up: {name}")
                brief = replace(self, stream_output=WARM_UP_TOKENS)
                await brief._run(name, servers, vocab, name="warm-up")
            return [
                replace(
                    (await self._run(arm, servers, vocab, name=str(repeat))).together(),
                    repeat=repeat,
                )
                for repeat, arm in rounds(ARMS, self.repeat, self.seed, say)
            ]

    async def _run(
        self, arm: str, servers: Mapping[str, LiveServer], vocab: Sequence[int], *, name: str
    ) -> BesideRun:
        """Runs one arm once. `name` makes its prompts different from other runs' prompts."""
        server = servers[APART if arm == IDLE else arm]
        rng = Random(f"{self.seed}/{arm}/{name}")
        streams = StreamAsk(self.streams, self.stream_input, self.stream_output)
        load = StreamAsk(0 if arm == IDLE else self.load_at_once, self.load_input, self.load_output)
        run = await measured_beside(
            server,
            *(bodies(ask, vocab, model=server.model, rng=rng) for ask in (streams, load)),
            at_once=(streams.at_once, load.at_once),
            sessions=our_sessions(servers),
            arm=arm,
        )
        if load.at_once and not run.prompts:
            failures = [one for one in run.others if isinstance(one, Failure)]
            raise RequestsFailed("all prompts", failures)
        return run


def results(runs: Sequence[BesideRun]) -> tuple[Result, ...]:
    """Returns all results, in the order of the table in this module's docstring, and by arm within
    a row.
    """
    figures = ((run.repeat, run.arm, figures_of(run)) for run in runs)
    return held_against(results_by_arm(figures, ARMS), PEERS)


def figures_of(run: BesideRun) -> dict[str, Figure]:
    """Returns the figures of one run."""
    gaps_ms = [1e3 * gap_s for gap_s in run.gaps_s]
    begin_s, end_s = run.window_s
    figures = {
        "itl_p50": Figure(percentile(gaps_ms, 50), "ms"),
        "itl_p99": Figure(percentile(gaps_ms, 99), "ms"),
        "itl_max": Figure(max(gaps_ms), "ms"),
        "prompts_per_s": Figure(len(run.answered) / (end_s - begin_s), "1/s"),
        "cpu_gateway": Figure(100 * run.gateway_cpu_s / run.wall_s, "%"),
        "cpu_client": Figure(100 * run.client_cpu_s / run.wall_s, "%"),
    }
    if run.answered:
        ttft_s = statistics.median(one.ttft_s for one in run.answered)
        figures["ttft"] = Figure(1e3 * ttft_s, "ms")
    if run.others_share is not None:
        figures["cpu_others"] = Figure(100 * run.others_share, "%")
    return figures


def promises(found: Sequence[Result]) -> list[str]:
    """Returns lines with the ratio of each p99 to its peer, and the promised ratio."""
    return [
        f"p99 of gaps, {arm}: {peer.ratio:.2f} × {name} (promised: {PROMISES[arm]})"
        for result in found
        for name, peer in result.peers.items()
        if (arm := result.name.partition("/")[2])
    ]


def warnings(runs: Sequence[BesideRun]) -> list[str]:
    """Returns facts that a reader needs before trusting the results."""
    streams = [stream for run in runs for stream in run.streams]
    others = [one for run in runs for one in run.others]
    lines = answer_warnings(streams, others, [run.others_share for run in runs])
    loaded = [loaded_share(run) for run in runs if run.arm != IDLE]
    if loaded and min(loaded) < LEAST_LOADED:
        lines.append(f"prompts were under way for only {min(loaded):.0%} of a run")
    return lines


def loaded_share(run: BesideRun) -> float:
    """Returns the share of the window in which any prompt was in flight."""
    begin_s, end_s = run.window_s
    under_way_s, until_s = 0.0, begin_s
    for prompt in sorted(run.prompts, key=_sent_s):
        last_s = min(prompt.chunk_times_s[-1], end_s)
        under_way_s += max(0.0, last_s - max(prompt.sent_s, until_s))
        until_s = max(until_s, last_s)
    return under_way_s / (end_s - begin_s)


def _sent_s(prompt: Answer) -> float:
    return prompt.sent_s

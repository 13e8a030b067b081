"""Measures the gap in a client's stream when its sequence moves, after a flip or a join of a
worker.

There are a prefill worker and two decode workers. All streams run on one decode worker, the source.
When the source is flipped to prefill, all streams move to the other decode worker at once. The next
repetition flips the other worker. Further streams may already run on the target, and stay there.

    streams begin ── calm ──> flip ──> the source is a prefill worker and decodes nothing

The result is the longest gap of each stream after the flip is ordered. It is compared with the
longest gap of the same stream in an equally long time before the order, because five processes that
share two cores cause gaps too.

| result        | unit |                                                                       |
|---------------|------|-----------------------------------------------------------------------|
| itl/p50       | ms   | between two chunks of a stream, before the flip                       |
| gap/p50 …     | ms   | longest gap of each stream that moved, after the order                |
| calm_gap/p50 …| ms   | longest gap of each stream in an equally long time before the order   |
| pull/p50, max | ms   | the part of the gap in which KV was transferred                       |
| of_limit/p50 …|      | gap over 3 × the stream's median gap + its pull; promised: at most 1  |
| beside_gap/p50 … ms  | as `gap`, for the streams that already ran on the target              |
| beside_of_limit/… |  | as `of_limit`, for these streams, which pull nothing                  |
| flip          | s    | from the order until the controller reports that it is carried out    |
| moved         |      | streams that moved                                                    |
| ended_first   |      | streams that ended before the order, or before they could move        |
| not_moved     |      | other streams: they were prefilled again, or stayed                   |

`--join` starts a decode worker beside a full one instead:

| result        | unit |                                                                          |
|---------------|------|--------------------------------------------------------------------------|
| ratio/before  |      | most over least streams of a decode worker when the new worker joins     |
| ratio/after   |      | most over least streams of a decode worker, `AFTER_S` later              |
| balance       | s    | from the join until the ratio is first below `EVEN`; absent if never     |
| stall         | ms   | longest gap of any stream from the join on                               |
| calm_stall    | ms   | longest gap of any stream of the same requests without a join            |
| itl/before, itl/after | ms | median gap before the join, and after the balance                  |
| moved         |      | streams                                                                  |
| changed       |      | streams whose text differs from the run without a join: promised none    |

In a ratio, zero streams count as one. All streams begin before the join, so only moves can bring
streams to the new worker.
"""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from random import Random
from typing import Annotated, ClassVar, Self

import typer
import uvloop

from bench.client.answers import Answer
from bench.client.load import whole
from bench.common.command import Say
from bench.common.prompts import plain_token_ids
from bench.common.report import Figure, Result, Scalar, results_of
from bench.common.stats import percentile
from bench.common.waiting import holds_within, pause
from bench.lab.experiment import Experiment, Findings, ShapeOption, check_lengths
from bench.lab.streams import REQUEST_TIMEOUT_S, StreamAsk, bodies, linked_checkpoint
from bench.processes.deployment import OperatedDeployment, operated
from bench.serve.plan import ServeTarget
from bench.serve.run import Send, ServeClient
from bench.simulator.pools import EVEN, ratio
from engine.clock import MonotonicClock
from engine.errors import BatonError
from engine.messages import Role

AFTER_S = 5.0
PULL = "move_pull"  # stage in a timeline


@dataclass(frozen=True, slots=True)
class JoinRun:
    """One join. All times are seconds on one clock."""

    alone: tuple[Answer, ...]  # answers to the same requests without a join
    streams: tuple[Answer, ...]
    joined_s: float  # time at which the new worker began to serve
    # after the join: pairs of time and number of streams of each decode worker
    samples: tuple[tuple[float, tuple[int, ...]], ...]


def join_figures_of(run: JoinRun) -> dict[str, Figure]:
    """Returns the figures of one join."""
    after = min(run.samples, key=lambda one: abs(one[0] - run.joined_s - AFTER_S))
    even_s = next((at_s for at_s, nums in run.samples if ratio(nums) < EVEN), None)
    gaps = [(a, b - a) for stream in run.streams for a, b in pairwise(stream.chunk_times_s)]
    until_s = run.joined_s if even_s is None else even_s
    before = [gap for at_s, gap in gaps if at_s + gap < run.joined_s]
    since = [gap for at_s, gap in gaps if at_s + gap >= run.joined_s]
    later = [gap for at_s, gap in gaps if at_s > until_s]
    changed = sum(a.said != b.said for a, b in zip(run.alone, run.streams, strict=True))
    figures = {
        "ratio/before": Figure(ratio(run.samples[0][1]), ""),
        "ratio/after": Figure(ratio(after[1]), ""),
        "stall": Figure(1e3 * max(since, default=0.0), "ms"),
        "calm_stall": Figure(1e3 * max(g for one in run.alone for g in one.gaps_s), "ms"),
        "moved": Figure(sum(PULL in stream.timeline_s for stream in run.streams), ""),
        "changed": Figure(changed, ""),
    }
    if even_s is not None:
        figures["balance"] = Figure(even_s - run.joined_s, "s")
    for name, some in (("before", before), ("after", later)):
        if some:
            figures[f"itl/{name}"] = Figure(1e3 * statistics.median(some), "ms")
    return figures


JOIN_OPTIONS: Mapping[str, Scalar] = {"--prefill": 1, "--decode": 1, "--threads": 1}
OPTIONS: Mapping[str, Scalar] = {**JOIN_OPTIONS, "--decode": 2}
# Streams run on decode workers only, and move only when their worker is flipped.
STAYS = {"BATON_ROUTER__BALANCE": "false", "BATON_POOLS__FLUID": "false"}
CALM_S = 2.0  # seconds that streams run before the flip: as long as a flip may take
QUICK_REPEATS = 2
ORDER_WITHIN_S = 30.0
LOOK_EVERY_S = 0.1
DECODERS = ("worker-1", "worker-2")  # the decode workers; there is one prefill worker
NUM_GAPS = 3.0  # a move may take this many median gaps, plus the stream's pull


class NotFlipped(BatonError):
    """The workers did not get the ordered roles, or the streams did not run where they should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovesStudy(Experiment):
    """Flip a worker whose streams run, and measure the gap that their clients see."""

    NAME: ClassVar = "moves"
    QUICK: ClassVar = "Two flips."

    shape: ShapeOption = "88m"
    streams: Annotated[int, typer.Option(min=1, help="Streams that move at once.")] = 16
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 256
    output_len: Annotated[int, typer.Option(min=8, help="Output tokens of each.")] = 256
    beside: Annotated[int, typer.Option(min=0, help="Streams that run where those go.")] = 0
    repeat: Annotated[int, typer.Option(min=1, help="Flips; results are their medians.")] = 6
    join: Annotated[bool, typer.Option(help="Start a decode worker beside a full one instead.")] = (
        False
    )

    def __post_init__(self) -> None:
        """Raises ConfigError if a request exceeds the model's context."""
        check_lengths(self.shape, (self.input_len, self.output_len))

    @property
    def report_name(self) -> str:
        """Returns the name of the report, which differs for joins."""
        return "joins" if self.join else self.NAME

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        if self.join:
            return f"a decode worker joins beside one with {self.streams} streams of {self.shape}"
        return (
            f"{self.repeat} flips of a worker of {self.shape} with {self.streams} streams,"
            f" {self.input_len} tokens in, {self.output_len} out, to one with {self.beside}"
        )

    def quick(self) -> Self:
        """Returns a study with one flip in each direction, which takes under 50 s."""
        return replace(self, repeat=QUICK_REPEATS)

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises ServerFailed, RequestsFailed, NotFlipped and OrderFailed."""
        options, environment = (JOIN_OPTIONS, {}) if self.join else (OPTIONS, STAYS)
        with linked_checkpoint(self.shape, seed=self.seed) as checkpoint:
            say(f"starting {options['--prefill']} + {options['--decode']} workers")
            with operated(checkpoint, options, environment) as deployment:
                vocab = plain_token_ids(checkpoint)
                found: tuple[Result, ...] = uvloop.run(self._measure(deployment, vocab, say))
        return Findings(found)

    async def _measure(
        self, deployment: OperatedDeployment, vocab: Sequence[int], say: Say
    ) -> tuple[Result, ...]:
        asked = StreamAsk(self.streams, self.input_len, self.output_len)
        async with deployment.connected(REQUEST_TIMEOUT_S) as session:
            target = ServeTarget(deployment.url)
            client = ServeClient(session, target, MonotonicClock(), keeps_text=self.join)
            model = await client.first_model()
            prompts = bodies(asked, vocab, model=model, rng=Random(f"{self.seed}/prompts"))
            bench = _Bench(self, deployment, client.send, prompts)
            if self.join:
                return results_of([join_figures_of(one) for one in await bench.joins(say)])
            return results_of([figures_of(one) for one in await bench.flips(say)])


class _Bench:
    """Starts streams, gives orders, and waits until they are carried out."""

    def __init__(
        self,
        study: MovesStudy,
        deployment: OperatedDeployment,
        send: Send,
        prompts: Iterator[bytes],
    ) -> None:
        self._study = study
        self._deployment = deployment
        self._send = send
        self._prompts = prompts
        self._clock = MonotonicClock()

    async def _until(self, holds: Callable[[], Awaitable[bool]], what: str) -> None:
        """Waits until a condition is true. Raises NotFlipped after a deadline."""
        if not await holds_within(holds, ORDER_WITHIN_S, self._clock):
            raise NotFlipped(f"not within {ORDER_WITHIN_S:g} s: {what}")

    # ---------------------------------------------------------------- flips

    async def flips(self, say: Say) -> "list[MovesRun]":
        """Flips each decode worker in turn. The first two flips are a warm-up and are not
        measured.
        """
        runs = []
        await self._flip(DECODERS[1], Role.PREFILL)
        for repeat in range(-2, self._study.repeat):
            source, target = DECODERS[repeat % 2], DECODERS[1 - repeat % 2]
            say(f"{source} to {target}" + (": warming up" if repeat < 0 else ""))
            run = await self._flipped(source, target)
            if repeat >= 0:
                runs.append(run)
        return runs

    async def _flipped(self, source: str, target: str) -> "MovesRun":
        """Starts streams on `source`, flips `target` back to decoding, and then flips `source`."""
        asked, beside = (
            [*islice(self._prompts, number)] for number in (self._study.streams, self._study.beside)
        )
        try:
            async with asyncio.TaskGroup() as group:
                first = [group.create_task(self._send(body)) for body in asked]
                await self._run_in(len(asked), source)
                await self._flip(target, Role.DECODE)
                others = [group.create_task(self._send(body)) for body in beside]
                # Nearly all of these streams run on `target`.
                await self._run_in(len(asked) + len(beside), source, target)
                await pause(CALM_S)
                ordered_s, emptied_s = await self._flip(source, Role.PREFILL)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors  # this error has cancelled the other tasks
        streams, stayed = (whole([task.result() for task in tasks]) for tasks in (first, others))
        return MovesRun(streams, ordered_s, emptied_s, stayed)

    async def _flip(self, worker: str, role: Role) -> tuple[float, float]:
        """Flips a worker. Returns the time of the order, and the time at which it was carried out.

        When the worker has left decoding, it must not have any sequence. Raises OrderFailed.
        """
        ordered_s = self._clock.now_s()
        await self._deployment.flip(worker, role)

        async def has_flipped() -> bool:
            seen = (await self._deployment.check()).by_name.get(worker)
            if seen is None or not seen.works or seen.role is not role:
                return False
            return role.decodes or seen.num_seqs == 0

        await self._until(has_flipped, f"{worker} is a {role} worker")
        return ordered_s, self._clock.now_s()

    async def _run_in(self, num_streams: int, *workers: str) -> None:
        async def all_run() -> bool:
            by_name = (await self._deployment.check()).by_name
            running = (seen.running_seqs for name, seen in by_name.items() if name in workers)
            return sum(running) == num_streams

        await self._until(all_run, f"all streams run in {' and '.join(workers)}")

    # ---------------------------------------------------------------- joins

    async def joins(self, say: Say) -> list[JoinRun]:
        """Lets a decode worker join while another one is full, once per repetition."""
        runs = []
        for repeat in range(self._study.repeat):
            say(f"join {repeat + 1} of {self._study.repeat}")
            runs.append(await self._join([*islice(self._prompts, self._study.streams)]))
        return runs

    async def _join(self, asked: Sequence[bytes]) -> JoinRun:
        """Runs streams with a join, and the same streams without it."""
        alone = await self._all_of(asked)
        streams = asyncio.create_task(self._all_of(asked))
        try:
            await self._decoders(lambda nums: sum(nums) == len(asked), "all streams run")
            await pause(CALM_S)
            await self._deployment.set_pools(1, 2)
            await self._decoders(lambda nums: len(nums) == 2, "another decode worker serves")
            joined_s = self._clock.now_s()
            samples = []
            while self._clock.now_s() < joined_s + AFTER_S and not streams.done():
                samples.append((self._clock.now_s(), await self._decoding()))
                await pause(LOOK_EVERY_S)
            answers = await streams
        finally:
            streams.cancel()
        await self._deployment.set_pools(1, 1)
        await self._decoders(lambda nums: len(nums) == 1, "one decode worker is left")
        return JoinRun(alone, answers, joined_s, tuple(samples))

    async def _all_of(self, asked: Sequence[bytes]) -> tuple[Answer, ...]:
        return whole(await asyncio.gather(*map(self._send, asked)))

    async def _decoding(self) -> tuple[int, ...]:
        """Returns the number of streams of each decode worker that serves."""
        seen = await self._deployment.check()
        return tuple(w.running_seqs for w in seen.workers if w.works and w.role is Role.DECODE)

    async def _decoders(self, holds: Callable[[tuple[int, ...]], bool], what: str) -> None:
        async def has_come() -> bool:
            return holds(await self._decoding())

        await self._until(has_come, what)


@dataclass(frozen=True, slots=True)
class MovesRun:
    """One flip. All times are seconds on one clock."""

    streams: tuple[Answer, ...]
    ordered_s: float
    emptied_s: float
    # streams that began when the target decoded, but had no stream yet: nearly all run on it
    beside: tuple[Answer, ...] = ()


@dataclass(frozen=True, slots=True)
class Across:
    """One stream before and after the flip. All times are seconds."""

    itl_s: float  # median gap before the flip
    gap_s: float
    calm_gap_s: float
    pull_s: float

    @property
    def of_limit(self) -> float:
        """Returns the gap as a share of the promised longest gap."""
        return self.gap_s / (NUM_GAPS * self.itl_s + self.pull_s)


def moved_of(run: MovesRun) -> list[Across]:
    """Returns the streams that moved and have gaps both before and after the order."""
    moved = [s for s in (*run.streams, *run.beside) if PULL in s.timeline_s]
    found = [_across(run, stream, stream.timeline_s[PULL]) for stream in moved]
    return [one for one in found if one is not None]


def beside_of(run: MovesRun) -> list[Across]:
    """Returns the streams that already ran on the target and have gaps both before and after the
    order.
    """
    found = [_across(run, s, 0.0) for s in run.beside if PULL not in s.timeline_s]
    return [one for one in found if one is not None]


def _ended_first(run: MovesRun, stream: Answer) -> bool:
    return stream.chunk_times_s[-1] <= min(run.emptied_s, run.ordered_s + CALM_S)


def _across(run: MovesRun, stream: Answer, pull_s: float) -> Across | None:
    begin_s, end_s = run.ordered_s - CALM_S, max(run.emptied_s, run.ordered_s + CALM_S)
    gaps = [(a, b - a) for a, b in pairwise(stream.chunk_times_s)]
    before = [g for a, g in gaps if begin_s <= a < run.ordered_s - g]
    across = [g for a, g in gaps if run.ordered_s - g <= a < end_s]
    if not before or not across:
        return None
    return Across(statistics.median(before), max(across), max(before), pull_s)


def figures_of(run: MovesRun) -> dict[str, Figure]:
    """Returns the figures of one flip."""
    moved = moved_of(run)
    stayed = [stream for stream in run.streams if PULL not in stream.timeline_s]
    figures = {
        "flip": Figure(run.emptied_s - run.ordered_s, "s"),
        "moved": Figure(len(moved), ""),
        "ended_first": Figure(sum(_ended_first(run, s) for s in stayed), ""),
        "not_moved": Figure(sum(not _ended_first(run, s) for s in stayed), ""),
    }
    if beside := beside_of(run):
        figures |= _spread("beside_gap", [1e3 * one.gap_s for one in beside], "ms")
        figures |= _spread("beside_of_limit", [one.of_limit for one in beside], "")
    if not moved:
        return figures
    gaps_ms = [1e3 * one.gap_s for one in moved]
    calm_ms = [1e3 * one.calm_gap_s for one in moved]
    pulls_ms = [1e3 * one.pull_s for one in moved]
    shares = [one.of_limit for one in moved]
    return {
        "itl/p50": Figure(1e3 * statistics.median(one.itl_s for one in moved), "ms"),
        **_spread("gap", gaps_ms, "ms"),
        **_spread("calm_gap", calm_ms, "ms"),
        **_spread("pull", pulls_ms, "ms"),
        **_spread("of_limit", shares, ""),
        **figures,
    }


def _spread(name: str, values: Sequence[float], unit: str) -> dict[str, Figure]:
    return {
        f"{name}/p50": Figure(percentile(values, 50), unit),
        f"{name}/p90": Figure(percentile(values, 90), unit),
        f"{name}/max": Figure(max(values), unit),
    }

"""An alternating load on a real deployment, with fixed splits and with the planner.

The deployment has a few workers of one thread. Its pools are set before each run: to a fixed split,
or to even pools with the planner on. In each run the same load alternates between two mixes:

    reading   long prompts without common prefixes, short answers: prefill workers are scarce
    writing   short prompts, long answers: decode workers are scarce

Rates and bounds follow from a measurement on the same machine just before. In it, a closed loop
keeps all workers of the scarce role busy. Each mix then arrives at `LOAD` times the rate measured
with all workers but one. A request may take `SLACK` times its time in the closed loop. Each
repetition has its own order of arms, so that drifts of the machine affect all arms alike.

The router is not given the bounds and refuses no request: a request that waits too long misses its
bound. So the arms differ in their pools only. The planner does not know the bounds either. It
compares the wait of prompts with `router.planning.planner.NO_BOUND_TTFT_S`, and decoding sequences
with the workers' places and memory.

On two cores, two workers use all computing time, and a third worker of the same role adds nothing.
Hence there are three workers: in each fixed split, one role has a single worker, and one mix needs
two of that role. The gain of two workers over one is measured too. If the gain is small, the sizes
of pools make little difference.

| result         |       |                                                                         |
|----------------|-------|-------------------------------------------------------------------------|
| scaling/…      |       | rate of a mix with all workers but one, over the rate with one worker   |
| goodput/…      | 1/s   | requests that met both bounds: best fixed split, planner, each split    |
| ratio          |       | planner over the best fixed split of the same repetition                |
| attainment/…   | share | requests that met both bounds, of all requests                          |
| flips          |       | changed roles in a planned run                                          |
| refused        |       | requests answered with 429, which count as a miss                       |
| lost           |       | requests that ended in any other way than an answer                     |
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random
from typing import Annotated, ClassVar, Self

import typer
import uvloop

from bench.client.answers import Answer, Failure
from bench.client.arrivals import arrival_times_s
from bench.client.load import LoadRun, SloBounds, kinds_of, meets
from bench.common.command import Say
from bench.common.prompts import plain_token_ids
from bench.common.report import Figure, Result, results_of
from bench.common.waiting import holds_within
from bench.lab.experiment import Experiment, Findings, ShapeOption, rounds
from bench.lab.streams import answered_per_s, body_of, linked_checkpoint
from bench.processes.deployment import OperatedDeployment, operated
from bench.serve.plan import ServeTarget
from bench.serve.run import Send, ServeClient, run_open_loop
from engine.clock import MonotonicClock
from engine.config import PlannerMode
from engine.errors import BatonError

MAX_RUNNING = 4  # most sequences that a decode worker runs
AHEAD = 2  # concurrent prompts of a closed loop, per prefill worker
LOAD = 0.85
SLACK = 4.0
COOL_DOWN_S = 3.0
REQUEST_TIMEOUT_S = 60.0
SETTLED_WITHIN_S = 30.0
RAMP_S, WINDOW_S = 3.0, 8.0  # seconds of a closed loop: warm-up, and measured part
REFUSED = "http_429"
PLANNER = "planner"


class PaceUnknown(BatonError):
    """The deployment failed before the load began."""


@dataclass(frozen=True, slots=True)
class LiveMix:
    """Requests of one kind. Lengths are in tokens."""

    name: str
    input_len: int
    output_len: int


READING = LiveMix("reading", 768, 8)
WRITING = LiveMix("writing", 64, 96)
MIXES = (READING, WRITING)


@dataclass(frozen=True, slots=True)
class MeasuredPace:
    """Answered requests/s of each mix in a closed loop: with one worker of the scarce role, and
    with `num_workers` workers of it, which is all workers but one.
    """

    num_workers: int
    one: Mapping[LiveMix, float]
    most: Mapping[LiveMix, float]

    @property
    def slo(self) -> SloBounds:
        """Returns the bounds that requests should meet."""
        prompt_s = self.num_workers / self.most[READING]
        token_s = self.num_workers * MAX_RUNNING / (self.most[WRITING] * WRITING.output_len)
        return SloBounds(SLACK * prompt_s, SLACK * token_s)

    def rate_per_s(self, mix: LiveMix) -> float:
        """Returns the requests/s at which this mix arrives in the load."""
        return LOAD * self.most[mix]


def num_at_once(mix: LiveMix, num_workers: int) -> int:
    """Returns the number of clients in a closed loop that keeps these workers busy."""
    return num_workers * (AHEAD if mix is READING else MAX_RUNNING)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The answers, flips and refusals of one run of one arm."""

    arm: str
    repeat: int
    load: LoadRun
    num_flips: int

    def num_good(self, slo: SloBounds) -> int:
        """Returns the number of requests that met both bounds."""
        return sum(meets(answer, slo) for answer in self.load.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticLiveStudy(Experiment):
    """Play an alternating load on a real deployment, with fixed splits and with the planner."""

    NAME: ClassVar = "elastic-live"
    QUICK: ClassVar = "One run of two phases, against the even split."

    shape: ShapeOption = "88m"
    workers: Annotated[int, typer.Option(min=2, help="Workers of one thread each.")] = 3
    phases: Annotated[
        int, typer.Option(min=2, help="Phases, which alternate between reading and writing.")
    ] = 4
    phase_s: Annotated[float, typer.Option(min=2.0, help="Length of a phase in seconds.")] = 20.0
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each; results are medians.")] = 3

    @property
    def arms(self) -> dict[str, int]:
        """Returns the initial number of prefill workers of each arm, by the arm's name."""
        even = self.workers // 2
        splits = [even] if self.is_quick else range(1, self.workers)
        return {f"fixed_{one}+{self.workers - one}": one for one in splits} | {PLANNER: even}

    @property
    def duration_s(self) -> float:
        """Returns the duration of one run's load in seconds."""
        return self.phases * self.phase_s

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        load = f"a load that changes every {self.phase_s:g} s"
        return f"{load}, {self.workers} workers of {self.shape}"

    def quick(self) -> Self:
        """Returns a study with one run: two phases, one fixed split, about two minutes."""
        phase_s = min(self.phase_s, 8.0)
        return replace(self, phases=2, phase_s=phase_s, repeat=1, is_quick=True)

    def load_of(self, pace: MeasuredPace, repeat: int) -> Iterator[tuple[float, LiveMix]]:
        """Yields the time and the mix of each request. All arms of a repetition get the same
        requests.
        """
        rng = Random(f"{self.seed}/load/{repeat}")
        for phase, mix in enumerate(islice(cycle(MIXES), self.phases)):
            rate_per_s = pace.rate_per_s(mix)
            num_requests = round(rate_per_s * self.phase_s)
            for at_s in arrival_times_s(rate_per_s, num_requests, burstiness=1.0, rng=rng):
                if at_s < self.phase_s:
                    yield phase * self.phase_s + at_s, mix

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises ServerFailed, ServerUnreachable, PaceUnknown and OrderFailed."""
        even = self.workers // 2
        options = {
            "--prefill": even,
            "--decode": self.workers - even,
            "--max-workers": self.workers,
            "--threads": 1,
        }
        environment = {
            "BATON_WORKER__MAX_RUNNING": str(MAX_RUNNING),
            "BATON_PLANNER__COOL_DOWN_S": str(COOL_DOWN_S),
        }
        say(f"starting {self.workers} workers of {self.shape}")
        with linked_checkpoint(self.shape, seed=self.seed) as checkpoint:
            vocab = plain_token_ids(checkpoint)
            with operated(checkpoint, options, environment) as deployment:
                found: Findings = uvloop.run(self._measure(vocab, deployment, say))
        return found

    async def _measure(
        self, vocab: Sequence[int], deployment: OperatedDeployment, say: Say
    ) -> Findings:
        async with deployment.connected(REQUEST_TIMEOUT_S) as session:
            client = ServeClient(session, ServeTarget(deployment.url), MonotonicClock())
            model = await client.first_model()
            bench = _Bench(self, vocab, deployment, client.send, model)
            pace = await bench.pace(say)
            runs = []
            for repeat, arm in rounds([*self.arms], self.repeat, self.seed, say):
                run = await bench.run(arm, pace, repeat)
                runs.append(run)
                good, num = run.num_good(pace.slo), len(run.load.outcomes)
                say(f"{good} of {num}, {run.num_flips} flips")
        failures = kinds_of([failure for run in runs for failure in run.load.failures])
        config = {
            "ttft_bound_s": pace.slo.ttft_s,
            "tpot_bound_s": pace.slo.tpot_s,
            **{f"{mix.name}_per_s": pace.rate_per_s(mix) for mix in MIXES},
        }
        warnings = [f"failed: {kind}" for kind in failures]
        return Findings(results(self, pace, runs), warnings, config=config)


class _Bench:
    """Sends requests and orders to one deployment."""

    def __init__(
        self,
        study: ElasticLiveStudy,
        vocab: Sequence[int],
        deployment: OperatedDeployment,
        send: Send,
        model: str,
    ) -> None:
        self._study = study
        self._deployment = deployment
        self._send = send
        self._model = model
        self._vocab = vocab
        self._clock = MonotonicClock()

    async def pace(self, say: Say) -> MeasuredPace:
        """Measures each mix in a closed loop: with one worker of the scarce role, and with all
        workers but one.
        """
        total = self._study.workers
        one: dict[LiveMix, float] = {}
        most: dict[LiveMix, float] = {}
        for mix in MIXES:
            for answered, num in ((one, 1), (most, total - 1)):
                await self._set(num if mix is READING else total - num)
                answered[mix] = await self._answered_per_s(mix, num)
            say(f"{mix.name}: {one[mix]:.2f}/s by one, {most[mix]:.2f}/s by all but one")
        return MeasuredPace(total - 1, one, most)

    async def _answered_per_s(self, mix: LiveMix, num_workers: int) -> float:
        """Returns the answered requests/s of a closed loop."""
        rng = Random(f"{self._study.seed}/pace/{mix.name}/{num_workers}")
        begin_s = self._clock.now_s() + RAMP_S
        end_s = begin_s + WINDOW_S
        answers: list[Sequence[float]] = []  # arrival times of the chunks of each answer

        async def ask() -> None:
            while self._clock.now_s() < end_s:
                answers.append((await self._answer(mix, rng)).chunk_times_s)

        await asyncio.gather(*(ask() for _ in range(num_at_once(mix, num_workers))))
        found_per_s = answered_per_s(answers, begin_s, end_s)
        if not found_per_s:
            raise PaceUnknown(f"no request of {mix.name} was answered in {WINDOW_S:g} s")
        return found_per_s

    async def run(self, arm: str, pace: MeasuredPace, repeat: int) -> LiveRun:
        """Plays the whole load on the pools of one arm."""
        study = self._study
        await self._set(study.arms[arm])
        num_flips = await self._num_flips()
        if arm == PLANNER:
            await self._deployment.set_planner(PlannerMode.ON)
        load = [*study.load_of(pace, repeat)]
        rng = Random(f"{study.seed}/prompts/{repeat}/{arm}")
        bodies = [self._body(mix, rng) for _, mix in load]
        found = await run_open_loop(
            self._send, bodies, [due_s for due_s, _ in load], clock=self._clock
        )
        await self._deployment.set_planner(PlannerMode.OFF)
        return LiveRun(arm, repeat, found, await self._num_flips() - num_flips)

    async def _set(self, num_prefill: int) -> None:
        """Orders the sizes of the pools and waits for them. Raises OrderFailed, PaceUnknown."""
        await self._deployment.set_pools(num_prefill, self._study.workers - num_prefill)

        async def is_settled() -> bool:
            return (await self._deployment.check()).settled

        if not await holds_within(is_settled, SETTLED_WITHIN_S, self._clock):
            raise PaceUnknown(f"the pools were not settled in {SETTLED_WITHIN_S:g} s")

    async def _num_flips(self) -> int:
        return (await self._deployment.check()).counters.get("flips", 0)

    async def _answer(self, mix: LiveMix, rng: Random) -> Answer:
        result = await self._send(self._body(mix, rng))
        if isinstance(result, Failure):
            raise PaceUnknown(f"a request of {mix.name} was not answered: {result.detail}")
        return result

    def _body(self, mix: LiveMix, rng: Random) -> bytes:
        lengths = (mix.input_len, mix.output_len)
        return body_of(*lengths, self._vocab, model=self._model, rng=rng)


def results(
    study: ElasticLiveStudy, pace: MeasuredPace, runs: Sequence[LiveRun]
) -> tuple[Result, ...]:
    """Returns all figures, with one value for each repetition."""
    repeats = sorted({run.repeat for run in runs})
    return results_of(
        [_figures(study, pace, [run for run in runs if run.repeat == one]) for one in repeats]
    )


def _figures(
    study: ElasticLiveStudy, pace: MeasuredPace, runs: Sequence[LiveRun]
) -> dict[str, Figure]:
    slo = pace.slo
    by_name = {arm: run for arm in study.arms for run in runs if run.arm == arm}
    planned = by_name[PLANNER]
    best = max(
        (run for run in by_name.values() if run is not planned),
        key=lambda run: run.num_good(slo),
    )
    named = {"best_fixed": best, **by_name}
    good = {name: run.num_good(slo) for name, run in named.items()}
    failures = [failure for run in runs for failure in run.load.failures]
    num_refused = sum(failure.kind == REFUSED for failure in failures)
    return {
        "ratio": Figure(good["planner"] / max(good["best_fixed"], 1), ""),
        **{f"goodput/{name}": Figure(n / study.duration_s, "1/s") for name, n in good.items()},
        **{
            f"attainment/{name}": Figure(good[name] / len(run.load.outcomes), "share")
            for name, run in named.items()
        },
        **{f"scaling/{mix.name}": Figure(pace.most[mix] / pace.one[mix], "") for mix in MIXES},
        "flips": Figure(planned.num_flips, ""),
        "refused": Figure(num_refused, ""),
        "lost": Figure(len(failures) - num_refused, ""),
    }

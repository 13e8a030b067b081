"""Computes the results of `bench batches`. Pure.

| result                  | unit       |                                                   |
|-------------------------|------------|---------------------------------------------------|
| clients/ttft, itl, e2e  | ms         | percentiles over all windows with a batch         |
| quiet/ttft, itl, e2e    | ms         | percentiles over pairs without other load         |
| quiet/pairs             | 1          | pairs of windows without other load; limit: all   |
| noise/ttft, itl, e2e    | ms         | p99 of the windows without a batch in every other pair |
| batches/answered_once   | requests   | with one result and no error; limit: all          |
| batches/beside_clients  | requests/s | batch requests answered during windows            |
| batches/active          | %          | share of a window in which its batch ran          |
| batches/pauses          | 1/request  | pauses of a batch request for clients             |
| killed/answered_once    | requests   | with one result, in the batch with kills          |
| killed/equal            | requests   | with the same text as in the undisturbed batch    |
| killed/answered_before  | requests   | that had a result at the last kill                |
| background/cpu          | %          | share of all cores that other programs used       |

The peer of a percentile is the same percentile in the windows without a batch. A ratio near one
means that batches do not slow clients down. A pair is quiet if other programs used at most 5 % of
the CPU in it: on a shared machine, other programs change a 99th percentile more than a batch does.
The peer of noise is the same percentile in the other half of the pairs. The ratio of noise shows
how much the machine itself changes the percentile.

The study measures how much batches slow clients down, and checks that kills neither lose nor repeat
a result.

It has two parts. Each part has its own deployment, which keeps its batches in a file:

    beside    windows of clients' requests, alternately with and without a batch. The batch is
              submitted at the begin of its window. After the window, the study waits for it.
    killed    all requests as one file, first undisturbed, then again. The second time, every
              process is killed with SIGKILL as often as requested, and the deployment restarts.

Clients send at random times, as a Poisson process. The two windows of a pair have the same arrival
times and different prompts. Prompts of batches are short, with answers of a few tokens, so that ten
thousand take minutes on a laptop. Each line of a file has its own seed, so both runs of the second
part must give the same answers.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Self

import typer
import uvloop

from bench.client.answers import Answer, Endpoint, request_body
from bench.client.arrivals import arrival_times_s
from bench.client.load import LoadRun
from bench.common.background import TOO_BUSY, BusyWatch, busy_results, busy_warning
from bench.common.command import Say
from bench.common.prompts import PromptShape, text_prompts
from bench.common.report import Result, result_of
from bench.common.stats import percentile
from bench.lab.batches.api import ENDPOINT, BatchServer, Texts, batch_server
from bench.lab.experiment import Experiment, Findings
from bench.processes.deployment import ServedDeployment, kill_at_once, serving
from bench.serve.run import run_open_loop
from engine.clock import MonotonicClock, unix_time_s

WITH, WITHOUT = "with", "without"

PERCENTS = (50, 99)
GOAL = 1.05  # bound on the ratio of 99th percentiles, with a batch over without
NOISE = "noise/"
ENOUGH_ACTIVE = 0.9


@dataclass(frozen=True, slots=True)
class Window:
    """Answers to clients in one window, and the batch that ran meanwhile."""

    which: str
    pair: int
    load: LoadRun
    num_answered: int = 0  # batch requests that were answered during the window
    active_s: float = 0.0  # seconds of the window in which the batch was not finished


@dataclass(frozen=True, slots=True)
class Killed:
    """Results of one file, run twice: undisturbed, and with kills."""

    num_requests: int
    undisturbed: Texts
    disturbed: Texts
    num_before: int  # results that existed at the last kill


@dataclass(frozen=True, slots=True)
class BatchesMeasured:
    """All measurements of both parts."""

    num_requests: int  # number of requests in the batches of all windows
    windows: tuple[Window, ...]
    texts: Texts  # answers of the batches of all windows
    num_pauses: float
    killed: Killed | None = None
    background: tuple[float, ...] = ()


def results(measured: BatchesMeasured) -> tuple[Result, ...]:
    """Returns all results, in the order of the table in this module's docstring."""
    found = [
        _compared(f"clients/{name}/p{percent}", measured.windows, of, percent)
        for name, of in _TIMES.items()
        for percent in PERCENTS
    ]
    found += _quiet(measured)
    found += _noise(measured)
    beside = [window for window in measured.windows if window.which == WITH]
    number = measured.num_requests
    once = float(len(once_of(measured.texts)))
    found.append(result_of("batches/answered_once", [once], "requests").limited(number))
    rates = [window.num_answered / window.load.duration_s for window in beside]
    found.append(result_of("batches/beside_clients", rates, "requests/s"))
    shares = [100 * window.active_s / window.load.duration_s for window in beside]
    found.append(result_of("batches/active", shares, "%"))
    found.append(result_of("batches/pauses", [measured.num_pauses / number], "1/request"))
    if measured.killed is not None:
        found += _killed(measured.killed)
    return (*found, *busy_results(measured.background))


def once_of(texts: Texts) -> dict[str, str]:
    """Returns the answers of the requests that have exactly one answer."""
    counts = Counter(name for name, _ in texts)
    return {name: text for name, text in texts if counts[name] == 1}


def warnings(measured: BatchesMeasured) -> list[str]:
    """Returns a line for each reason not to trust the results, and for each goal that was
    missed.
    """
    lines = busy_warning(measured.background)
    failures = sum(len(window.load.failures) for window in measured.windows)
    if failures:
        lines.append(f"{failures} requests of clients failed")
    for result in results(measured):
        ratio = max((peer.ratio for peer in result.peers.values()), default=0.0)
        if result.name.endswith("/p99") and ratio > GOAL and not result.name.startswith(NOISE):
            lines.append(f"{result.name} is {ratio:.2f} times that without batches")
        if result.name == "batches/active" and result.value < 100 * ENOUGH_ACTIVE:
            lines.append("batches were over before their windows: give more --requests")
        if result.of_limit is not None and result.of_limit < 1 and result.unit == "requests":
            lines.append(f"{result.name}: {result.value:.0f} of {result.limit:.0f}")
    return lines


def _quiet(measured: BatchesMeasured) -> list[Result]:
    """Returns the percentiles over the pairs of windows in which other programs used little CPU."""
    quiet = {pair for pair, share in enumerate(measured.background) if share <= TOO_BUSY}
    windows = [window for window in measured.windows if window.pair in quiet]
    if not windows:
        return []
    found = [
        _compared(f"quiet/{name}/p{percent}", windows, of, percent)
        for name, of in _TIMES.items()
        for percent in PERCENTS
    ]
    number = result_of("quiet/pairs", [float(len(quiet))], "1")
    return [*found, number.limited(len({window.pair for window in measured.windows}))]


def _noise(measured: BatchesMeasured) -> list[Result]:
    """Returns the 99th percentiles of windows without a batch: of every other pair, with the
    remaining pairs as peer.
    """
    halves: tuple[list[Window], list[Window]] = ([], [])
    for window in measured.windows:
        if window.which == WITHOUT:
            halves[window.pair % 2].append(window)
    if not all(halves):
        return []
    found: list[Result] = []
    for name, times_of in _TIMES.items():
        ours, theirs = (percentile(_pooled(half, times_of) or [0.0], 99) for half in halves)
        result = result_of(f"{NOISE}{name}/p99", [ours], "ms")
        found.append(result.beside({"other_half": theirs}) if theirs else result)
    return found


def _pooled(
    windows: Sequence[Window], times_of: Callable[[Answer], Sequence[float]]
) -> list[float]:
    """Returns the values of all answers of some windows, in milliseconds."""
    return [1e3 * s for window in windows for each in window.load.answers for s in times_of(each)]


def _killed(killed: Killed) -> list[Result]:
    undisturbed, disturbed = once_of(killed.undisturbed), once_of(killed.disturbed)
    equal = sum(undisturbed.get(name) == text for name, text in disturbed.items())
    before = float(killed.num_before)
    return [
        result_of("killed/answered_once", [float(len(disturbed))], "requests").limited(
            killed.num_requests
        ),
        result_of("killed/equal", [float(equal)], "requests").limited(killed.num_requests),
        result_of("killed/answered_before", [before], "requests"),
    ]


def _compared(
    name: str,
    windows: Sequence[Window],
    times_of: Callable[[Answer], Sequence[float]],
    percent: int,
) -> Result:
    ours, theirs = (
        percentile(
            _pooled([each for each in windows if each.which == which], times_of) or [0.0], percent
        )
        for which in (WITH, WITHOUT)
    )
    result = result_of(name, [ours], "ms")
    return result.beside({WITHOUT: theirs}) if theirs else result


_TIMES: dict[str, Callable[[Answer], Sequence[float]]] = {
    "ttft": lambda answer: [answer.ttft_s],
    "itl": lambda answer: answer.gaps_s,
    "e2e": lambda answer: [answer.e2e_s],
}


MODEL = Path(__file__).parents[3] / "engine" / "model" / "bundled" / "target"
OPTIONS = {"--mixed": 1, "--threads": 1}
INPUT_LEN, OUTPUT_LEN = 48, 16  # words of a client's prompt, and tokens of its answer
BATCH_INPUT_LEN, BATCH_OUTPUT_LEN = 6, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesStudy(Experiment):
    """Measure what batches cost clients, and whether kills lose or repeat a result."""

    NAME: ClassVar = "batches"
    QUICK: ClassVar = "Few requests and one short pair of windows."

    requests: Annotated[int, typer.Option(min=1, help="Requests of batches.")] = 10_000
    pairs: Annotated[int, typer.Option(min=1, help="Windows with and without a batch.")] = 10
    window_s: Annotated[float, typer.Option(min=1.0, help="Length of a window.")] = 20.0
    rate: Annotated[float, typer.Option(min=0.01, help="Clients' requests per second.")] = 4.0
    kills: Annotated[
        int, typer.Option(min=0, help="Kills of every process during a second batch; 0: none.")
    ] = 0

    @property
    def title(self) -> str:
        """Returns the title of the table."""
        return f"clients beside {self.requests:,} requests of batches"

    def quick(self) -> Self:
        """Returns a study that takes under a minute."""
        return replace(self, requests=200, pairs=1, window_s=4.0, kills=min(self.kills, 1))

    @property
    def num_of_window(self) -> int:
        """Returns the number of requests in the batch of one window."""
        return -(-self.requests // self.pairs)

    def order_of(self, pair: int) -> tuple[str, str]:
        """Returns the windows of a pair in their order. The order changes with each pair."""
        return (WITH, WITHOUT) if (pair + self.seed) % 2 else (WITHOUT, WITH)

    def due_times_s(self, pair: int) -> list[float]:
        """Returns the times at which clients send requests, in seconds from the start of a
        window.
        """
        number = max(round(self.rate * self.window_s), 1)
        rng = Random(f"{self.seed}/{pair}/arrivals")
        return arrival_times_s(self.rate, number, burstiness=1.0, rng=rng)

    def lines_of(self, name: str, number: int, model: str) -> list[dict[str, Any]]:
        """Returns the lines of one input file for a batch."""
        rng = Random(f"{self.seed}/{name}")
        prompts = text_prompts(PromptShape(number, BATCH_INPUT_LEN, 0), rng)
        return [
            {
                "custom_id": f"{name}-{index}",
                "method": "POST",
                "url": ENDPOINT,
                "body": {
                    "model": model,
                    "prompt": prompt,
                    "max_tokens": BATCH_OUTPUT_LEN,
                    "temperature": 1.0,
                    "seed": index,
                    "ignore_eos": True,
                },
            }
            for index, prompt in enumerate(prompts)
        ]

    def measure(self, say: Say) -> Findings:
        """Runs the study. Raises ServerFailed, ServerUnreachable and BatchNotCompleted."""
        measured = self.run(say)
        return Findings(results(measured), warnings(measured))

    def run(self, say: Say) -> BatchesMeasured:
        """Carries out both parts."""
        with tempfile.TemporaryDirectory() as directory:
            with _kept_in(Path(directory) / "beside.sqlite") as deployment:
                busy = BusyWatch(lambda: [deployment.pid, *deployment.sessions(), os.getsid(0)])
                windows, texts, num_pauses = uvloop.run(self._beside(deployment.url, busy, say))
            killed = self._killed(Path(directory) / "killed.sqlite", say) if self.kills else None
        shares = tuple(busy.shares)
        return BatchesMeasured(
            self.num_of_window * self.pairs, windows, texts, num_pauses, killed, shares
        )

    # ------------------------------------------------------------ beside clients

    async def _beside(
        self, url: str, busy: BusyWatch, say: Say
    ) -> tuple[tuple[Window, ...], Texts, float]:
        windows: list[Window] = []
        texts: list[tuple[str, str]] = []
        async with batch_server(url) as server:
            await server.complete(self.lines_of("warm-up", 64, server.model))
            await self._window(server, which="warm-up", pair=-1)
            for pair in range(self.pairs):
                with busy.repetition():
                    for which in self.order_of(pair):
                        window, batch_id = await self._window(server, which=which, pair=pair)
                        windows.append(window)
                        if batch_id is not None:
                            texts += await server.texts(await server.ended(batch_id))
                            say(f"window {pair + 1}: {window.num_answered} beside clients")
            return tuple(windows), texts, await server.num_pauses()

    async def _window(
        self, server: BatchServer, *, which: str, pair: int
    ) -> tuple[Window, str | None]:
        """Sends the requests of one window. Returns the window's answers and the id of its
        batch.
        """
        due_s = self.due_times_s(pair)
        prompts = text_prompts(
            PromptShape(len(due_s), INPUT_LEN, 0), Random(f"{self.seed}/{pair}/{which}")
        )
        bodies = [
            request_body(
                Endpoint.COMPLETIONS,
                prompt,
                model=server.model,
                output_len=OUTPUT_LEN,
                temperature=0.0,
            )
            for prompt in prompts
        ]
        batch_id = None
        if which == WITH:
            batch_id = await server.submit(
                self.lines_of(f"window-{pair}", self.num_of_window, server.model)
            )
            await server.answers(batch_id, 1)
        begun_s, num_before = unix_time_s(), await server.num_answered(batch_id)
        load = await run_open_loop(server.client.send, bodies, due_s, clock=MonotonicClock())
        if batch_id is None:
            return Window(which, pair, load), None
        num_answered = await server.num_answered(batch_id) - num_before
        ended_s = (await server.batch(batch_id)).completed_at
        active_s = load.duration_s
        if ended_s is not None:
            active_s = min(max(float(ended_s - begun_s), 0.0), active_s)
        return Window(which, pair, load, num_answered, active_s), batch_id

    # ------------------------------------------------------------ killed

    def _killed(self, store: Path, say: Say) -> Killed:
        """Runs all requests as one file twice: undisturbed, and with kills."""
        batch_id, num_before = None, 0
        for number in range(self.kills):
            with _kept_in(store) as deployment:
                if batch_id is None:
                    undisturbed = uvloop.run(self._undisturbed(deployment.url))
                    say(f"undisturbed: {len(undisturbed)} answers")
                kill = self._until_kill(deployment.url, batch_id, number)
                batch_id, num_before = uvloop.run(kill)
                kill_at_once(deployment)
            say(f"killed all processes after {num_before} answers")
        assert batch_id is not None
        with _kept_in(store) as deployment:
            disturbed = uvloop.run(_rest(deployment.url, batch_id))
        return Killed(self.requests, undisturbed, disturbed, num_before)

    async def _undisturbed(self, url: str) -> Texts:
        async with batch_server(url) as server:
            return await server.complete(self.lines_of("file", self.requests, server.model))

    async def _until_kill(self, url: str, batch_id: str | None, number: int) -> tuple[str, int]:
        """Runs the batch until the next kill is due. Returns the batch's id and the number of its
        answers.
        """
        async with batch_server(url) as server:
            if batch_id is None:
                lines = self.lines_of("file", self.requests, server.model)
                batch_id = await server.submit(lines)
            share = (number + 1) / (self.kills + 1)
            return batch_id, await server.answers(batch_id, round(share * self.requests))


@contextmanager
def _kept_in(store: Path) -> Iterator[ServedDeployment]:
    """Starts a deployment that keeps its batches in a file."""
    with serving(MODEL, OPTIONS, {"BATON_GATEWAY__STORE": str(store)}) as deployment:
        yield deployment


async def _rest(url: str, batch_id: str) -> Texts:
    async with batch_server(url) as server:
        return await server.texts(await server.ended(batch_id))

"""What batches cost clients, and whether kills lose or repeat a result.

Two parts, each with a deployment of its own that keeps its batches in a file:

    beside    windows of clients' requests, in turn with and without a batch. A window with a batch
              begins with a file of its share of the requests. After it the batch is waited for.
    killed    all requests as one file, undisturbed and then again. The second time every process is
              killed with SIGKILL, as often as asked, and the deployment is started again.

Clients send at random times, as a Poisson process. A pair of windows has the same times and other
prompts. Prompts of batches are short and their answers a few tokens long, so that ten thousand take
minutes on a laptop. Each line has its own seed, so both files of the second part have the same
answers.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, ClassVar, Self

import typer
import uvloop

from bench.client.answers import Endpoint, request_body
from bench.client.arrivals import arrival_times_s
from bench.common.background import BusyWatch
from bench.common.progress import Say
from bench.common.prompts import PromptShape, text_prompts
from bench.lab.batches.api import ENDPOINT, BatchServer, Texts, batch_server
from bench.lab.batches.figures import (
    WITH,
    WITHOUT,
    BatchesMeasured,
    Killed,
    Window,
    results,
    warnings,
)
from bench.lab.experiment import Experiment, Findings
from bench.processes.serving import ServedDeployment, kill_at_once, serving
from bench.serve.run import run_open_loop
from engine.clock import MonotonicClock, unix_time_s

MODEL = Path(__file__).parents[3] / "engine" / "model" / "bundled" / "target"
OPTIONS = {"--mixed": 1, "--threads": 1}
INPUT_LEN, OUTPUT_LEN = 48, 16  # words of a client's prompt, tokens of its answer
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
        """Returns the line above the table."""
        return f"clients beside {self.requests:,} requests of batches"

    def quick(self) -> Self:
        """Returns a study under a minute."""
        return replace(self, requests=200, pairs=1, window_s=4.0, kills=min(self.kills, 1))

    @property
    def num_of_window(self) -> int:
        """Returns the requests of the batch of one window."""
        return -(-self.requests // self.pairs)

    def order_of(self, pair: int) -> tuple[str, str]:
        """Returns the windows of a pair, in their order, which changes with each pair."""
        return (WITH, WITHOUT) if (pair + self.seed) % 2 else (WITHOUT, WITH)

    def due_times_s(self, pair: int) -> list[float]:
        """Returns when clients send, in seconds from the start of a window."""
        number = max(round(self.rate * self.window_s), 1)
        rng = Random(f"{self.seed}/{pair}/arrivals")
        return arrival_times_s(self.rate, number, burstiness=1.0, rng=rng)

    def lines_of(self, name: str, number: int, model: str) -> list[dict[str, Any]]:
        """Returns the lines of one input file."""
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
        """Raises ServerFailed, ServerUnreachable and BatchNotCompleted."""
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
        """Sends the requests of one window. Returns it, and the id of its batch."""
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
            batch_id = await server.begin(
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
        """Runs all requests as one file, and again with kills."""
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
        """Runs the batch up to the next kill. Returns its id and the number of its answers."""
        async with batch_server(url) as server:
            if batch_id is None:
                lines = self.lines_of("file", self.requests, server.model)
                batch_id = await server.begin(lines)
            share = (number + 1) / (self.kills + 1)
            return batch_id, await server.answers(batch_id, round(share * self.requests))


@contextmanager
def _kept_in(store: Path) -> Iterator[ServedDeployment]:
    """A deployment with its batches in a file."""
    with serving(MODEL, OPTIONS, {"BATON_GATEWAY__STORE": str(store)}) as deployment:
        yield deployment


async def _rest(url: str, batch_id: str) -> Texts:
    async with batch_server(url) as server:
        return await server.texts(await server.ended(batch_id))

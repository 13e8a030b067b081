"""Runs `bench batches` on real deployments, over HTTP."""

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from bench.batches.plan import (
    ENDPOINT,
    WITH,
    BesidePlan,
    client_prompts,
    due_times_s,
    lines_of,
    order_of,
)
from bench.batches.results import BatchesMeasured, Killed, Texts, Window
from bench.client.answers import Endpoint, request_body
from bench.client.http import http_session
from bench.common.background import BusyWatch
from bench.common.progress import Say, say_nothing
from bench.common.waiting import holds_within
from bench.processes.serving import ServedDeployment, kill_at_once, serving
from bench.serve.plan import ServeTarget
from bench.serve.run import ServeClient, run_open_loop
from deploy.base.defaults import BUNDLED_MODEL
from engine.clock import MonotonicClock, unix_time_s
from engine.errors import BatonError

OPTIONS = {"--mixed": 1, "--threads": 1}
REQUEST_TIMEOUT_S = 60.0
BATCH_TIMEOUT_S = 3600.0
ENDED = ("completed", "failed", "expired", "cancelled")
PAUSES = "baton_batch_pauses_total "


class BatchNotCompleted(BatonError):
    """A batch ended in another way, or not at all."""


def measure(plan: BesidePlan, say: Say = say_nothing) -> BatchesMeasured:
    """Carries out the plan. Raises ServerFailed, ServerUnreachable, BatchNotCompleted."""
    with tempfile.TemporaryDirectory() as directory:
        with _kept_in(Path(directory) / "beside.sqlite") as deployment:
            busy = BusyWatch(lambda: [deployment.pid, *deployment.sessions(), os.getsid(0)])
            windows, texts, num_pauses = uvloop.run(_beside(plan, deployment, busy, say))
        killed = _killed(plan, Path(directory) / "killed.sqlite", say) if plan.num_kills else None
    return BatchesMeasured(windows, texts, num_pauses, killed, tuple(busy.shares))


@contextmanager
def _kept_in(store: Path) -> Iterator[ServedDeployment]:
    """A deployment with its batches in a file."""
    with serving(BUNDLED_MODEL, OPTIONS, {"BATON_GATEWAY__STORE": str(store)}) as deployment:
        yield deployment


# ---------------------------------------------------------------- beside clients


async def _beside(
    plan: BesidePlan, deployment: ServedDeployment, busy: BusyWatch, say: Say
) -> tuple[tuple[Window, ...], Texts, float]:
    windows: list[Window] = []
    texts: list[tuple[str, str]] = []
    async with http_session(REQUEST_TIMEOUT_S) as session:
        client = ServeClient(session, ServeTarget(deployment.url), MonotonicClock())
        server = _Server(session, deployment.url, await client.first_model())
        await server.complete(plan, "warm-up", 64)
        await _window(plan, client, server, which="warm-up", pair=-1)
        for pair in range(plan.num_pairs):
            with busy.repetition():
                for which in order_of(plan, pair):
                    window, batch_id = await _window(plan, client, server, which=which, pair=pair)
                    windows.append(window)
                    if batch_id is not None:
                        texts += await server.texts(await server.ended(batch_id))
                        num, rate = window.num_answered, window.num_answered / plan.window_s
                        say(f"window {pair + 1}: {num} beside clients, {rate:.0f}/s")
        return tuple(windows), texts, await server.num_pauses()


async def _window(
    plan: BesidePlan, client: ServeClient, server: "_Server", *, which: str, pair: int
) -> tuple[Window, str | None]:
    """Sends the requests of one window. Returns it, and the id of its batch."""
    clock = MonotonicClock()
    due_s = due_times_s(plan, pair)
    bodies = [
        request_body(
            Endpoint.COMPLETIONS,
            prompt,
            model=server.model,
            output_len=plan.output_len,
            temperature=0.0,
        )
        for prompt in client_prompts(plan, pair, which, len(due_s))
    ]
    batch_id = None
    if which == WITH:
        batch_id = await server.begin(plan, f"window-{pair}", plan.num_of_window)
        await server.answers(batch_id, 1)
    begun_s, num_before = unix_time_s(), await server.num_answered(batch_id)
    load = await run_open_loop(client.send, bodies, due_s, clock=clock)
    if batch_id is None:
        return Window(which, pair, load), None
    num_answered = await server.num_answered(batch_id) - num_before
    ended_s = (await server.batch(batch_id)).completed_at
    active_s = load.duration_s
    if ended_s is not None:
        active_s = min(max(float(ended_s - begun_s), 0.0), active_s)
    return Window(which, pair, load, num_answered, active_s), batch_id


# ---------------------------------------------------------------- killed


def _killed(plan: BesidePlan, store: Path, say: Say) -> Killed:
    with _kept_in(store) as deployment:
        undisturbed = uvloop.run(_undisturbed(plan, deployment.url))
        say(f"undisturbed: {len(undisturbed)} answers")
        batch_id, num_before = uvloop.run(_until_kill(plan, deployment.url, None, 0))
        kill_at_once(deployment)
    for number in range(1, plan.num_kills):
        say(f"killed all processes after {num_before} answers")
        with _kept_in(store) as deployment:
            batch_id, num_before = uvloop.run(_until_kill(plan, deployment.url, batch_id, number))
            kill_at_once(deployment)
    say(f"killed all processes after {num_before} answers")
    with _kept_in(store) as deployment:
        disturbed = uvloop.run(_rest(deployment.url, batch_id))
    return Killed(undisturbed, disturbed, num_before)


async def _undisturbed(plan: BesidePlan, url: str) -> Texts:
    async with _connected(url) as server:
        return await server.complete(plan, "file", plan.num_requests)


async def _until_kill(
    plan: BesidePlan, url: str, batch_id: str | None, number: int
) -> tuple[str, int]:
    """Runs the batch up to the next kill. Returns its id and the number of its answers."""
    async with _connected(url) as server:
        batch_id = batch_id or await server.begin(plan, "file", plan.num_requests)
        share = (number + 1) / (plan.num_kills + 1)
        return batch_id, await server.answers(batch_id, round(share * plan.num_requests))


async def _rest(url: str, batch_id: str) -> Texts:
    async with _connected(url) as server:
        return await server.texts(await server.ended(batch_id))


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator["_Server"]:
    async with http_session(REQUEST_TIMEOUT_S) as session:
        client = ServeClient(session, ServeTarget(url), MonotonicClock())
        yield _Server(session, url, await client.first_model())


# ---------------------------------------------------------------- the API


class _Counts(msgspec.Struct):
    completed: int
    failed: int


class _Batch(msgspec.Struct):
    id: str
    status: str
    completed_at: int | None
    request_counts: _Counts
    output_file_id: str | None
    error_file_id: str | None


class _File(msgspec.Struct):
    id: str


class _Choice(msgspec.Struct):
    text: str


class _Body(msgspec.Struct):
    choices: list[_Choice]


class _Response(msgspec.Struct):
    body: _Body


class _Result(msgspec.Struct):
    custom_id: str
    response: _Response


class _Server:
    """Files and batches of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self.model = model

    async def begin(self, plan: BesidePlan, name: str, number: int) -> str:
        """Uploads a file and makes a batch of it. Returns its id."""
        lines = [msgspec.json.encode(line) for line in lines_of(plan, name, number, self.model)]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"\n".join(lines), filename=f"{name}.jsonl")
        async with self._session.post(f"{self._url}/v1/files", data=form) as reply:
            reply.raise_for_status()
            file = msgspec.json.decode(await reply.read(), type=_File)
        fields = {
            "input_file_id": file.id,
            "endpoint": ENDPOINT,
            "completion_window": "24h",
        }
        async with self._session.post(f"{self._url}/v1/batches", json=fields) as reply:
            reply.raise_for_status()
            return msgspec.json.decode(await reply.read(), type=_Batch).id

    async def batch(self, batch_id: str) -> _Batch:
        """A batch as it is now."""
        return msgspec.json.decode(await self._get(f"/v1/batches/{batch_id}"), type=_Batch)

    async def num_answered(self, batch_id: str | None) -> int:
        """Requests of a batch that have a result; 0 without a batch."""
        if batch_id is None:
            return 0
        counts = (await self.batch(batch_id)).request_counts
        return counts.completed + counts.failed

    async def answers(self, batch_id: str, number: int) -> int:
        """Waits until a batch has so many results. Returns their number."""
        found = 0

        async def is_there() -> bool:
            nonlocal found
            found = await self.num_answered(batch_id)
            return found >= number

        await _wait(is_there, f"{batch_id} has {number} answers")
        return found

    async def ended(self, batch_id: str) -> _Batch:
        """Waits for the end of a batch. Raises BatchNotCompleted."""

        async def is_over() -> bool:
            return (await self.batch(batch_id)).status in ENDED

        await _wait(is_over, f"{batch_id} is over")
        batch = await self.batch(batch_id)
        if batch.status != "completed":
            raise BatchNotCompleted(f"{batch_id} is {batch.status}")
        return batch

    async def texts(self, batch: _Batch) -> Texts:
        """The answers of a batch. Raises BatchNotCompleted if a request has an error."""
        if batch.error_file_id is not None or batch.output_file_id is None:
            raise BatchNotCompleted(f"{batch.id}: {batch.request_counts.failed} requests failed")
        data = await self._get(f"/v1/files/{batch.output_file_id}/content")
        lines = [msgspec.json.decode(line, type=_Result) for line in data.splitlines()]
        return [(line.custom_id, line.response.body.choices[0].text) for line in lines]

    async def complete(self, plan: BesidePlan, name: str, number: int) -> Texts:
        """Runs a batch to its end. Returns its answers."""
        return await self.texts(await self.ended(await self.begin(plan, name, number)))

    async def num_pauses(self) -> float:
        """Times that requests of batches stepped aside so far."""
        text = (await self._get("/metrics")).decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(PAUSES))

    async def _get(self, path: str) -> bytes:
        async with self._session.get(f"{self._url}{path}") as reply:
            reply.raise_for_status()
            return await reply.read()


async def _wait(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Raises BatchNotCompleted if it does not hold in time."""
    if not await holds_within(holds, BATCH_TIMEOUT_S, MonotonicClock()):
        raise BatchNotCompleted(f"not in {BATCH_TIMEOUT_S:g} s: {what}")

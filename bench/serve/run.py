"""The shell of `bench serve`: sends a plan's requests to a server and reads the answers.

This is an open loop. Due times are fixed before the first request. No request waits for another,
except for a slot under a concurrency limit. If the client is late it sends at once and records its
lateness. In a closed loop a slow server would slow its own load and look better than it is: Gil
Tene's "coordinated omission".

Bodies are encoded before the clock starts. A piece of an answer gets its time when the event loop
delivers it, before parsing.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from bench.client.answers import Answer, AnswerReader, Failure, request_body
from bench.client.http import http_session
from bench.client.load import LoadRun, RequestOutcome, RequestsFailed
from bench.common.prompts import Prompt, plain_token_ids
from bench.serve.plan import ServePlan, ServeTarget, base_url, due_times_s, prompts
from engine.clock import Clock, MonotonicClock
from engine.errors import BatonError

Send = Callable[[bytes], Coroutine[Any, Any, Answer | Failure]]


class ServerUnreachable(BatonError):
    """The server does not answer, or is not OpenAI-compatible."""

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(f"no OpenAI-compatible server at {url}: {detail}")


@dataclass(frozen=True, slots=True)
class ServeMeasured:
    """The runs, and the model that they measured."""

    model: str
    runs: tuple[LoadRun, ...]


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class ServeClient:
    """A client of one server, which keeps and reuses its HTTP connections."""

    def __init__(self, session: aiohttp.ClientSession, target: ServeTarget, clock: Clock) -> None:
        self._session = session
        self._url = base_url(target.url)
        self._path = target.endpoint.path
        self._clock = clock
        self._headers = {"Content-Type": "application/json", "X-Baton-Timeline": "1"}
        if target.api_key:
            self._headers["Authorization"] = f"Bearer {target.api_key}"

    async def first_model(self) -> str:
        """The first model that the server lists."""
        try:
            async with self._session.get(
                f"{self._url}/v1/models", headers=self._headers
            ) as response:
                response.raise_for_status()
                models = msgspec.json.decode(await response.read(), type=_ModelList)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise ServerUnreachable(self._url, _said(error)) from error
        if not models.data:
            raise ServerUnreachable(self._url, "it lists no model")
        return models.data[0].id

    async def send(self, body: bytes) -> Answer | Failure:
        """Sends one request and reads its answer to the end."""
        reader = AnswerReader(sent_s=self._clock.now_s())
        begun = False
        try:
            async with self._session.post(
                f"{self._url}{self._path}", data=body, headers=self._headers
            ) as response:
                begun = True
                if response.status != 200:
                    said = (await response.text(errors="replace"))[:200]
                    return Failure(f"http_{response.status}", " ".join(said.split()))
                async for piece in response.content.iter_any():
                    reader.feed(piece, self._clock.now_s())
        except TimeoutError:
            return Failure("timeout", "began, did not end" if begun else "no response")
        except aiohttp.ClientError as error:
            return Failure("truncated" if begun else "connection", _said(error))
        return reader.finish()


async def measure(plan: ServePlan, clock: Clock | None = None) -> ServeMeasured:
    """Warms the server up and runs every repetition of the plan.

    Raises ServerUnreachable. Raises RequestsFailed if no request of the warm-up or of all
    repetitions was answered. Other failures are results.
    """
    clock = clock or MonotonicClock()
    vocab = plain_token_ids(plan.ask.tokenizer_dir) if plan.ask.tokenizer_dir else None
    warmup, repeats = prompts(plan, vocab)
    due_s = due_times_s(plan)
    async with http_session(plan.target.timeout_s) as session:
        client = ServeClient(session, plan.target, clock)
        model = plan.target.model or await client.first_model()
        await _warm_up(client.send, _bodies(plan, model, warmup))
        limit = plan.load.concurrency_limit
        runs = [
            await run_open_loop(
                client.send, _bodies(plan, model, own), due_s, clock=clock, concurrency_limit=limit
            )
            for own in repeats
        ]
    if not any(run.answers for run in runs):
        failures = [failure for run in runs for failure in run.failures]
        raise RequestsFailed(f"all {len(failures)} requests", failures)
    return ServeMeasured(model=model, runs=tuple(runs))


async def run_open_loop(
    send: Send,
    bodies: Sequence[bytes],
    due_s: Sequence[float],
    *,
    clock: Clock,
    concurrency_limit: int | None = None,
) -> LoadRun:
    """Sends each body at its due time, counted from now, and waits for all answers."""
    slots: AbstractAsyncContextManager[object] = (
        nullcontext() if concurrency_limit is None else asyncio.Semaphore(concurrency_limit)
    )

    async def one(body: bytes, due_at_s: float) -> RequestOutcome:
        ready_s = clock.now_s()
        async with slots:
            slot_wait_s = None if concurrency_limit is None else clock.now_s() - ready_s
            result = await send(body)
        return RequestOutcome(
            send_lag_s=max(0.0, ready_s - due_at_s), slot_wait_s=slot_wait_s, result=result
        )

    start_s = clock.now_s()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, after_s in zip(bodies, due_s, strict=True):
            due_at_s = start_s + after_s
            delay_s = max(0.0, due_at_s - clock.now_s())
            await asyncio.sleep(delay_s)  # noqa: TID251 (an arrival is an event of the clock)
            tasks.append(group.create_task(one(body, due_at_s)))
    duration_s = clock.now_s() - start_s
    return LoadRun(duration_s=duration_s, outcomes=tuple(task.result() for task in tasks))


async def _warm_up(send: Send, bodies: Sequence[bytes]) -> None:
    results = await asyncio.gather(*(send(body) for body in bodies))
    failures = [result for result in results if isinstance(result, Failure)]
    if failures and len(failures) == len(results):
        raise RequestsFailed(f"all {len(failures)} warm-up requests", failures)


def _bodies(plan: ServePlan, model: str, prompts: Sequence[Prompt]) -> list[bytes]:
    ask = plan.ask
    return [
        request_body(
            plan.target.endpoint,
            prompt,
            model=model,
            output_len=ask.output_len,
            temperature=ask.temperature,
        )
        for prompt in prompts
    ]


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

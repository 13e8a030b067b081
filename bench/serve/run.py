"""The I/O of `bench serve`: sends a plan's sessions to a server and reads the answers.

In an open loop, due times are fixed before the first request. A request waits only for the earlier
turns of its own session, and for a slot if there is a concurrency limit. If the client is late, it
sends the request at once and records its lateness. In a closed loop, a slow server gets requests
more slowly, so its latencies look better than under a fixed rate (Gil Tene's "coordinated
omission"). A closed loop only measures the service for a fixed number of clients.

Bodies of first turns are encoded before the clock starts. The arrival time of a piece is taken when
the event loop delivers it, before parsing.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator, MutableSequence, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from bench.client.answers import Answer, AnswerReader, Failure, request_body
from bench.client.load import ClientCost, LoadRun, RequestOutcome, RequestsFailed, SloBounds, meets
from bench.client.stream import http_session
from bench.common.prompts import Messages, Prompt, plain_token_ids
from bench.serve.lengths import Conversation, Session, SessionTurn
from bench.serve.plan import ServePlan, ServeTarget, base_url, repetition, warmup_sessions
from engine.clock import Clock, MonotonicClock
from engine.errors import BatonError

Send = Callable[[bytes], Coroutine[Any, Any, Answer | Failure]]
NUM_COUNTS = 6
BEGUN, ENDED, FAILED, TOKENS, TTFT_S, WITHIN = range(NUM_COUNTS)


class ServerUnreachable(BatonError):
    """The server does not answer, or is not OpenAI-compatible."""

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(f"no OpenAI-compatible server at {url}: {detail}")


class Tally:
    """Counts of one client process, for the progress of its load.

    Processes share their counts without a lock. Each process writes only its own array, and readers
    may see slightly outdated counts.
    """

    def __init__(
        self, counts: MutableSequence[float] | None = None, slo: SloBounds | None = None
    ) -> None:
        self._counts = [0.0] * NUM_COUNTS if counts is None else counts
        self._slo = slo or SloBounds()

    def submitted(self) -> None:
        """Counts a request that is about to be sent."""
        self._counts[BEGUN] += 1

    def ended(self, outcome: RequestOutcome) -> None:
        """Counts the end of a request by its result."""
        result = outcome.result
        self._counts[ENDED] += 1
        if isinstance(result, Answer):
            self._counts[TOKENS] += result.num_output_tokens
            self._counts[TTFT_S] += result.ttft_s + outcome.delay_s
            self._counts[WITHIN] += meets(result, self._slo, delay_s=outcome.delay_s)
        else:
            self._counts[FAILED] += 1


def told(counts: Sequence[float], slo: SloBounds | None = None) -> str:
    """Returns one line with the counts of all processes, summed."""
    ended = counts[ENDED]
    answered = ended - counts[FAILED]
    mean_ms = counts[TTFT_S] / answered * 1e3 if answered else 0.0
    parts = [
        f"{counts[BEGUN] - ended:.0f} in flight",
        f"{counts[FAILED]:.0f} failed" if counts[FAILED] else "",
        f"TTFT {mean_ms:.0f} ms",
        f"{counts[WITHIN] / ended:.0%} in bounds" if slo and ended else "",
        f"{counts[TOKENS]:.0f} tokens",
    ]
    return " · ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class ServeMeasured:
    """All runs of a plan, and the name of the measured model."""

    model: str
    runs: tuple[LoadRun, ...]


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class ServeClient:
    """A client of one server, which keeps and reuses its HTTP connections."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        target: ServeTarget,
        clock: Clock,
        *,
        keeps_text: bool = False,
    ) -> None:
        self._session = session
        self._keeps_text = keeps_text
        self._url = base_url(target.url)
        self._path = target.endpoint.path
        self._clock = clock
        self._headers = {"Content-Type": "application/json", "X-Baton-Timeline": "1"}
        if target.api_key:
            self._headers["Authorization"] = f"Bearer {target.api_key}"

    async def first_model(self) -> str:
        """Returns the first model that the server lists."""
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
        """Sends one request and reads its answer completely."""
        reader = AnswerReader(self._clock.now_s(), keeps_text=self._keeps_text)
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


class SessionRunner:
    """Plays sessions of one plan on one server."""

    def __init__(
        self, send: Send, plan: ServePlan, model: str, clock: Clock, tally: Tally | None = None
    ) -> None:
        self._send = send
        self._plan = plan
        self._model = model
        self._clock = clock
        self._tally = tally or Tally()
        limit = plan.load.concurrency_limit
        self._slots = _slots(limit)
        self._is_limited = limit is not None

    async def play(self, sessions: Sequence[Session], start_s: float | None = None) -> LoadRun:
        """Plays all sessions completely. `start_s` is the moment of the load's time 0."""
        ready = [(session, self._first(session)) for session in sessions]
        start_s = self._clock.now_s() if start_s is None else start_s
        await _sleep_until(start_s, self._clock)
        cpu_s = time.process_time()
        if self._plan.load.clients is None:
            outcomes = await self._open_loop(ready, start_s)
        else:
            outcomes = await self._closed_loop(ready, start_s, self._plan.load.clients)
        cost = ClientCost(time.process_time() - cpu_s, os.cpu_count() or 1)
        return LoadRun(self._clock.now_s() - start_s, tuple(outcomes), cost)

    def _first(self, session: Session) -> bytes | None:
        """Returns the encoded body of the only turn. Bodies of sessions with history are encoded
        later, turn by turn.
        """
        if session.has_history:
            return None
        [turn] = session.turns
        return self._body(Conversation(self._plan.target.endpoint).prompt(turn), turn)

    async def _open_loop(
        self, ready: Sequence[tuple[Session, bytes | None]], start_s: float
    ) -> list[RequestOutcome]:
        tasks = []
        async with asyncio.TaskGroup() as group:
            for session, body in ready:
                due_s = start_s + (session.due_s or 0.0)
                await _sleep_until(due_s, self._clock)
                tasks.append(group.create_task(self._session(session, body, due_s, start_s)))
        return [outcome for task in tasks for outcome in task.result()]

    async def _closed_loop(
        self, ready: Sequence[tuple[Session, bytes | None]], start_s: float, num_clients: int
    ) -> list[RequestOutcome]:
        waiting: Iterator[tuple[Session, bytes | None]] = iter(ready)

        async def client() -> list[RequestOutcome]:
            outcomes: list[RequestOutcome] = []
            # all clients share this iterator, so each takes the next session
            for session, body in waiting:
                due_s = self._clock.now_s()
                outcomes += await self._session(session, body, due_s, start_s)
            return outcomes

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client()) for _ in range(num_clients)]
        return [outcome for task in tasks for outcome in task.result()]

    async def _session(
        self, session: Session, body: bytes | None, due_s: float, start_s: float
    ) -> list[RequestOutcome]:
        """Plays one session. A failed request ends it."""
        talk = Conversation(self._plan.target.endpoint)
        outcomes: list[RequestOutcome] = []
        for number, turn in enumerate(session.turns):
            if number:
                due_s = self._clock.now_s() + turn.pause_s
                await _sleep_until(due_s, self._clock)
            ready_s = self._clock.now_s()
            this = body or self._body(talk.prompt(turn), turn)
            self._tally.submitted()
            outcome = await _send_one(
                self._send, this, due_s, ready_s, self._slots, self._clock, self._is_limited
            )
            self._tally.ended(outcome)
            outcomes.append(
                replace(outcome, due_s=due_s - start_s, session=session.number, turn=number)
            )
            if isinstance(outcome.result, Failure):
                break
            talk.answered(turn, outcome.result.said)
        return outcomes

    def _body(self, prompt: Prompt | Messages, turn: SessionTurn) -> bytes:
        return request_body(
            self._plan.target.endpoint,
            prompt,
            model=self._model,
            output_len=turn.output_len,
            temperature=self._plan.ask.temperature,
        )


async def measure(
    plan: ServePlan, clock: Clock | None = None, tally: Tally | None = None
) -> ServeMeasured:
    """Warms up the server and runs all repetitions of the plan in this process.

    Raises ServerUnreachable. Raises RequestsFailed if no request of the warm-up, or no request of
    all repetitions, was answered. Other failures are part of the results.
    """
    clock = clock or MonotonicClock()
    model = await prepare(plan, clock)
    runs = [
        await play_repetition(plan, number, model=model, clock=clock, tally=tally)
        for number in range(plan.load.num_repeats)
    ]
    return measured_of(model, runs)


def measured_of(model: str, runs: Sequence[LoadRun]) -> ServeMeasured:
    """Joins the runs of all repetitions. Raises RequestsFailed if no request was answered."""
    if not any(run.answers for run in runs):
        failures = [failure for run in runs for failure in run.failures]
        raise RequestsFailed(f"all {len(failures)} requests", failures)
    return ServeMeasured(model=model, runs=tuple(runs))


async def prepare(plan: ServePlan, clock: Clock) -> str:
    """Warms up the server. Returns the name of its model."""
    async with http_session(plan.target.timeout_s) as session:
        client = ServeClient(session, plan.target, clock)
        model = plan.target.model or await client.first_model()
        runner = SessionRunner(client.send, _without_limits(plan), model, clock)
        warmup = warmup_sessions(plan, vocab_of(plan))
        run = await runner.play([replace(one, due_s=0.0) for one in warmup])
    if run.failures and not run.answers:
        raise RequestsFailed(f"all {len(run.failures)} warm-up requests", run.failures)
    return model


async def play_repetition(  # noqa: PLR0913 (what to play, where, and which part of it)
    plan: ServePlan,
    number: int,
    *,
    model: str,
    clock: Clock,
    tally: Tally | None = None,
    share: slice = slice(None),
    start_s: Callable[[], float] | None = None,
) -> LoadRun:
    """Plays one repetition, or one process's share of its sessions.

    `start_s` is called when everything is prepared, and returns the moment of the load's time 0.
    """
    sessions = repetition(plan, vocab_of(plan), number)[share]
    keeps_text = any(session.has_history for session in sessions)
    async with http_session(plan.target.timeout_s) as session:
        client = ServeClient(session, plan.target, clock, keeps_text=keeps_text)
        runner = SessionRunner(client.send, plan, model, clock, tally)
        return await runner.play(sessions, start_s() if start_s else None)


def vocab_of(plan: ServePlan) -> list[int] | None:
    """Returns the token ids from which prompts are drawn; None for prompts of words."""
    return plain_token_ids(plan.ask.tokenizer_dir) if plan.ask.tokenizer_dir else None


def _without_limits(plan: ServePlan) -> ServePlan:
    return replace(plan, load=replace(plan.load, clients=None, concurrency_limit=None))


async def run_open_loop(
    send: Send,
    bodies: Sequence[bytes],
    due_s: Sequence[float],
    *,
    clock: Clock,
    concurrency_limit: int | None = None,
) -> LoadRun:
    """Sends each body at its due time, counted from now, and waits for all answers."""
    slots = _slots(concurrency_limit)
    is_limited = concurrency_limit is not None

    async def one(body: bytes, due_at_s: float) -> RequestOutcome:
        outcome = await _send_one(send, body, due_at_s, clock.now_s(), slots, clock, is_limited)
        return replace(outcome, due_s=due_at_s - start_s)

    start_s = clock.now_s()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for body, after_s in zip(bodies, due_s, strict=True):
            due_at_s = start_s + after_s
            await _sleep_until(due_at_s, clock)
            tasks.append(group.create_task(one(body, due_at_s)))
    duration_s = clock.now_s() - start_s
    return LoadRun(duration_s=duration_s, outcomes=tuple(task.result() for task in tasks))


def _slots(limit: int | None) -> AbstractAsyncContextManager[object]:
    return nullcontext() if limit is None else asyncio.Semaphore(limit)


async def _send_one(  # noqa: PLR0913 (the moment, the wait and the way of one request)
    send: Send,
    body: bytes,
    due_at_s: float,
    ready_s: float,
    slots: AbstractAsyncContextManager[object],
    clock: Clock,
    is_limited: bool,  # noqa: FBT001
) -> RequestOutcome:
    async with slots:
        slot_wait_s = clock.now_s() - ready_s if is_limited else None
        result = await send(body)
    return RequestOutcome(
        send_lag_s=max(0.0, ready_s - due_at_s), slot_wait_s=slot_wait_s, result=result
    )


async def _sleep_until(at_s: float, clock: Clock) -> None:
    """Sleeps until a given time. Yields to the event loop at least once, even if the time has
    passed.
    """
    delay_s = max(0.0, at_s - clock.now_s())
    await asyncio.sleep(delay_s)  # noqa: TID251 (an arrival is an event of the clock)


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

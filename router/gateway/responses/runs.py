"""Responses that run in the background of this gateway process.

The table of responses is authoritative. One task per process writes new events into the table, and
renews the leases of running responses. The task also stops runs whose responses were cancelled or
deleted, perhaps by another process. The result of a run is stored only if the response is still
alive in the table.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from contextvars import Context
from typing import Any

import msgspec

from engine.clock import unix_time_s
from engine.errors import InvalidRequest
from router.gateway.answering import AnswerService
from router.gateway.answers.choice import AnswerPiece
from router.gateway.answers.writing import AnswerWriter, Ending, Heading
from router.gateway.metrics.meters import GatewayMetrics, RequestMeter
from router.gateway.requests.calls import ApiCall
from router.gateway.responses.draft import Event, ResponseDraft, encode_events, event_parts
from router.gateway.responses.store import LEASE_S, ResponseSaver, ResponseStore
from router.gateway.responses.table import KeptEvent, KeptResponse, NewResponse
from router.inbox.api_errors import ApiError
from router.inbox.fair_queue import Turn, no_turn
from router.inbox.json_parts import joined_in_turns

log = logging.getLogger(__name__)

BACKGROUND_TIMEOUT_S = 3600.0  # timeout of a call that sets no timeout
FLUSH_S = 0.1  # maximum seconds until other processes can read an event
RENEW_S = LEASE_S / 8
POLL_S = 0.25  # seconds between reads of a response that another process makes
FINISH_ATTEMPTS = 3
STOP_TIMEOUT_S = 10.0  # maximum seconds to store the ends of runs


class BackgroundRun(AnswerWriter):
    """Collects the answer of one background call for the table.

    The future `checked` is done when the call was checked. Its result is the first state to be
    stored; its exception is the error of the check. No client waits for pieces, so pieces are never
    delayed. Events are encoded only if the response can be streamed.
    """

    def __init__(
        self,
        id: str,
        saver: ResponseSaver,
        new_draft: Callable[[Heading], ResponseDraft],
        *,
        has_events: bool,
    ) -> None:
        self.id = id
        self._saver = saver
        self.has_events = has_events
        self.checked: asyncio.Future[NewResponse] = asyncio.get_running_loop().create_future()
        self.is_kept = asyncio.Event()  # set once the response is stored
        self.changed = asyncio.Event()  # set when new events were stored
        self.events: list[KeptEvent] = []  # events that are not stored yet
        self.task: asyncio.Task[None] | None = None
        self.draft: ResponseDraft | None = None
        self.headers: dict[str, str] = {}
        self._new_draft = new_draft
        self._turn: Turn = no_turn  # the turns of the call, set by `open`
        self._has_begun = False

    @property
    def status(self) -> str:
        """The status of the response: "queued" or "in_progress"."""
        return "in_progress" if self._has_begun else "queued"

    def notify(self) -> None:
        """Wakes the tasks that wait for new events."""
        self.changed.set()
        self.changed = asyncio.Event()

    def close(self) -> None:
        """Records that the run has ended."""
        self.changed.set()
        if not self.checked.done():
            self.checked.cancel()
        elif not self.checked.cancelled():
            self.checked.exception()  # marks the exception as read

    def record(self, events: list[Event]) -> None:
        """Keeps events until the next write to the table."""
        if self.has_events:
            self.events += [
                KeptEvent(event["sequence_number"], encode_events([event])) for event in events
            ]

    async def record_long(self, events: list[Event]) -> None:
        """Keeps events that may be long, until the next write to the table.

        Each event is encoded in turns of the call's tenant.
        """
        for event in events if self.has_events else ():
            data = await joined_in_turns(event_parts(event), self._turn)
            self.events.append(KeptEvent(event["sequence_number"], data))

    def refuse(self, error: InvalidRequest) -> None:
        """Passes the error to the task that waits for `checked`."""
        if not self.checked.done():
            self.checked.set_exception(error)

    def open(self, heading: Heading) -> "BackgroundRun":
        """Makes the first state of the response, and passes it to the task that waits for
        `checked`.
        """
        self.draft = self._new_draft(heading)
        self.headers = heading.headers
        self._turn = heading.turn
        self.record(self.draft.queue())
        if not self.checked.done():
            self.checked.set_result(self._saver.record(self.draft))
        return self

    def write(self, piece: AnswerPiece) -> None:
        """Keeps the events of the piece."""
        self.record(self._begun().append(piece))

    async def end(self, ending: Ending) -> None:
        """Keeps the events at the end of the answer."""
        assert self.draft is not None
        await self.record_long(self.draft.finish(ending, unix_time_s()))

    def _begun(self) -> ResponseDraft:
        assert self.draft is not None
        if not self._has_begun:
            self._has_begun = True
            self.record(self.draft.start())
        return self.draft


class BackgroundRuns:
    """All runs of this process. The task that writes events runs only while there are runs."""

    def __init__(self, service: AnswerService, store: ResponseStore, metrics: GatewayMetrics):
        self._service = service
        self._store = store
        self._metrics = metrics
        self._runs: dict[str, BackgroundRun] = {}
        self._turn = asyncio.Lock()  # held while a task writes events
        self._writer: asyncio.Task[None] | None = None
        self._is_closing = False
        self._stops_draining = asyncio.Event()

    def __len__(self) -> int:
        return len(self._runs)

    async def start(self, call: ApiCall, run: BackgroundRun, meter: RequestMeter) -> dict[str, Any]:
        """Starts a call, and waits for its check.

        Returns the queued response. Raises InvalidRequest.
        """
        if self._is_closing:
            raise ApiError("the server is stopping", code="server_shutdown", status=503)
        most = self._store.config.max_background_responses
        if len(self._runs) >= most:
            message = f"{most} responses run in the background already: try again"
            raise ApiError(message, code="overloaded", status=503)
        if call.timeout_s is None:
            call = msgspec.structs.replace(call, timeout_s=BACKGROUND_TIMEOUT_S)
        meter.is_detached = True
        self._runs[run.id] = run
        run.task = asyncio.create_task(self._go(call, run, meter))
        try:
            begun = await run.checked
            await self._store.start(begun, has_events=run.has_events)
        except BaseException:
            run.task.cancel()
            del run  # its error has a traceback with this frame
            raise
        run.is_kept.set()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), context=Context())
        return {**begun.fields, "output": []}

    def stop(self, id: str) -> None:
        """Cancels the run of a response that is no longer alive in the table."""
        if (run := self._runs.get(id)) is not None and run.task is not None:
            run.task.cancel()

    async def follow(self, id: str, owner: str, last: int) -> AsyncIterator[bytes]:
        """Yields stored and new events after number `last`, up to the end of the response."""
        while True:
            changed = self._runs[id].changed if id in self._runs else None
            kept, events = await self._store.events(id, owner, last)
            if kept is None:
                return  # the response was deleted
            if events:
                if events[0].number > last + 1:
                    yield _error_event(f"the events up to {events[0].number - 1} are gone", last)
                    return
                last = events[-1].number
                yield b"".join(event.data for event in events)
                continue
            if not kept.is_alive:
                if data := _missing_end(kept, last):
                    yield data
                return
            await _pause(POLL_S, changed)

    def stop_draining(self) -> None:
        """Makes a running `close` stop waiting."""
        self._stops_draining.set()

    async def close(self, timeout_s: float) -> None:
        """Waits for the runs. After `timeout_s`, runs that have not ended end as failed."""
        self._is_closing = True
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if tasks:
            ended = asyncio.ensure_future(asyncio.wait(tasks))
            cut = asyncio.create_task(self._stops_draining.wait())
            await asyncio.wait((ended, cut), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            cut.cancel()
            ended.cancel()
        if left := [task for task in tasks if not task.done()]:
            log.warning("%d responses in the background are ended", len(left))
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=STOP_TIMEOUT_S)
        if self._writer is not None:
            self._writer.cancel()

    async def _go(self, call: ApiCall, run: BackgroundRun, meter: RequestMeter) -> None:
        try:
            with self._metrics.detached(meter):
                await self._service.answer(call, run.open, meter)
            assert run.draft is not None
            await self._finish(run, run.draft)
        except InvalidRequest as error:
            run.refuse(error)
        except asyncio.CancelledError:
            if self._is_closing:
                await self._fail(run, "the server was stopped before the response was complete")
        except Exception:  # a bug in Baton: no client of this run would see it
            log.exception("the response %s failed", run.id)
            await self._fail(run, "internal error")
        finally:
            run.close()
            del self._runs[run.id]

    async def _fail(self, run: BackgroundRun, message: str) -> None:
        if run.draft is not None:
            run.record(run.draft.fail(message))
            await self._finish(run, run.draft)

    async def _finish(self, run: BackgroundRun, draft: ResponseDraft) -> None:
        await run.is_kept.wait()
        await run.record_long(draft.last())
        for attempt in range(FINISH_ATTEMPTS):
            try:
                async with self._turn:
                    fields, items = draft.fields(), draft.items
                    if not await self._store.finish(run.id, fields, items, run.events):
                        log.info("the response %s ended after it was cancelled", run.id)
                    run.events.clear()
                return
            except ApiError as error:
                self._store.counters["not_finished"] += 1
                log.warning("the end of %s is not kept (%d): %s", run.id, attempt, error.message)
            await _pause(RENEW_S)

    async def _write(self) -> None:
        """Writes events and renews leases while there are runs."""
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while self._runs:
            await _pause(FLUSH_S)
            renews = loop.time() - renewed_s >= RENEW_S
            try:
                gone = await self._beat(renews=renews)
            except ApiError as error:
                self._store.counters["not_renewed"] += 1
                log.warning("leases are not renewed: %s", error.message)
                continue
            renewed_s = loop.time() if renews else renewed_s
            for id in gone:
                self.stop(id)

    async def _beat(self, *, renews: bool) -> set[str]:
        """Writes new events, and renews leases if `renews`.

        Returns the ids of runs that must stop.
        """
        async with self._turn:
            kept = [run for run in self._runs.values() if run.is_kept.is_set()]
            batches = {run.id: [*run.events] for run in kept if run.events}
            if not (batches or renews):
                return set()
            status = {run.id: run.status for run in kept if renews or run.id in batches}
            gone = await self._store.beat(status, batches)
            for run in kept:
                if batch := batches.get(run.id):
                    del run.events[: len(batch)]
                    run.notify()
        return gone


async def _pause(seconds: float, changed: asyncio.Event | None = None) -> None:
    """Waits for `seconds`, or until the event is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (changed or asyncio.Event()).wait()


def _error_event(message: str, number: int) -> bytes:
    return encode_events(
        [
            {
                "type": "error",
                "code": "events_gone",
                "message": message,
                "param": "starting_after",
                "sequence_number": number + 1,
            }
        ]
    )


def _missing_end(kept: KeptResponse, last: int) -> bytes:
    """Returns the last event of a response whose process ended before it wrote that event."""
    if kept.fields["status"] == kept.status:
        return b""
    event: Event = {"type": f"response.{kept.status}", "response": kept.body()}
    return encode_events([{**event, "sequence_number": last + 1}])

"""Runs the batches of a database while the pools are idle.

All gateway processes of a machine can run batches, but only the process with the lease runs them.
In each iteration:

1. The lease is taken or extended, and the unfinished batches are read.
2. Input files are validated and output files are written, a slice at a time.
3. The gate gets the number of requests that may run (`idleness`). Lines are started up to this
   number, one after the other. So a client's request that arrives waits for at most one line to
   start.

A line is answered like a call of its endpoint. The seed is computed from the batch's id and the
line's number, so a line that is computed again after `kill -9` gets the same answer. One
transaction stores a line's result and updates the batch's count. If an answer says "try again", the
line is tried again later, until the completion window ends.
"""

import asyncio
import logging
import secrets
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import msgspec

from engine.clock import unix_time_s
from engine.errors import InvalidRequest
from router.access.limits import UNLIMITED, Tenant
from router.gateway.answering import GatewayParts
from router.gateway.batches import tables
from router.gateway.batches.endpoints import BatchEndpoint, CapturedAnswer
from router.gateway.batches.idleness import Idleness, PoolsLoad, has_time
from router.gateway.batches.lines import (
    answered_line,
    is_retried,
    retry_after_s,
)
from router.gateway.batches.records import BatchRecord, BatchStatus
from router.gateway.batches.stepping import BatchGate, VersionLeaves
from router.gateway.metrics.meters import INVALID, GatewayMetrics, RequestMeter
from router.gateway.storage import Storage
from router.gateway.versions import Versions
from router.inbox.api_errors import ApiError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05  # seconds between iterations while a batch is unfinished
REST_S = 1.0  # seconds between iterations while all batches are finished
RENEW_EVERY_S = 2.0
CLEAN_EVERY_S = 30.0
START_TIMEOUT_S = 1.0  # maximum wait until a started line reaches the gate
MAX_KEEPING = 64  # maximum answered lines whose results are not stored yet
PAGE_LINES = 64
MAX_LOST = 5  # losses of workers after which a request is not tried again
LOST = frozenset({"request_failed"})
_STORE_ERRORS = (sqlite3.Error, ApiError)


@dataclass(slots=True, eq=False)
class _WaitingLine:
    """One request of a batch that has no result yet."""

    number: int
    custom_id: str
    body: bytes
    num_lost: int
    tries: int = 0
    due_s: float = 0.0  # time before which the line is not tried again


@dataclass(slots=True, eq=False)
class _Job:
    """One batch in this process. `after` is the number of the last line read from the database."""

    batch: BatchRecord
    after: int = 0
    is_read: bool = False  # True once all lines were read from the database
    lines: deque[_WaitingLine] = field(default_factory=deque)
    later: list[_WaitingLine] = field(default_factory=list)  # lines to be tried again
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        """True if every line has a result."""
        return self.is_read and not (self.lines or self.later or self.tasks)

    async def next_line(self, storage: Storage, now_s: float) -> _WaitingLine | None:
        """Removes and returns the next line that is due, if there is one."""
        due = next((line for line in self.later if line.due_s <= now_s), None)
        if due is not None:
            self.later.remove(due)
            return due
        if not self.lines and not self.is_read:
            rows = await storage.run(
                tables.lines_left, batch_id=self.batch.id, after=self.after, limit=PAGE_LINES
            )
            self.lines.extend(_WaitingLine(*row) for row in rows)
            self.is_read = len(rows) < PAGE_LINES
            self.after = rows[-1][0] if rows else self.after
        return self.lines.popleft() if self.lines else None

    async def cancel(self) -> None:
        """Cancels all running lines, waits for their tasks, and drops all waiting lines."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.lines.clear()
        self.later.clear()


class BatchRunner:
    """Runs batches from `open` to `close`."""

    def __init__(
        self,
        parts: GatewayParts,
        endpoints: Mapping[str, BatchEndpoint],
        *,
        gate: BatchGate,
        idleness: Idleness,
        quiet: GatewayMetrics,
        unix_s: Callable[[], int] = unix_time_s,
    ) -> None:
        """`quiet` measures the requests of batches, which count in no metric of clients.

        The constructor needs no event loop.
        """
        self._storage = parts.storage
        self._versions = parts.versions
        self._metrics = parts.metrics  # metrics of clients' requests
        self._clock = parts.clock
        self._max_line_bytes = parts.settings.gateway.max_body_bytes
        self._endpoints = endpoints
        self._gate = gate
        self._idleness = idleness
        self._quiet = quiet
        self._unix_s = unix_s
        self._owner = secrets.token_hex(16)
        self._jobs: dict[str, _Job] = {}  # by batch id, oldest first
        self._task: asyncio.Task[None] | None = None
        self._renew_at_s = 0.0
        self._clean_at_s = 0.0
        self._is_owner = False
        self._num_beside = 0  # batch requests that may run during other work
        self._woken = asyncio.Event()  # set when the next iteration is due
        self._moved = asyncio.Event()  # set when a line reached the gate, or ended
        self.num_by_outcome: Counter[str] = Counter(
            dict.fromkeys(("completed", "failed", "retried", "started again"), 0)
        )
        self.events: Counter[str] = Counter()

    @property
    def num_lines_waiting(self) -> int:
        """The number of lines without a result in running batches, at the last iteration."""
        batches = [job.batch for job in self._jobs.values()]
        return sum(b.num_lines - b.num_completed - b.num_failed for b in batches)

    @property
    def num_batches(self) -> int:
        """The number of unfinished batches if this process runs batches; otherwise 0."""
        return len(self._jobs)

    # ------------------------------------------------------------ opening and closing

    async def open(self) -> None:
        """Starts to run batches."""
        self._gate.on_request = self._moved.set
        self._gate.has_time = lambda: has_time(self._versions.workers().values())
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stops running batches.

        Lines without a result run when a process opens this database again.
        """
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._drop_jobs()
        try:
            await self._storage.run(tables.drop_lease, owner=self._owner)
        except _STORE_ERRORS as error:
            log.warning("the lease of batches ends by itself: %s", error)

    def wake(self) -> None:
        """Starts the next iteration at once, in which the batches are read."""
        self._renew_at_s = 0.0
        self._woken.set()

    def _record_arrival(self) -> None:
        """Makes room for a client's request that arrives.

        Batch requests are withdrawn before this method returns.
        """
        if self._jobs:
            self._idleness.record_other(self._clock.now_s())
            self._gate.allow(self._num_beside)

    async def _run(self) -> None:
        while True:
            try:
                await self._iterate()
            except tables.LeaseLost:
                await self._lose_lease()
            except _STORE_ERRORS as error:
                self.events["store failed"] += 1
                log.warning("batches wait, as the store fails: %s", error)
            except Exception:  # a bug must stop neither the gateway nor its batches
                self.events["bug"] += 1
                log.exception("an iteration of the batches failed")
            await self._rest()

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S if self._jobs else REST_S):
                await self._woken.wait()
        self._woken.clear()

    async def _iterate(self) -> None:
        now_s = self._clock.now_s()
        if now_s >= self._renew_at_s:
            await self._renew()
            self._renew_at_s = now_s + RENEW_EVERY_S
            self._metrics.on_arrival = self._record_arrival if self._jobs else None
        if not self._is_owner:
            return
        if now_s >= self._clean_at_s:
            await self._clean()
            self._clean_at_s = now_s + CLEAN_EVERY_S
        for job in list(self._jobs.values()):
            await self._try_to_advance(job)
        load = _load(self._versions, self._metrics, self._gate)
        self._num_beside = self._idleness.num_beside(load)
        self._gate.allow(self._idleness.num_allowed(load, self._clock.now_s()))
        self._gate.dismiss_leaving()
        await self._start_lines()

    async def _renew(self) -> None:
        """Takes or extends the lease, and reads the unfinished batches."""
        owner, now_s = self._owner, self._unix_s()

        def work(connection: sqlite3.Connection) -> list[BatchRecord] | None:
            if not tables.take_lease(connection, owner, now_s):
                return None
            return tables.active_batches(connection)

        batches = await self._storage.run(work)
        if batches is None:
            await self._lose_lease()
            return
        if not self._is_owner:
            log.info("this process runs batches; %d are not over", len(batches))
        self._is_owner = True
        for batch in batches:
            job = self._jobs.setdefault(batch.id, _Job(batch))
            job.batch = batch

    async def _lose_lease(self) -> None:
        if self._is_owner:
            self.events["lease lost"] += 1
            log.warning("another process runs the batches now")
        self._is_owner = False
        await self._drop_jobs()

    async def _drop_jobs(self) -> None:
        jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            await job.cancel()

    async def _clean(self) -> None:
        """Removes expired files and broken uploads, one per transaction."""
        now_s = self._unix_s()
        while await self._storage.run(tables.delete_old_files, now_s=now_s):
            self.events["file removed"] += 1

    # ------------------------------------------------------------ work on one batch

    async def _try_to_advance(self, job: _Job) -> None:
        try:
            await self._advance(job)
        except (tables.LeaseLost, *_STORE_ERRORS):
            raise
        except Exception:  # a bug that only this batch triggers must not stop others
            self.events["bug"] += 1
            log.exception("%s cannot go on", job.batch.id)

    async def _advance(self, job: _Job) -> None:
        """Does the next part of a batch's work: validation, the change to its end, or output."""
        batch, now_s = job.batch, self._unix_s()
        is_over = now_s >= batch.expires_s
        if batch.status is BatchStatus.VALIDATING and not is_over:
            await self._change(job, tables.validate_slice, max_line_bytes=self._max_line_bytes)
        elif batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            if is_over or job.is_done:
                ending = BatchStatus.EXPIRED if is_over else BatchStatus.COMPLETED
                await job.cancel()
                await self._change(job, tables.begin_end, ending=ending)
                # A batch that is still in progress has a line without a result.
                job.after, job.is_read = 0, False
        else:
            await job.cancel()
            await self._change(job, tables.write_slice)

    async def _change(self, job: _Job, change: Callable[..., BatchRecord], **given: object) -> None:
        """Changes a batch in the database.

        The next iteration starts at once if more is to be validated or written.
        """
        batch = await self._storage.run(
            change, owner=self._owner, batch_id=job.batch.id, now_s=self._unix_s(), **given
        )
        if batch.status is not job.batch.status:
            log.info("%s is %s", batch.id, batch.status)
        job.batch = batch
        if batch.ended_s is not None:
            self._jobs.pop(batch.id, None)
            self.events[batch.status] += 1
        elif batch.status is not BatchStatus.IN_PROGRESS and not self._metrics.num_in_flight:
            self._woken.set()

    # ------------------------------------------------------------ work on the lines of batches

    async def _start_lines(self) -> None:
        """Starts lines while the gate has room, one line per tenant in turn."""
        while self._gate.num_free > 0:
            # Lines whose results are being stored are no longer at the gate, so tasks are counted.
            num_tasks = sum([len(job.tasks) for job in self._jobs.values()])
            if num_tasks >= self._gate.num_allowed + MAX_KEEPING:
                return
            found = await self._next_line()
            if found is None:
                return
            job, line = found
            self._moved.clear()
            task = asyncio.create_task(self._answer(job, line))
            job.tasks.add(task)
            task.add_done_callback(partial(self._on_task_end, job))
            with suppress(TimeoutError):
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._moved.wait()
            if self._clock.now_s() >= self._renew_at_s:
                return

    async def _next_line(self) -> tuple[_Job, _WaitingLine] | None:
        """Returns the next line of the oldest batch of the tenant whose turn it is."""
        tried: set[str] = set()
        for job in list(self._jobs.values()):
            tenant = job.batch.tenant
            if tenant in tried or job.batch.status is not BatchStatus.IN_PROGRESS:
                continue
            line = await job.next_line(self._storage, self._clock.now_s())
            if line is None:
                continue
            self._jobs = _with_tenant_last(self._jobs, tenant)
            return job, line
        return None

    async def _answer(self, job: _Job, line: _WaitingLine) -> None:
        """Answers a line. Stores the result, or schedules another try."""
        batch, answer = job.batch, CapturedAnswer()
        endpoint = self._endpoints.get(batch.endpoint)
        line.tries += 1
        try:
            request_id = await _ask(endpoint, batch, line, answer, self._quiet)
        except Exception as error:
            if _is_leaving(error):
                self.num_by_outcome["started again"] += 1
                job.lines.appendleft(line)
                return
            # A bug in Baton that only this line triggers.
            log.exception("%s, line %d: answering it failed", batch.id, line.number)
            self.events["bug"] += 1
            answer, request_id = CapturedAnswer(), ""
            await answer.refuse(ApiError("internal error", code="internal_error", status=500))
        status = answer.status
        code = _code_of(answer.body) if status != 200 else ""
        if is_retried(status, line.num_lost + 1, MAX_LOST, LOST, code):
            if code in LOST:
                line.num_lost += 1
                await self._keep(job, line, tables.record_lost)
            self._try_later(job, line, retry_after_s(line.tries, answer.headers.get("retry-after")))
            return
        name = tables.line_id(batch.id, line.number)
        result = answered_line(name, line.custom_id, status, request_id, answer.body)
        if await self._keep(job, line, tables.keep_result, result=result, is_error=status != 200):
            self.num_by_outcome["completed" if status == 200 else "failed"] += 1

    async def _keep(
        self, job: _Job, line: _WaitingLine, change: Callable[..., object], **given: object
    ) -> bool:
        """Changes a line in the database. Returns True if the line was changed.

        If the store fails, the line is tried again.
        """
        try:
            kept = await self._storage.run(
                change, owner=self._owner, batch_id=job.batch.id, number=line.number, **given
            )
            return kept is not False
        except _STORE_ERRORS as error:
            self.events["store failed"] += 1
            log.warning("%s, line %d was not kept: %s", job.batch.id, line.number, error)
            self._try_later(job, line, retry_after_s(line.tries, None))
            return False

    def _try_later(self, job: _Job, line: _WaitingLine, after_s: float) -> None:
        self.num_by_outcome["retried"] += 1
        line.due_s = self._clock.now_s() + after_s
        job.later.append(line)

    def _on_task_end(self, job: _Job, task: "asyncio.Task[None]") -> None:
        job.tasks.discard(task)
        self._moved.set()
        self._woken.set()
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, tables.LeaseLost):
            self._renew_at_s = 0.0  # the next iteration checks the lease
            return
        self.events["bug"] += 1
        log.error("a line of %s failed", job.batch.id, exc_info=error)


def _load(versions: Versions, metrics: GatewayMetrics, gate: BatchGate) -> PoolsLoad:
    return PoolsLoad(
        tuple(versions.workers().values()),
        num_other=metrics.num_in_flight,
        num_running=gate.num_running,
        is_ready=versions.readiness() is None,
    )


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _Error


def _code_of(body: bytes) -> str:
    """Returns the error code in the body of an error."""
    return msgspec.json.decode(body, type=_ErrorAnswer).error.code or ""


def _seed(batch_id: str, number: int) -> int:
    """Returns the seed for a line whose request has no seed of its own."""
    digest = blake2b(f"{batch_id}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _with_tenant_last(jobs: dict[str, _Job], tenant: str) -> dict[str, _Job]:
    """Returns the jobs in their order, but with the jobs of one tenant last."""
    others = {name: job for name, job in jobs.items() if job.batch.tenant != tenant}
    return {**others, **{name: job for name, job in jobs.items() if name not in others}}


def _is_leaving(error: Exception) -> bool:
    """True if a request ended because its version is leaving.

    A request with several choices raises an exception group.
    """
    if isinstance(error, ExceptionGroup):
        return error.subgroup(VersionLeaves) is not None
    return isinstance(error, VersionLeaves)


async def _ask(
    endpoint: BatchEndpoint | None,
    batch: BatchRecord,
    line: _WaitingLine,
    answer: CapturedAnswer,
    metrics: GatewayMetrics,
) -> str:
    """Answers a line like a call of its endpoint. Returns the id of the call, or an empty text."""
    if endpoint is None:
        message = f"this server has no {batch.endpoint}"
        await answer.refuse(ApiError(message, param="url", code="not_found", status=404))
        return ""
    name = batch.tenant.removeprefix(f"{batch.sharing}/")
    tenant = Tenant(name, batch.sharing, UNLIMITED, may_debug=False)
    with RequestMeter(metrics) as meter:
        try:
            await endpoint(line.body, tenant, _seed(batch.id, line.number), answer, meter)
        except InvalidRequest as error:
            meter.outcome = INVALID
            await answer.refuse(error)
        return meter.request_id

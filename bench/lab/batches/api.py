"""An HTTP client for the files and batches of one server."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from bench.client.stream import http_session
from bench.common.waiting import holds_within
from bench.serve.plan import ServeTarget
from bench.serve.run import ServeClient
from engine.clock import MonotonicClock
from engine.errors import BatonError

ENDPOINT = "/v1/completions"
REQUEST_TIMEOUT_S = 60.0
BATCH_TIMEOUT_S = 3600.0
ENDED = ("completed", "failed", "expired", "cancelled")
PAUSES = "baton_batch_pauses_total "

Texts = Sequence[tuple[str, str]]  # (custom id, answer) pairs of an output file
Lines = Sequence[dict[str, Any]]  # lines of an input file


class BatchNotCompleted(BatonError):
    """A batch did not reach the state `completed`."""


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


class BatchServer:
    """A client for the files and batches of one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, client: ServeClient, model: str):
        self._session = session
        self._url = url
        self.client = client
        self.model = model

    async def submit(self, lines: Lines) -> str:
        """Uploads a file and creates a batch from it. Returns the batch's id."""
        encoded = b"\n".join(map(msgspec.json.encode, lines))
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", encoded, filename="batch.jsonl")
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
        """Returns the current state of a batch."""
        return msgspec.json.decode(await self._get(f"/v1/batches/{batch_id}"), type=_Batch)

    async def num_answered(self, batch_id: str | None) -> int:
        """Returns the number of requests of a batch that have a result; 0 if there is no batch."""
        if batch_id is None:
            return 0
        counts = (await self.batch(batch_id)).request_counts
        return counts.completed + counts.failed

    async def answers(self, batch_id: str, number: int) -> int:
        """Waits until a batch has at least `num` results. Returns the number of results."""
        found = 0

        async def is_there() -> bool:
            nonlocal found
            found = await self.num_answered(batch_id)
            return found >= number

        await _wait(is_there, f"{batch_id} has {number} answers")
        return found

    async def ended(self, batch_id: str) -> _Batch:
        """Waits until a batch has ended. Raises BatchNotCompleted."""

        async def is_over() -> bool:
            return (await self.batch(batch_id)).status in ENDED

        await _wait(is_over, f"{batch_id} is over")
        batch = await self.batch(batch_id)
        if batch.status != "completed":
            raise BatchNotCompleted(f"{batch_id} is {batch.status}")
        return batch

    async def texts(self, batch: _Batch) -> Texts:
        """Returns the answers of a batch. Raises BatchNotCompleted if a request has an error."""
        if batch.error_file_id is not None or batch.output_file_id is None:
            raise BatchNotCompleted(f"{batch.id}: {batch.request_counts.failed} requests failed")
        data = await self._get(f"/v1/files/{batch.output_file_id}/content")
        lines = [msgspec.json.decode(line, type=_Result) for line in data.splitlines()]
        return [(line.custom_id, line.response.body.choices[0].text) for line in lines]

    async def complete(self, lines: Lines) -> Texts:
        """Submits a batch and waits for its end. Returns its answers."""
        return await self.texts(await self.ended(await self.submit(lines)))

    async def num_pauses(self) -> float:
        """Returns how many times batch requests have been paused for clients so far."""
        text = (await self._get("/metrics")).decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(PAUSES))

    async def _get(self, path: str) -> bytes:
        async with self._session.get(f"{self._url}{path}") as reply:
            reply.raise_for_status()
            return await reply.read()


async def _wait(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Waits until a condition is true. Raises BatchNotCompleted after a timeout."""
    if not await holds_within(holds, BATCH_TIMEOUT_S, MonotonicClock()):
        raise BatchNotCompleted(f"not in {BATCH_TIMEOUT_S:g} s: {what}")


@asynccontextmanager
async def batch_server(url: str) -> AsyncIterator[BatchServer]:
    """Connects to a server. Raises ServerUnreachable."""
    async with http_session(REQUEST_TIMEOUT_S) as session:
        client = ServeClient(session, ServeTarget(url), MonotonicClock())
        yield BatchServer(session, url, client, await client.first_model())

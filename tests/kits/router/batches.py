"""Kit of the batch tests: a router that computes tokens, and apps that run batches."""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from engine.clock import MonotonicClock
from engine.messages import FinishReason, RequestId, Role, WorkerId
from router.gateway.background import BackgroundWork
from router.gateway.storage import Storage
from router.machine.requests import Cancelled, Finished, Request, Update
from router.port import FrameTaker, Handle, Sink, WorkerStatus
from tests.kits.router.gateway import FakeRouter, create_app, fetch, settings_of, versions_of

ENDED = ("completed", "failed", "expired", "cancelled")
IDLE = WorkerStatus(Role.MIXED, None, 0, 0, max_running=4)


def next_token(tokens: Sequence[int], seed: int) -> int:
    """Returns the next token, a letter that depends on all earlier tokens and on the seed."""
    return ord("a") + random.Random(f"{seed} {tokens}").randrange(26)


class ComputingRouter(FakeRouter):
    """Computes one token of each request per `step`. If `is_quick`, the router steps by itself."""

    def __init__(self, *, is_quick: bool = True) -> None:
        super().__init__()
        self.is_quick = is_quick
        self.statuses = {WorkerId("m0"): IDLE}
        self.running: dict[RequestId, tuple[Request, Sink]] = {}
        self.num_withdrawn = 0

    def submit(self, request: Request, sink: Sink) -> Handle:
        assert request.request_id not in {each.request_id for each in self.requests}
        self.requests.append(request)
        self.running[request.request_id] = request, sink
        if self.is_quick:
            self._step_soon()
        return _Computed(self, request.request_id)

    def _step_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._step_on)

    def _step_on(self) -> None:
        self.step()
        if self.running:
            self._step_soon()

    def step(self) -> None:
        for request_id, (request, sink) in list(self.running.items()):
            tokens = list(request.token_ids)
            token = next_token(tokens, request.sampling.seed)
            grown = msgspec.structs.replace(request, token_ids=(*tokens, token))
            outcome = None
            if len(grown.token_ids) >= request.limits.max_len:
                outcome = Finished(FinishReason.LENGTH)
                del self.running[request_id]
            else:
                self.running[request_id] = grown, sink
            sink.update(Update((token,), outcome))

    def withdraw(self, request_ids: Collection[RequestId]) -> None:
        for request_id in request_ids:
            if (found := self.running.pop(request_id, None)) is not None:
                self.num_withdrawn += 1
                found[1].update(Update(outcome=Cancelled()))


class _Computed:
    """A request of a `ComputingRouter`."""

    def __init__(self, router: ComputingRouter, request_id: RequestId) -> None:
        self._router = router
        self._request_id = request_id

    def cancel(self) -> None:
        self._router.running.pop(self._request_id, None)

    def offer_frames(self, taker: FrameTaker) -> None:
        """Does nothing: no worker sends frames."""


@asynccontextmanager
async def batch_app(
    router: FakeRouter,
    storage: Storage | None = None,
    *,
    keys: Any = None,
    runs: bool = True,
    **bounds: Any,
):
    """Opens an app and runs its batches, unless `runs` is false."""
    background = BackgroundWork()
    storage = storage or Storage(None)
    app = create_app(
        versions_of(router),
        settings=settings_of(**bounds),
        clock=MonotonicClock(),
        keys=keys,
        storage=storage,
        background=background,
    )
    if runs:
        await background.open()
    try:
        yield app
    finally:
        await background.close(0.0)
        await storage.close()


def form_of(
    data: bytes, *, purpose: str | None = "batch", **fields: str
) -> tuple[bytes, dict[str, str]]:
    """Returns the body and the headers of an upload."""
    given = {**({} if purpose is None else {"purpose": purpose}), **fields}
    parts = [
        f'--limit\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in given.items()
    ]
    parts.append(
        b'--limit\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
        b"content-type: application/octet-stream\r\n\r\n" + data + b"\r\n--limit--\r\n"
    )
    return b"".join(parts), {"content-type": "multipart/form-data; boundary=limit"}


def line_of(name: str, **body: Any) -> dict[str, Any]:
    """Returns one line of a batch's input file."""
    fields = {"model": "tiny", "prompt": name, "max_tokens": 5, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": fields}


def file_of(*lines: Any) -> bytes:
    """Returns an input file with these lines."""
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


async def upload(app: Any, data: bytes, **headers: str) -> str:
    """Uploads a file and returns its id."""
    body, own = form_of(data)
    reply = await fetch(app, "POST", "/v1/files", body, own | headers)
    assert reply.status == 200, reply.body
    return reply.json()["id"]


async def create(app: Any, file_id: str, **fields: Any) -> Any:
    """Creates a batch and returns it."""
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    reply = await fetch(app, "POST", "/v1/batches", msgspec.json.encode(body | fields))
    assert reply.status == 200, reply.body
    return reply.json()


async def ended(app: Any, batch_id: str, *, within_s: float = 10.0) -> Any:
    """Waits until the batch has ended, and returns it."""
    async with asyncio.timeout(within_s):
        while True:
            batch = (await fetch(app, "GET", f"/v1/batches/{batch_id}")).json()
            if batch["status"] in ENDED:
                return batch
            await asyncio.sleep(0.005)


async def lines_in(app: Any, file_id: str | None) -> list[Any]:
    """Returns the lines of an output file."""
    if file_id is None:
        return []
    data = (await fetch(app, "GET", f"/v1/files/{file_id}/content")).body
    return [msgspec.json.decode(line) for line in data.splitlines()]


async def texts_in(app: Any, file_id: str | None) -> list[tuple[str, str]]:
    """Returns the ids and answers of an output file, in its order."""
    return [
        (line["custom_id"], line["response"]["body"]["choices"][0]["text"])
        for line in await lines_in(app, file_id)
    ]


async def until(holds: Callable[[], object], *, within_s: float = 10.0) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(within_s):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)

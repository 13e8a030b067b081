"""The HTTP side of a call with a body, whatever its API: read, watched, measured.

The body is read within bounds of size and time. From then on a watcher waits for the client to
leave. When the client leaves, everything that runs for the call is cancelled and awaited.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.types import Receive, Scope, Send

from engine.errors import InvalidRequest
from router.edge.extension import Caller, caller_of
from router.edge.responses import send_invalid
from router.gateway.access_log import show_meter
from router.gateway.answering import GatewayParts
from router.gateway.metrics.meters import RequestMeter
from router.gateway.requests.calls import ClientLeft, check_size, read_body
from router.inbox.task_groups import LightTaskGroup


class Serve(Protocol):
    """Answers one call."""

    async def __call__(self, body: bytes, scope: Scope, meter: RequestMeter, send: Send) -> None:
        """Sends the answer. Raises InvalidRequest if nothing of it is sent."""
        ...


class CallShell:
    """An ASGI application that reads a call, and gives it to `serve` while its client is there."""

    def __init__(self, parts: GatewayParts, serve: Serve) -> None:
        self._parts = parts
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        settings = self._parts.settings
        with self._parts.metrics.request() as meter:
            show_meter(scope, meter)
            caller = caller_of(scope)
            try:
                body = None if caller is None else caller.take_body()
                if body is None:
                    body = await read_body(receive, settings)
                check_size(len(body), settings)
                if caller is not None:
                    with _UntilCallerLeaves(caller):
                        await self._serve(body, scope, meter, send)
                    return
                async with until_client_leaves(receive):
                    await self._serve(body, scope, meter, send)
            except InvalidRequest as error:
                meter.refuse()
                await send_invalid(send, error)
            except ClientLeft:
                return


@asynccontextmanager
async def until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside, and waits for it, as soon as the client has left."""
    refused: InvalidRequest | None = None
    try:
        async with LightTaskGroup() as group:
            watcher = group.create_task(_wait_until_gone(receive))
            try:
                yield
            except InvalidRequest as error:  # the group would wrap it
                refused = error
            watcher.cancel()
    except* ClientLeft:
        pass
    try:
        if refused is not None:
            raise refused
    finally:
        del refused  # its traceback holds this frame


class _UntilCallerLeaves:
    """Cancels what runs inside, on a server that calls back when the client has left."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._has_left = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if not self._caller.watch(self._leave):
            self._leave()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        self._caller.watch(None)
        if self._has_left:
            self._task.uncancel()
        return self._has_left and isinstance(error, asyncio.CancelledError)

    def _leave(self) -> None:
        self._has_left = True
        self._task.cancel()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientLeft

"""An HTTP endpoint that answers a prompt: chat completions or completions.

Decides how the body is read and how the answer is sent; `router.gateway.answering` does what is
between. The body is read within bounds of size and time. From then on a watcher waits for the
client to leave. When the client leaves, everything that runs for the call is cancelled and awaited.
The response's head waits for the first token.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from engine.errors import InvalidRequest
from router.access.guard import tenant_of
from router.edge.extension import Caller, caller_of, pipe_of
from router.edge.responses import send_invalid
from router.gateway.answering import ID_HEADER, AnswerService, GatewayParts
from router.gateway.answers.dialects import Dialect
from router.gateway.answers.stream import StreamedAnswer
from router.gateway.answers.whole import WholeAnswer
from router.gateway.answers.writing import AnswerWriter, Heading
from router.gateway.metrics.meters import RequestMeter
from router.gateway.requests.calls import ApiCall, ClientLeft, check_size, read_body
from router.gateway.requests.openai_schema import Body


class AnswerEndpoint:
    """One endpoint, as an ASGI application."""

    def __init__(self, parts: GatewayParts, dialect: Dialect, body_type: type[Body]) -> None:
        self._parts = parts
        self._service = AnswerService(parts, dialect, body_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        settings = self._parts.settings
        with self._parts.metrics.request() as meter:
            caller = caller_of(scope)
            try:
                body = None if caller is None else caller.take_body()
                if body is None:
                    body = await read_body(receive, settings)
                check_size(len(body), settings)
                call = self._service.call(body, tenant_of(scope), Headers(scope=scope))
            except InvalidRequest as error:
                meter.refuse()
                await send_invalid(send, error)
                return
            except ClientLeft:
                return
            if caller is not None:
                with _UntilCallerLeaves(caller):
                    await self._answer(call, scope, meter, send)
                return
            async with _until_client_leaves(receive):
                await self._answer(call, scope, meter, send)

    async def _answer(self, call: ApiCall, scope: Scope, meter: RequestMeter, send: Send) -> None:
        await self._service.answer(call, _HttpReplies(call, scope, send), meter)


class _HttpReplies:
    """Sends the answer to one HTTP request; implements `router.gateway.answering.Replies`."""

    def __init__(self, call: ApiCall, scope: Scope, send: Send) -> None:
        self._call = call
        self._scope = scope
        self._send = send

    async def refuse(self, error: InvalidRequest) -> None:
        """Sends an error response."""
        await send_invalid(self._send, error, {ID_HEADER: self._call.shown_id})

    def open(self, heading: Heading) -> AnswerWriter:
        """Returns the writer of a stream or of a whole answer, as the client asked."""
        if heading.call.stream:
            return StreamedAnswer(heading, self._send, pipe_of(self._scope))
        return WholeAnswer(heading, self._send)


@asynccontextmanager
async def _until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside, and waits for it, as soon as the client has left."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_wait_until_gone(receive))
            yield
            watcher.cancel()
    except* ClientLeft:
        pass


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

"""The HTTP side of calls with a body, for all APIs: reads a call, and sends its answer.

The body is read within limits of size and time. Once the body is read, a task waits for the client
to leave. If the client leaves, all tasks of the call are cancelled and awaited.
`router.gateway.answering` makes the answer. The head of the response is sent with the first token.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import Protocol

from starlette.types import Receive, Scope, Send

from engine.config import GatewayConfig
from engine.errors import InvalidRequest
from router.access.guard import tenant_of
from router.edge.exchange import EXCHANGE, PIPE, Exchange
from router.edge.responses import send_invalid
from router.gateway.access_log import METER
from router.gateway.answering import (
    ID_HEADER,
    LONG_BODY_BYTES,
    AnswerService,
    GatewayParts,
)
from router.gateway.answers.stream import StreamedAnswer
from router.gateway.answers.whole import whole_answer
from router.gateway.answers.writing import AnswerWriter, Dialect, Heading
from router.gateway.metrics.meters import INVALID, RequestMeter
from router.gateway.requests.body import Body
from router.gateway.requests.field_table import EMBEDDINGS
from router.gateway.requests.json_fields import endpoint_of
from router.inbox.api_errors import ApiError
from router.inbox.task_groups import LightTaskGroup

_decoded = methodcaller("decode", "latin-1")
BODY_TIMEOUT_S = 30.0  # maximum seconds to read a whole body


class ClientLeft(Exception):
    """The client closed the connection."""


class Serve(Protocol):
    """A function that answers one call of an endpoint."""

    async def __call__(self, body: bytes, scope: Scope, meter: RequestMeter, send: Send) -> None:
        """Sends the answer.

        Raises InvalidRequest if the call fails a check; then nothing was sent.
        """
        ...


class CallEndpoint:
    """An ASGI application that reads a call and runs `serve`.

    Cancels `serve` if the client leaves.
    """

    def __init__(self, parts: GatewayParts, serve: Serve) -> None:
        self._metrics = parts.metrics
        self._config = parts.settings.gateway
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads and answers one request."""
        with RequestMeter(self._metrics) as meter:
            scope[METER] = meter
            exchange: Exchange | None = scope.get(EXCHANGE)
            try:
                body = None if exchange is None else exchange.take_body()
                if body is None:
                    body = await read_body(receive, self._config)
                elif len(body) > self._config.max_body_bytes:
                    check_size(len(body), self._config)
                if exchange is not None:
                    await _until_gone(exchange, self._serve(body, scope, meter, send))
                    return
                async with until_client_leaves(receive):
                    await self._serve(body, scope, meter, send)
            except InvalidRequest as error:
                meter.outcome = INVALID
                shown = {ID_HEADER: meter.shown_id} if meter.shown_id else None
                await send_invalid(send, error, shown)
            except ClientLeft:
                return


class HttpAnswers:
    """Answers calls of one dialect over HTTP."""

    def __init__(self, parts: GatewayParts, dialect: Dialect, body_type: type[Body]) -> None:
        self._service = AnswerService(parts, dialect, body_type)

    async def serve(self, body: bytes, scope: Scope, meter: RequestMeter, send: Send) -> None:
        """Answers a call with a streamed or a whole answer. Raises InvalidRequest."""

        def writer(heading: Heading) -> AnswerWriter:
            if heading.call.body.stream:
                return StreamedAnswer(heading, send, scope.get(PIPE))
            return whole_answer(heading, send)

        call = self._service.call(body, tenant_of(scope), headers_of(list(scope["headers"])))
        await self._service.answer(call, writer, meter)


class Invocations:
    """POST /invocations, which SageMaker calls. The fields of the body determine the endpoint."""

    def __init__(self, parts: GatewayParts, answers: Mapping[str, HttpAnswers]) -> None:
        """The keys of `answers` are endpoint names of `router.gateway.requests.field_table`."""
        self._answers = answers
        self._parts = parts

    async def serve(self, body: bytes, scope: Scope, meter: RequestMeter, send: Send) -> None:
        """Answers a call at the endpoint of its body. Raises InvalidRequest."""
        pools, find = self._parts.parse_pools, partial(endpoint_of, body)
        is_long = len(body) >= LONG_BODY_BYTES
        name = await pools.run(tenant_of(scope).queue, len(body), find) if is_long else find()
        if all(served.text.embedding is not None for served in self._parts.versions.table):
            name = EMBEDDINGS  # also for embeddings of chat messages
        await self._answers[name].serve(body, scope, meter, send)


def headers_of(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns the headers of an ASGI scope, by name. If a name is repeated, its first value is
    returned.

    This is faster than Starlette's mapping, which searches the whole list for each name.
    """
    texts = map(_decoded, chain.from_iterable(reversed(headers)))
    return dict(zip(texts, texts, strict=True))  # `texts` yields names and values by turns


async def read_body(receive: Receive, config: GatewayConfig) -> bytes:
    """Reads the whole body.

    Raises ApiError if the body is too long or too slow, and ClientLeft if the client closes the
    connection.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            more_body = True
            while more_body:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                body += message.get("body", b"")
                more_body = message.get("more_body", False)
                check_size(len(body), config)
    except TimeoutError:
        text = f"the body did not come within {BODY_TIMEOUT_S:g} s"
        raise ApiError(text, code="request_timeout", status=408) from None
    return bytes(body)


def check_size(num_bytes: int, config: GatewayConfig) -> None:
    """Raises ApiError if a body is too long."""
    if num_bytes > config.max_body_bytes:
        text = f"the body is longer than {config.max_body_bytes} bytes"
        raise ApiError(text, code="request_too_large", status=413)


@asynccontextmanager
async def until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Runs the block of a `with` statement.

    If the client leaves, cancels the block and waits for its end.
    """
    refused: InvalidRequest | None = None
    try:
        async with LightTaskGroup() as group:
            watcher = group.create_task(_wait_until_gone(receive))
            try:
                yield
            except InvalidRequest as error:  # a task group would wrap the error in a group
                refused = error
            watcher.cancel()
    except* ClientLeft:
        pass
    try:
        if refused is not None:
            raise refused
    finally:
        del refused  # the error's traceback has this frame


async def _until_gone(exchange: Exchange, serving: Awaitable[None]) -> None:
    """Awaits `serving`. If the server reports that the client has left, `serving` is cancelled."""
    task, has_left = asyncio.current_task(), False
    assert task is not None

    def leave() -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    try:
        exchange.on_gone = leave
        if exchange.is_gone:
            leave()
        await serving
    except asyncio.CancelledError:
        if not has_left:
            raise
    finally:
        exchange.on_gone = None
        if has_left:
            task.uncancel()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientLeft

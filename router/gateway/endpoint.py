"""An HTTP endpoint that answers a prompt: chat completions or completions.

Decides how the answer is sent. `router.gateway.shell` reads the body and watches the client;
`router.gateway.answering` does what is between. The response's head waits for the first token.
"""

from collections.abc import Awaitable, Mapping
from functools import partial

from starlette.types import Receive, Scope, Send

from engine.errors import InvalidRequest
from router.access.guard import tenant_of
from router.edge.extension import pipe_of
from router.edge.responses import send_invalid
from router.gateway.answering import (
    ID_HEADER,
    LONG_BODY_BYTES,
    AnswerService,
    GatewayParts,
)
from router.gateway.answers.batching import TextBatch
from router.gateway.answers.dialects import Dialect
from router.gateway.answers.stream import StreamedAnswer
from router.gateway.answers.whole import whole_answer
from router.gateway.answers.writing import AnswerWriter, Heading
from router.gateway.metrics.meters import RequestMeter
from router.gateway.requests.calls import ApiCall
from router.gateway.requests.field_table import EMBEDDINGS
from router.gateway.requests.headers import headers_of
from router.gateway.requests.json_fields import endpoint_of
from router.gateway.requests.openai_schema import Body
from router.gateway.shell import CallShell


class AnswerEndpoint:
    """One endpoint, as an ASGI application."""

    def __init__(self, parts: GatewayParts, dialect: Dialect, body_type: type[Body]) -> None:
        self._service = AnswerService(parts, dialect, body_type)
        self._shell = CallShell(parts, self.serve)
        self._batch = parts.batch

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request."""
        return self._shell(scope, receive, send)

    async def serve(self, body: bytes, scope: Scope, meter: RequestMeter, send: Send) -> None:
        """Answers a request that was read."""
        call = self._service.call(body, tenant_of(scope), headers_of(list(scope["headers"])))
        await self._service.answer(call, _HttpReplies(call, scope, send, self._batch), meter)


class Invocations:
    """POST /invocations, as SageMaker asks: the endpoint follows from the body."""

    def __init__(self, parts: GatewayParts, endpoints: Mapping[str, AnswerEndpoint]) -> None:
        """`endpoints` are by their names in the table of fields."""
        self._shell = CallShell(parts, self._serve)
        self._endpoints = endpoints
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        await self._shell(scope, receive, send)

    async def _serve(self, body: bytes, scope: Scope, meter: RequestMeter, send: Send) -> None:
        lanes, find = self._parts.lanes, partial(endpoint_of, body)
        is_long = len(body) >= LONG_BODY_BYTES
        name = await lanes.run(tenant_of(scope).turn, len(body), find) if is_long else find()
        if all(served.text.embedding is not None for served in self._parts.versions.table):
            name = EMBEDDINGS  # also of messages
        await self._endpoints[name].serve(body, scope, meter, send)


class _HttpReplies:
    """Sends the answer to one HTTP request; implements `router.gateway.answering.Replies`."""

    def __init__(self, call: ApiCall, scope: Scope, send: Send, batch: TextBatch | None) -> None:
        self._batch = batch
        self._call = call
        self._scope = scope
        self._send = send

    async def refuse(self, error: InvalidRequest) -> None:
        """Sends an error response."""
        await send_invalid(self._send, error, {ID_HEADER: self._call.shown_id})

    def open(self, heading: Heading) -> AnswerWriter:
        """Returns the writer of a stream or of a whole answer, as the client asked."""
        if heading.call.body.stream:
            return StreamedAnswer(heading, self._send, pipe_of(self._scope), self._batch)
        return whole_answer(heading, self._send)

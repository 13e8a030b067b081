"""The endpoints that batches may name: each answers a line as an HTTP client would get it."""

from typing import Protocol

import msgspec
from starlette.types import Message

from engine.errors import InvalidRequest
from router.access.limits import Tenant
from router.edge.responses import send_invalid
from router.gateway.answering import AnswerService
from router.gateway.answers.whole import whole_answer
from router.gateway.answers.writing import AnswerWriter, Heading
from router.gateway.metrics.meters import RequestMeter
from router.gateway.responses.service import ResponseService
from router.inbox.api_errors import ApiError


class CapturedAnswer:
    """Keeps the response to one call."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._body = bytearray()

    @property
    def body(self) -> bytes:
        """The response's body, JSON."""
        return bytes(self._body)

    async def refuse(self, error: InvalidRequest) -> None:
        """Keeps an error."""
        await send_invalid(self.send, error)

    def open(self, heading: Heading) -> AnswerWriter:
        """Returns the writer of the whole answer."""
        return whole_answer(heading, self.send)

    async def send(self, message: Message) -> None:
        """Takes a part of the response, as ASGI sends it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self._body += message.get("body", b"")


class BatchEndpoint(Protocol):
    """One endpoint."""

    async def answer(
        self, body: bytes, tenant: Tenant, seed: int, answer: CapturedAnswer, meter: RequestMeter
    ) -> str:
        """Answers a request, with this seed if it has none. Returns the id of the call."""
        ...


class CompletionEndpoint:
    """Chat completions, completions or embeddings."""

    def __init__(self, service: AnswerService) -> None:
        self._service = service

    async def answer(
        self, body: bytes, tenant: Tenant, seed: int, answer: CapturedAnswer, meter: RequestMeter
    ) -> str:
        """Answers a request, with this seed if it has none. Returns the id of the call."""
        call = self._service.call(body, tenant, {})
        call = msgspec.structs.replace(call, random_seed=seed)
        try:
            await self._service.answer(call, answer.open, meter)
        except InvalidRequest as error:
            await answer.refuse(error)
        return call.request_id


class ResponsesEndpoint:
    """Responses, kept as usual if they say so."""

    def __init__(self, service: ResponseService) -> None:
        self._service = service

    async def answer(
        self, body: bytes, tenant: Tenant, seed: int, answer: CapturedAnswer, meter: RequestMeter
    ) -> str:
        """Answers a request, with this seed if it has none. Returns the id of the call."""
        try:
            prepared = await self._service.prepare(body, tenant)
            if prepared.body.background:
                message = "a request of a batch cannot run in the background"
                raise ApiError(message, param="background", code="unsupported_parameter")
            call = self._service.call(prepared, tenant, {})
        except InvalidRequest as error:
            meter.refuse()
            await answer.refuse(error)
            return ""
        call = msgspec.structs.replace(call, random_seed=seed)
        try:
            await self._service.answer(prepared, call, meter, answer.send, None)
        except InvalidRequest as error:
            await answer.refuse(error)
        return call.request_id

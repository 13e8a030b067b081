"""The endpoints that batches may name.

An endpoint answers a batch's line like a client's request.
"""

from typing import Protocol

from msgspec.structs import replace
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
    """Keeps the response to one call in the form that an HTTP client would receive."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._body = bytearray()

    @property
    def body(self) -> bytes:
        """The JSON body of the captured response."""
        return bytes(self._body)

    async def refuse(self, error: InvalidRequest) -> None:
        """Keeps the error as the response."""
        await send_invalid(self.send, error)

    def open(self, heading: Heading) -> AnswerWriter:
        """Returns a writer that sends the whole answer to this object."""
        return whole_answer(heading, self.send)

    async def send(self, message: Message) -> None:
        """Keeps the head or a part of the body, from an ASGI message."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self._body += message.get("body", b"")


class BatchEndpoint(Protocol):
    """An endpoint that batches may name."""

    async def __call__(
        self, body: bytes, tenant: Tenant, seed: int, answer: CapturedAnswer, meter: RequestMeter
    ) -> None:
        """Answers a request; `seed` is used if the request has no seed. Raises InvalidRequest."""
        ...


def completions_of(service: AnswerService) -> BatchEndpoint:
    """Returns the endpoint of chat completions, completions or embeddings."""

    async def ask(
        body: bytes, tenant: Tenant, seed: int, answer: CapturedAnswer, meter: RequestMeter
    ) -> None:
        call = replace(service.call(body, tenant, {}), random_seed=seed)
        await service.answer(call, answer.open, meter)

    return ask


def responses_of(service: ResponseService) -> BatchEndpoint:
    """Returns the endpoint of responses. A response is stored if its request has `store`."""

    async def ask(
        body: bytes, tenant: Tenant, seed: int, answer: CapturedAnswer, meter: RequestMeter
    ) -> None:
        prepared = await service.prepare(body, tenant)
        if prepared.body.background:
            message = "a request of a batch cannot run in the background"
            raise ApiError(message, param="background", code="unsupported_parameter")
        call = replace(service.call(prepared, tenant, {}), random_seed=seed)
        await service.answer(prepared, call, meter, answer.send, None)

    return ask

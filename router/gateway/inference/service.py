"""The methods of `inference.GRPCInferenceService`: keys, checks, answers and errors in gRPC's form.

A request becomes the body of a completion and is answered by `router.gateway.answering`. If a
client leaves, or its deadline passes, gRPC cancels the method. The cancellation also reaches the
workers.

Errors have the texts of HTTP and the matching gRPC status code. An error in a stream is a response
with `error_message`, and the stream continues, as in Triton. If the client sends the metadata
`triton_grpc_error: true`, an error ends the stream with a status.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from google.protobuf.message import DecodeError

from engine.errors import InvalidRequest
from engine.net.grpc_library import grpc
from router.access.guard import KeyFinder, identify
from router.access.limits import Tenant
from router.edge.responses import refusal_of
from router.gateway.access_log import AccessLine
from router.gateway.answering import AnswerService, GatewayParts
from router.gateway.answers.writing import (
    COMPLETION,
    AnswerWriter,
    Heading,
    failure_body,
    failure_head,
)
from router.gateway.endpoint import BODY_TIMEOUT_S, check_size
from router.gateway.inference import inference_pb2 as pb
from router.gateway.inference.answers import StreamedInference, WholeInference
from router.gateway.inference.calls import INPUTS, OUTPUTS, AnswerForm, InferenceCall, read_call
from router.gateway.inference.wire import check_wire, no_message
from router.gateway.metrics.meters import INVALID, RequestMeter
from router.gateway.requests.completion import CompletionBody
from router.gateway.versions import ServedVersion
from router.inbox.api_errors import ApiError, invalid_value
from router.inbox.task_groups import LightTaskGroup
from router.machine.requests import Outcome

log = logging.getLogger(__name__)

GRPC = "GRPC"  # method name in the access log
SERVICE = "inference.GRPCInferenceService"
MAX_CALLS_IN_STREAM = 64  # requests of a stream answered at the same time; later ones wait
LONG_REQUEST_BYTES = 65_536  # a thread reads longer requests, in milliseconds
_GRPC_ERRORS = "triton_grpc_error"
_CODES = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.INTERNAL_SERVER_ERROR: grpc.StatusCode.INTERNAL,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_STATUSES = {code: int(status) for status, code in reversed(_CODES.items())}
_Method = Callable[[Any, Any], Awaitable[Any]]
_Receive = Callable[[], Awaitable[bytes]]  # waits for the message of a request and returns it


@dataclass(frozen=True, slots=True)
class InferenceFailure:
    """A failure of a call, with its HTTP status and headers."""

    status: int
    message: str
    headers: dict[str, str]

    @property
    def code(self) -> Any:
        """The gRPC status code."""
        return _CODES.get(HTTPStatus(self.status), grpc.StatusCode.INVALID_ARGUMENT)


class _StreamEnds(Exception):
    """A failure ends the stream, because the client has asked for that."""

    def __init__(self, failure: InferenceFailure) -> None:
        self.failure = failure


@dataclass(slots=True)
class _Replies:
    """The replies to one request: sends its responses, and keeps its failure."""

    send: Callable[[Any], Awaitable[None]]
    id: str = ""  # the client's id of the request, set once the message is read
    form: AnswerForm | None = None  # set once the request is read
    failure: InferenceFailure | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def status(self, *, is_over: bool) -> int:
        """Returns the HTTP status for the log; 0 if the client left before the end."""
        if self.failure is not None:
            return self.failure.status
        return int(HTTPStatus.OK) if is_over else 0

    async def fail(self, outcome: Outcome) -> None:
        """Keeps the failure of an answer that did not finish."""
        status, headers = failure_head(outcome)
        message = failure_body(outcome).error.message
        self.failure = InferenceFailure(status, message, headers)

    def open(self, heading: Heading) -> AnswerWriter:
        """Returns a writer that streams the answer, or sends the whole answer, as the client
        asked.
        """
        form = self.form
        assert form is not None
        writer = StreamedInference if form.streams else WholeInference

        async def send(response: Any) -> None:
            if not form.streams:  # sent as metadata after the response
                self.headers = heading.headers
            await self.send(response)

        return writer(heading, form, send, self.fail)


class InferenceService:
    """The methods of the service. `version` is the version of Baton."""

    def __init__(self, parts: GatewayParts, keys: KeyFinder | None, version: str) -> None:
        self._parts = parts
        self._keys = keys
        self._version = version
        self._answers = AnswerService(parts, COMPLETION, CompletionBody)

    def handler(self) -> Any:
        """Returns the handler of all methods, for a gRPC server."""
        infer = grpc.stream_unary_rpc_method_handler(  # the handler reads the message
            self.infer, None, pb.ModelInferResponse.SerializeToString
        )
        infer_stream = grpc.stream_stream_rpc_method_handler(
            self.infer_stream, None, pb.ModelStreamInferResponse.SerializeToString
        )
        methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
        kinds = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ServerMetadata": self.server_metadata,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.model_metadata,
        }
        handlers = {"ModelInfer": infer, "ModelStreamInfer": infer_stream}
        for name, method in kinds.items():
            request = getattr(pb, methods[name].input_type.name)
            response = getattr(pb, methods[name].output_type.name)
            handlers[name] = grpc.unary_unary_rpc_method_handler(
                self._logged(name, method), request.FromString, response.SerializeToString
            )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _logged(self, name: str, method: _Method) -> _Method:
        """Returns the method, wrapped so that each call writes a line of the access log."""

        async def run(request: Any, context: Any) -> Any:
            start_s, status = self._parts.clock.now_s(), 0
            try:
                answer = await method(request, context)
                status = int(HTTPStatus.OK)
                return answer
            except grpc.aio.AbortError:
                status = _STATUSES.get(context.code(), 0)
                raise
            finally:
                seconds = self._parts.clock.now_s() - start_s
                AccessLine(_client(context), GRPC, f"/{SERVICE}/{name}", status, seconds).write()

        return run

    # ------------------------------------------------------------ methods that need no key

    async def server_live(self, _: Any, __: Any) -> Any:
        """Returns True in `live`, as the process is alive."""
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _: Any, __: Any) -> Any:
        """Returns in `ready` if requests can be served."""
        return pb.ServerReadyResponse(ready=self._parts.versions.readiness() is None)

    async def server_metadata(self, _: Any, __: Any) -> Any:
        """Returns the name and version of the server."""
        return pb.ServerMetadataResponse(name="baton", version=self._version)

    # ------------------------------------------------------------ methods about models

    async def model_ready(self, request: Any, context: Any) -> Any:
        """Returns in `ready` if a model can be served.

        Aborts with NOT_FOUND for an unknown model.
        """
        served = await self._chosen(request, context)
        return pb.ModelReadyResponse(ready=served.port.readiness() is None)

    async def model_metadata(self, request: Any, context: Any) -> Any:
        """Returns the input and output tensors of a model."""
        served = await self._chosen(request, context)
        names = [each.name for each in self._parts.versions.table if not each.is_leaving]
        shapes = {"text_input": (-1,), "input_ids": (1, -1)}
        metadata = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=request.name or served.model_names[0],
            versions=names,
            platform="baton",
            inputs=[
                metadata(name=name, datatype=kind, shape=shapes.get(name, (1,)))
                for name, kind in INPUTS.items()
            ],
            outputs=[
                metadata(name=name, datatype=kind, shape=(-1,)) for name, kind in OUTPUTS.items()
            ],
        )

    async def _chosen(self, request: Any, context: Any) -> ServedVersion:
        """Checks the client's key.

        Returns the version that the request names; aborts an invalid call.
        """
        try:
            identify(self._keys, _authorization(context))
            return self._parts.versions.choose(
                key="", model=request.name or None, version=request.version or None
            )
        except InvalidRequest as error:
            await _abort(context, _refusal(error))
            raise

    # ------------------------------------------------------------ methods that answer requests

    async def infer(self, messages: AsyncIterator[bytes], context: Any) -> Any:
        """Answers a call with one response: method ModelInfer."""
        responses: list[Any] = []

        async def send(response: Any) -> None:
            responses.append(response)

        replies = _Replies(send)
        await self._answer(partial(self._only, messages), context, replies, may_stream=False)
        if replies.failure is not None:
            await _abort(context, replies.failure)
        context.set_trailing_metadata(tuple(replies.headers.items()))
        return responses[0]

    async def _only(self, messages: AsyncIterator[bytes]) -> bytes:
        """Waits for the single message of a call. Raises ApiError if no message arrives in time."""
        limit_s = BODY_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                return await anext(messages)
        except StopAsyncIteration:
            raise no_message() from None
        except TimeoutError:
            message = f"the message did not arrive within {limit_s:g} s"
            raise ApiError(message, code="request_timeout", status=408) from None

    async def infer_stream(self, messages: AsyncIterator[bytes], context: Any) -> None:
        """Answers the requests of a stream concurrently. Responses have the id of their request."""
        try:
            identify(self._keys, _authorization(context))
        except InvalidRequest as error:
            await _abort(context, _refusal(error))
        ends_on_errors = _metadata(context).get(_GRPC_ERRORS) == "true"
        turn = asyncio.Lock()  # gRPC can write only one message at a time
        slots = asyncio.Semaphore(MAX_CALLS_IN_STREAM)

        async def send(response: Any, error: str = "") -> None:
            async with turn:
                await context.write(
                    pb.ModelStreamInferResponse(error_message=error, infer_response=response)
                )

        async def answer(message: bytes) -> None:
            try:
                replies = _Replies(send)
                await self._answer(partial(_given, message), context, replies, may_stream=True)
                if replies.failure is not None:
                    if ends_on_errors:
                        raise _StreamEnds(replies.failure)
                    await send(pb.ModelInferResponse(id=replies.id), replies.failure.message)
            finally:
                slots.release()

        ended: InferenceFailure | None = None
        try:
            async with LightTaskGroup() as group:
                async for message in messages:
                    await slots.acquire()
                    group.create_task(answer(message))
        except* _StreamEnds as ends:
            first = ends.exceptions[0]
            assert isinstance(first, _StreamEnds)
            ended = first.failure
        if ended is not None:
            await _abort(context, ended)

    async def _read(
        self, message: bytes, tenant: Tenant, replies: _Replies, *, may_stream: bool
    ) -> InferenceCall:
        """Converts the message of a request, in a thread if it is long. Raises ApiError."""
        check_size(len(message), self._parts.settings.gateway)
        read = partial(_read, message, replies, may_stream=may_stream)
        if len(message) < LONG_REQUEST_BYTES:
            return read()
        return await self._parts.parse_pools.run(tenant.queue, len(message), read)

    async def _answer(
        self, receive: _Receive, context: Any, replies: _Replies, *, may_stream: bool
    ) -> None:
        """Answers and logs one request. The message is received after the key was checked.

        A failure is stored in `replies`, also for an exception caused by a bug in Baton.
        """
        start_s, key, shown_id, is_over = self._parts.clock.now_s(), "", "", False
        seen: RequestMeter | None = None
        try:
            with RequestMeter(self._parts.metrics) as meter:
                seen = meter
                try:
                    tenant = identify(self._keys, _authorization(context), _client(context))
                    key = tenant.name
                    call = await self._read(await receive(), tenant, replies, may_stream=may_stream)
                    replies.form = call.form
                    headers = _metadata(context) | call.headers
                    api_call = self._answers.call(call.data, tenant, headers)
                    shown_id = api_call.shown_id
                    await self._answers.answer(api_call, replies.open, meter)
                except InvalidRequest as error:
                    meter.outcome = INVALID
                    replies.failure = _refusal(error)
            is_over = True
        except grpc.aio.BaseError:  # the client has left
            raise
        except Exception:
            log.exception("a request over gRPC failed")
            replies.failure = InferenceFailure(500, "internal error", {})
        finally:
            AccessLine(
                client=_client(context),
                method=GRPC,
                path=f"/{SERVICE}/{'ModelStreamInfer' if may_stream else 'ModelInfer'}",
                status=replies.status(is_over=is_over),
                seconds=self._parts.clock.now_s() - start_s,
                key=key,
                request_id=shown_id,
            ).write(seen)


async def _given(message: bytes) -> bytes:
    """Returns a message that was already received."""
    return message


def _read(message: bytes, replies: _Replies, *, may_stream: bool) -> InferenceCall:
    """Parses and converts a request, and sets its id in `replies`. Raises ApiError."""
    check_wire(message)
    try:
        request = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        raise no_message() from None
    replies.id = request.id
    call = read_call(request)
    if call.form.streams and not may_stream:
        text = "stream: ModelInfer has one response; use ModelStreamInfer"
        raise invalid_value(text, "stream")
    return call


def _refusal(error: InvalidRequest) -> InferenceFailure:
    _, headers = refusal_of(error)
    headers.pop("connection", None)
    return InferenceFailure(error.status, error.message, headers)


def _client(context: Any) -> str:
    """Returns the address of a client, without gRPC's port: "ipv4:127.0.0.1:50000"."""
    _, _, address = str(context.peer()).partition(":")
    return unquote(address.rpartition(":")[0].strip("[]"))


def _metadata(context: Any) -> dict[str, str]:
    """Returns the metadata of a call; names are in lower case, binary values are left out."""
    given = context.invocation_metadata() or ()
    return {name: value for name, value in given if isinstance(value, str)}


def _authorization(context: Any) -> bytes | None:
    value = _metadata(context).get("authorization")
    return None if value is None else value.encode()


async def _abort(context: Any, failure: InferenceFailure) -> None:
    """Aborts a call with an error. Always raises gRPC's exception."""
    await context.abort(failure.code, failure.message, tuple(failure.headers.items()))

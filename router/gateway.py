"""The HTTP gateway: OpenAI's API in front of a `RouterPort`.

Decides what an HTTP request becomes and how its answer is sent; where and when it runs is the
router's business, and nothing here knows workers, except to show them in /metrics.

The life of one call of an answer endpoint:

1. The body is read, bounded in size and time. From now on a watcher waits for the client to
   leave; when it does, whatever runs is cancelled and awaited.
2. The body becomes a `Request`: checked, templated, tokenised, in a thread where it is long.
3. The router's updates become text, and text becomes a response, whose head waits for the first
   token.
4. At the end, at a stop string or when the client has left, the router's iterator is closed: that
   is what cancels the request on the workers.
"""

import asyncio
import hmac
import importlib.metadata
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.clock import Clock, unix_time_s
from engine.errors import InvalidRequest
from engine.messages import FinishReason, RequestId
from router.detokenizer import AnswerText
from router.metrics import GatewayMetrics, RequestMeter
from router.openai_schema import (
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    check_stop_token_ids,
    decode_body,
    limits_of,
    sampling_of,
)
from router.requests import Finished, Outcome, Request, RouterPort, Timeline, Update
from router.sse import (
    CHAT,
    COMPLETION,
    AnswerWriter,
    Dialect,
    Ending,
    Heading,
    StreamedAnswer,
    WholeAnswer,
    error_body,
    send_invalid,
)
from router.tokenizer import TextModel

LONG_BODY_BYTES = 4096  # about a millisecond of encoding; a thread costs a tenth of that
TIMELINE_HEADER = "x-baton-timeline"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What an operator decides. The first name is the model's own, the others are aliases."""

    model_names: tuple[str, ...]
    context_len: int
    eos_token_ids: tuple[int, ...]
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 30.0
    default_max_tokens: int | None = None  # None: the rest of the context
    api_keys: tuple[str, ...] = ()  # empty: open to everyone


def create_app(
    port: RouterPort,
    text: TextModel,
    *,
    settings: GatewaySettings,
    clock: Clock,
    rng: random.Random,
) -> Starlette:
    """The application, to be run by any ASGI server."""
    version = _version()
    metrics = GatewayMetrics(port, model_name=settings.model_names[0], version=version)
    service = _Service(port, text, settings, clock, rng, metrics)
    pages = _Pages(port, settings, metrics, version)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", _Answers(service, CHAT, ChatBody), methods=["POST"]),
            Route(
                "/v1/completions", _Answers(service, COMPLETION, CompletionBody), methods=["POST"]
            ),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model_id:path}", pages.model),
            Route("/health", pages.health),
            Route("/ready", pages.ready),
            Route("/metrics", pages.metrics),
            Route("/version", pages.version),
        ],
        middleware=[Middleware(_KeyGuard, api_keys=settings.api_keys)],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )


# ---------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class _Service:
    """What both answer endpoints need."""

    port: RouterPort
    text: TextModel
    settings: GatewaySettings
    clock: Clock
    rng: random.Random
    metrics: GatewayMetrics


@dataclass(frozen=True, slots=True)
class _Job:
    """A call that passed all checks."""

    request: Request
    model: str
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    usage_in_every_chunk: bool


class _Answers:
    """One endpoint, as an ASGI application."""

    def __init__(self, service: _Service, dialect: Dialect, body_type: type[Body]) -> None:
        self._service = service
        self._dialect = dialect
        self._body_type = body_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        settings = self._service.settings
        with self._service.metrics.request() as meter:
            try:
                body = await _read_body(receive, settings)
            except InvalidRequest as error:
                meter.refuse()
                await send_invalid(send, error)
                return
            except _ClientGone:
                return
            async with _until_client_leaves(receive):
                await self._answer(body, headers, meter, send)

    async def _answer(self, data: bytes, headers: Headers, meter: RequestMeter, send: Send) -> None:
        service = self._service
        received_s = service.clock.now_s()
        try:
            job = await self._job(data, received_s)
        except InvalidRequest as error:
            meter.refuse()
            await send_invalid(send, error)
            return
        meter.accept(received_s, len(job.request.token_ids))
        writer = self._writer(job, send, include_timeline=headers.get(TIMELINE_HEADER) == "1")
        progress = _Progress(job, service.text, meter)
        piece = await _follow(service, job.request, progress, writer)
        fingerprint = service.port.fingerprint()
        if piece:
            await writer.text(piece, progress.num_tokens, fingerprint)
        await writer.end(progress.ending(), fingerprint)

    async def _job(self, data: bytes, received_s: float) -> _Job:
        request_id = RequestId(
            f"{self._dialect.id_prefix}{self._service.rng.getrandbits(128):032x}"
        )
        random_seed = self._service.rng.getrandbits(64)
        if len(data) < LONG_BODY_BYTES:
            return self._parse(data, request_id, random_seed, received_s)
        return await asyncio.to_thread(self._parse, data, request_id, random_seed, received_s)

    def _parse(
        self, data: bytes, request_id: RequestId, random_seed: int, received_s: float
    ) -> _Job:
        settings, text = self._service.settings, self._service.text
        body = decode_body(data, self._body_type)
        model = _served_model(body.model, settings)
        check_stop_token_ids(body, text.vocab_size)
        token_ids = tuple(body.encode(text))
        limits = limits_of(
            body,
            prompt_len=len(token_ids),
            context_len=settings.context_len,
            default_max_tokens=settings.default_max_tokens,
            stop_token_ids=() if body.ignore_eos else settings.eos_token_ids,
        )
        sampling = sampling_of(body, vocab_size=text.vocab_size, random_seed=random_seed)
        options = body.stream_options
        return _Job(
            request=Request(request_id, token_ids, sampling, limits, received_s),
            model=model,
            stop=body.stop_strings,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            usage_in_every_chunk=bool(options and options.continuous_usage_stats),
        )

    def _writer(self, job: _Job, send: Send, *, include_timeline: bool) -> AnswerWriter:
        heading = Heading(
            dialect=self._dialect,
            answer_id=job.request.request_id,
            created=unix_time_s(),
            model=job.model,
            prompt_tokens=len(job.request.token_ids),
            include_usage=job.include_usage,
            usage_in_every_chunk=job.usage_in_every_chunk,
            include_timeline=include_timeline,
        )
        return StreamedAnswer(heading, send) if job.stream else WholeAnswer(heading, send)


class _Progress:
    """How far one answer has come: updates in, text out."""

    def __init__(self, job: _Job, text: TextModel, meter: RequestMeter) -> None:
        request = job.request
        self.outcome: Outcome | None = None
        self._timeline: Timeline | None = None
        self._prompt_len = len(request.token_ids)
        self._meter = meter
        self._text = AnswerText(
            text.detokenizer(request.token_ids),
            prompt_len=self._prompt_len,
            limits=request.limits,
            stop=job.stop,
        )

    def take(self, update: Update, now_s: float) -> str:
        """The text that this update makes ready to be shown."""
        text = self._text.push(update.token_ids)
        if update.token_ids:
            self._meter.tokens(len(update.token_ids), now_s)
        if isinstance(update.outcome, Finished):
            text += self._text.finish()
        self._timeline = update.timeline or self._timeline
        self.outcome = Finished(FinishReason.STOP) if self._text.stopped else update.outcome
        if self.outcome is not None:
            self._meter.end(self.outcome, self._timeline, now_s)
        return text

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._text.num_tokens

    def ending(self) -> Ending:
        """The end of the answer; only when there is an outcome."""
        assert self.outcome is not None, "the router's iterator ended without an outcome"
        return Ending(self.outcome, self._prompt_len, self._text.num_tokens, self._timeline)


async def _follow(
    service: _Service, request: Request, progress: _Progress, writer: AnswerWriter
) -> str:
    """Writes all of the answer but its last piece, which it returns.

    So the iterator is closed, and a request that a stop string ended is cancelled, before anything
    waits for the client to take the end of the answer.
    """
    updates = service.port.submit(request)
    async with aclosing(updates):
        async for update in updates:
            piece = progress.take(update, service.clock.now_s())
            if progress.outcome is not None:
                return piece
            if update.token_ids:
                await writer.text(piece, progress.num_tokens, service.port.fingerprint())
    return ""


def _served_model(name: str | None, settings: GatewaySettings) -> str:
    if name is None:
        return settings.model_names[0]
    if name not in settings.model_names:
        message = f"the model {name!r} does not exist"
        raise ApiError(message, param="model", code="model_not_found", status=404)
    return name


# ---------------------------------------------------------------- the client's side


class _ClientGone(Exception):
    """The client closed the connection."""


@asynccontextmanager
async def _until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside, and waits for it, as soon as the client is gone."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_wait_until_gone(receive))
            yield
            watcher.cancel()
    except* _ClientGone:
        pass


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise _ClientGone


async def _read_body(receive: Receive, settings: GatewaySettings) -> bytes:
    """All of the body. Raises ApiError if too long or too slow, _ClientGone if it breaks off."""
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            more_body = True
            while more_body:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientGone
                body += message.get("body", b"")
                more_body = message.get("more_body", False)
                if len(body) > settings.max_body_bytes:
                    text = f"the body is longer than {settings.max_body_bytes} bytes"
                    raise ApiError(text, code="request_too_large", status=413)
    except TimeoutError:
        text = f"the body did not come within {settings.body_timeout_s:g} s"
        raise ApiError(text, code="request_timeout", status=408) from None
    return bytes(body)


class _KeyGuard:
    """Lets only requests with a known key to the API; health and metrics stay open."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith("/v1/")
        if not guarded or not self._api_keys or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError("missing or wrong API key", code="invalid_api_key", status=401)
        await send_invalid(send, error)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # All keys are compared, and each in constant time, so that timing tells nothing.
        same = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._api_keys]
        return scheme.lower() == "bearer" and any(same)


# ---------------------------------------------------------------- everything else


class _Pages:
    """The endpoints that only tell."""

    def __init__(
        self, port: RouterPort, settings: GatewaySettings, metrics: GatewayMetrics, version: str
    ) -> None:
        self._port = port
        self._settings = settings
        self._metrics = metrics
        self._version = version
        self._created = unix_time_s()

    async def models(self, _: HttpRequest) -> Response:
        """GET /v1/models."""
        data = [self._model(name) for name in self._settings.model_names]
        return _json(200, {"object": "list", "data": data})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{model_id}."""
        try:
            name = _served_model(request.path_params["model_id"], self._settings)
        except ApiError as error:
            return _error(error.status, error.message, param=error.param, code=error.code)
        return _json(200, self._model(name))

    async def health(self, _: HttpRequest) -> Response:
        """GET /health: this process is alive."""
        return _json(200, {"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        """GET /ready: requests can be served."""
        reason = self._port.readiness()
        if reason is None:
            return _json(200, {"status": "ready"})
        return _json(503, {"status": "not ready", "reason": reason})

    async def metrics(self, _: HttpRequest) -> Response:
        """GET /metrics."""
        headers = {"content-type": CONTENT_TYPE_LATEST}
        return Response(self._metrics.exposition(), headers=headers)

    async def version(self, _: HttpRequest) -> Response:
        """GET /version."""
        return _json(200, {"version": self._version})

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": self._settings.context_len,
        }


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = _error(error.status_code, message, code=code)
    response.headers.update(error.headers or {})
    return response


async def _internal_error(_: HttpRequest, __: Exception) -> Response:
    """A bug in Baton; the server logs the exception."""
    return _json(500, error_body("internal error", kind="server_error", code="internal_error"))


def _error(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> Response:
    kind = "invalid_request_error"
    return _json(status, error_body(message, kind=kind, param=param, code=code))


def _json(status: int, body: object) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _version() -> str:
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"

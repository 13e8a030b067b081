"""The HTTP gateway: OpenAI's API in front of a `RouterPort`.

Decides what an HTTP request becomes and how its answer is sent; where and when it runs is the
router's business, and nothing here knows workers, except to show them in /metrics.

The life of one call of an answer endpoint:

1. The body is read, bounded in size and time. From now on a watcher waits for the client to
   leave; when it does, whatever runs is cancelled and awaited.
2. The body becomes a `Request`: checked, templated, tokenised, in a thread where it is long. A
   grammar is compiled in a process of its own, which says whether workers can follow it.
3. The router's updates become text, and text becomes a response, whose head waits for the first
   token. Several choices are several requests to the router, whose updates come as they like; one
   that fails fails the answer.
4. At the end, at a stop string or when the client has left, the router's iterator is closed: that
   is what cancels the request on the workers.
"""

import asyncio
import importlib.metadata
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.clock import Clock, unix_time_s
from engine.errors import InvalidRequest
from engine.grammar.child import Vocabulary
from engine.messages import RequestId
from router.access.file import KeyFile
from router.access.guard import KeyGuard, tenant_of
from router.access.limits import KeyAccounts, Stream
from router.edge.limits import Book
from router.gateway.answers import Choice, Piece
from router.gateway.connection import Caller, caller_of, pipe_of
from router.gateway.grammar_checker import Asker, GrammarCheck, check_structure
from router.gateway.jobs import (
    Call,
    ClientGone,
    GatewaySettings,
    Job,
    check_size,
    parse,
    read_body,
)
from router.gateway.metrics import GatewayMetrics, RequestMeter
from router.gateway.openai_schema import Body, ChatBody, CompletionBody
from router.gateway.siblings import Siblings
from router.gateway.sse import (
    CHAT,
    COMPLETION,
    DECISION_HEADER,
    AnswerWriter,
    Dialect,
    Ending,
    Heading,
    StreamedAnswer,
    WholeAnswer,
    Wish,
    error_body,
    send_invalid,
    send_json,
)
from router.gateway.versions import AFFINITY_HEADER, VERSION_HEADER, Versions, no_model
from router.inbox.lanes import Lanes
from router.machine.requests import Finished, Outcome, Update
from router.port import RouterPort
from router.text.tokenizer import TextModel
from router.text.tool_calls import ToolCallParser

LONG_BODY_BYTES = 4096  # about a millisecond of encoding; a thread costs a tenth of that
TIMELINE_HEADER = "x-baton-timeline"


def create_app(  # noqa: PLR0913 - all that an application is wired with
    versions: Versions,
    *,
    settings: GatewaySettings,
    clock: Clock,
    rng: random.Random,
    grammars: GrammarCheck,
    keys: KeyFile | None = None,
    siblings: Siblings | None = None,
    edge: Book | None = None,
) -> ASGIApp:
    """The application, to be run by any ASGI server; `siblings` share its port.

    `edge` holds the counts of the listener that it is served by, for /metrics. Without `keys` it is
    open to everyone.
    """
    version = _version()
    process = None if siblings is None else siblings.process
    key_events = None if keys is None else keys.counters
    metrics = GatewayMetrics(versions, version=version, process=process, key_events=key_events)
    metrics.watch_grammars(grammars.counters)
    if edge is not None:
        metrics.watch_edge(edge)
    if siblings is not None:
        siblings.own = metrics.own
    accounts = KeyAccounts(settings.key_limits)
    service = _Service(versions, settings, clock, rng, metrics, grammars, accounts, Lanes())
    pages = _Pages(versions, metrics, version, siblings)
    answers = {
        "/v1/chat/completions": _Answers(service, CHAT, ChatBody),
        "/v1/completions": _Answers(service, COMPLETION, CompletionBody),
    }
    others = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in answers.items()),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model_id:path}", pages.model),
            Route("/health", pages.health),
            Route("/ready", pages.ready),
            Route("/metrics", pages.metrics),
            Route("/version", pages.version),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )
    front = _Front(answers, others)
    return front if keys is None else KeyGuard(front, keys)


# ---------------------------------------------------------------- answers


def _vocabulary_of(text: TextModel) -> Vocabulary | None:
    if text.file is None:
        return None
    return Vocabulary(str(text.file), text.vocab_size, text.eos_token_ids)


@dataclass(frozen=True, slots=True)
class _Service:
    """What both answer endpoints need."""

    versions: Versions
    settings: GatewaySettings
    clock: Clock
    rng: random.Random
    metrics: GatewayMetrics
    grammars: GrammarCheck
    accounts: KeyAccounts
    lanes: Lanes


class _Front:
    """Gives answer endpoints their requests at once, past what all other pages need."""

    def __init__(self, answers: Mapping[str, ASGIApp], others: ASGIApp) -> None:
        self._answers = answers
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._answers.get(scope.get("path", ""))
        if endpoint is None or scope.get("method") != "POST":
            await self._others(scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await endpoint(scope, receive, noted)
        except Exception:  # a bug in Baton; the server logs it
            if not has_begun:
                await send_json(send, 500, _internal_error_body())
            raise


class _Answers:
    """One endpoint, as an ASGI application."""

    def __init__(self, service: _Service, dialect: Dialect, body_type: type[Body]) -> None:
        self._service = service
        self._dialect = dialect
        self._body_type = body_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._service.settings
        with self._service.metrics.request() as meter:
            caller = caller_of(scope)
            try:
                body = None if caller is None else caller.take_body()
                if body is None:
                    body = await read_body(receive, settings)
                check_size(len(body), settings)
            except InvalidRequest as error:
                meter.refuse()
                await send_invalid(send, error)
                return
            except ClientGone:
                return
            if caller is not None:
                with _UntilCallerLeaves(caller):
                    await self._answer(body, scope, meter, send)
                return
            async with _until_client_leaves(receive):
                await self._answer(body, scope, meter, send)

    async def _answer(self, data: bytes, scope: Scope, meter: RequestMeter, send: Send) -> None:
        service, tenant = self._service, tenant_of(scope)
        received_s = service.clock.now_s()
        stream: Stream | None = None
        try:
            try:
                stream = service.accounts.begin(tenant.name, tenant.limits, received_s)
                job = await self._job(data, received_s, scope)
                while not service.versions.takes(job.served):  # it has begun to leave meanwhile
                    job = await self._job(data, received_s, scope)
                stream.hold_tokens(job.most_tokens, received_s)
            except InvalidRequest as error:
                meter.refuse()
                await send_invalid(send, error)
                return
            with service.versions.serving(job.served):
                await self._serve(job, received_s, scope, meter, send, stream)
        finally:
            if stream is not None:
                stream.end(service.clock.now_s())

    async def _serve(
        self,
        job: Job,
        received_s: float,
        scope: Scope,
        meter: RequestMeter,
        send: Send,
        stream: Stream,
    ) -> None:
        service = self._service
        meter.accept(received_s, len(job.first.token_ids), job.served.name)
        choices = [
            Choice(
                index,
                request,
                job.served.text,
                rules=job.rules,
                parser=ToolCallParser(service.rng) if job.structure.calls else None,
                meter=meter.choice(),
            )
            for index, request in enumerate(job.requests)
        ]
        writer = self._writer(job, choices[0], scope, send, stream)
        source = _Updates(job.served.port, service.clock)
        try:
            await _answer_with(source, choices, writer, job.num_shown, meter)
        finally:
            num_answered = sum(choice.num_tokens for choice in choices)
            stream.num_used = len(job.first.token_ids) + num_answered

    async def _job(self, data: bytes, received_s: float, scope: Scope) -> Job:
        service = self._service
        rng = service.rng
        headers = Headers(scope=scope)
        call = Call(
            data,
            RequestId(f"{self._dialect.id_prefix}{rng.getrandbits(128):032x}"),
            rng.getrandbits(64),
            received_s,
            tenant=tenant_of(scope),
            version=headers.get(VERSION_HEADER),
            affinity=headers.get(AFFINITY_HEADER),
        )
        parsed = partial(parse, call, self._body_type, service.versions, service.settings)
        if len(data) < LONG_BODY_BYTES:
            job = parsed()
        else:
            job = await service.lanes.run(call.tenant.name, len(data), parsed)
        if job.structure.grammar is not None:
            vocabulary = _vocabulary_of(job.served.text)
            asker = Asker(call.tenant.name, job.first.salt)
            await check_structure(service.grammars, job.structure, vocabulary, asker)
        return job

    def _writer(
        self, job: Job, first: Choice, scope: Scope, send: Send, stream: Stream
    ) -> AnswerWriter:
        heading = Heading(
            dialect=self._dialect,
            answer_id=job.first.request_id,
            created=unix_time_s(),
            model=job.model,
            prompt_tokens=len(job.first.token_ids),
            num_choices=len(job.requests),
            fingerprint=job.served.port.fingerprint,
            bytes_of=job.served.text.bytes_of,
            wish=_with_headers(job.wish, scope),
            decision=lambda: first.decision,
            limit_headers=lambda: stream.headers(job.first.received_s),
        )
        if job.stream:
            return StreamedAnswer(heading, send, pipe_of(scope))
        return WholeAnswer(heading, send)


def _with_headers(wish: Wish, scope: Scope) -> Wish:
    """What is asked for in headers, since it is no matter of the answer, too.

    A tenant that may not debug gets neither: both tell of the load that others make.
    """
    if not tenant_of(scope).may_debug:
        return wish
    headers = Headers(scope=scope)
    timeline, decision = (headers.get(name) == "1" for name in (TIMELINE_HEADER, DECISION_HEADER))
    if not (timeline or decision):
        return wish
    return replace(wish, timeline=timeline, decision=decision)


@dataclass(frozen=True, slots=True)
class _Updates:
    """Where the updates of an answer come from, and when it is."""

    port: RouterPort
    clock: Clock


async def _answer_with(
    source: _Updates,
    choices: list[Choice],
    writer: AnswerWriter,
    num_shown: int,
    meter: RequestMeter,
) -> None:
    """Follows the choices to their ends, and writes all that is to be shown of them."""
    if len(choices) == 1:
        last = await _follow(source, choices[0], writer)
    else:
        last = await _follow_all(source, choices, writer)
    outcome = last.outcome
    assert outcome is not None
    meter.end(outcome, choices[last.choice].last_s)
    if not last.is_empty or last.finish is not None:
        await writer.write(last)
    await writer.end(_ending(choices, outcome, num_shown))


class _Follower:
    """Turns the updates of one choice into pieces, and writes those that can be written at once."""

    def __init__(self, choice: Choice, writer: AnswerWriter, clock: Clock) -> None:
        self._choice = choice
        self._writer = writer
        self._clock = clock
        self._is_plain = choice.is_plain and writer.shows_text_alone
        self._last: Piece | None = None  # of an answer that a stop string ended

    def take_at_once(self, update: Update) -> bool:
        """Writes what this update brings, if nothing has to wait for it."""
        writer = self._writer
        if update.outcome is not None or not writer.is_ready:
            return False
        piece = self._choice.take(update, self._clock.now_s())
        if piece.outcome is not None:
            self._last = piece
            return False
        writer.write_at_once(piece)
        return True

    def take_tokens(self, token_ids: Sequence[int], now_s: float) -> bool:
        """Writes what these tokens bring, if nothing has to wait for it: the way of most tokens."""
        choice, writer = self._choice, self._writer
        if not (self._is_plain and writer.is_ready):
            return False
        if text := choice.take_tokens(token_ids, now_s):
            writer.write_text(choice.index, text)
        return True

    def take(self, update: Update) -> Piece:
        """What this update brings, if it was not taken at once."""
        return self._last or self._choice.take(update, self._clock.now_s())


async def _follow(source: _Updates, choice: Choice, writer: AnswerWriter) -> Piece:
    """Writes all of a choice but its last piece, which it returns.

    So the iterator is closed, and a request that a stop string ended is cancelled, before anything
    waits for the client to take the end of the answer.
    """
    follower = _Follower(choice, writer, source.clock)
    updates = source.port.submit(choice.request, follower.take_at_once, follower.take_tokens)
    async with aclosing(updates):
        async for update in updates:
            piece = follower.take(update)
            if piece.outcome is not None:
                return piece
            if update.token_ids:
                await writer.write(piece)
    raise AssertionError("the router's iterator ended without an outcome")


async def _follow_all(source: _Updates, choices: list[Choice], writer: AnswerWriter) -> Piece:
    """Writes the pieces of several choices as they come, up to the last one, which it returns.

    That is the last of all, or the first one of a choice that failed: the others are cancelled. A
    choice waits until its piece is taken, so a client that reads slowly gets larger pieces.
    """
    num_open = len(choices)
    end: asyncio.Future[Piece] = asyncio.get_running_loop().create_future()

    async def follow(choice: Choice) -> None:
        nonlocal num_open
        last = await _follow(source, choice, writer)
        num_open -= 1
        if num_open and last.finish is not None:
            await writer.write(last)
        elif not end.done():
            end.set_result(last)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(choice)) for choice in choices]  # the leader's first
        last = await end
        if last.finish is None:
            for task in tasks:
                task.cancel()
    return last


def _ending(choices: list[Choice], outcome: Outcome, num_shown: int) -> Ending:
    first = choices[0]
    timelines = [choice.timeline for choice in choices if choice.timeline is not None]
    shown = list(range(len(choices)))
    if num_shown < len(choices) and isinstance(outcome, Finished):
        shown.sort(key=lambda index: -choices[index].mean_logprob)
    return Ending(
        outcome=outcome,
        shown=tuple(shown[:num_shown]),
        prompt_tokens=len(first.request.token_ids),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        timeline=first.timeline,
        num_drafted_tokens=sum(timeline.num_drafted_tokens for timeline in timelines),
        num_accepted_tokens=sum(timeline.num_accepted_tokens for timeline in timelines),
        prompt_entries=first.prompt_entries,
    )


# ---------------------------------------------------------------- the client's side


@asynccontextmanager
async def _until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside, and waits for it, as soon as the client is gone."""
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_wait_until_gone(receive))
            yield
            watcher.cancel()
    except* ClientGone:
        pass


class _UntilCallerLeaves:
    """The same where the server tells when the client is gone."""

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
    raise ClientGone


# ---------------------------------------------------------------- everything else


class _Pages:
    """The endpoints that only tell."""

    def __init__(
        self,
        versions: Versions,
        metrics: GatewayMetrics,
        version: str,
        siblings: Siblings | None,
    ) -> None:
        self._versions = versions
        self._metrics = metrics
        self._version = version
        self._siblings = siblings
        self._created = unix_time_s()

    async def models(self, _: HttpRequest) -> Response:
        """GET /v1/models."""
        data = [self._model(name, length) for name, length in self._versions.models().items()]
        return _json(200, {"object": "list", "data": data})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{model_id}."""
        name = request.path_params["model_id"]
        max_len = self._versions.models().get(name)
        if max_len is None:
            error = no_model(name)
            return _error(error.status, error.message, param=error.param, code=error.code)
        return _json(200, self._model(name, max_len))

    async def health(self, _: HttpRequest) -> Response:
        """GET /health: this process is alive."""
        return _json(200, {"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        """GET /ready: requests can be served."""
        reason = self._versions.readiness()
        if reason is None:
            return _json(200, {"status": "ready"})
        return _json(503, {"status": "not ready", "reason": reason})

    async def metrics(self, _: HttpRequest) -> Response:
        """GET /metrics."""
        others = [] if self._siblings is None else await self._siblings.ask()
        headers = {"content-type": CONTENT_TYPE_LATEST}
        return Response(self._metrics.exposition(others), headers=headers)

    async def version(self, _: HttpRequest) -> Response:
        """GET /version."""
        return _json(200, {"version": self._version})

    def _model(self, name: str, max_len: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": max_len,
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
    return _json(500, _internal_error_body())


def _internal_error_body() -> dict[str, Any]:
    return error_body("internal error", kind="server_error", code="internal_error")


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

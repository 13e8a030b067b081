"""The HTTP gateway: OpenAI's API in front of the routers of all versions.

Decides which endpoint a request goes to. `router.gateway.endpoint` has the life of one call.
"""

import importlib.metadata
import random
from collections.abc import Collection, Mapping
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.clock import Clock
from engine.errors import InvalidRequest
from router.access.guard import KeyFinder, KeyGuard
from router.access.limits import KeyAccounts
from router.edge.content_types import check_content
from router.edge.limits import Book
from router.edge.responses import send_invalid, send_json
from router.gateway.answering import GatewayParts
from router.gateway.answers.dialects import CHAT, COMPLETION, EMBEDDING
from router.gateway.background import BackgroundWork
from router.gateway.batches.service import Batches
from router.gateway.endpoint import AnswerEndpoint, Invocations
from router.gateway.metrics.collectors import edge_families
from router.gateway.metrics.meters import GatewayMetrics
from router.gateway.metrics.siblings import Siblings
from router.gateway.pages.description import DescriptionPages
from router.gateway.pages.models import ModelPages
from router.gateway.pages.replies import (
    gone,
    http_error,
    internal_error,
    internal_error_body,
    invalid,
)
from router.gateway.pages.status import StatusPages
from router.gateway.pages.tokens import TokenPages
from router.gateway.requests.calls import ClientLeft, GatewaySettings
from router.gateway.requests.embedding_schema import EmbeddingBody
from router.gateway.requests.grammar_checker import GrammarCheck
from router.gateway.requests.openai_schema import ChatBody, CompletionBody
from router.gateway.responses.pages import ResponsePages
from router.gateway.storage import Storage
from router.gateway.versions import Versions
from router.inbox.lanes import Lanes

EXPOSED_HEADERS = (  # that scripts of other origins may read
    "x-request-id",
    "x-baton-decision",
    "x-baton-ignored",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "retry-after",
)


def create_app(  # noqa: PLR0913 - all that an application is wired with
    versions: Versions,
    *,
    settings: GatewaySettings,
    clock: Clock,
    rng: random.Random,
    grammars: GrammarCheck,
    keys: KeyFinder | None = None,
    siblings: Siblings | None = None,
    edge: Book | None = None,
    storage: Storage | None = None,
    background: BackgroundWork | None = None,
) -> ASGIApp:
    """Returns the application, for any ASGI server.

    `siblings` are the gateway processes that share its port. `edge` holds the counts of its
    listener, for /metrics. Without `keys` the application is open to all clients. Without `storage`
    what it keeps is in memory. Without `background` no batch runs.
    """
    parts = parts_of(
        versions,
        settings=settings,
        clock=clock,
        rng=rng,
        grammars=grammars,
        siblings=siblings,
        storage=storage,
    )
    return app_of(parts, keys=keys, siblings=siblings, edge=edge, background=background)


def parts_of(  # noqa: PLR0913 - all that they are
    versions: Versions,
    *,
    settings: GatewaySettings,
    clock: Clock,
    rng: random.Random,
    grammars: GrammarCheck,
    siblings: Siblings | None = None,
    storage: Storage | None = None,
) -> GatewayParts:
    """Returns the parts that all ways to answer share."""
    process = None if siblings is None else siblings.process
    return GatewayParts(
        versions=versions,
        settings=settings,
        clock=clock,
        rng=rng,
        metrics=GatewayMetrics(versions, version=version_of_baton(), process=process),
        grammars=grammars,
        accounts=KeyAccounts(settings.key_limits),
        lanes=Lanes(),
        storage=storage or Storage(None),
    )


def app_of(
    parts: GatewayParts,
    *,
    keys: KeyFinder | None = None,
    siblings: Siblings | None = None,
    edge: Book | None = None,
    background: BackgroundWork | None = None,
) -> ASGIApp:
    """Returns the application over parts that others may use too."""
    version = version_of_baton()
    versions, metrics = parts.versions, parts.metrics
    if keys is not None:
        text = "Refused keys, reloads of the keys file"
        metrics.watch_counts("baton_key_events", text, "event", keys.counters)
    text = "Grammars compiled before workers get them"
    metrics.watch_counts("baton_grammars", text, "verdict", parts.grammars.counters)
    if edge is not None:
        metrics.watch(partial(edge_families, edge))
    if siblings is not None:
        siblings.own = metrics.own
    responses = ResponsePages(parts)
    batches = Batches(parts, shares_port=siblings is not None)
    if background is not None:
        background.add(responses)
        background.add(batches)
    status = StatusPages(versions, metrics, version, siblings)
    models, tokens = ModelPages(versions), TokenPages(parts)
    description = DescriptionPages(version, needs_key=keys is not None)
    chat = AnswerEndpoint(parts, CHAT, ChatBody)
    texts = AnswerEndpoint(parts, COMPLETION, CompletionBody)
    numbers = AnswerEndpoint(parts, EMBEDDING, EmbeddingBody)
    by_name = {ChatBody.endpoint: chat, CompletionBody.endpoint: texts}
    answers: dict[str, ASGIApp] = {
        "/v1/chat/completions": chat,
        "/v1/completions": texts,
        "/v1/embeddings": numbers,
        "/invocations": Invocations(parts, by_name | {EmbeddingBody.endpoint: numbers}),
        "/v1/responses": responses.create,
    }
    others = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in answers.items()),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/v1/models", models.models),
            Route("/v1/models/{model_id:path}", models.model),
            Route("/health", status.health),
            Route("/ready", status.ready),
            Route("/ping", status.ready, methods=["GET", "POST"]),
            Route("/load", status.load),
            Route("/metrics", status.metrics),
            Route("/version", status.version),
            Route("/openapi.json", description.openapi),
            Route("/docs", description.docs),
            *responses.routes(),
            *batches.routes(),
        ],
        exception_handlers={
            HTTPException: http_error,
            InvalidRequest: invalid,
            ClientLeft: gone,
            Exception: internal_error,
        },
    )
    app: ASGIApp = _Front(answers, others, metrics)
    if keys is not None:
        app = KeyGuard(app, keys)
    if parts.settings.cors_origins:
        app = _with_cors(app, parts.settings.cors_origins)
    return app


def _with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Lets pages of other origins use the application; their preflights need no key.

    Pages send keys in the `authorization` header. So cookies are never allowed, and `*` is safe.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE", "OPTIONS"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )


class _Front:
    """Calls answer endpoints directly, without the middleware that all other pages go through."""

    def __init__(
        self, answers: Mapping[str, ASGIApp], others: ASGIApp, metrics: GatewayMetrics
    ) -> None:
        self._answers = answers
        self._others = others
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "POST":
            await self._others(scope, receive, send)
            return
        endpoint = self._answers.get(scope["path"])
        try:
            check_content(scope)
        except InvalidRequest as error:
            if endpoint is not None:
                self._metrics.note_invalid()
            await send_invalid(send, error)
            return
        if endpoint is None:
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
                await send_json(send, 500, internal_error_body())
            raise


def version_of_baton() -> str:
    """Returns the version of Baton."""
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"

"""The HTTP gateway: OpenAI's API in front of the routers of all versions.

Decides which endpoint answers a request. `router.gateway.endpoint` has the life of one call.
"""

import importlib.metadata
import random
import sqlite3
from collections.abc import Collection, Mapping
from functools import cache, partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.clock import Clock
from engine.config import DashboardMode
from engine.errors import InvalidRequest
from router.access.guard import HostGuard, KeyFinder, KeyGuard
from router.access.limits import KeyAccounts, KeyLimits
from router.access.shared_accounts import SharedAccounts
from router.edge.limits import Book
from router.edge.responses import check_content, send_invalid, send_json
from router.gateway.access_log import AccessLog
from router.gateway.answering import GatewayParts
from router.gateway.answers.batching import TextBatch
from router.gateway.answers.writing import CHAT, COMPLETION, EMBEDDING
from router.gateway.background import BackgroundWork
from router.gateway.batches.service import Batches
from router.gateway.dashboard.pages import WebPages
from router.gateway.dashboard.recent import RecentRequests
from router.gateway.dashboard.records import Bounds
from router.gateway.dashboard.service import Dashboard
from router.gateway.endpoint import CallEndpoint, ClientLeft, HttpAnswers, Invocations
from router.gateway.hints.pages import HintPages
from router.gateway.metrics.collectors import edge_families
from router.gateway.metrics.meters import INVALID, GatewayMetrics
from router.gateway.metrics.pools import PoolBoard
from router.gateway.metrics.process import ProcessMeter
from router.gateway.metrics.siblings import Siblings
from router.gateway.pages.description import DescriptionPages
from router.gateway.pages.models import ModelPages
from router.gateway.pages.replies import (
    gone,
    http_error,
    internal_error,
    internal_error_body,
    invalid,
    store_failed,
)
from router.gateway.pages.status import StatusPages
from router.gateway.pages.tokens import TokenPages
from router.gateway.requests.calls import GatewaySettings
from router.gateway.requests.chat import ChatBody
from router.gateway.requests.completion import CompletionBody
from router.gateway.requests.embedding import EmbeddingBody
from router.gateway.requests.grammar_checker import GrammarCheck
from router.gateway.responses.pages import ResponsePages
from router.gateway.storage import Storage
from router.gateway.tracing.trace import Tracing
from router.gateway.versions import Versions
from router.inbox.fair_queue import LoopQueue
from router.inbox.parse_pools import ParsePools

EXPOSED_HEADERS = (  # response headers that scripts of pages of other origins may read
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
OTHER_PATHS = "other"  # metric label of all paths except the endpoints that answer prompts


def parts_of(  # noqa: PLR0913 - all that they are
    versions: Versions,
    *,
    settings: GatewaySettings,
    clock: Clock,
    rng: random.Random,
    grammars: GrammarCheck,
    siblings: Siblings | None = None,
    shared: SharedAccounts | None = None,
    storage: Storage | None = None,
    tracing: Tracing | None = None,
) -> GatewayParts:
    """Returns the parts that all kinds of calls share. Raises BuildError."""
    process = None if siblings is None else siblings.process
    gateway, router = settings.gateway, settings.router
    limits = KeyLimits(gateway.requests_per_s, gateway.tokens_per_min, gateway.max_streams)
    metrics = GatewayMetrics(versions, version=version_of_baton(), process=process)
    return GatewayParts(
        versions=versions,
        settings=settings,
        clock=clock,
        rng=rng,
        metrics=metrics,
        grammars=grammars,
        accounts=KeyAccounts(limits, shared=shared),
        parse_pools=ParsePools(),
        loop_queue=LoopQueue(),
        storage=storage or Storage(None),
        tracing=tracing,
        recent=RecentRequests(Bounds(router.slo_ttft_s, router.slo_tpot_s), versions.tallies),
        batch=TextBatch(metrics),
    )


def app_of(  # noqa: PLR0913 - all that it shows
    parts: GatewayParts,
    *,
    keys: KeyFinder | None = None,
    siblings: Siblings | None = None,
    edge: Book | None = None,
    background: BackgroundWork | None = None,
    board: PoolBoard | None = None,
    process: ProcessMeter | None = None,
    logs_requests: bool = False,
) -> ASGIApp:
    """Returns the HTTP application. Other servers of this gateway may use the same `parts`."""
    version = version_of_baton()
    versions, metrics = parts.versions, parts.metrics
    if keys is not None:
        text = "Refused keys, reloads of the keys file"
        metrics.watch_counts("baton_key_events", text, "event", keys.counters)
    text = "Grammars compiled before workers get them"
    metrics.watch_counts("baton_grammars", text, "verdict", parts.grammars.counters)
    if edge is not None:
        metrics.watch(partial(edge_families, edge))
    if board is not None:
        metrics.watch_shared(board.families)
    if process is not None:
        metrics.watch(process.families)
    if siblings is not None:
        siblings.own = metrics.own
    responses = ResponsePages(parts)
    batches = Batches(parts)
    if background is not None:
        background.add(responses)
        background.add(batches)
    config = parts.settings.gateway
    mode = config.dashboard
    has_pages = mode is not DashboardMode.OFF
    by_name = {
        ChatBody.endpoint: HttpAnswers(parts, CHAT, ChatBody),
        CompletionBody.endpoint: HttpAnswers(parts, COMPLETION, CompletionBody),
        EmbeddingBody.endpoint: HttpAnswers(parts, EMBEDDING, EmbeddingBody),
    }
    answers: dict[str, ASGIApp] = {
        "/v1/chat/completions": CallEndpoint(parts, by_name[ChatBody.endpoint].serve),
        "/v1/completions": CallEndpoint(parts, by_name[CompletionBody.endpoint].serve),
        "/v1/embeddings": CallEndpoint(parts, by_name[EmbeddingBody.endpoint].serve),
        "/invocations": CallEndpoint(parts, Invocations(parts, by_name).serve),
        "/v1/responses": responses.create,
    }
    others = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in answers.items()),
            *TokenPages(parts).routes(),
            *ModelPages(versions).routes(),
            *StatusPages(versions, metrics, version, siblings, board).routes(),
            *DescriptionPages(version, needs_key=keys is not None, has_home=has_pages).routes(),
            *HintPages(parts).routes(),
            *responses.routes(),
            *batches.routes(),
        ],
        exception_handlers={
            HTTPException: http_error,
            InvalidRequest: invalid,
            ClientLeft: gone,
            sqlite3.Error: store_failed,
            Exception: internal_error,
        },
    )
    web: WebPages | None = None
    if has_pages:
        dashboard = dashboard_of(parts, board, siblings)
        web = WebPages(dashboard, takes_orders=mode is DashboardMode.ON)
        text = "Subscribers of the dashboard that were refused or cut off"
        metrics.watch_counts("baton_dashboard_events", text, "event", dashboard.feed.counters)
        if background is not None:
            background.add(dashboard)
    app: ASGIApp = _Front(answers, others, metrics, web)
    if keys is not None:
        app = KeyGuard(app, keys)
    if config.cors_origins:
        app = _with_cors(app, config.cors_origins)
    if keys is None:
        app = HostGuard(app, (config.host.lower(), *config.allowed_hosts))
    if logs_requests:
        app = AccessLog(app, parts.clock)
    return app


def dashboard_of(
    parts: GatewayParts, board: PoolBoard | None = None, siblings: Siblings | None = None
) -> Dashboard:
    """Returns a dashboard that shows these parts. The caller opens the dashboard."""
    return Dashboard(
        parts.versions,
        parts.recent,
        parts.metrics,
        parts.clock,
        board=board or PoolBoard(parts.versions, parts.clock),
        baton=version_of_baton(),
        siblings=siblings,
        takes_orders=parts.settings.gateway.dashboard is DashboardMode.ON,
    )


def _with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Returns the application with CORS, so that pages of other origins may call it.

    Preflight requests need no key.

    Pages send keys in the `authorization` header. Cookies are never allowed, so `*` is safe.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE", "OPTIONS"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )


class _Front:
    """Passes requests for answers directly to their endpoints, without the middleware of other
    pages.
    """

    def __init__(
        self,
        answers: Mapping[str, ASGIApp],
        others: ASGIApp,
        metrics: GatewayMetrics,
        web: WebPages | None,
    ) -> None:
        self._web = web
        self._answers = answers
        self._others = others
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope.get("method"), scope.get("path", "")
        endpoint = self._answers.get(path) if method == "POST" else None
        has_started = False

        async def recorded(message: Message) -> None:
            nonlocal has_started
            if not has_started:  # this message is the head of the response
                has_started = True
                handler = OTHER_PATHS if endpoint is None else path
                self._metrics.record_status(str(method), handler, message.get("status", 0))
            await send(message)

        if method == "POST":
            try:
                check_content(scope)
            except InvalidRequest as error:
                if endpoint is not None:
                    self._metrics.num_by_outcome[INVALID] += 1
                await send_invalid(recorded, error)
                return
        if endpoint is None:
            await self._page_of(scope)(
                scope, receive, recorded if scope["type"] == "http" else send
            )
            return
        try:
            await endpoint(scope, receive, recorded)
        except Exception:  # a bug in Baton; the server logs it
            if not has_started:
                await send_json(recorded, 500, internal_error_body())
            raise

    def _page_of(self, scope: Scope) -> ASGIApp:
        if self._web is not None and self._web.serves(scope["path"]):
            return self._web
        return self._others


@cache
def version_of_baton() -> str:
    """Returns the version of Baton."""
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # Baton runs from a source tree
        return "0+unknown"

"""The pages for people: the handlers, and the files of this package that they send.

The files are HTML, styles, scripts and the chart library. The files are read once. Clients need no
key for the files, because the files have no data. Scripts fetch the data, and insert the data as
text. `/dashboard/state` and `/dashboard/events` reveal the load of all tenants, so they need a key
that may debug. Orders also need the admin key.
"""

from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.errors import InvalidRequest
from router.access.guard import tenant_of
from router.gateway.dashboard.orders import KEY_HEADER, MAX_BODY_BYTES, OrderDesk
from router.gateway.dashboard.service import Dashboard
from router.gateway.pages.replies import gone, http_error, internal_error, invalid
from router.inbox.api_errors import ApiError

PAGES = {"/": "index.html", "/dashboard": "dashboard.html", "/play": "play.html"}
ASSET_PREFIX = "/assets/"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # clients revalidate each time, mostly with status 304
}
_DATA_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Asset:
    """One file, with an ETag that is computed from its content."""

    def __init__(self, name: str, content: bytes) -> None:
        self._content = content
        self._type = _TYPES[name.rpartition(".")[2]]
        self.tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'

    def response(self, known_tag: str | None) -> Response:
        """Returns the file, or status 304 if the client already has the file."""
        headers = {**HEADERS, "etag": self.tag}
        if known_tag == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self._content, media_type=self._type, headers=headers)


def load_assets() -> dict[str, Asset]:
    """Reads all files. Returns the files by URL path."""
    found = dict(_assets_in(files(__package__).joinpath("static"), ASSET_PREFIX))
    for path, name in PAGES.items():
        found[path] = found.pop(f"{ASSET_PREFIX}{name}")
    return found


def _assets_in(folder: Traversable, prefix: str) -> Iterator[tuple[str, Asset]]:
    """Yields the files of a folder and of its subfolders, with their URL paths."""
    for each in folder.iterdir():
        if each.is_dir():
            yield from _assets_in(each, f"{prefix}{each.name}/")
        elif each.name.rpartition(".")[2] in _TYPES:
            yield f"{prefix}{each.name}", Asset(each.name, each.read_bytes())


class WebPages:
    """An ASGI application for all paths for which `serves` returns True."""

    def __init__(self, dashboard: Dashboard, *, takes_orders: bool) -> None:
        self._dashboard = dashboard
        self._takes_orders = takes_orders
        self._desk = OrderDesk()
        paths = (*PAGES, f"{ASSET_PREFIX}{{name:path}}")
        self._app = Starlette(
            routes=[
                *(Route(path, self._file) for path in paths),
                Route("/dashboard/state", self._state),
                Route("/dashboard/events", self._events),
                Route("/dashboard/orders/{path:path}", self._order, methods=["GET", "POST"]),
            ],
            exception_handlers={
                HTTPException: http_error,
                InvalidRequest: invalid,
                ClientDisconnect: gone,
                Exception: internal_error,
            },
        )

    @staticmethod
    def serves(path: str) -> bool:
        """True if this application answers the path."""
        return path in PAGES or path.startswith((ASSET_PREFIX, "/dashboard/"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        await self._app(scope, receive, send)

    @cached_property
    def _assets(self) -> dict[str, Asset]:
        return load_assets()

    async def _file(self, request: HttpRequest) -> Response:
        asset = self._assets.get(request.url.path)
        if asset is None:
            raise HTTPException(404)
        return asset.response(request.headers.get("if-none-match"))

    async def _state(self, _: HttpRequest) -> Response:
        """GET /dashboard/state."""
        state = await self._dashboard.encoded()
        return Response(state, media_type="application/json", headers=_DATA_HEADERS)

    async def _events(self, _: HttpRequest) -> Response:
        """GET /dashboard/events: first the whole state, then the changes once a second."""
        feed = self._dashboard.feed
        feed.check()
        frames = feed.follow(self._dashboard.first_frame)
        headers = {**_DATA_HEADERS, "x-accel-buffering": "no"}
        return StreamingResponse(frames, media_type="text/event-stream", headers=headers)

    async def _order(self, request: HttpRequest) -> Response:
        """Passes an order, or a query that orders need, to the operator's API."""
        if not self._takes_orders:
            why = "this gateway takes no orders: gateway.dashboard is read-only"
            raise ApiError(why, code="permission_denied", status=403)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise ApiError("the order is too long", code="request_too_large", status=413)
        news = self._dashboard.news
        status, answer = await self._desk.send(
            "" if news is None else news.admin_url,
            request.method,
            request.path_params["path"],
            key=request.headers.get(KEY_HEADER, ""),
            query=request.url.query,
            body=bytes(body),
            caller=_caller(request),
        )
        return Response(answer, status, media_type="application/json", headers=_DATA_HEADERS)


def _caller(request: HttpRequest) -> str:
    """Returns the name of an order's client in the audit log: its address and its key's name."""
    address = request.client.host if request.client is not None else ""
    return f"{address} {tenant_of(request.scope).name}".strip()

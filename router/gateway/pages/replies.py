"""Replies of pages, and replies for errors in pages."""

import logging
import sqlite3

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match

from engine.errors import InvalidRequest
from router.edge.responses import refusal_of
from router.inbox.api_errors import ErrorReply, error_body

log = logging.getLogger(__name__)

_CODES = {404: "not_found", 405: "method_not_allowed", 426: "upgrade_required"}


def json_reply(status: int, body: object) -> Response:
    """Returns a complete JSON reply."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def http_error(request: HttpRequest, error: Exception) -> Response:
    """Replies to unknown paths, wrong methods, OPTIONS, and WebSocket probes."""
    assert isinstance(error, HTTPException)
    headers, status, detail = dict(error.headers or {}), error.status_code, error.detail
    if status == 405:
        headers["allow"] = ", ".join(_methods_of(request))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        if request.headers.get("upgrade", "").lower() == "websocket":
            # Clients that tried a WebSocket first use HTTP after status 426.
            status, detail = 426, "there is no WebSocket here"
            headers["upgrade"] = "HTTP/1.1"
    message = f"{detail}: {request.method} {request.url.path}"
    code = _CODES.get(status)
    response = json_reply(status, error_body(message, kind="invalid_request_error", code=code))
    response.headers.update(headers)
    return response


def _methods_of(request: HttpRequest) -> list[str]:
    """Returns the methods of all routes of a path, and OPTIONS."""
    routes = request.app.routes
    found = (each for each in routes if each.matches(request.scope)[0] is not Match.NONE)
    return sorted({"OPTIONS"}.union(*(each.methods for each in found)))


async def invalid(_: HttpRequest, error: Exception) -> Response:
    """Replies to a request that failed a check, with the error's status."""
    assert isinstance(error, InvalidRequest)
    body, headers = refusal_of(error)
    response = json_reply(error.status, body)
    response.headers.update(headers)
    return response


async def gone(_: HttpRequest, __: Exception) -> Response:
    """Returns a reply for a request whose client has left. Nobody reads the reply."""
    return Response(status_code=499)


async def store_failed(_: HttpRequest, error: Exception) -> Response:
    """Replies 503 and logs the cause if `gateway.store` cannot be used, for example on a full
    disk.
    """
    assert isinstance(error, sqlite3.Error)
    log.error("the store failed: %s", error)
    message = f"the store failed: {error}"
    return json_reply(503, error_body(message, kind="server_error", code="store_failed"))


async def internal_error(_: HttpRequest, __: Exception) -> Response:
    """Replies 500 for a bug in Baton; the server logs the exception."""
    return json_reply(500, internal_error_body())


def internal_error_body() -> ErrorReply:
    """Returns the body of a reply with status 500."""
    return error_body("internal error", kind="server_error", code="internal_error")

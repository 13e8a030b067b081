"""The pages beside the answer endpoints: models, health, readiness, metrics, version, errors."""

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.clock import unix_time_s
from router.gateway.metrics.meters import GatewayMetrics
from router.gateway.metrics.siblings import Siblings
from router.gateway.versions import Versions, no_model
from router.inbox.api_errors import error_body


class Pages:
    """The handlers of all GET endpoints."""

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
        """GET /health: 200 while this process is alive."""
        return _json(200, {"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        """GET /ready: 200 while requests can be served, else 503 with the reason."""
        reason = self._versions.readiness()
        if reason is None:
            return _json(200, {"status": "ready"})
        return _json(503, {"status": "not ready", "reason": reason})

    async def metrics(self, _: HttpRequest) -> Response:
        """GET /metrics, for all gateway processes that share the port."""
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


async def http_error(request: HttpRequest, error: Exception) -> Response:
    """Answers unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = _error(error.status_code, message, code=code)
    response.headers.update(error.headers or {})
    return response


async def internal_error(_: HttpRequest, __: Exception) -> Response:
    """Answers 500 for a bug in Baton; the server logs the exception."""
    return _json(500, internal_error_body())


def internal_error_body() -> dict[str, Any]:
    """The body of a 500 answer."""
    return error_body("internal error", kind="server_error", code="internal_error")


def _error(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> Response:
    kind = "invalid_request_error"
    return _json(status, error_body(message, kind=kind, param=param, code=code))


def _json(status: int, body: object) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")

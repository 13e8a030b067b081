"""Lets requests with a known key to the API, and says in the scope whose key it was.

Pages for probes and scrapers need no key: `/health`, `/ready`, `/metrics` and `/version`. Every
other path does, also one that does not exist.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.file import KeyFile
from router.access.keys import ANONYMOUS, Tenant
from router.api_errors import ApiError
from router.sse import send_invalid

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
_TENANT = "baton.tenant"


class KeyGuard:
    """An application, called only for requests whose key is known."""

    def __init__(self, app: ASGIApp, keys: KeyFile) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401, or calls the application with the tenant in the scope."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = _bearer(scope)
        tenant = None if key is None else self._keys.find(key)
        if tenant is None:
            self._keys.counters["refused"] += 1
            error = ApiError("missing or wrong API key", code="invalid_api_key", status=401)
            await send_invalid(send, error)
            return
        await self._app({**scope, _TENANT: tenant}, receive, send)


def tenant_of(scope: Scope) -> Tenant:
    """Whose key opened; the anonymous tenant where no keys are configured."""
    tenant: Tenant = scope.get(_TENANT, ANONYMOUS)
    return tenant


def _bearer(scope: Scope) -> bytes | None:
    """The key in the first `authorization` header, as the bytes that came."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None

"""Lets requests with a known key pass to the API, and puts the tenant into the scope.

Probes and the description of the API, `OPEN_PATHS`, need no key. Every other path needs one, even
if it does not exist. `DEBUG_PATHS` reveal the load of all tenants: they need a key that may debug.
"""

from collections import Counter
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.keys import ANONYMOUS, Tenant
from router.edge.responses import send_invalid
from router.inbox.api_errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/docs", "/openapi.json"})
DEBUG_PATHS = frozenset({"/metrics", "/load"})
_TENANT = "baton.tenant"


class KeyFinder(Protocol):
    """The keys of a gateway."""

    counters: Counter[str]  # refused requests, and events of the keys' source

    def find(self, key: bytes) -> Tenant | None:
        """The holder of a key; None for an unknown or expired one."""
        ...


class KeyGuard:
    """An application, called only for requests whose key is known."""

    def __init__(self, app: ASGIApp, keys: KeyFinder) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 or 403, or calls the application with the tenant in the scope."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = _bearer(scope)
        tenant = None if key is None else self._keys.find(key)
        error = _fault(tenant, scope["path"])
        if error is not None:
            self._keys.counters["refused"] += 1
            await send_invalid(send, error)
            return
        await self._app({**scope, _TENANT: tenant}, receive, send)


def tenant_of(scope: Scope) -> Tenant:
    """The tenant whose key was used; the anonymous tenant if no keys are configured."""
    tenant: Tenant = scope.get(_TENANT, ANONYMOUS)
    return tenant


def _fault(tenant: Tenant | None, path: str) -> ApiError | None:
    """The error if the tenant may not use the path, else None."""
    if tenant is None:
        return ApiError("missing or wrong API key", code="invalid_api_key", status=401)
    if path in DEBUG_PATHS and not tenant.may_debug:
        return ApiError("this key may not debug", code="permission_denied", status=403)
    return None


def _bearer(scope: Scope) -> bytes | None:
    """The key in the first `authorization` header, as raw bytes."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
    return None

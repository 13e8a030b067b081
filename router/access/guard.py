"""Access checks. With keys, only requests with a known key reach the API. Without keys, only
requests to names of this server do.

Probes and the description of the API, `OPEN_PATHS`, need no key. Every other path needs a key, even
if it does not exist. `DEBUG_PATHS` reveal the load of all tenants, so they need a key with debug
access.

Without keys, a web page could point its own domain to 127.0.0.1 (DNS rebinding). The browser then
regards the gateway as the page's own server, and the page's scripts may read the answers. But the
browser still sends the page's domain in the `host` field, and an attacker's domain is neither
`localhost` nor an address.

Source: RFC 6761, 6.3, for names below `localhost`; the URL standard, "ends in a number", for the
texts that browsers regard as addresses.
"""

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from router.access.limits import ANONYMOUS, Tenant
from router.edge.responses import send_invalid
from router.inbox.api_errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/docs", "/openapi.json"})
PAGE_PATHS = frozenset({"/", "/dashboard", "/play"})  # open, but their data needs a key
ASSET_PREFIX = "/assets/"
DEBUG_PATHS = frozenset(
    {"/metrics", "/metrics/targets", "/load", "/dashboard/state", "/dashboard/events"}
)
_TENANT = "baton.tenant"
MAX_REMEMBERED = 256  # maximum number of cached `host` fields and client addresses
_MAX_SHOWN = 100
_PORT = re.compile(r":\d*$")
_ADDRESS = re.compile(r"\[[0-9a-f:.]+(%[^\]]*)?\]|(.*\.)?(\d+|0x[0-9a-f]*)")
ANY = "*"


class KeyFinder(Protocol):
    """The interface of a gateway's keys."""

    counters: Counter[str]  # numbers of refused requests, and of events of the keys' source

    def find(self, key: bytes) -> Tenant | None:
        """Returns the tenant of a key; None for an unknown or expired key."""
        ...


class KeyGuard:
    """An ASGI application that forwards only requests with a known key."""

    def __init__(self, app: ASGIApp, keys: KeyFinder) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 401 or 403, or else calls the application with the tenant in the scope."""
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            tenant = identify(self._keys, _field(scope, b"authorization"))
            if scope["path"] in DEBUG_PATHS and not tenant.may_debug:
                self._keys.counters["refused"] += 1
                raise ApiError("this key may not debug", code="permission_denied", status=403)
        except ApiError as error:
            await send_invalid(send, error)
            return
        scope[_TENANT] = tenant
        await self._app(scope, receive, send)


def is_open(path: str) -> bool:
    """True if a path needs no key."""
    return path in OPEN_PATHS or path in PAGE_PATHS or path.startswith(ASSET_PREFIX)


def with_tenant(scope: Scope, tenant: Tenant) -> Scope:
    """Returns a scope for a request that the gateway makes itself on behalf of a tenant."""
    return {**scope, _TENANT: tenant}


def tenant_of(scope: Scope) -> Tenant:
    """Returns the tenant of a request; without keys, a tenant without a name."""
    tenant: Tenant | None = scope.get(_TENANT)
    if tenant is not None:
        return tenant
    client = scope.get("client")
    return anonymous_at(client[0]) if client else ANONYMOUS


@lru_cache(MAX_REMEMBERED)
def anonymous_at(address: str) -> Tenant:
    """Returns the tenant of a client address, if no keys are configured."""
    return msgspec.structs.replace(ANONYMOUS, queue=address)


def identify(keys: KeyFinder | None, authorization: bytes | None, address: str = "") -> Tenant:
    """Returns the tenant whose key is in an `authorization` field.

    Without `keys`, returns a tenant for the client's address. Raises ApiError if the key is missing
    or wrong, and counts the refusal.
    """
    if keys is None:
        return anonymous_at(address)
    scheme, _, key = (authorization or b"").partition(b" ")
    tenant = keys.find(key.strip()) if scheme.lower() == b"bearer" else None
    if tenant is None:
        keys.counters["refused"] += 1
        raise ApiError("missing or wrong API key", code="invalid_api_key", status=401)
    return tenant


def _field(scope: Scope, wanted: bytes) -> bytes:
    """Returns the first header field with this name; empty if there is none."""
    fields: Iterable[tuple[bytes, bytes]] = scope["headers"]
    for name, value in fields:
        if name == wanted:
            return value
    return b""


class HostGuard:
    """An ASGI application that forwards requests to localhost, IP addresses or allowed names."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        """`allowed`: names; `*.NAME` allows all subdomains of a name, `*` allows every name."""
        self._app = app
        self._allowed = frozenset(allowed)
        self._passed: set[bytes] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 403, or else calls the application."""
        if scope["type"] == "http":
            field = _field(scope, b"host")
            if field and field not in self._passed:  # browsers always send it
                if not is_own(field.decode("latin-1"), self._allowed):
                    await send_invalid(send, _refused(field))
                    return
                if len(self._passed) < MAX_REMEMBERED:
                    self._passed.add(field)
        await self._app(scope, receive, send)


def is_own(field: str, allowed: frozenset[str]) -> bool:
    """True if a `host` field is localhost, an IP address or an allowed name; a port is ignored."""
    name = _PORT.sub("", field.strip().lower()).removesuffix(".")
    if ANY in allowed or name in allowed or _ADDRESS.fullmatch(name) is not None:
        return True
    labels = name.split(".")
    above = (".".join(labels[start:]) for start in range(1, len(labels)))
    return labels[-1] == "localhost" or any(f"*.{each}" in allowed for each in above)


def _refused(field: bytes) -> ApiError:
    shown = repr(field.decode("latin-1")[:_MAX_SHOWN])
    message = (
        f"the host {shown} is not known, and this server needs no key: add the name to"
        " gateway.allowed_hosts, use an address or localhost, or set keys"
    )
    return ApiError(message, param="host", code="host_not_allowed", status=403)

"""Refuses requests whose `host` is not a name of this server, if no key is needed.

A web page can point its own name to 127.0.0.1 (DNS rebinding). For the browser, its scripts then
call their own server, and may read the answers. The browser still sends the page's name in the
`host` field. A name that an attacker owns is neither `localhost` nor an address.

Source: RFC 6761, 6.3, for names below `localhost`; the URL standard, "ends in a number", for what
browsers take as an address.
"""

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from router.edge.responses import send_invalid
from router.inbox.api_errors import ApiError

MAX_REMEMBERED = 256  # `host` fields that passed
_MAX_SHOWN = 100
_PORT = re.compile(r":\d*$")
_ADDRESS = re.compile(r"\[[0-9a-f:.]+(%[^\]]*)?\]|(.*\.)?(\d+|0x[0-9a-f]*)")
ANY = "*"


class HostGuard:
    """An application, called only for requests to localhost, an address or an allowed name."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        """`allowed` has names, `*.NAME` for all below a name, or `*`."""
        self._app = app
        self._allowed = frozenset(allowed)
        self._passed: set[bytes] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 403, or calls the application."""
        if scope["type"] == "http":
            field = next((value for name, value in scope["headers"] if name == b"host"), b"")
            if field and field not in self._passed:  # browsers always send it
                if not is_own(field.decode("latin-1"), self._allowed):
                    await send_invalid(send, _refused(field))
                    return
                if len(self._passed) < MAX_REMEMBERED:
                    self._passed.add(field)
        await self._app(scope, receive, send)


def is_own(field: str, allowed: frozenset[str]) -> bool:
    """True if a `host` field is localhost, an address or an allowed name, perhaps with a port."""
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

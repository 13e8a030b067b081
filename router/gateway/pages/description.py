"""The pages that describe the API: /openapi.json and /docs."""

from functools import cached_property

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from router.gateway.openapi.document import document
from router.gateway.openapi.page import page_of

NOT_GUESSED = {"x-content-type-options": "nosniff"}  # browsers must use the given type


class DescriptionPages:
    """The handlers of the description. Each page is made at the first request, and kept."""

    def __init__(self, version: str, *, needs_key: bool, has_home: bool) -> None:
        self._version = version
        self._needs_key = needs_key
        self._has_home = has_home  # True if there is a landing page

    def routes(self) -> list[Route]:
        """Returns the routes of all handlers."""
        return [Route("/openapi.json", self.openapi), Route("/docs", self.docs)]

    async def openapi(self, _: HttpRequest) -> Response:
        """GET /openapi.json."""
        return Response(self._document, media_type="application/json", headers=NOT_GUESSED)

    async def docs(self, _: HttpRequest) -> Response:
        """GET /docs."""
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none';"
            " frame-ancestors 'none'"
        )
        if self._has_home:
            policy += "; script-src 'self'; img-src 'self'"
        headers = {"content-security-policy": policy, **NOT_GUESSED}
        return Response(self._page, media_type="text/html", headers=headers)

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(document(self._version, needs_key=self._needs_key))

    @cached_property
    def _page(self) -> bytes:
        decoded = msgspec.json.decode(self._document)
        return page_of(decoded, has_home=self._has_home).encode()

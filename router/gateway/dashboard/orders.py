"""Passes orders of the dashboard on to the operator's API, which checks the admin key.

Only the paths of orders, and of queries that orders need, are passed on. Bodies, answers, waits and
concurrent calls are limited. The answer to a wrong key is delayed by half a second, so that nobody
can try keys fast.
"""

import asyncio
import re
from collections.abc import Mapping

import httpx

from engine.log_context import CALLER_HEADER
from router.inbox.api_errors import ApiError

KEY_HEADER = "x-baton-admin-key"
MAX_BODY_BYTES = 64 * 2**10
MAX_ANSWER_BYTES = 4 * 2**20
MAX_AT_ONCE = 4
TIMEOUT_S = 10.0
UPDATE_TIMEOUT_S = 120.0  # seconds; the controller may have to look up a new version's model first
WRONG_KEY_S = 0.5

_NAME = r"[A-Za-z0-9._~-]{1,128}"
_PATHS = {
    "GET": re.compile(r"v1/(pools|workers|requests|planner|versions)"),
    "POST": re.compile(
        rf"v1/(pools|planner|weights|versions|rollback|workers/{_NAME}/(flip|drain|stop)"
        rf"|versions/{_NAME}/(finish|abort))"
    ),
}


class OrderDesk:
    """Forwards orders to the controller, after the controller has published its address."""

    def __init__(self) -> None:
        self._at_once = 0
        self._never = asyncio.Event()

    async def send(  # noqa: PLR0913 - an HTTP call, whose it is, and where it goes
        self,
        admin_url: str,
        method: str,
        path: str,
        *,
        key: str,
        query: str,
        body: bytes,
        caller: str = "",
    ) -> tuple[int, bytes]:
        """Forwards a call. Returns the status and the JSON body of the answer. Raises ApiError.

        `caller` names the client in the audit log.
        """
        if not is_order(method, path):
            raise ApiError(f"no order: {method} /{path}", code="not_found", status=404)
        if not key:
            raise ApiError(
                f"an order needs the admin key ({KEY_HEADER})", code="invalid_api_key", status=401
            )
        if len(body) > MAX_BODY_BYTES:
            raise ApiError("the order is too long", code="request_too_large", status=413)
        if not admin_url:
            raise ApiError("no controller has said where orders go", code="not_ready", status=503)
        if self._at_once >= MAX_AT_ONCE:
            raise ApiError("too many orders at once", code="rate_limit_exceeded", status=429)
        self._at_once += 1
        try:
            status, answer = await _forward(
                f"{admin_url}/{path}", method, query, body, _headers(key, caller)
            )
            if status == 401:
                await self._pause()
            return status, answer
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = f"the controller does not answer: {str(error) or type(error).__name__}"
            raise ApiError(why, code="not_ready", status=503) from error
        finally:
            self._at_once -= 1

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(WRONG_KEY_S):
                await self._never.wait()
        except TimeoutError:
            return


def is_order(method: str, path: str) -> bool:
    """True if calls with this method and path are forwarded."""
    pattern = _PATHS.get(method)
    return pattern is not None and pattern.fullmatch(path) is not None


def _headers(key: str, caller: str) -> dict[str, str]:
    return {
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
        CALLER_HEADER: caller.encode("ascii", "backslashreplace").decode(),
    }


async def _forward(
    address: str, method: str, query: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    is_update = method == "POST" and address.endswith("/v1/versions")
    timeout_s = UPDATE_TIMEOUT_S if is_update else TIMEOUT_S
    url = address + (f"?{query}" if query else "")
    async with (
        asyncio.timeout(timeout_s),
        httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client,
        client.stream(method, url, headers=headers, content=body) as answer,
    ):
        pieces = bytearray()
        async for piece in answer.aiter_bytes():
            pieces += piece
            if len(pieces) > MAX_ANSWER_BYTES:
                raise ApiError("the answer is too long", code="not_ready", status=503)
        return answer.status_code, bytes(pieces)

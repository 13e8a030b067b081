"""The HTTP side of responses: create, read, follow, cancel, delete, count, and list inputs."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.datastructures import QueryParams
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import InvalidRequest
from router.access.guard import tenant_of
from router.edge.exchange import PIPE
from router.edge.responses import (
    EVENT_STREAM,
    send_head,
    send_invalid,
    send_json,
    send_parts,
)
from router.gateway.answering import ID_HEADER, GatewayParts
from router.gateway.answers.stream import STREAM_HEADERS
from router.gateway.endpoint import CallEndpoint, headers_of, read_body, until_client_leaves
from router.gateway.metrics.meters import RequestMeter
from router.gateway.pages.replies import json_reply
from router.gateway.responses.items import Item
from router.gateway.responses.service import ResponseService
from router.inbox.api_errors import ApiError, invalid_value
from router.inbox.json_parts import json_parts

PATH = "/v1/responses"
MAX_PAGE = 100  # maximum items per page
PAGE = 20
_INCLUDES = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})

Page = Callable[[Scope, Send], Awaitable[None]]


class _ResponseIdConvertor(StringConvertor):
    """Matches a response's id in a path, but not `input_tokens`, which is the name of a page."""

    regex = "(?!input_tokens$)[^/]+"


register_url_convertor("response", _ResponseIdConvertor())


class DeletedResponse(msgspec.Struct):
    """A response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ItemList(msgspec.Struct, kw_only=True):
    """Items of a response's input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponsePages:
    """The endpoints of responses; a `BackgroundPart`."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._service = ResponseService(parts)
        self._store = self._service.store
        self.create = CallEndpoint(parts, self._create)  # handles POST /v1/responses

    def routes(self) -> list[Route]:
        """Returns the routes of all endpoints except the one that creates responses."""
        one = f"{PATH}/{{response_id:response}}"
        return [
            Route(f"{PATH}/input_tokens", self._input_tokens, methods=["POST"]),
            Route(one, _watched(self._get), methods=["GET"]),
            Route(one, _watched(self._delete), methods=["DELETE"]),
            Route(f"{one}/cancel", _watched(self._cancel), methods=["POST"]),
            Route(f"{one}/input_items", _watched(self._input_items), methods=["GET"]),
        ]

    async def open(self) -> None:
        """Does nothing, because runs start with their calls."""

    def stop_draining(self) -> None:
        """Makes a running `close` stop waiting."""
        self._service.runs.stop_draining()

    async def close(self, timeout_s: float) -> None:
        """Waits for background responses.

        After `timeout_s`, responses that still run end as failed.
        """
        await self._service.runs.close(timeout_s)

    async def _create(self, body: bytes, scope: Scope, meter: RequestMeter, send: Send) -> None:
        tenant, service = tenant_of(scope), self._service
        prepared = await service.prepare(body, tenant)
        call = service.call(prepared, tenant, headers_of(list(scope["headers"])))
        if not prepared.body.background:
            await service.answer(prepared, call, meter, send, scope.get(PIPE))
            return
        try:
            accepted = await service.start(prepared, call, meter)
        except InvalidRequest as error:
            await send_invalid(send, error, {ID_HEADER: call.shown_id})
            return
        if not accepted.is_streamed:
            await send_json(send, 200, accepted.body, accepted.headers)
            return
        events = service.runs.follow(accepted.id, tenant.owner, -1)
        await _stream(events, send, accepted.headers)

    async def _get(self, scope: Scope, send: Send) -> None:
        """GET /v1/responses/{id}, the whole response, or a stream of its events."""
        id, owner, query = _id(scope), tenant_of(scope).owner, _query(scope)
        unknown = {*query.getlist("include"), *query.getlist("include[]")} - _INCLUDES
        if unknown:
            shown = sorted(unknown)[0][:64]
            raise ApiError(f"include {shown!r} is not supported", param="include")
        stream = _flag(query, "stream")
        last = _number(query, "starting_after", -1, least=0)
        if _flag(query, "include_obfuscation"):
            raise ApiError("include_obfuscation is not supported", param="include_obfuscation")
        kept = await self._store.get(id, owner)
        if not stream:
            if "starting_after" in query:
                raise invalid_value("starting_after needs stream=true", "starting_after")
            await self._send(scope, send, kept.body())
            return
        if not kept.has_events:
            message = "only responses made with background: true and stream: true can be streamed"
            raise invalid_value(message, "stream")
        await _stream(self._service.runs.follow(id, owner, last), send, {})

    async def _delete(self, scope: Scope, send: Send) -> None:
        """DELETE /v1/responses/{id}."""
        id = _id(scope)
        await self._store.delete(id, tenant_of(scope).owner)
        self._service.runs.stop(id)
        await send_json(send, 200, DeletedResponse(id))

    async def _cancel(self, scope: Scope, send: Send) -> None:
        """POST /v1/responses/{id}/cancel."""
        id = _id(scope)
        kept = await self._store.cancel(id, tenant_of(scope).owner)
        if kept.status == "cancelled":
            self._service.runs.stop(id)
        await self._send(scope, send, kept.body())

    async def _input_tokens(self, request: HttpRequest) -> Response:
        """POST /v1/responses/input_tokens. The call counts as a request of its key."""
        parts, tenant = self._parts, tenant_of(request.scope)
        use = parts.accounts.start(tenant.name, tenant.limits, parts.clock.now_s())
        try:
            data = await read_body(request.receive, parts.settings.gateway)
            num_tokens = await self._service.count(data, tenant, request.headers)
        finally:
            use.release(parts.clock.now_s())
        return json_reply(200, InputTokens(num_tokens))

    async def _input_items(self, scope: Scope, send: Send) -> None:
        """GET /v1/responses/{id}/input_items."""
        query, owner = _query(scope), tenant_of(scope).owner
        limit = _number(query, "limit", PAGE, least=1, most=MAX_PAGE)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid_value(f"order is {order[:40]!r}; expected asc or desc", "order")
        max_bytes = self._parts.settings.gateway.max_body_bytes
        items = await self._store.input_items(_id(scope), owner, max_bytes)
        if order == "desc":
            items.reverse()
        await self._send(scope, send, _page(items, query.get("after"), limit))

    async def _send(self, scope: Scope, send: Send, body: object) -> None:
        """Sends a JSON body in parts, because the body may be long."""
        turn = partial(self._parts.loop_queue.wait, tenant_of(scope).queue)
        await send_parts(send, json_parts(body), {}, turn)


def _page(items: list[Item], after: str | None, limit: int) -> ItemList:
    """Returns at most `limit` items, which follow the item with the id `after`."""
    start = 0
    if after is not None:
        start = next((i for i, item in enumerate(items, 1) if item["id"] == after), -1)
        if start < 0:
            raise invalid_value(f"after names no item: {after[:64]!r}", "after")
    shown = items[start : start + limit]
    return ItemList(
        data=shown,
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=start + limit < len(items),
    )


async def _stream(events: AsyncIterator[bytes], send: Send, headers: Mapping[str, str]) -> None:
    await send_head(send, 200, EVENT_STREAM, {**STREAM_HEADERS, **headers})
    async with aclosing(events):  # type: ignore[type-var]  # `events` is a generator
        async for data in events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _watched(page: Page) -> ASGIApp:
    """Returns an ASGI application that runs the page, and cancels the page if its client leaves."""

    class _WatchedPage:  # Starlette would treat a function as a handler of its requests
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async with until_client_leaves(receive):
                await page(scope, send)

    return _WatchedPage()


def _id(scope: Scope) -> str:
    id: str = scope["path_params"]["response_id"]
    return id


def _query(scope: Scope) -> QueryParams:
    return QueryParams(scope["query_string"])


def _flag(query: QueryParams, name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise invalid_value(f"{name} is {value[:40]!r}; expected true or false", name)
    return value == "true"


def _number(query: QueryParams, name: str, default: int, *, least: int, most: int = 2**31) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and least <= int(text) <= most):
        message = f"{name} is {text[:40]!r}; expected a whole number from {least} to {most}"
        raise invalid_value(message, name)
    return int(text)

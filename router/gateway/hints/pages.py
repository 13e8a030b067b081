"""The endpoints with which clients end sessions, and pin prompts in the stores of KV blocks.

A pin has the body of a chat completion or of a completion. The body is checked and tokenised by the
same code as a request, so an equal request looks up the same blocks. The gateway keeps no pins:
stores limit the pins of each key, and a DELETE with the same body removes a pin.
"""

from collections.abc import Mapping
from functools import partial

import msgspec
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from engine.messages import PinBlocks, SessionEnd, UnpinBlocks
from engine.worker.blocks import BlockHash
from router.access.guard import tenant_of
from router.edge.responses import check_content
from router.gateway.answering import LONG_BODY_BYTES, AnswerService, GatewayParts
from router.gateway.answers.writing import CHAT as CHAT_DIALECT
from router.gateway.endpoint import read_body
from router.gateway.hints.claims import check_session, key_id, session_id
from router.gateway.hints.uses import prompt_hashes
from router.gateway.requests.body import Body
from router.gateway.requests.calls import (
    ApiCall,
    CheckedCall,
    GatewaySettings,
    parse,
)
from router.gateway.requests.chat import ChatBody
from router.gateway.requests.completion import CompletionBody
from router.gateway.requests.field_table import CHAT
from router.gateway.requests.json_fields import endpoint_of
from router.gateway.versions import AFFINITY_HEADER, Versions
from router.inbox.api_errors import ApiError, invalid_value

SESSION_PARAM = "session_id"
_ANY_KEY = "pins"  # affinity key of pins, so that pin and unpin choose the same version


class _SessionConvertor(StringConvertor):
    """Matches the rest of a path, with any characters."""

    regex = "(?s:.*)"


register_url_convertor("session", _SessionConvertor())


class ShownPin(msgspec.Struct):
    """A prompt that stores are asked to keep. `covered_tokens` are those in whole blocks."""

    object: str
    model: str
    prompt_tokens: int
    covered_tokens: int


class _Pin(msgspec.Struct, frozen=True):
    """A checked pin, with the block hashes of each prompt."""

    call: CheckedCall
    hashes: list[list[BlockHash]]
    covered_tokens: int


class HintPages:
    """The handlers of the sessions and pins endpoints."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts
        self._calls = AnswerService(parts, CHAT_DIALECT, ChatBody)

    def routes(self) -> list[Route]:
        """Returns the routes of all handlers."""
        session = f"/v1/sessions/{{{SESSION_PARAM}:session}}"
        return [
            Route(session, self._end, methods=["DELETE"]),
            Route("/v1/pins", self._pin, methods=["POST"]),
            Route("/v1/pins", self._unpin, methods=["DELETE"]),
        ]

    async def _end(self, request: HttpRequest) -> Response:
        """DELETE /v1/sessions/{session_id}.

        Informs the stores of all versions, since each may have the session's blocks.
        """
        name = request.path_params[SESSION_PARAM]
        check_session(name, SESSION_PARAM)
        tenant, secret = tenant_of(request.scope), self._parts.settings.secret
        end = SessionEnd(key_id(tenant, secret), session_id(name, tenant, secret))
        for served in self._parts.versions.table:
            if served.port.store_block_size() is not None:
                served.port.tell_stores(end)
        return Response(status_code=204)

    async def _pin(self, request: HttpRequest) -> Response:
        """POST /v1/pins."""
        pin, key, headers = await self._read(request)
        for hashes in pin.hashes:
            pin.call.served.port.tell_stores(PinBlocks(key, [*hashes]))
        shown = ShownPin("pin", pin.call.model, pin.call.prompt_len, pin.covered_tokens)
        body = msgspec.json.encode(shown)
        return Response(body, media_type="application/json", headers=headers)

    async def _unpin(self, request: HttpRequest) -> Response:
        """DELETE /v1/pins, with the same body as the pin."""
        pin, key, headers = await self._read(request)
        for hashes in pin.hashes:
            pin.call.served.port.tell_stores(UnpinBlocks(key, [*hashes]))
        return Response(status_code=204, headers=headers)

    async def _read(self, request: HttpRequest) -> tuple[_Pin, str, Mapping[str, str]]:
        """Reads a pin. Returns the pin, the id of its API key, and headers of the answer.

        Raises InvalidRequest.

        A long body is read in a thread. The call counts as a request of its API key.
        """
        check_content(request.scope)  # `app` checks only POST
        parts, tenant = self._parts, tenant_of(request.scope)
        use = parts.accounts.start(tenant.name, tenant.limits, parts.clock.now_s())
        try:
            data = await read_body(request.receive, parts.settings.gateway)
            call = self._calls.call(data, tenant, request.headers)
            work = partial(_pin_of, call, parts.versions, parts.settings)
            if len(data) < LONG_BODY_BYTES:
                pin = work()
            else:
                pin = await parts.parse_pools.run(tenant.queue, len(data), work)
        finally:
            use.release(parts.clock.now_s())
        headers = use.headers(parts.clock.now_s())
        return pin, key_id(tenant, parts.settings.secret), headers


def _pin_of(call: ApiCall, versions: Versions, settings: GatewaySettings) -> _Pin:
    """Returns the checked pin of a call. Raises InvalidRequest."""
    body_type: type[Body] = ChatBody if endpoint_of(call.data) == CHAT else CompletionBody
    if AFFINITY_HEADER not in call.headers:
        headers = {**call.headers, AFFINITY_HEADER: _ANY_KEY}
        call = msgspec.structs.replace(call, headers=headers)
    checked = parse(call, body_type, versions, settings)
    block_size = checked.served.port.store_block_size()
    if block_size is None:
        message = "no store of KV blocks is connected: `store.memory_mib` sets one up"
        raise ApiError(message, code="no_store", status=501)
    found = [prompt_hashes(leader, block_size) for leader in checked.leaders]
    hashes = [each for each in found if each]
    if not hashes:
        longest = max(len(leader.token_ids) for leader in checked.leaders)
        message = f"the prompt has {longest} tokens, and only whole blocks of {block_size} are kept"
        raise invalid_value(message, body_type.prompt_field)
    return _Pin(checked, hashes, block_size * sum(map(len, hashes)))

"""Pages that turn text into tokens and back, as the answer endpoints do it.

A body for `/tokenize` is one for chat completions or for completions, with a few more fields. It is
parsed and templated by the same code. So its count is what the request itself would take.
Unlike a request, a text may be longer than the model's context.

Sources: vLLM's OpenAI-compatible server, `/tokenize` and `/detokenize`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from router.access.guard import tenant_of
from router.gateway.answering import LONG_BODY_BYTES, GatewayParts
from router.gateway.requests.calls import read_body
from router.gateway.requests.json_fields import decode_fields
from router.gateway.requests.openai_schema import (
    ChatBody,
    CompletionBody,
    Refused,
    body_of,
    check_in_vocabulary,
    from_validation,
)
from router.gateway.requests.parameters import checked_structure
from router.gateway.versions import AFFINITY_HEADER, VERSION_HEADER, ServedVersion, Versions
from router.inbox.api_errors import invalid_value
from router.inbox.json_values import no_object, not_json

MAX_TOKENS = 2**20  # of a text or a list; their objects and JSON take some 0.1 s


class TokenizeChatBody(ChatBody, kw_only=True):
    """POST /tokenize with messages: a chat completion's body."""

    # Templates write the special tokens themselves.
    refused: ClassVar[Refused] = {**ChatBody.refused, "add_special_tokens": (False,)}

    return_token_strs: bool | None = None


class TokenizeTextBody(CompletionBody, kw_only=True):
    """POST /tokenize with a text: a completion's body."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Tokenized(msgspec.Struct):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The answer of /detokenize."""

    prompt: str


class _Kind(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"null")


Read = Callable[[bytes, Callable[[str | None], ServedVersion]], Tokenized | Detokenized]


class TokenPages:
    """Their handlers."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts

    async def tokenize(self, request: HttpRequest) -> Response:
        """POST /tokenize."""
        return await self._answer(request, tokenized)

    async def detokenize(self, request: HttpRequest) -> Response:
        """POST /detokenize."""
        return await self._answer(request, detokenized)

    async def _answer(self, request: HttpRequest, read: Read) -> Response:
        """Reads the body in a thread if it is long. Counts as a request of its key."""
        parts, tenant = self._parts, tenant_of(request.scope)
        use = parts.accounts.begin(tenant.name, tenant.limits, parts.clock.now_s())
        try:
            data = await read_body(request.receive, parts.settings)
            work = partial(_encoded, read, data, partial(_chosen, parts.versions, request.headers))
            if len(data) < LONG_BODY_BYTES:
                body = work()
            else:
                body = await parts.lanes.run(tenant.name, len(data), work)
        finally:
            use.end(parts.clock.now_s())
        headers = use.headers(parts.clock.now_s())
        return Response(body, media_type="application/json", headers=headers)


def tokenized(data: bytes, choose: Callable[[str | None], ServedVersion]) -> Tokenized:
    """Answers /tokenize. `choose` finds the version for a model's name. Raises InvalidRequest."""
    is_chat = _is_chat(data)
    body_type: type[TokenizeChatBody | TokenizeTextBody]
    body_type = TokenizeChatBody if is_chat else TokenizeTextBody
    fields = decode_fields(data, body_type)
    if is_chat and fields.get("prompt") is not None:
        raise invalid_value("prompt and messages cannot be combined", "prompt")
    body = body_of(fields, body_type)
    served = choose(body.model)
    text = served.text
    if isinstance(body, TokenizeTextBody):
        if body.prompt is None:
            raise invalid_value("prompt or messages are missing", "prompt")
        special = body.add_special_tokens is not False
        token_ids = text.encode_text(body.prompt, MAX_TOKENS, add_special_tokens=special)
    else:
        structure = checked_structure(fields, text.added_token_id)
        token_ids = body.encode(text, MAX_TOKENS, structure.tools)
    return Tokenized(
        count=len(token_ids),
        max_model_len=served.max_len,
        tokens=token_ids,
        token_strs=text.names_of(token_ids) if body.return_token_strs else None,
    )


def detokenized(data: bytes, choose: Callable[[str | None], ServedVersion]) -> Detokenized:
    """Answers /detokenize. Raises InvalidRequest."""
    if data.count(b",") >= MAX_TOKENS:
        raise invalid_value(f"tokens may hold {MAX_TOKENS} token ids", "tokens")
    try:
        body = msgspec.json.decode(data, type=DetokenizeBody)
    except msgspec.ValidationError as error:
        raise from_validation(error) from error
    except (ValueError, RecursionError) as error:
        raise not_json(error) from error
    text = choose(body.model).text
    check_in_vocabulary(body.tokens, text.vocab_size, "tokens")
    return Detokenized(text.decode_all(body.tokens))


def _is_chat(data: bytes) -> bool:
    try:
        kind = msgspec.json.decode(data, type=_Kind)
    except msgspec.ValidationError as error:
        raise no_object() from error
    except (ValueError, RecursionError) as error:
        raise not_json(error) from error
    return bytes(kind.messages) != b"null"


def _encoded(read: Read, data: bytes, choose: Callable[[str | None], ServedVersion]) -> bytes:
    return msgspec.json.encode(read(data, choose))


def _chosen(versions: Versions, headers: Mapping[str, str], model: str | None) -> ServedVersion:
    """The version for a request, the same at every time if nothing else decides."""
    affinity = headers.get(AFFINITY_HEADER, "")
    return versions.choose(key=affinity, model=model, version=headers.get(VERSION_HEADER))

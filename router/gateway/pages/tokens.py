"""Pages that convert text to tokens and tokens to text, in the same way as the answer endpoints.

A body for `/tokenize` is a body for chat completions or completions with a few more fields. The
same code parses the body and applies the template. So the count is equal to the token count of the
request. Unlike a request's prompt, a text may be longer than the model's context.

Sources: vLLM's OpenAI-compatible server, `/tokenize` and `/detokenize`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from router.access.guard import tenant_of
from router.gateway.answering import LONG_BODY_BYTES, GatewayParts
from router.gateway.endpoint import read_body
from router.gateway.requests.body import body_of, check_in_vocabulary, from_validation
from router.gateway.requests.chat import ChatBody
from router.gateway.requests.completion import CompletionBody
from router.gateway.requests.json_fields import decode_fields
from router.gateway.requests.parameters import checked_structure
from router.gateway.versions import AFFINITY_HEADER, VERSION_HEADER, ServedVersion, Versions
from router.inbox.api_errors import invalid_value
from router.inbox.json_parts import json_parts
from router.inbox.json_values import not_json

MAX_TOKENS = 2**20  # maximum tokens in a list; their objects and JSON take some 0.1 s


class TokenizeOptions(msgspec.Struct):
    """The fields of POST /tokenize beside a request's."""

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


class _Kind(TokenizeOptions):
    messages: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_chat(self) -> bool:
        return bytes(self.messages) != b"null"


Choose = Callable[[str | None], ServedVersion]  # given a model's name, returns the version
Read = Callable[[bytes, Choose], Tokenized | Detokenized]
StructT = TypeVar("StructT", bound=msgspec.Struct)


class TokenPages:
    """The handlers of the token pages."""

    def __init__(self, parts: GatewayParts) -> None:
        self._parts = parts

    def routes(self) -> list[Route]:
        """Returns the routes of all handlers."""
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: HttpRequest) -> Response:
        """POST /tokenize."""
        return await self._answer(request, tokenized)

    async def detokenize(self, request: HttpRequest) -> Response:
        """POST /detokenize."""
        return await self._answer(request, detokenized)

    async def _answer(self, request: HttpRequest, read: Read) -> Response:
        """Answers a request, in a thread if the body is long.

        The request counts towards its key's limits.
        """
        parts, tenant = self._parts, tenant_of(request.scope)
        use = parts.accounts.start(tenant.name, tenant.limits, parts.clock.now_s())
        try:
            data = await read_body(request.receive, parts.settings.gateway)
            work = partial(_encoded, read, data, partial(_chosen, parts.versions, request.headers))
            if len(data) < LONG_BODY_BYTES:
                body = work()
            else:
                body = await parts.parse_pools.run(tenant.queue, len(data), work)
        finally:
            use.release(parts.clock.now_s())
        headers = use.headers(parts.clock.now_s())
        return Response(body, media_type="application/json", headers=headers)


def tokenized(data: bytes, choose: Choose) -> Tokenized:
    """Returns the answer of /tokenize for a body. Raises InvalidRequest."""
    kind = _decoded(data, _Kind)
    if kind.is_chat:
        served, token_ids = _chat_tokens(data, choose)
    else:
        served, token_ids = _text_tokens(data, choose)
    return Tokenized(
        count=len(token_ids),
        max_model_len=served.max_len,
        tokens=token_ids,
        token_strs=served.text.names_of(token_ids) if kind.return_token_strs else None,
    )


def _chat_tokens(data: bytes, choose: Choose) -> tuple[ServedVersion, list[int]]:
    fields = decode_fields(data, ChatBody)
    if fields.get("prompt") is not None:
        raise invalid_value("prompt and messages cannot be combined", "prompt")
    body = body_of(fields, ChatBody)
    served = choose(body.model)
    structure = checked_structure(fields, served.text)
    return served, body.encode(served.text, served.max_len, structure.tools, may_exceed=True)


def _text_tokens(data: bytes, choose: Choose) -> tuple[ServedVersion, list[int]]:
    body = body_of(decode_fields(data, CompletionBody), CompletionBody)
    if not isinstance(body.prompt, str):
        raise invalid_value("prompt must be a text, or messages be given", "prompt")
    served = choose(body.model)
    return served, body.encode(served.text, served.max_len, may_exceed=True)


def detokenized(data: bytes, choose: Choose) -> Detokenized:
    """Returns the answer of /detokenize for a body. Raises InvalidRequest."""
    if data.count(b",") >= MAX_TOKENS:
        raise invalid_value(f"tokens may hold {MAX_TOKENS} token ids", "tokens")
    body = _decoded(data, DetokenizeBody)
    text = choose(body.model).text
    check_in_vocabulary(body.tokens, text.vocab_size, "tokens")
    return Detokenized(text.decode_all(body.tokens))


def _decoded(data: bytes, kind: type[StructT]) -> StructT:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise from_validation(error) from error
    except (ValueError, RecursionError) as error:
        raise not_json(error) from error


def _encoded(read: Read, data: bytes, choose: Choose) -> bytes:
    """Returns the answer as JSON.

    The JSON is made in parts, so that other threads get the interpreter lock between the parts.
    """
    return b"".join(json_parts(msgspec.structs.asdict(read(data, choose))))


def _chosen(versions: Versions, headers: Mapping[str, str], model: str | None) -> ServedVersion:
    """Returns the version for a request.

    Requests without an affinity header and a version header always get the same version.
    """
    affinity = headers.get(AFFINITY_HEADER, "")
    return versions.choose(key=affinity, model=model, version=headers.get(VERSION_HEADER))

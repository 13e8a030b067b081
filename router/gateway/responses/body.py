"""The body of POST /v1/responses, with the range of each field.

Pure: converts bytes to a `ResponseBody` or an ApiError. Values that Baton cannot honour are refused
by name. Fields that are not in this API (`top_k`, `seed`, `stop`, …) become fields of the chat
body, which checks them like fields of a chat completion.

Source: OpenAI API reference, responses.
"""

from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from router.gateway.requests.body import (
    MAX_USER_LEN,
    Count,
    Refused,
    TopCount,
    from_validation,
    known_fields,
    unsupported,
)
from router.gateway.requests.chat import ChatBody
from router.gateway.requests.json_fields import SHORT_BODY_BYTES, suggestions
from router.gateway.responses.items import ItemBody, decode_input
from router.inbox.api_errors import ApiError, invalid_value
from router.inbox.json_values import check_containers, decode_value, no_object, not_json

MAX_METADATA = 16
MAX_ID_LEN = 128

Label = Annotated[str, Meta(max_length=MAX_USER_LEN)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
LOGPROBS = "message.output_text.logprobs"
# The second value has no effect: reasoning is sent as text, which clients may send back.
Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]

Summary = Literal["auto", "concise", "detailed"]

# Fields that Baton cannot honour, with their neutral values.
_REFUSED: Refused = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "echo": (False,),
    "image": (),
    "moderation": (),
    "n": (1,),
    "best_of": (1,),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
}
# By a chat completion's field name: the field's name in this API.
_RENAMED = {
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning`. Reasoning is shown as it is, without summaries."""

    effort: str | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: Any = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`. Padding that hides lengths from observers is not supported."""

    include_obfuscation: Literal[False] | None = None


class ResponseBody(msgspec.Struct, kw_only=True):
    """The fields of this API. In all fields, null means absent."""

    input: str | list[ItemBody] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=MAX_ID_LEN)] | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[Include] | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None  # no effect, as the server runs no tools
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)] | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    prompt_cache_key: Label | None = None  # no effect
    reasoning: ReasoningOptions | None = None
    safety_identifier: Label | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    text: TextOptions | None = None
    tool_choice: Any = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: TopCount | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    user: Label | None = None

    @property
    def is_stored(self) -> bool:
        """True unless the client has set `store` to false."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """True if the client wants log-probabilities of the answer's tokens."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def decode_response_body(data: bytes) -> tuple[ResponseBody, dict[str, Any]]:
    """Returns a checked body, and the fields that are not in this API. Raises ApiError."""
    raw = _raw_fields(data)
    fields = {name: _decoded(name, value) for name, value in raw.items()}
    _refuse(fields)
    own = {name: fields.pop(name) for name in ResponseBody.__struct_fields__ if name in fields}
    input = own.pop("input", None)  # already decoded with its types
    for name in (*_REFUSED, *_RENAMED):
        fields.pop(name, None)
    try:
        body = msgspec.convert(own, ResponseBody)
    except msgspec.ValidationError as error:
        invalid = from_validation(error)
        unknown = [name for name in fields if name not in known_fields(ChatBody)]
        invalid.message += suggestions(unknown, ChatBody, ResponseBody.__struct_fields__)
        raise invalid from error
    body.input = input
    _check(body)
    return body, fields


def _raw_fields(data: bytes) -> dict[str, bytes]:
    """Returns the undecoded fields of a body. For a long body, returns only known fields."""
    try:
        if len(data) > SHORT_BODY_BYTES:
            known = msgspec.json.decode(data, type=_undecoded())
            named = {name: bytes(getattr(known, name)) for name in known.__struct_fields__}
        else:
            raw = msgspec.json.decode(data, type=dict[str, Raw])
            named = {name: bytes(value) for name, value in raw.items()}
    except msgspec.ValidationError as error:
        raise no_object() from error
    except (ValueError, RecursionError) as error:
        raise not_json(error) from error
    return {name: value for name, value in named.items() if value}


@cache
def _undecoded() -> type[msgspec.Struct]:
    own = ResponseBody.__struct_fields__
    names = dict.fromkeys((*own, *_REFUSED, *_RENAMED, *known_fields(ChatBody)))
    return msgspec.defstruct("UndecodedResponseBody", [(name, Raw, Raw()) for name in names])


def _decoded(name: str, data: bytes) -> Any:
    try:
        if name == "input":
            check_containers(data, name)
            return decode_input(data)
        return decode_value(data, name)
    except (ValueError, RecursionError) as error:
        raise not_json(error) from error


def _refuse(fields: dict[str, Any]) -> None:
    for name, harmless in _REFUSED.items():
        value = fields.get(name)
        if value is None or any(type(value) is type(ok) and value == ok for ok in harmless):
            continue
        shown = f"as {value!r}" if isinstance(value, str) and len(value) <= MAX_ID_LEN else ""
        raise unsupported(name, shown)
    for name, ours in _RENAMED.items():
        if fields.get(name) is not None:
            message = f"{name} is not a field of this API: use {ours}"
            raise ApiError(message, param=name, code="unsupported_parameter")


def _check(body: ResponseBody) -> None:
    if not body.input:
        raise invalid_value("input must not be empty", "input")
    if body.background and not body.is_stored:
        raise invalid_value("background needs store: the answer is fetched later", "background")
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options is allowed only with stream", "stream_options")

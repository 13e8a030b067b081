"""The fields of a JSON body, decoded so that no call keeps the interpreter for long.

Decoding keeps the interpreter lock, and what takes time is the objects that it makes: 8 MiB of `[]`
take a second, and 0.04 s where they are skipped. So of a long body only known fields are decoded,
each by itself: the prompt and the messages as what they must be, where the first wrong item ends
it, and all others after a look at their size. Short bodies are decoded at once.
"""

from functools import cache
from typing import Any

import msgspec
from msgspec import Raw

from router.gateway.requests.messages import ChatMessage, ContentPart, Speaker
from router.gateway.requests.openai_schema import Body, from_validation, known_fields, unsupported
from router.inbox.api_errors import invalid_value
from router.inbox.json_values import check_containers, decode_value, no_object, not_json

SHORT_BODY_BYTES = 65_536
MAX_PROMPT_IDS = 2**20


class _Message(msgspec.Struct):
    """A ChatMessage whose calls are not decoded yet."""

    role: Speaker
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Raw = Raw(b"null")
    tool_call_id: str | None = None


def decode_fields(data: bytes, body_type: type[Body]) -> dict[str, Any]:
    """The fields of a request's body as they came; of a long one, those that are known.

    Raises ApiError.
    """
    try:
        if len(data) > SHORT_BODY_BYTES:
            return _long_fields(data, body_type)
        fields = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise not_json(error) from error
    if not isinstance(fields, dict):
        raise no_object()
    return fields


def _long_fields(data: bytes, body_type: type[Body]) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(data, type=_undecoded(body_type))
    except msgspec.ValidationError as error:
        raise no_object() from error
    values = ((name, bytes(getattr(raw, name))) for name in raw.__struct_fields__)
    return {name: _decode(name, value) for name, value in values if value}


@cache
def _undecoded(body_type: type[Body]) -> type[msgspec.Struct]:
    """A body whose known fields are not decoded, and whose unknown ones are skipped."""
    fields = [(name, Raw, Raw()) for name in known_fields(body_type)]
    return msgspec.defstruct("UndecodedBody", fields)


def _decode(name: str, data: bytes) -> Any:
    try:
        if name == "prompt":
            return _prompt(data)
        if name == "messages":
            return _messages(data)
    except msgspec.ValidationError as error:
        raise from_validation(error, name) from error
    return decode_value(data, name)


def _prompt(data: bytes) -> Any:
    """A text, token ids, or a list of one of these."""
    if not data.startswith(b"["):
        return msgspec.json.decode(data, type=str | None)
    first = data[1:].lstrip()[:1]
    if first != b'"' and data.count(b",") >= MAX_PROMPT_IDS:
        raise invalid_value(f"prompt holds more than {MAX_PROMPT_IDS} token ids", "prompt")
    if first not in (b'"', b"["):
        return msgspec.json.decode(data, type=list[int])
    try:
        return list(msgspec.json.decode(data, type=tuple[str | list[int]]))
    except msgspec.ValidationError as error:
        if "$" in str(error):  # it names the place
            raise
        raise unsupported("prompt", "as a batch of prompts") from error


def _messages(data: bytes) -> list[ChatMessage]:
    check_containers(data, "messages")
    messages = msgspec.json.decode(data, type=list[_Message])
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, raw: _Message) -> ChatMessage:
    where = f"messages[{index}].tool_calls"
    try:
        calls = decode_value(bytes(raw.tool_calls), where, list[dict[str, Any]] | None)
    except msgspec.ValidationError as error:
        raise from_validation(error, where) from error
    return ChatMessage(raw.role, raw.content, raw.name, calls, raw.tool_call_id)

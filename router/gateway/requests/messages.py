"""Chat messages as clients send them, and as chat templates expect them."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.inbox.api_errors import ApiError, invalid_value

MAX_ROLE_LEN = 64
# Types of parts that are text, with the name of their text. Responses have names of their own.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
# "system", "developer", "user", "assistant" and "tool"; a chat template may know others.
Speaker = Annotated[str, Meta(min_length=1, max_length=MAX_ROLE_LEN)]


class ContentPart(msgspec.Struct):
    """A part of a message or of an item; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct):
    """One message. The chat template interprets tool calls of earlier turns."""

    role: Speaker
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name
    refusal: str | None = None  # the assistant's text instead of a content


def template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """Converts a message to the form of chat templates; absent fields are left out."""
    role = "system" if message.role == "developer" else message.role
    fields = {
        "role": role,
        "content": _content(message, f"messages[{index}].content"),
        "name": message.name,
        "tool_calls": message.tool_calls or None,  # templates take an empty list for calls
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _content(message: ChatMessage, param: str) -> str:
    content = message.refusal if message.content is None else message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise invalid_value("content is missing", param)
        return ""
    return "\n".join(_part_text(part, param) for part in content)


def _part_text(part: ContentPart, param: str) -> str:
    name = TEXT_PARTS.get(part.type)
    if name is None:
        message = f"content of type {part.type[:40]!r} is not supported"
        raise ApiError(message, param=param, code="unsupported_content")
    text: str | None = getattr(part, name)
    if text is None:
        raise invalid_value(f"a part of type {part.type!r} needs a {name}", param)
    return text

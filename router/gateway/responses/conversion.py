"""From a checked body to the JSON of a chat completion, and from its errors back to our fields.

Pure. The chat body is then handled like all others, so that both APIs mean the same. The fields of
a response that repeat its request are also made here.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from router.gateway.responses.body import ResponseBody
from router.gateway.responses.conversation import Messages
from router.gateway.responses.tools.offer import ToolOrigin, choose, offer_of
from router.inbox.api_errors import invalid_value

# Field names of chat in errors, and our names. The order matters.
_FIELD_NAMES = (
    (r"\bresponse_format\.json_schema\.(schema|name|strict|description)\b", r"text.format.\1"),
    (r"\bresponse_format\.json_schema\b", "text.format"),
    (r"\bresponse_format\b", "text.format"),
    (r"\b(max_completion_tokens|max_tokens)\b", "max_output_tokens"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\bmessages\b", "input"),
)
_TOOL = re.compile(r"\btools\[(\d+)\](\.function\b)?")
_MESSAGE = re.compile(r"\bmessages\[(\d+)\](\.content|\.role|\.tool_calls)?")

_encode = msgspec.json.Encoder().encode


class ChatForm(msgspec.Struct, frozen=True):
    """A response as a chat completion: its JSON, and where its parts come from."""

    data: bytes
    places: list[str]  # the client's field for each message
    tools: list[str]  # the client's field for each tool
    origins: dict[str, ToolOrigin]  # the client's names of tools, by the model's names
    ignored: tuple[str, ...]  # the client's fields that have no effect

    def translated(self, error: InvalidRequest) -> InvalidRequest:
        """Replaces chat's field names in an error by the client's field names."""
        if error.param is not None:
            error.param = self._ours(error.param)
        error.message = self._ours(error.message)
        return error

    def all_ignored(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns all ignored fields of the client: in the response, and in its chat completion."""
        return (*self.ignored, *map(self._ours, names))

    def _ours(self, text: str) -> str:
        text = _TOOL.sub(self._tool, _MESSAGE.sub(self._place, text))
        for pattern, name in _FIELD_NAMES:
            text = re.sub(pattern, name, text)
        return text

    def _place(self, found: re.Match[str]) -> str:
        index = int(found[1])
        name = self.places[index] if index < len(self.places) else "input"
        return name + (found[2] or "") if "[" in name else name

    def _tool(self, found: re.Match[str]) -> str:
        index = int(found[1])
        return self.tools[index] if index < len(self.tools) else found[0]


def chat_form(body: ResponseBody, extras: dict[str, Any], messages: Messages) -> ChatForm:
    """Returns the chat completion that makes this response. Raises ApiError.

    `extras` are unknown fields that chat completions may know.
    """
    offer = offer_of([("tools", body.tools or []), *messages.tools])
    tools, choice = choose(body.tool_choice, offer)
    fields = {
        **extras,
        "model": body.model,
        "messages": messages.messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "user": body.user,
        "tools": [tool.chat_form() for tool in tools] or None,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    given = {name: value for name, value in fields.items() if value is not None}
    places = [tool.place for tool in tools]
    ignored = (*offer.left_out, *messages.left_out)
    return ChatForm(_encode(given), messages.places, places, offer.origins, ignored)


def repeated_fields(body: ResponseBody) -> dict[str, Any]:
    """Returns the fields of a response that repeat its request."""
    text_format = body.text.format if body.text is not None else None
    shown_format: dict[str, Any] = {"type": "text"}
    if text_format is not None:
        named = msgspec.to_builtins(text_format)
        shown_format = {name: value for name, value in named.items() if value is not None}
    parallel = body.parallel_tool_calls
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if body.reasoning is None else body.reasoning.effort,
            "summary": None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.is_stored,
        "text": {"format": shown_format},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_repeated_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "user": body.user,
    }


def _repeated_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    return {"strict": None, "parameters": None, **tool}


def _response_format(body: ResponseBody) -> dict[str, Any] | None:
    asked = body.text.format if body.text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    if not asked.name:
        raise invalid_value("text.format.name is missing", "text.format.name")
    if asked.schema is None:
        raise invalid_value("text.format.schema is missing", "text.format.schema")
    schema = {
        "name": asked.name,
        "schema": asked.schema,
        "strict": asked.strict,
        "description": asked.description,
    }
    named = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": named}

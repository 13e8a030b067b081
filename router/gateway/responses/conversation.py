"""Converts a checked body and its conversation to a chat completion, and translates its errors.

Pure. The chat body is handled like the body of any chat completion, so that both APIs have the same
meaning. This module also makes the fields of a response that repeat its request.

An answer may consist of several items: reasoning, a message, calls. Chat templates write all of
them as one message of the assistant, so adjacent items of these types become one message. Then the
prompt of the next turn begins with the tokens of this turn. Chat templates decide which reasoning
of earlier turns is in the prompt.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from router.gateway.responses.body import ResponseBody
from router.gateway.responses.items import (
    CLIENT_CALLS,
    CLIENT_OUTPUTS,
    ENCRYPTED,
    HIDDEN,
    Item,
    LocatedItem,
)
from router.gateway.responses.tools import INPUT, ToolOrigin, choose, flat_name, offer_of
from router.inbox.api_errors import invalid_value

_CALLS = CLIENT_CALLS | {"function_call", "custom_tool_call"}
_OUTPUTS = CLIENT_OUTPUTS | {"function_call_output", "custom_tool_call_output"}
# Fields of items of client-run tools: the model's arguments, and the outputs.
_CHOSEN, _RESULTS = ("action", "operation"), ("output", "status")

_encode = msgspec.json.Encoder().encode


class Messages(msgspec.Struct, frozen=True):
    """Chat messages, each with the name of the client's field from which it was made.

    `tools` are lists of further tools from items. `left_out` names fields that are in no message.
    """

    messages: list[dict[str, Any]]
    paths: list[str]
    tools: list[tuple[str, Any]]
    left_out: list[str]


def messages_of(instructions: str | None, items: Sequence[LocatedItem]) -> Messages:
    """Returns the chat messages of a conversation.

    Raises ApiError if the call of an output is missing.
    """
    made = Messages([], [], [], [])
    if instructions is not None:
        made.messages.append({"role": "system", "content": instructions})
        made.paths.append("instructions")
    calls: set[str] = set()
    answer: dict[str, Any] | None = None  # message to which further calls are added
    reasoning = ""  # reasoning that precedes the next item
    for located in items:
        item, kind = located.item, located.item["type"]
        if kind in HIDDEN:
            _record_hidden(located, made)
            continue
        if kind == "reasoning":
            if ENCRYPTED in item:
                made.left_out.append(f"{located.path}.{ENCRYPTED}")
            reasoning, answer = reasoning + _reasoning_text(item), None
            continue
        if kind in _CALLS and answer is not None:
            message = answer
        else:
            message = _message(located)
            made.messages.append(message)
            made.paths.append(located.path)
            answer = message if message["role"] == "assistant" else None
            if reasoning and answer is not None:
                message["reasoning_content"] = reasoning
            reasoning = ""
        if kind in _CALLS:
            call = _chat_call(located)
            calls.add(call["id"])
            message.setdefault("tool_calls", []).append(call)
        elif kind in _OUTPUTS and message["tool_call_id"] not in calls:
            shown = message["tool_call_id"][:64]
            text = f"no function call with the call_id {shown!r} comes before"
            raise invalid_value(text, f"{located.path}.call_id")
    return made


def _record_hidden(located: LocatedItem, made: Messages) -> None:
    kind, tools = located.item["type"], located.item.get("tools")
    if kind in ("additional_tools", "tool_search_output") and tools is not None:
        made.tools.append((f"{located.path}.tools", tools))
    else:
        made.left_out.append(f"{located.path}.{kind}")


def _reasoning_text(item: Item) -> str:
    return "".join(part["text"] for part in item.get("content") or ())


def _message(located: LocatedItem) -> dict[str, Any]:
    item = located.item
    if item["type"] in _CALLS:
        return {"role": "assistant", "content": None}
    if item["type"] in _OUTPUTS:
        output = next((item[name] for name in _RESULTS if item.get(name) is not None), "")
        return {"role": "tool", "tool_call_id": _call_id(located), "content": _text(output)}
    return {"role": item["role"], "content": _content(item)}


def _call_id(located: LocatedItem) -> str:
    """Returns the id that a call and its output share; without such an id, the item's own id."""
    found = located.item.get("call_id") or located.item["id"]
    if not isinstance(found, str):
        raise invalid_value("call_id must be a text", f"{located.path}.call_id")
    return found


def _chat_call(located: LocatedItem) -> dict[str, Any]:
    item, kind = located.item, located.item["type"]
    if kind in CLIENT_CALLS:
        name = kind.removesuffix("_call")
        arguments = _text(next((item[field] for field in _CHOSEN if field in item), {}))
    else:
        name = flat_name(item.get("namespace"), item["name"])
        is_custom = kind == "custom_tool_call"
        arguments = _text({INPUT: item["input"]}) if is_custom else item["arguments"]
    function = {"name": name, "arguments": arguments}
    return {"id": _call_id(located), "type": "function", "function": function}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode()


def _content(item: Item) -> str | list[dict[str, Any]]:
    texts = [part["text"] for part in item["content"]]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


# ---------------------------------------------------------------- the chat completion

# Field names of chat completions in errors, and of this API. The order matters.
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


class ChatForm(msgspec.Struct, frozen=True):
    """A chat completion that makes a response: its JSON, and the client's names of its parts."""

    data: bytes
    paths: list[str]  # client's field from which each message was made
    tools: list[str]  # client's field from which each tool was made
    origins: dict[str, ToolOrigin]  # the client's names of tools, by the model's names
    ignored: tuple[str, ...]  # the client's fields that have no effect

    def translated(self, error: InvalidRequest) -> InvalidRequest:
        """Replaces, in an error, field names of chat completions by the client's field names."""
        if error.param is not None:
            error.param = self._ours(error.param)
        error.message = self._ours(error.message)
        return error

    def all_ignored(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns all ignored fields, with the client's names.

        `names` are ignored in the completion.
        """
        return (*self.ignored, *map(self._ours, names))

    def _ours(self, text: str) -> str:
        text = _TOOL.sub(self._tool, _MESSAGE.sub(self._place, text))
        for pattern, name in _FIELD_NAMES:
            text = re.sub(pattern, name, text)
        return text

    def _place(self, found: re.Match[str]) -> str:
        index = int(found[1])
        name = self.paths[index] if index < len(self.paths) else "input"
        return name + (found[2] or "") if "[" in name else name

    def _tool(self, found: re.Match[str]) -> str:
        index = int(found[1])
        return self.tools[index] if index < len(self.tools) else found[0]


def chat_form(body: ResponseBody, extras: dict[str, Any], messages: Messages) -> ChatForm:
    """Returns the chat completion that makes this response. Raises ApiError.

    `extras` are fields that are not in this API, but may be fields of chat completions.
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
    paths = [tool.path for tool in tools]
    ignored = (*offer.left_out, *messages.left_out)
    return ChatForm(_encode(given), messages.paths, paths, offer.origins, ignored)


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

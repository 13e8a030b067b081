"""From the items of a conversation to chat messages.

Pure. An answer may be several items: reasoning, a message, calls. Chat templates write all of these
as one message of the assistant, so adjacent items of these types become one message. Then the
prompt of the next turn begins with the tokens of this turn. Templates decide which reasoning of
earlier turns is shown.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from router.gateway.responses.items import (
    CLIENT_CALLS,
    CLIENT_OUTPUTS,
    ENCRYPTED,
    HIDDEN,
    Item,
    PlacedItem,
)
from router.gateway.responses.tools.offer import INPUT, flat_name
from router.inbox.api_errors import invalid_value

_CALLS = CLIENT_CALLS | {"function_call", "custom_tool_call"}
_OUTPUTS = CLIENT_OUTPUTS | {"function_call_output", "custom_tool_call_output"}
# Fields of tools that clients run: the model's arguments, and the outputs.
_CHOSEN, _RESULTS = ("action", "operation"), ("output", "status")

_encode = msgspec.json.Encoder().encode


class Messages(msgspec.Struct, frozen=True):
    """Chat messages, each with the name of the client's field that it comes from.

    `tools` are lists of further tools from items. `left_out` names fields that no message shows.
    """

    messages: list[dict[str, Any]]
    places: list[str]
    tools: list[tuple[str, Any]]
    left_out: list[str]


def messages_of(instructions: str | None, items: Sequence[PlacedItem]) -> Messages:
    """Returns a conversation's chat messages. Raises ApiError for an output without its call."""
    made = Messages([], [], [], [])
    if instructions is not None:
        made.messages.append({"role": "system", "content": instructions})
        made.places.append("instructions")
    calls: set[str] = set()
    answer: dict[str, Any] | None = None  # a message to which further items of the answer are added
    reasoning = ""  # reasoning that precedes the next item
    for placed in items:
        item, kind = placed.item, placed.item["type"]
        if kind in HIDDEN:
            _record_hidden(placed, made)
            continue
        if kind == "reasoning":
            if ENCRYPTED in item:
                made.left_out.append(f"{placed.place}.{ENCRYPTED}")
            reasoning, answer = reasoning + _reasoning_text(item), None
            continue
        if kind in _CALLS and answer is not None:
            message = answer
        else:
            message = _message(placed)
            made.messages.append(message)
            made.places.append(placed.place)
            answer = message if message["role"] == "assistant" else None
            if reasoning and answer is not None:
                message["reasoning_content"] = reasoning
            reasoning = ""
        if kind in _CALLS:
            call = _chat_call(placed)
            calls.add(call["id"])
            message.setdefault("tool_calls", []).append(call)
        elif kind in _OUTPUTS and message["tool_call_id"] not in calls:
            shown = message["tool_call_id"][:64]
            text = f"no function call with the call_id {shown!r} comes before"
            raise invalid_value(text, f"{placed.place}.call_id")
    return made


def _record_hidden(placed: PlacedItem, made: Messages) -> None:
    kind, tools = placed.item["type"], placed.item.get("tools")
    if kind in ("additional_tools", "tool_search_output") and tools is not None:
        made.tools.append((f"{placed.place}.tools", tools))
    else:
        made.left_out.append(f"{placed.place}.{kind}")


def _reasoning_text(item: Item) -> str:
    return "".join(part["text"] for part in item.get("content") or ())


def _message(placed: PlacedItem) -> dict[str, Any]:
    item = placed.item
    if item["type"] in _CALLS:
        return {"role": "assistant", "content": None}
    if item["type"] in _OUTPUTS:
        output = next((item[name] for name in _RESULTS if item.get(name) is not None), "")
        return {"role": "tool", "tool_call_id": _call_id(placed), "content": _text(output)}
    return {"role": item["role"], "content": _content(item)}


def _call_id(placed: PlacedItem) -> str:
    """Returns the id that a call and its output share; for some items the item's own id."""
    found = placed.item.get("call_id") or placed.item["id"]
    if not isinstance(found, str):
        raise invalid_value("call_id must be a text", f"{placed.place}.call_id")
    return found


def _chat_call(placed: PlacedItem) -> dict[str, Any]:
    item, kind = placed.item, placed.item["type"]
    if kind in CLIENT_CALLS:
        name = kind.removesuffix("_call")
        arguments = _text(next((item[field] for field in _CHOSEN if field in item), {}))
    else:
        name = flat_name(item.get("namespace"), item["name"])
        is_custom = kind == "custom_tool_call"
        arguments = _text({INPUT: item["input"]}) if is_custom else item["arguments"]
    function = {"name": name, "arguments": arguments}
    return {"id": _call_id(placed), "type": "function", "function": function}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode()


def _content(item: Item) -> str | list[dict[str, Any]]:
    texts = [part["text"] for part in item["content"]]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]

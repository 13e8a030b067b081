"""The items of a conversation: as clients send them, as they are kept, and as chat messages.

Pure. A kept item is a JSON object in OpenAI's form, with an id. There are messages, calls of
functions and their outputs, and reasoning.

An answer may be several items: reasoning, a message, calls. Chat templates write all of these as
one message of the assistant, so neighbours of these types become one. Then the prompt of the next
turn begins with the tokens of this one. Templates decide which reasoning of earlier turns is shown.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from router.inbox.api_errors import ApiError, invalid_value

Item = dict[str, Any]
NewId = Callable[[str], str]  # makes an id with this prefix
Status = Literal["in_progress", "completed", "incomplete"]
MAX_ITEM_ID_LEN = 256  # characters
MAX_REFERENCES = 512  # each is looked up

_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}
_ROLES = ("user", "assistant", "system", "developer")
# The types of parts that are text, by the name of their text.
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}


class ItemPart(msgspec.Struct):
    """A part of an item's content. Only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ItemBody(msgspec.Struct):
    """An item as a client sends it, of any type."""

    type: str | None = None  # None: a message, or a reference
    id: str | None = None
    status: Status | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None


class PlacedItem(msgspec.Struct, frozen=True):
    """An item, and the name of the client's field that it comes from."""

    item: Item
    place: str


class Messages(msgspec.Struct, frozen=True):
    """Chat messages, each with the name of the client's field that it comes from."""

    messages: list[dict[str, Any]]
    places: list[str]


def references_in(input: str | Sequence[ItemBody]) -> list[str]:
    """The ids of kept items that the input only names. Raises ApiError for too many."""
    if isinstance(input, str):
        return []
    named = [body.id for body in input if _is_reference(body) and body.id is not None]
    if len(named) > MAX_REFERENCES:
        message = f"input refers to {len(named)} items; at most {MAX_REFERENCES} are allowed"
        raise invalid_value(message, "input")
    return named


def items_of(
    input: str | Sequence[ItemBody], kept: Mapping[str, Item], new_id: NewId
) -> list[PlacedItem]:
    """The items of a request's input. Raises ApiError, which names the item.

    `kept` holds the items that the input refers to.
    """
    if isinstance(input, str):
        return [PlacedItem(_user_message(input, new_id), "input")]
    return [
        PlacedItem(_item(body, f"input[{index}]", kept, new_id), f"input[{index}]")
        for index, body in enumerate(input)
    ]


def messages_of(instructions: str | None, items: Sequence[PlacedItem]) -> Messages:
    """The chat messages of a conversation. Raises ApiError for an output without its call."""
    made = Messages([], [])
    if instructions is not None:
        made.messages.append({"role": "system", "content": instructions})
        made.places.append("instructions")
    calls: set[str] = set()
    answer: dict[str, Any] | None = None  # a message that more items of an answer may go to
    reasoning = ""  # before the next item
    for placed in items:
        item, kind = placed.item, placed.item["type"]
        if kind == "reasoning":
            reasoning, answer = reasoning + _reasoning_text(item), None
            continue
        if kind == "function_call" and answer is not None:
            message = answer
        else:
            message = _message(item)
            made.messages.append(message)
            made.places.append(placed.place)
            answer = message if message["role"] == "assistant" else None
            if reasoning and answer is not None:
                message["reasoning_content"] = reasoning
            reasoning = ""
        if kind == "function_call":
            calls.add(item["call_id"])
            message.setdefault("tool_calls", []).append(_chat_call(item))
        elif kind == "function_call_output" and item["call_id"] not in calls:
            text = f"no function call with the call_id {item['call_id'][:64]!r} comes before"
            raise invalid_value(text, f"{placed.place}.call_id")
    return made


def _reasoning_text(item: Item) -> str:
    return "".join(part["text"] for part in item.get("content") or ())


def new_message(id: str, status: Status = "in_progress") -> Item:
    """A message of the assistant, empty."""
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": []}


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """A part of the assistant's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def new_call(id: str, call_id: str, name: str) -> Item:
    """A call of a function, without arguments yet."""
    return {
        "id": id,
        "type": "function_call",
        "status": "in_progress",
        "call_id": call_id,
        "name": name,
        "arguments": "",
    }


def new_reasoning(id: str) -> Item:
    """Reasoning, empty."""
    return {
        "id": id,
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [],
    }


# ---------------------------------------------------------------- from the client


def _user_message(text: str, new_id: NewId) -> Item:
    return _told(new_id("msg_"), "user", [{"type": "input_text", "text": text}])


def _told(id: str, role: str, content: list[dict[str, Any]]) -> Item:
    return {"id": id, "type": "message", "status": "completed", "role": role, "content": content}


def _is_reference(body: ItemBody) -> bool:
    if body.type is None:
        return body.role is None and body.content is None and body.id is not None
    return body.type == "item_reference"


def _item(body: ItemBody, place: str, kept: Mapping[str, Item], new_id: NewId) -> Item:
    if body.id is not None and not 0 < len(body.id) <= MAX_ITEM_ID_LEN:
        raise invalid_value(f"an id has 1 to {MAX_ITEM_ID_LEN} characters", f"{place}.id")
    if _is_reference(body):
        if body.id is None or body.id not in kept:
            message = f"no item with the id {body.id!r} is stored"
            raise ApiError(message, param=f"{place}.id", code="item_not_found")
        return kept[body.id]
    kind = body.type or "message"
    if kind not in _PREFIXES:
        message = f"items of type {kind[:40]!r} are not supported"
        raise ApiError(message, param=f"{place}.type", code="unsupported_content")
    id = body.id or new_id(_PREFIXES[kind])
    if kind == "message":
        return _message_item(body, id, place)
    if kind == "function_call":
        _require(body, ("call_id", "name", "arguments"), place)
        return new_call(id, body.call_id or "", body.name or "") | {
            "arguments": body.arguments,
            "status": body.status or "completed",
        }
    if kind == "function_call_output":
        _require(body, ("call_id", "output"), place)
        output = body.output
        if not isinstance(output, str):
            output = "\n".join(_texts(output or (), f"{place}.output"))
        return {
            "id": id,
            "type": kind,
            "status": body.status or "completed",
            "call_id": body.call_id,
            "output": output,
        }
    return _reasoning_item(body, id, place)


def _message_item(body: ItemBody, id: str, place: str) -> Item:
    _require(body, ("role", "content"), place)
    if body.role not in _ROLES:
        expected = ", ".join(_ROLES)
        message = f"role is {str(body.role)[:40]!r}; expected {expected}"
        raise invalid_value(message, f"{place}.role")
    content = body.content
    texts = [content] if isinstance(content, str) else _texts(content or (), f"{place}.content")
    if body.role == "assistant":
        parts = [text_part(text, []) for text in texts]
        return new_message(id, body.status or "completed") | {"content": parts}
    return _told(id, str(body.role), [{"type": "input_text", "text": text} for text in texts])


def _reasoning_item(body: ItemBody, id: str, place: str) -> Item:
    if body.encrypted_content:
        message = "encrypted reasoning cannot be read here"
        raise ApiError(message, param=f"{place}.encrypted_content", code="unsupported_content")
    content = body.content
    texts = [content] if isinstance(content, str) else _texts(content or (), f"{place}.content")
    summary = _texts(body.summary or (), f"{place}.summary")
    return new_reasoning(id) | {
        "status": body.status or "completed",
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in texts],
    }


def _texts(parts: Sequence[ItemPart], place: str) -> list[str]:
    return [_text(part, f"{place}[{index}]") for index, part in enumerate(parts)]


def _text(part: ItemPart, place: str) -> str:
    name = _TEXTS.get(part.type)
    if name is None:
        message = f"content of type {part.type[:40]!r} is not supported"
        raise ApiError(message, param=f"{place}.type", code="unsupported_content")
    text: str | None = getattr(part, name)
    if text is None:
        raise invalid_value(f"a part of type {part.type!r} needs a {name}", f"{place}.{name}")
    return text


def _require(body: ItemBody, names: Sequence[str], place: str) -> None:
    for name in names:
        if getattr(body, name) is None:
            message = f"{place}.{name} is missing, which items of this type need"
            raise invalid_value(message, f"{place}.{name}")


# ---------------------------------------------------------------- to chat messages


def _message(item: Item) -> dict[str, Any]:
    if item["type"] == "function_call":
        return {"role": "assistant", "content": None}
    if item["type"] == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    return {"role": item["role"], "content": _content(item)}


def _chat_call(item: Item) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _content(item: Item) -> str | list[dict[str, Any]]:
    texts = [part["text"] for part in item["content"]]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]

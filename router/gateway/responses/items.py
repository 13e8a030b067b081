"""The items of a conversation: converts items that clients send to the form that is stored.

Pure. A stored item is a JSON object in OpenAI's form, with an id. Items are messages, calls of
tools and their outputs, and reasoning. Items of tools that this server does not run are stored
unchanged. `router.gateway.responses.conversation` converts items to chat messages.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from router.gateway.requests.body import from_validation
from router.gateway.requests.chat import TEXT_PARTS, ContentPart
from router.inbox.api_errors import ApiError, invalid_value

Item = dict[str, Any]
NewId = Callable[[str], str]  # given a prefix, makes an id
Status = Literal["in_progress", "completed", "incomplete"]
ENCRYPTED = "encrypted_content"  # a field of reasoning that is never put into a prompt
MAX_ITEM_ID_LEN = 256  # maximum characters of an item's id
MAX_REFERENCES = 512  # maximum references in one input; each is looked up

_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}
# Calls of tools that clients run, and their outputs. Such items are stored unchanged.
CLIENT_CALLS = frozenset({"local_shell_call", "shell_call", "apply_patch_call"})
CLIENT_OUTPUTS = frozenset(f"{kind}_output" for kind in CLIENT_CALLS)
# Items of tools and features that only other servers have. Such items are stored, but not prompted.
HIDDEN = frozenset(
    {
        "additional_tools",
        "code_interpreter_call",
        "compaction",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
_AS_THEY_CAME = CLIENT_CALLS | CLIENT_OUTPUTS | HIDDEN
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = TEXT_PARTS | {"reasoning_text": "text", "summary_text": "text"}


class ItemBody(msgspec.Struct):
    """An item as a client sends it, of any type."""

    type: str | None = None  # None: the item is a message or a reference
    id: str | None = None
    status: Status | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


class ForeignItem(ItemBody):
    """An item that is stored unchanged."""

    raw: Raw = Raw()


class _ItemHead(msgspec.Struct):
    type: str | None = None
    id: str | None = None


class LocatedItem(msgspec.Struct, frozen=True):
    """An item, and the name of the client's field that has the item."""

    item: Item
    path: str


def decode_input(data: bytes) -> str | list[ItemBody] | None:
    """Decodes a request's input, up to the first wrong item. Raises ApiError."""
    try:
        found = msgspec.json.decode(data, type=str | list[Raw] | None)
    except msgspec.ValidationError as error:
        raise from_validation(error, "input") from error
    if not isinstance(found, list):
        return found
    return [_decoded(raw, f"input[{index}]") for index, raw in enumerate(found)]


def _decoded(raw: Raw, path: str) -> ItemBody:
    try:
        head = msgspec.json.decode(raw, type=_ItemHead)
        if head.type in _AS_THEY_CAME:
            return ForeignItem(head.type, head.id, raw=raw)
        return msgspec.json.decode(raw, type=ItemBody)
    except msgspec.ValidationError as error:
        raise from_validation(error, path) from error


def references_in(input: str | Sequence[ItemBody]) -> list[str]:
    """Returns the ids of stored items to which the input refers. Raises ApiError if too many."""
    if isinstance(input, str):
        return []
    named = [body.id for body in input if _is_reference(body) and body.id is not None]
    if len(named) > MAX_REFERENCES:
        message = f"input refers to {len(named)} items; at most {MAX_REFERENCES} are allowed"
        raise invalid_value(message, "input")
    return named


def items_of(
    input: str | Sequence[ItemBody], kept: Mapping[str, Item], new_id: NewId
) -> list[LocatedItem]:
    """Returns the items of a request's input. An ApiError names the item.

    `kept` has the stored items to which the input refers, by id.
    """
    if isinstance(input, str):
        return [LocatedItem(_user_message(input, new_id), "input")]
    return [
        LocatedItem(_item(body, f"input[{index}]", kept, new_id), f"input[{index}]")
        for index, body in enumerate(input)
    ]


def new_message(id: str, status: Status = "in_progress") -> Item:
    """Returns an empty message of the assistant."""
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": []}


def text_part(text: str, logprobs: list[object]) -> dict[str, Any]:
    """Returns a text part of the assistant's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def new_call(
    id: str, call_id: str, name: str, namespace: str | None = None, *, is_custom: bool = False
) -> Item:
    """Returns a call of a function or of a custom tool, with empty arguments or input."""
    kind, field = ("custom_tool_call", "input") if is_custom else ("function_call", "arguments")
    item = {"id": id, "type": kind, "status": "in_progress", "call_id": call_id, "name": name}
    return item | ({} if namespace is None else {"namespace": namespace}) | {field: ""}


def new_reasoning(id: str) -> Item:
    """Returns an empty reasoning item."""
    return {
        "id": id,
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [],
    }


# ---------------------------------------------------------------- items from the client


def _user_message(text: str, new_id: NewId) -> Item:
    return _input_message(new_id("msg_"), "user", [{"type": "input_text", "text": text}])


def _input_message(id: str, role: str, content: list[dict[str, Any]]) -> Item:
    return {"id": id, "type": "message", "status": "completed", "role": role, "content": content}


def _is_reference(body: ItemBody) -> bool:
    if body.type is None:
        return body.role is None and body.content is None and body.id is not None
    return body.type == "item_reference"


def _item(body: ItemBody, path: str, kept: Mapping[str, Item], new_id: NewId) -> Item:
    if body.id is not None and not 0 < len(body.id) <= MAX_ITEM_ID_LEN:
        raise invalid_value(f"an id has 1 to {MAX_ITEM_ID_LEN} characters", f"{path}.id")
    if _is_reference(body):
        if body.id is None or body.id not in kept:
            message = f"no item with the id {body.id!r} is stored"
            raise ApiError(message, param=f"{path}.id", code="item_not_found")
        return kept[body.id]
    kind = body.type or "message"
    if isinstance(body, ForeignItem):
        raw: Item = msgspec.json.decode(body.raw)
        return {**raw, "id": body.id or new_id(f"{kind}_")}
    if kind not in _PREFIXES:
        message = f"items of type {kind[:40]!r} are not supported"
        raise ApiError(message, param=f"{path}.type", code="unsupported_content")
    id = body.id or new_id(_PREFIXES[kind])
    if kind == "message":
        return _message_item(body, id, path)
    if kind == "reasoning":
        return _reasoning_item(body, id, path)
    if kind in ("function_call", "custom_tool_call"):
        return _call_item(body, id, path)
    _require(body, ("call_id", "output"), path)
    output = body.output
    if not isinstance(output, str):
        output = "\n".join(_texts(output or (), f"{path}.output"))
    return {
        "id": id,
        "type": kind,
        "status": body.status or "completed",
        "call_id": body.call_id,
        "output": output,
    }


def _call_item(body: ItemBody, id: str, path: str) -> Item:
    is_custom = body.type == "custom_tool_call"
    _require(body, ("call_id", "name", *(("input",) if is_custom else ())), path)
    said = {"input": body.input} if is_custom else {"arguments": body.arguments or "{}"}
    call_id, name = body.call_id or "", body.name or ""
    item = new_call(id, call_id, name, body.namespace, is_custom=is_custom)
    return {**item, **said, "status": body.status or "completed"}


def _message_item(body: ItemBody, id: str, path: str) -> Item:
    _require(body, ("role", "content"), path)
    if body.role not in _ROLES:
        expected = ", ".join(_ROLES)
        message = f"role is {str(body.role)[:40]!r}; expected {expected}"
        raise invalid_value(message, f"{path}.role")
    content = body.content
    texts = [content] if isinstance(content, str) else _texts(content or (), f"{path}.content")
    if body.role == "assistant":
        parts = [text_part(text, []) for text in texts]
        return new_message(id, body.status or "completed") | {"content": parts}
    return _input_message(
        id, str(body.role), [{"type": "input_text", "text": text} for text in texts]
    )


def _reasoning_item(body: ItemBody, id: str, path: str) -> Item:
    content = body.content
    texts = [content] if isinstance(content, str) else _texts(content or (), f"{path}.content")
    summary = _texts(body.summary or (), f"{path}.summary")
    encrypted = {ENCRYPTED: body.encrypted_content} if body.encrypted_content else {}
    return (
        new_reasoning(id)
        | encrypted
        | {
            "status": body.status or "completed",
            "summary": [{"type": "summary_text", "text": text} for text in summary],
            "content": [{"type": "reasoning_text", "text": text} for text in texts],
        }
    )


def _texts(parts: Sequence[ContentPart], path: str) -> list[str]:
    return [_text(part, f"{path}[{index}]") for index, part in enumerate(parts)]


def _text(part: ContentPart, path: str) -> str:
    name = _TEXTS.get(part.type)
    if name is None:
        message = f"content of type {part.type[:40]!r} is not supported"
        raise ApiError(message, param=f"{path}.type", code="unsupported_content")
    text: str | None = getattr(part, name)
    if text is None:
        raise invalid_value(f"a part of type {part.type!r} needs a {name}", f"{path}.{name}")
    return text


def _require(body: ItemBody, names: Sequence[str], path: str) -> None:
    for name in names:
        if getattr(body, name) is None:
            message = f"{path}.{name} is missing, which items of this type need"
            raise invalid_value(message, f"{path}.{name}")

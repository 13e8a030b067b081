"""Decodes the fields of a JSON body in short steps, so that other threads run in between.

Decoding keeps the interpreter lock, and making objects takes most of the time: decoding 8 MiB of
`[]` takes a second, skipping them 0.04 s. So in a long body only known fields are decoded, each
field separately. Prompt and messages are decoded with their types, so decoding stops at the first
wrong item. All other fields are decoded after a check of their size. Short bodies are decoded at
once.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw

from router.gateway.requests.body import Body, from_validation, known_fields
from router.gateway.requests.chat import ChatMessage, ContentPart, Speaker
from router.gateway.requests.field_table import CHAT, COMPLETIONS, EMBEDDINGS, honoured_by
from router.inbox.api_errors import invalid_value
from router.inbox.json_values import check_containers, decode_value, no_object, not_json

SHORT_BODY_BYTES = 65_536
MAX_PROMPT_IDS = 2**20
MAX_IGNORED = 16  # maximum unknown fields that an answer lists
MAX_IGNORED_LEN = 64  # maximum characters of a listed name
MAX_SUGGESTED = 4  # maximum names that get a suggestion
MAX_SUGGESTED_LEN = 32  # maximum characters of a name that gets a suggestion
LEAST_LIKENESS = 0.75  # minimum similarity of a name and its suggestion, from 0 to 1
MAX_PROMPTS = 4096  # maximum prompts decoded, far above `gateway.max_batch_choices`


class _Message(msgspec.Struct):
    """A ChatMessage whose tool calls are not decoded yet."""

    role: Speaker
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Raw = Raw(b"null")
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _OnlyPrompts(msgspec.Struct):
    messages: Raw = Raw(b"null")
    input: Raw = Raw(b"null")


def decode_fields(data: bytes, body_type: type[Body]) -> dict[str, Any]:
    """Returns the fields of a body. For a long body, returns only known fields. Raises ApiError."""
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
def _undecoded(body_type: type[Body], *, forbids: bool = False) -> type[msgspec.Struct]:
    """Returns a type that leaves known fields undecoded, and skips or `forbids` unknown fields."""
    fields = [(name, Raw, Raw()) for name in sorted(known_fields(body_type))]
    return msgspec.defstruct("UndecodedBody", fields, forbid_unknown_fields=forbids)


def endpoint_of(data: bytes) -> str:
    """Returns the endpoint that has the fields of a body; completions if the body cannot be
    read.
    """
    try:
        found = msgspec.json.decode(data, type=_OnlyPrompts)
    except (ValueError, RecursionError):
        return COMPLETIONS
    if bytes(found.messages) != b"null":
        return CHAT
    return COMPLETIONS if bytes(found.input) == b"null" else EMBEDDINGS


def ignored_names(data: bytes, fields: Mapping[str, Any], body_type: type[Body]) -> tuple[str, ...]:
    """Returns the names of unknown fields in a form for headers.

    For a long body, returns only the first name.

    Otherwise a client could force the gateway to make millions of objects.
    """
    known = known_fields(body_type)
    if len(data) <= SHORT_BODY_BYTES:
        if known.issuperset(fields):  # usually all fields are known
            return ()
        names = [name for name in fields if name not in known]
        return tuple(map(_printable, names[:MAX_IGNORED]))
    try:
        msgspec.json.decode(data, type=_undecoded(body_type, forbids=True))
    except msgspec.ValidationError as error:
        _, _, name = str(error).partition("unknown field `")
        return (_printable(name.rpartition("`")[0]),)
    return ()


def suggestions(names: Sequence[str], body_type: type[Body], own_fields: Sequence[str] = ()) -> str:
    """Returns suggestions for misspelt fields, as a text that is appended to a message.

    The text is empty if no name is similar to a known field.

    `own_fields` are further names that may be suggested.
    """
    known = (*own_fields, *honoured_by(body_type.endpoint))
    short = [name for name in names if len(name) <= MAX_SUGGESTED_LEN][:MAX_SUGGESTED]
    pairs = ((n, get_close_matches(n, known, 1, LEAST_LIKENESS)) for n in short)
    return "".join(f" ({n} is not a field: did you mean {near[0]}?)" for n, near in pairs if near)


def _printable(name: str) -> str:
    """Returns a field's name with only characters that a header may contain."""
    return re.sub(r"[^\w.-]", "?", name[:MAX_IGNORED_LEN], flags=re.ASCII)


def _decode(name: str, data: bytes) -> Any:
    try:
        if name in ("prompt", "input"):
            return _prompt(data, name)
        if name == "messages":
            return _messages(data)
    except msgspec.ValidationError as error:
        raise from_validation(error, name) from error
    return decode_value(data, name)


def _prompt(data: bytes, name: str) -> Any:
    """Decodes a prompt field: a text, token ids, a list of texts, or a list of lists of token
    ids.
    """
    if not data.startswith(b"["):
        return msgspec.json.decode(data, type=str | None)
    first = data[1:].lstrip()[:1]
    # Each text has two quotes, and quotes after a backslash are not counted.
    quotes = data.count(b'"') - data.count(b'\\"') if first == b'"' else 0
    if max(data.count(b"[") - 1 if first == b"[" else 0, quotes // 2) > MAX_PROMPTS:
        raise invalid_value(f"{name} holds more than {MAX_PROMPTS} prompts", name)
    if first == b'"':
        return msgspec.json.decode(data, type=list[str])
    if data.count(b",") >= MAX_PROMPT_IDS:
        raise invalid_value(f"{name} holds more than {MAX_PROMPT_IDS} token ids", name)
    return msgspec.json.decode(data, type=list[list[int]] if first == b"[" else list[int])


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
    rest = raw.reasoning_content, raw.reasoning, raw.refusal
    return ChatMessage(raw.role, raw.content, raw.name, calls, raw.tool_call_id, *rest)

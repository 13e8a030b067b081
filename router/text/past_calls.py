"""Tool calls of earlier turns, in the forms of arguments that chat templates read.

A client sends arguments back as the model wrote them: JSON in a text. The text may be empty, cut
short, or no object. Most templates take a mapping, which they write as JSON or item by item.
Others insert the text unchanged. A template does not declare its form, so each form is tried.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from router.inbox.json_values import decode_value

Message = Mapping[str, Any]
Call = Mapping[str, Any]
Form = Callable[[Any], Any]  # of arguments as the client sent them


def argument_forms(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yields the messages with their calls' arguments decoded, then as mappings, then as texts.

    Text that is no JSON stays a text in the first form, and is an empty mapping in the second.
    Messages without calls come once. Raises ApiError for arguments that are too large.
    """
    if not any(message.get("tool_calls") for message in messages):
        yield messages
        return
    for form in (_decoded, _mapping, _text):
        yield [_with_arguments(message, form) for message in messages]


def _with_arguments(message: Message, form: Form) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_call(call, form) for call in calls]}


def _call(call: Call, form: Form) -> Call:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": form(function.get("arguments"))}}


def _decoded(arguments: Any) -> Any:
    """The value of JSON in a text; another text stays. An empty text is an empty mapping."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        return decode_value(arguments.encode(), "messages")
    except (ValueError, RecursionError):
        return arguments


def _mapping(arguments: Any) -> dict[str, Any]:
    decoded = _decoded(arguments)
    return decoded if isinstance(decoded, dict) else {}


def _text(arguments: Any) -> str:
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return json.dumps(_decoded(arguments), ensure_ascii=False)

"""Converts the tools of a response to functions of a chat completion, and names of calls back.

Pure. A function is not changed. The input of a custom tool is a text, so it becomes a function with
a text as its only argument. The tools of a namespace become functions whose names begin with the
namespace's name. Tools that run on a provider's servers, or need its protocols, are left out.

Source: OpenAI API reference, responses: function, custom and namespace tools.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from router.inbox.api_errors import ApiError, invalid_value

Tool = Mapping[str, Any]
INPUT = "input"  # name of the argument of a custom tool's function
MAX_NAME_LEN = 64  # maximum characters of a function's name in chat completions
# Tools that other servers run. Types may end with a date, such as `web_search_2025_08_26`.
_FOREIGN = re.compile(
    r"(apply_patch|code_interpreter|computer|computer_use|computer_use_preview|file_search"
    r"|image_generation|local_shell|mcp|programmatic_tool_calling|shell|tool_search|web_search"
    r"|web_search_preview)(_\d{4}_\d{2}_\d{2})?"
)
_OWN = ("function", "custom")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CUSTOM_FIELDS = ("name", "description", "format")
# Hints for a provider's tool search and programs. Baton loads and calls all tools directly.
_HINTS = ("type", "allowed_callers", "defer_loading", "output_schema")


class ToolOrigin(NamedTuple):
    """A tool with the names that the client uses."""

    name: str
    namespace: str | None
    is_custom: bool


class OfferedTool(NamedTuple):
    """A tool that the model may call: a chat completion's function, and the client's field."""

    function: dict[str, Any]
    origin: ToolOrigin
    path: str

    @property
    def name(self) -> str:
        """The name of the tool in the model's prompt."""
        return str(self.function.get("name"))

    def chat_form(self) -> dict[str, Any]:
        """Returns the tool in a chat completion's form."""
        return {"type": "function", "function": self.function}


class Offer(msgspec.Struct, frozen=True):
    """The tools that a request offers to the model. `left_out` are the client's ignored fields."""

    tools: list[OfferedTool]
    left_out: list[str]

    @property
    def origins(self) -> dict[str, ToolOrigin]:
        """The client's names of tools, by the model's names.

        Tools whose two names are equal are left out.
        """
        return {
            tool.name: tool.origin
            for tool in self.tools
            if tool.origin != ToolOrigin(tool.name, None, is_custom=False)
        }


def offer_of(groups: Sequence[tuple[str, Any]]) -> Offer:
    """Converts the tools of several lists. `groups` has the field and value of each list.

    Raises ApiError.

    If two lists have a tool of the same name, the tool of the first list is offered.
    """
    made = Offer([], [])
    for path, tools in groups:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise invalid_value(f"{path} must be a list of objects", path)
        known = {tool.name for tool in made.tools}
        for index, tool in enumerate(tools):
            found = _offered(tool, f"{path}[{index}]", made.left_out)
            made.tools.extend(each for each in found if each.name not in known)
    return made


def flat_name(namespace: str | None, name: str) -> str:
    """Returns the name for the model's prompt. A long name is cut, and a checksum is appended."""
    if namespace is None:
        return name
    whole = re.sub(r"[^a-zA-Z0-9_.-]", "_", namespace) + "__" + name
    if len(whole) <= MAX_NAME_LEN:
        return whole
    return f"{whole[: MAX_NAME_LEN - 9]}_{zlib.crc32(whole.encode()):08x}"


def choose(choice: Any, offer: Offer) -> tuple[Sequence[OfferedTool], Any]:
    """Returns the tools that the model may call, and the chat completion's `tool_choice`.

    Raises ApiError.
    """
    match choice:
        case None | str():
            return offer.tools, choice
        case {"type": "function" | "custom", "name": str(name)}:
            chosen = next((tool.name for tool in _named(choice, offer.tools)), name)
            return offer.tools, {"type": "function", "function": {"name": chosen}}
        case {"type": "allowed_tools", "mode": str(mode), "tools": list(allowed)}:
            if mode not in ("auto", "required"):
                message = f"tool_choice.mode is {mode[:40]!r}; expected auto or required"
                raise invalid_value(message, "tool_choice.mode")
            return _allowed(allowed, offer), mode
        case {"type": str(kind)} if kind not in (*_OWN, "allowed_tools"):
            message = f"tool_choice of type {kind[:40]!r} is not supported"
            raise ApiError(message, param="tool_choice.type", code="unsupported_parameter")
    message = "tool_choice must be 'none', 'auto', 'required', a tool by name, or allowed_tools"
    raise invalid_value(message, "tool_choice")


def _offered(tool: Tool, path: str, left_out: list[str]) -> Iterator[OfferedTool]:
    kind = tool.get("type")
    if kind == "namespace":
        yield from _of_namespace(tool, path, left_out)
    elif kind in _OWN:
        yield _own_tool(tool, path, left_out)
    elif isinstance(kind, str) and _FOREIGN.fullmatch(kind):
        left_out.append(f"{path}.{kind}")
    else:
        message = f"tools of type {str(kind)[:40]!r} are not supported"
        raise ApiError(message, param=f"{path}.type", code="unsupported_parameter")


def _of_namespace(tool: Tool, path: str, left_out: list[str]) -> Iterator[OfferedTool]:
    """Yields the tools of a namespace.

    The description of the namespace is prepended to the description of its first tool.
    """
    name, about, inner = tool.get("name"), tool.get("description") or "", tool.get("tools")
    for field, value, kind in (("name", name, str), ("description", about, str)):
        if not isinstance(value, kind):
            raise invalid_value(f"{path}.{field} must be a text", f"{path}.{field}")
    if not isinstance(inner, list):
        raise invalid_value(f"{path}.tools must be a list", f"{path}.tools")
    for index, each in enumerate(inner):
        where = f"{path}.tools[{index}]"
        if not isinstance(each, dict) or each.get("type") not in _OWN:
            raise invalid_value(f"{where}.type must be function or custom", f"{where}.type")
        shown = each
        if index == 0 and about and isinstance(each.get("description") or "", str):
            shown = {**each, "description": f"{about}\n\n{each.get('description') or ''}".rstrip()}
        yield _own_tool(shown, where, left_out, namespace=name)


def _own_tool(
    tool: Tool, path: str, left_out: list[str], namespace: str | None = None
) -> OfferedTool:
    """Returns a function or a custom tool. The chat body's checks cover the function."""
    is_custom = tool["type"] == "custom"
    known = _CUSTOM_FIELDS if is_custom else _FUNCTION_FIELDS
    for field, value in tool.items():
        if value and field not in (*known, *_HINTS):
            where = f"{path}.{field[:40]}"
            message = f"{where} is not supported"
            raise ApiError(message, param=where, code="unsupported_parameter")
    named = {field: tool[field] for field in known if tool.get(field) is not None}
    function = _text_function(named, path, left_out) if is_custom else named
    name = function.get("name")
    if isinstance(name, str):
        function["name"] = flat_name(namespace, name)
    return OfferedTool(function, ToolOrigin(str(name), namespace, is_custom), path)


def _text_function(tool: dict[str, Any], path: str, left_out: list[str]) -> dict[str, Any]:
    """Returns a custom tool's function.

    A Lark grammar is added to the description, not enforced.
    """
    text, more = {"type": "string"}, ""
    match tool.pop("format", None):
        case None | {"type": "text"}:
            pass
        case {"type": "grammar", "syntax": "regex", "definition": str(definition)}:
            text["pattern"] = f"^(?:{definition})$"
            tool["strict"] = True  # strict, so that the pattern is enforced
        case {"type": "grammar", "syntax": "lark", "definition": str(definition)}:
            more = f"\n\nThe input follows this grammar in Lark:\n{definition}"
            left_out.append(f"{path}.format")
        case _:
            message = "a format is text, or a grammar in lark or regex with its definition"
            raise invalid_value(f"{path}.format: {message}", f"{path}.format")
    if more and isinstance(tool.get("description", ""), str):
        tool["description"] = (tool.get("description", "") + more).lstrip()
    schema = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {**tool, "parameters": schema}


def _named(named: Tool, tools: Sequence[OfferedTool]) -> list[OfferedTool]:
    """Returns the tools that an entry of `tool_choice` names. A namespace may have several tools.

    A name without a namespace matches tools of namespaces only if no tool outside has the name.
    """
    name, kind, namespace = named.get("name"), named.get("type"), named.get("namespace")
    if kind == "namespace":
        return [tool for tool in tools if tool.origin.namespace == name]
    found = [
        tool
        for tool in tools
        if tool.origin.name == name
        and kind in (None, "custom" if tool.origin.is_custom else "function")
    ]
    exact = [tool for tool in found if tool.origin.namespace == namespace]
    return exact if exact or namespace is not None else found


def _allowed(allowed: list[Any], offer: Offer) -> list[OfferedTool]:
    """Returns the tools that the client allows now. Raises ApiError for an unknown tool."""
    paths: set[str] = set()
    for index, each in enumerate(allowed):
        named = each if isinstance(each, dict) else {}
        if _FOREIGN.fullmatch(str(named.get("type"))):
            continue
        found = _named(named, offer.tools)
        if not found:
            where = f"tool_choice.tools[{index}]"
            raise invalid_value(f"{where} names no function among the tools", where)
        paths.update(tool.path for tool in found)
    return [tool for tool in offer.tools if tool.path in paths]


# ---------------------------------------------------------------- the inputs of custom tools

_HEAD = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
# The longest prefix of a JSON string without an incomplete escape or surrogate pair.
_HIGH, _UNIT = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[0-9a-fA-F]{4}"
_WHOLE = re.compile(rf'(?:[^"\\]|\\[^u]|{_HIGH}(?:{_UNIT}|(?=[^\\]|\\[^u]))|(?!{_HIGH}){_UNIT})+')


class CustomInput:
    """Decodes `{"input": "…"}`, which arrives in pieces, to the text between the quotes."""

    def __init__(self) -> None:
        self._rest = ""  # text that is not decoded yet
        self._has_begun = False

    def feed(self, arguments: str) -> str:
        """Adds a piece of arguments.

        Returns the further part of the input that can be decoded now.
        """
        self._rest += arguments
        if not self._has_begun:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._has_begun, self._rest = True, self._rest[head.end() :]
        whole = _WHOLE.match(self._rest)
        if whole is None:
            return ""
        self._rest = self._rest[whole.end() :]
        return _unquoted(whole[0])

    def finish(self) -> str:
        """Returns the rest of the input. If the arguments have another form, they are the input."""
        return "" if self._has_begun else self._rest


def _unquoted(text: str) -> str:
    """Decodes the inside of a JSON string. Half a surrogate pair becomes U+FFFD."""
    value: str = json.loads(f'"{text}"', strict=False)
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

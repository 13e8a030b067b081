"""Converts the tools of a request to one grammar, which also allows the answers without a call.

A tool with `strict: true` follows its schema exactly, whatever `tool_choice` says. The same holds
for any tool that must be called, if the compiler supports its schema. All other arguments come in
any order and spelling, and their schemas are enforced as far as possible. A header of the answer
names the places that are not enforced.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import quote

from engine.errors import GrammarError, InvalidRequest
from engine.grammar.json_schemas import check_nesting, closed
from engine.messages import Grammar, GrammarKind
from router.text.forms.calling import (
    ANY_TEXT,
    AnswerRules,
    CallForm,
    CallGrammar,
    Calling,
    arguments,
)

MAX_TOOLS = 128
MAX_NAMED = 16  # maximum number of places in a header
MAX_PLACE_LEN = 120

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Json = Any


class GrammarPart(NamedTuple):
    """A field and its grammar. With a `function`, a looser grammar may replace it."""

    param: str
    grammar: Grammar
    function: str | None = None


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The tools of a request, the tools that may be called, and the form of calls."""

    tools: Sequence[Mapping[str, Json]]
    calling: Calling
    strict: frozenset[str]
    form: CallForm
    token_of: Callable[[str], int | None]
    answer: AnswerRules = ANY_TEXT

    def grammar(self) -> CallGrammar:
        """Returns the grammar of calls and answers. Raises InvalidRequest."""
        answer = ANY_TEXT if self.calling.at_least_one else self.answer
        return self.form.grammar(self.calling, self.token_of, answer)

    def sayable(self) -> "ToolOffer":
        """Returns an offer whose grammar can be written.

        If the form does not support the present grammar, tools that are not strict get looser
        rules.
        """
        spare = self.calling.held - self.strict
        try:
            self.grammar()
        except InvalidRequest:
            return self.loosened(sorted(spare)) if spare else self
        return self

    def parts(self, source_of: Callable[[Json], str]) -> tuple[GrammarPart, ...]:
        """Returns the grammar of each function's arguments. `source_of` encodes a schema."""
        places = self._places()
        parts = list[GrammarPart]()
        for name, schema in self.calling.functions.items():
            if name in self.calling.held:
                grammar = Grammar(GrammarKind.JSON_SCHEMA, source_of(schema))
            else:
                alone = replace(self.calling, functions={name: schema})
                rules = ["start: arguments_0", *arguments(alone).rules]
                grammar = Grammar(GrammarKind.LARK, "\n".join(rules))
            function = None if name in self.strict else name
            parts.append(GrammarPart(places[name], grammar, function))
        return tuple(parts)

    def named(self, unheld: Sequence[tuple[str, str]]) -> tuple[str, ...]:
        """Returns names of the places that are not enforced, in characters that a header allows."""
        places = self._places()
        found = [each for name, at in unheld for each in named_places(places[name], [at])]
        return tuple(found[:MAX_NAMED])

    def loosened(self, names: Sequence[str]) -> "ToolOffer":
        """Returns an offer with looser rules for these functions' arguments.

        The first time the rules become lenient; the second time the arguments may be any object.
        """
        calling = self.calling
        free = calling.free | (frozenset(names) - calling.held)
        return replace(
            self, calling=replace(calling, held=calling.held - frozenset(names), free=free)
        )

    def _places(self) -> dict[str, str]:
        return {
            tool["function"]["name"]: f"tools[{i}].function.parameters"
            for i, tool in enumerate(self.tools)
        }


def named_places(param: str, places: Sequence[str]) -> tuple[str, ...]:
    """Returns names of places in a schema, in characters that a header allows."""
    found = (param + quote(place, safe=".[]$_-", errors="replace") for place in places)
    return tuple(dict.fromkeys(place[:MAX_PLACE_LEN] for place in found))[:MAX_NAMED]


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """The tools of a request, and the tools among them that may be called."""

    tools: Sequence[Mapping[str, Json]]
    calling: Calling
    strict: frozenset[str]


def allowed_tools(fields: Mapping[str, Json]) -> AllowedTools | None:
    """Returns the tools of a body; None if the answer calls no tools. Raises InvalidRequest."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequest("tools must be a list", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    functions = _functions(tools)
    only = _chosen(choice)
    if only is not None and only not in functions:
        message = f"tool_choice names {only!r}, which is not among the tools"
        raise InvalidRequest(message, param="tool_choice")
    if choice == "none":
        return None
    if only is not None:
        functions = {only: functions[only]}
    single = only is not None or fields.get("parallel_tool_calls") is False
    forced = only is not None or choice == "required"
    strict = frozenset(
        tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True
    ) & frozenset(functions)
    held = frozenset(functions) if forced else strict
    calling = Calling(functions, at_least_one=forced, at_most_one=single, held=held)
    return AllowedTools(tools, calling, strict)


def _chosen(choice: Json) -> str | None:
    """Returns the name of the only function that may be called; None if there is no such name."""
    match choice:
        case None | "none" | "auto" | "required":
            return None
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    message = "tool_choice must be 'none', 'auto', 'required' or name one function"
    raise InvalidRequest(message, param="tool_choice")


def _functions(tools: Json) -> dict[str, Json]:
    """Returns the schemas of the tools' arguments, by name."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS}", param="tools")
    functions: dict[str, Json] = {}
    for i, tool in enumerate(tools):
        param = f"tools[{i}]"
        check_nesting_at(tool, param)  # the chat template writes the whole schema
        if object_at(tool, param).get("type") != "function":
            raise InvalidRequest(f"{param}.type must be 'function'", param=f"{param}.type")
        function = object_at(tool.get("function"), f"{param}.function")
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name) or name in functions:
            message = f"{param}.function.name must be a new name of letters, digits, _, . and -"
            raise InvalidRequest(message, param=f"{param}.function.name")
        if not isinstance(function.get("description"), str | None):
            where = f"{param}.function.description"
            raise InvalidRequest(f"{where} must be a text", param=where)
        schema = _arguments(function, f"{param}.function.parameters")
        functions[name] = closed(schema) if function.get("strict") is True else schema
    return functions


def _arguments(function: Mapping[str, Json], param: str) -> Json:
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "additionalProperties": False}
    if object_at(schema, param).get("type", "object") != "object":
        raise InvalidRequest(f"{param}.type must be 'object'", param=param)
    return {"type": "object", **schema}


def object_at(value: Json, param: str) -> Mapping[str, Json]:
    """Returns a client's value if it is an object. Otherwise raises InvalidRequest."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return value


def check_nesting_at(value: Json, param: str) -> None:
    """Raises InvalidRequest for a value that is nested too deeply."""
    try:
        check_nesting(value)
    except GrammarError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error

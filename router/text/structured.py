"""Turns the fields about the form of an answer into one grammar.

Pure: fields of a body in, a `Structure` or an InvalidRequest that names the field out. A request
may have one of these: OpenAI's `response_format`, vLLM's `structured_outputs`, its older `guided_*`
fields, SGLang's `regex`, `ebnf` and `json_schema`. It may have tools besides.

Tool calls have the form of the model's family (`router.text.forms`). With `tool_choice` "auto" an
answer may come instead of calls, which follows the other field if there is one. Any text may be an
answer otherwise, and in most forms come before calls; nothing follows them.

Sources: OpenAI API reference, chat completions; vLLM, structured outputs and tool calling;
NousResearch, Hermes function calling; llguidance, docs/syntax.md (lazy lexemes, special tokens).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.errors import GrammarError, InvalidRequest
from engine.grammar.json_schemas import check_nesting, closed
from engine.messages import Grammar, GrammarKind
from router.text.composed import answer_rules
from router.text.forms.calling import ANY_TEXT, AnswerRules, CallForm, Calling, literal
from router.text.forms.chosen import HARMONY, HERMES
from router.text.forms.harmony import final_grammar, missing_mark
from router.text.forms.lenient import can_be_held, lenient_grammar
from router.text.structural_tags import grammar_of_tag, newer_form
from router.text.tools import GrammarPart, ToolOffer, named_places

MAX_TOOLS = 128
MAX_CHOICES = 10_000
MAX_LOOSENED_LEN = 32 * 2**10  # characters of an answer's schema that is held as far as it goes

Json = Any
Fields = Mapping[str, Json]

# vLLM's older fields and SGLang's, and the kind of grammar that each holds.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
}
_ANY_JSON = "$$ANY$$"  # SGLang's word for any value
FIELDS = ("response_format", "structured_outputs", *_GUIDED, "tools", "tool_choice")
_NAMES = frozenset(FIELDS)
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class Structure(msgspec.Struct, frozen=True):
    """The grammar of an answer and the tools that it may call.

    `param` names the field of the grammar. `parts` are the fields and grammars that it is made of;
    if it cannot be followed, one of them is the reason. `tools` are for the chat template, as the
    client wrote them. With `calling`, the answer may hold calls of them. `unheld` names places of
    schemas that the grammar does not follow.
    """

    grammar: Grammar | None = None
    param: str | None = None
    tools: tuple[Mapping[str, Json], ...] = ()
    calling: Calling | None = None
    parts: tuple[GrammarPart, ...] = ()
    unheld: tuple[str, ...] = ()
    offer: ToolOffer | None = None

    def all_parts(self) -> tuple[GrammarPart, ...]:
        """The parts, with those of tools, which only a refused grammar needs."""
        return self.parts + (() if self.offer is None else self.offer.parts(_dumped))

    def loosened(self, functions: Sequence[str]) -> "Structure":
        """The same with less held of these functions' arguments. Raises InvalidRequest."""
        assert self.offer is not None
        unheld = tuple(name for name in self.unheld if not name.startswith("tools["))
        return _offered(self.offer.loosened(functions), self.parts, unheld)


def structure_of(
    fields: Fields,
    *,
    token_of: Callable[[str], int | None] = lambda text: None,
    form: CallForm = HERMES,
) -> Structure:
    """Returns the structure that the fields of a body ask for. Raises InvalidRequest.

    `token_of` gives the id of an added token, which in some models is the mark around calls, and
    `form` the way in which the model writes them.
    The gateway's grammar checker decides whether the grammar can be followed.
    """
    if _NAMES.isdisjoint(fields):  # as nearly always
        return Structure()
    asked = [name for name in _GUIDED if fields.get(name) is not None]
    asked += [n for n in ("response_format", "structured_outputs") if _asks(fields.get(n))]
    allowed = _tools_of(fields)
    if len(asked) > 1:
        raise InvalidRequest(f"{asked[0]} and {asked[1]} cannot be combined", param=asked[1])
    answer = _answer(asked[0], fields) if asked else Structure()
    if allowed is not None:
        return _calling(allowed, answer, form, token_of)
    return _behind_channel(answer, token_of) if form is HARMONY else answer


def _answer(name: str, fields: Fields) -> Structure:
    """The structure of an answer that calls nothing."""
    if name == "json_schema" and fields[name] == _ANY_JSON:
        return Structure(Grammar(GrammarKind.JSON_SCHEMA, "{}"), name)
    if name == "response_format":
        return _response_format(fields[name])
    if name == "structured_outputs":
        return _structured_outputs(fields[name])
    return Structure(_grammar(_GUIDED[name], fields[name], name), name)


def _behind_channel(answer: Structure, token_of: Callable[[str], int | None]) -> Structure:
    """The same for a model that writes messages: reasoning is free, and the last one follows it."""
    if answer.grammar is None or missing_mark(token_of) is not None:
        return answer
    source = final_grammar(_rules(answer), token_of)
    parts = (GrammarPart(str(answer.param), answer.grammar),)
    grammar = Grammar(GrammarKind.LARK, source)
    return Structure(grammar, answer.param, parts=parts, unheld=answer.unheld)


def _rules(answer: Structure) -> AnswerRules:
    if answer.grammar is None:
        return ANY_TEXT
    try:
        return answer_rules(answer.grammar)
    except GrammarError as error:
        raise InvalidRequest(f"{answer.param}: {error}", param=answer.param) from error


def check_combination(structure: Structure, fields: Fields) -> None:
    """Raises InvalidRequest if the grammar cannot be followed with the other fields."""
    if structure.grammar is None:
        return
    for name in ("min_tokens", "ignore_eos"):
        if fields.get(name):
            message = f"{name} cannot be combined with {structure.param}, which ends the answer"
            raise InvalidRequest(message, param=name)


def _asks(value: Json) -> bool:
    return value is not None and value != {"type": "text"}


def _response_format(value: Json) -> Structure:
    param = "response_format"
    kind = _object(value, param).get("type")
    if kind == "json_object":
        return Structure(_json_object(), param)
    if kind == "structural_tag":
        return _structural_tag(value, param)
    if kind != "json_schema":
        raise InvalidRequest(f"{param}.type {kind!r} is not supported", param=f"{param}.type")
    named = _object(value.get("json_schema"), f"{param}.json_schema")
    strict = named.get("strict")
    if not isinstance(strict, bool | None):
        where = f"{param}.json_schema.strict"
        raise InvalidRequest(f"{where} must be true or false", param=where)
    where, schema = f"{param}.json_schema.schema", named.get("schema")
    asked = Structure(_grammar("json", schema, where, strict=bool(strict)), where)
    is_long = asked.grammar is None or len(asked.grammar.source) > MAX_LOOSENED_LEN
    if strict or is_long or not isinstance(schema, dict) or can_be_held(schema):
        return asked
    source, unheld = lenient_grammar(schema)
    return Structure(Grammar(GrammarKind.LARK, source), where, unheld=named_places(where, unheld))


def _structural_tag(value: Fields, param: str) -> Structure:
    _check_nesting(value, param)
    is_older = "structures" in value
    known = {"type", "structures", "triggers"} if is_older else {"type", "format"}
    for name in value.keys() - known:
        raise InvalidRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")
    where = param if is_older else f"{param}.format"
    form = newer_form(value, param) if is_older else value.get("format")
    source = grammar_of_tag(form, where)
    return Structure(Grammar(GrammarKind.LARK, source), where)


def _structured_outputs(value: Json) -> Structure:
    param = "structured_outputs"
    given = {k: v for k, v in _object(value, param).items() if v is not None and v is not False}
    given.pop("disable_fallback", None)  # there is one backend, so no other to fall back on
    strict = given.pop("disable_additional_properties", False)
    if strict not in (True, False) or (strict and "json" not in given):
        where = f"{param}.disable_additional_properties"
        raise InvalidRequest(f"{where} must be true beside json, or false", param=where)
    if given.keys() == {"structural_tag"}:
        where = f"{param}.structural_tag"
        tag = given["structural_tag"]
        tag = _loaded_json(tag, where) if isinstance(tag, str) else tag
        return _structural_tag(_object(tag, where), where)
    for name in given:
        if name not in _EXPECTED:
            raise InvalidRequest(f"{param}.{name} is not supported", param=f"{param}.{name}")
    if len(given) != 1:
        message = f"{param} needs exactly one of json, regex, choice, grammar, json_object"
        raise InvalidRequest(message, param=param)
    ((name, asked),) = given.items()
    where = f"{param}.{name}"
    return Structure(_grammar(name, asked, where, strict=bool(strict)), where)


def _grammar(kind: str, value: Json, param: str, *, strict: bool = False) -> Grammar:
    """The grammar of one of vLLM's kinds. If `strict`, objects of a schema have no other keys."""
    match kind, value:
        case "json", dict() if strict:
            _check_nesting(value, param)
            return Grammar(GrammarKind.JSON_SCHEMA, _dumped(closed(value)))
        case "json", str() if strict:
            return _grammar(kind, _loaded_json(value, param), param, strict=True)
        case "json", bool() | dict():
            return Grammar(GrammarKind.JSON_SCHEMA, _dumped_json(value, param))
        case "json", str():
            return Grammar(GrammarKind.JSON_SCHEMA, value)
        case "json_object", True:
            return _json_object()
        case "regex", str() if value:
            return Grammar(GrammarKind.REGEX, value)
        case "grammar", str() if value:
            return Grammar(GrammarKind.LARK, value)
        case "choice", list() if value and all(isinstance(choice, str) for choice in value):
            if len(value) > MAX_CHOICES:
                raise InvalidRequest(f"more than {MAX_CHOICES} choices", param=param)
            return Grammar(GrammarKind.LARK, f"start: CHOICE\nCHOICE: {_any_of(value)}")
        case (("json" | "json_object" | "regex" | "grammar" | "choice"), _):
            expected = _EXPECTED[kind]
            raise InvalidRequest(f"{param} must be {expected}", param=param)
    raise InvalidRequest(f"{param} is not supported", param=param)


_EXPECTED = {
    "json": "a JSON schema",
    "json_object": "true",
    "regex": "a regular expression",
    "grammar": "a grammar in Lark or EBNF",
    "choice": "a list of strings",
}


def _json_object() -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')


# ---------------------------------------------------------------- tools


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The tools of a request, and those that may be called."""

    tools: Sequence[Mapping[str, Json]]
    calling: Calling
    strict: frozenset[str]


def _tools_of(fields: Fields) -> _Allowed | None:
    """The tools that may be called; None if the answer calls no tools."""
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
    return _Allowed(tools, calling, strict)


def _chosen(choice: Json) -> str | None:
    """The name of the function that must be called, if there is one."""
    match choice:
        case None | "none" | "auto" | "required":
            return None
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    message = "tool_choice must be 'none', 'auto', 'required' or name one function"
    raise InvalidRequest(message, param="tool_choice")


def _functions(tools: Json) -> dict[str, Json]:
    """The schemas of the tools' arguments, by name."""
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be a list of at most {MAX_TOOLS}", param="tools")
    functions: dict[str, Json] = {}
    for i, tool in enumerate(tools):
        param = f"tools[{i}]"
        _check_nesting(tool, param)  # the chat template writes all of it
        if _object(tool, param).get("type") != "function":
            raise InvalidRequest(f"{param}.type must be 'function'", param=f"{param}.type")
        function = _object(tool.get("function"), f"{param}.function")
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
    if _object(schema, param).get("type", "object") != "object":
        raise InvalidRequest(f"{param}.type must be 'object'", param=param)
    return {"type": "object", **schema}


def _calling(
    allowed: _Allowed, answer: Structure, form: CallForm, token_of: Callable[[str], int | None]
) -> Structure:
    offer = ToolOffer(
        allowed.tools, allowed.calling, allowed.strict, form, token_of, _rules(answer)
    )
    others: tuple[GrammarPart, ...] = ()
    if answer.grammar is not None and not allowed.calling.at_least_one:
        others = (GrammarPart(str(answer.param), answer.grammar),)
    return _offered(offer, others, answer.unheld)


def _offered(
    offer: ToolOffer, others: tuple[GrammarPart, ...], unheld: tuple[str, ...]
) -> Structure:
    offer = offer.sayable() if offer.calling.at_least_one else offer
    found = offer.grammar()
    return Structure(
        grammar=Grammar(GrammarKind.LARK, found.source),
        param="tools",
        tools=tuple(offer.tools),
        calling=offer.calling,
        parts=others,
        unheld=(*unheld, *offer.named(found.unheld)),
        offer=offer,
    )


# ---------------------------------------------------------------- text


def _object(value: Json, param: str) -> Mapping[str, Json]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    return value


def _any_of(choices: Sequence[str]) -> str:
    return " | ".join(map(literal, choices))


def _dumped_json(value: Json, param: str) -> str:
    """A client's value as JSON. Raises InvalidRequest if it is nested too deeply."""
    _check_nesting(value, param)
    return _dumped(value)


def _loaded_json(text: str, param: str) -> Json:
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(loaded, bool | dict):
        raise InvalidRequest(f"{param} must be {_EXPECTED['json']}", param=param)
    return loaded


def _check_nesting(value: Json, param: str) -> None:
    try:
        check_nesting(value)
    except GrammarError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error


def _dumped(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)

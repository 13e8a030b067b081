"""Converts the fields about the form of an answer to one grammar.

Pure: takes the fields of a body, and returns a `Structure` or raises an InvalidRequest with the
field's name. A request may use one of these: OpenAI's `response_format`, vLLM's
`structured_outputs`, its older `guided_*` fields, SGLang's `regex`, `ebnf` and `json_schema`. It
may also have tools.

Tool calls have the form of the model's family (`router.text.forms`). With `tool_choice` "auto", the
model may answer without calls. The grammar of such an answer comes from one of these fields;
without a field, it may be any text. In most forms, any text may also precede calls; no text follows
calls. So the grammar of a field becomes a part of another grammar: a schema or a regular expression
becomes one rule. A grammar in Lark or EBNF keeps its rules, under names that no other part uses.

Sources: OpenAI API reference, chat completions; vLLM, structured outputs and tool calling;
NousResearch, Hermes function calling; llguidance, docs/syntax.md (lazy lexemes, special tokens).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from llguidance import regex_to_lark

from engine.errors import GrammarError, InvalidRequest
from engine.grammar.ebnf import is_ebnf, lark_of
from engine.grammar.guides import LARK_TOKEN
from engine.grammar.json_schemas import closed
from engine.grammar.rewriting.finite import is_endless
from engine.messages import Grammar, GrammarKind
from router.text.forms.calling import ANY_TEXT, AnswerRules, CallForm, Calling, literal
from router.text.forms.chosen import HARMONY, HERMES
from router.text.forms.harmony import final_grammar, missing_mark
from router.text.forms.lenient import can_be_held, lenient_grammar
from router.text.structural_tags import grammar_of_tag, newer_form
from router.text.tools import (
    AllowedTools,
    GrammarPart,
    ToolOffer,
    allowed_tools,
    check_nesting_at,
    named_places,
    object_at,
)

MAX_CHOICES = 10_000
MAX_LOOSENED_LEN = 32 * 2**10  # maximum length of a schema that may be enforced in part

Json = Any
Fields = Mapping[str, Json]

# vLLM's older fields and SGLang's fields, each with its kind of grammar.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
}
_ANY_JSON = "$$ANY$$"  # SGLang's notation for any value
FIELDS = frozenset(("response_format", "structured_outputs", *_GUIDED, "tools", "tool_choice"))


class Structure(msgspec.Struct, frozen=True):
    """The grammar of an answer, and the tools that it may call.

    The request's field `param` gave the grammar, which is made of the fields and grammars in
    `parts`. If the grammar cannot be used, one of these parts is the cause. `tools` are for the
    chat template, as the client wrote them. With `calling`, the answer may contain calls of these
    tools. `unheld` names places of schemas that the grammar does not enforce.
    """

    grammar: Grammar | None = None
    param: str | None = None
    tools: tuple[Mapping[str, Json], ...] = ()
    calling: Calling | None = None
    parts: tuple[GrammarPart, ...] = ()
    unheld: tuple[str, ...] = ()
    offer: ToolOffer | None = None

    def all_parts(self) -> tuple[GrammarPart, ...]:
        """Returns `parts` and the grammars of tools, which are read only after a refusal."""
        return self.parts + (() if self.offer is None else self.offer.parts(_dumped))

    def loosened(self, functions: Sequence[str]) -> "Structure":
        """Returns a structure with looser rules for these functions. Raises InvalidRequest."""
        assert self.offer is not None
        unheld = tuple(name for name in self.unheld if not name.startswith("tools["))
        return _offered(self.offer.loosened(functions), self.parts, unheld)


def structure_of(
    fields: Fields,
    *,
    token_of: Callable[[str], int | None] = lambda text: None,
    form: CallForm = HERMES,
) -> Structure:
    """Returns the structure that the fields of a body request. Raises InvalidRequest.

    `token_of` returns the id of an added token; in some models, marks of calls are added tokens.
    `form` is the form in which the model writes calls. The gateway's grammar checker decides later
    if the grammar can be used.
    """
    asked = [name for name in _GUIDED if fields.get(name) is not None]
    asked += [n for n in ("response_format", "structured_outputs") if _asks(fields.get(n))]
    allowed = allowed_tools(fields)
    if len(asked) > 1:
        raise InvalidRequest(f"{asked[0]} and {asked[1]} cannot be combined", param=asked[1])
    answer = _answer(asked[0], fields) if asked else Structure()
    if allowed is not None:
        return _calling(allowed, answer, form, token_of)
    return _behind_channel(answer, token_of) if form is HARMONY else answer


def _answer(name: str, fields: Fields) -> Structure:
    """Returns the structure of an answer without calls."""
    if name == "json_schema" and fields[name] == _ANY_JSON:
        return Structure(Grammar(GrammarKind.JSON_SCHEMA, "{}"), name)
    if name == "response_format":
        return _response_format(fields[name])
    if name == "structured_outputs":
        return _structured_outputs(fields[name])
    return Structure(_grammar(_GUIDED[name], fields[name], name), name)


def _behind_channel(answer: Structure, token_of: Callable[[str], int | None]) -> Structure:
    """Returns the structure for gpt-oss, where the grammar applies only to the final message."""
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
    """Raises InvalidRequest if the other fields do not allow the grammar."""
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
    kind = object_at(value, param).get("type")
    if kind == "json_object":
        return Structure(_json_object(), param)
    if kind == "structural_tag":
        return _structural_tag(value, param)
    if kind != "json_schema":
        raise InvalidRequest(f"{param}.type {kind!r} is not supported", param=f"{param}.type")
    named = object_at(value.get("json_schema"), f"{param}.json_schema")
    strict = named.get("strict")
    if not isinstance(strict, bool | None):
        where = f"{param}.json_schema.strict"
        raise InvalidRequest(f"{where} must be true or false", param=where)
    where, schema = f"{param}.json_schema.schema", named.get("schema")
    asked = Structure(_grammar("json", schema, where, strict=bool(strict)), where)
    is_long = asked.grammar is None or len(asked.grammar.source) > MAX_LOOSENED_LEN
    is_whole = strict or is_long or not isinstance(schema, dict) or can_be_held(schema)
    if is_whole or is_endless(schema):  # refused, as no answer can satisfy an endless schema
        return asked
    source, unheld = lenient_grammar(schema)
    return Structure(Grammar(GrammarKind.LARK, source), where, unheld=named_places(where, unheld))


def _structural_tag(value: Fields, param: str) -> Structure:
    check_nesting_at(value, param)
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
    given = {k: v for k, v in object_at(value, param).items() if v is not None and v is not False}
    given.pop("disable_fallback", None)  # ignored, as there is only one backend
    strict = given.pop("disable_additional_properties", False)
    if strict not in (True, False) or (strict and "json" not in given):
        where = f"{param}.disable_additional_properties"
        raise InvalidRequest(f"{where} must be true beside json, or false", param=where)
    if given.keys() == {"structural_tag"}:
        where = f"{param}.structural_tag"
        tag = given["structural_tag"]
        tag = _loaded_json(tag, where) if isinstance(tag, str) else tag
        return _structural_tag(object_at(tag, where), where)
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
    """Returns a grammar of one of vLLM's kinds. With `strict`, objects have no other keys."""
    match kind, value:
        case "json", dict() if strict:
            check_nesting_at(value, param)
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


def _calling(
    allowed: AllowedTools, answer: Structure, form: CallForm, token_of: Callable[[str], int | None]
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


def _any_of(choices: Sequence[str]) -> str:
    return " | ".join(map(literal, choices))


def _dumped_json(value: Json, param: str) -> str:
    """Returns a client's value as JSON. Raises InvalidRequest if the value is nested too deeply."""
    check_nesting_at(value, param)
    return _dumped(value)


def _loaded_json(text: str, param: str) -> Json:
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is not valid JSON: {error}", param=param) from error
    if not isinstance(loaded, bool | dict):
        raise InvalidRequest(f"{param} must be {_EXPECTED['json']}", param=param)
    return loaded


def _dumped(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


_DEFINED = re.compile(r"^[ \t]*[?!]?([\w-]+)(?=[ \t]*(?:\[[^\]\n]*\][ \t]*)?:)", re.MULTILINE)
_SCHEMA = "%json"


def answer_rules(grammar: Grammar) -> AnswerRules:
    """Returns a grammar as an expression with rules. Raises GrammarError for bad EBNF or JSON."""
    source = grammar.source
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return AnswerRules("answer", (f"answer: {_SCHEMA} {_checked(source)}",))
        case GrammarKind.REGEX:
            return AnswerRules("answer", (f"answer: /{regex_to_lark(source, use_ascii='')}/",))
    lark = lark_of(source) if is_ebnf(source) else source
    names = {name: _own(name) for name in _DEFINED.findall(lark)}
    return AnswerRules(_own("start"), (_renamed(lark, names),))


def _checked(source: str) -> str:
    """Returns a schema as JSON, so that no part of it can be read as grammar."""
    try:
        return json.dumps(json.loads(source), ensure_ascii=False)
    except (ValueError, RecursionError):
        return "false"  # a schema that is refused too


def _own(name: str) -> str:
    return ("OWN_" if name.lstrip("_")[:1].isupper() else "own_") + name


def _renamed(lark: str, names: dict[str, str]) -> str:
    """Returns the grammar with renamed rules. Texts, expressions and schemas are not changed."""
    parts, depth = list[str](), 0
    for found in LARK_TOKEN.finditer(lark):
        token = found[0]
        depth = max(depth + (token == "{") - (token == "}"), 0)
        parts.append(names.get(token, token) if depth == 0 else token)
    return "".join(parts)

"""Tools beside answers: strict schemas are enforced, and otherwise every valid call is accepted."""

import asyncio
import contextlib
import json
import time

import pytest

from engine.errors import InvalidRequest
from engine.messages import GrammarKind
from router.gateway.requests.grammar_checker import Asker, check_structure
from router.text.forms.chosen import CALL_FORMS
from router.text.structured import structure_of
from tests.kits.router.forms import allows, byte_guides, token_of

EMAIL = {"type": "string", "pattern": r"^(?!\.)[a-z]+@x$"}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ODD = {
    "type": "object",
    "properties": {
        "mail": EMAIL,
        "word": {"type": "string", "pattern": r"\bx"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "some": {"type": "array", "items": {"type": "null"}, "contains": {"type": "null"}},
        "kind": {"type": "str"},
    },
    "required": None,
}
ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "n",
        "strict": True,
        "schema": {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]},
    },
}


def tool(parameters, name="f", **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


class Checker:
    """Compiles a grammar at once, for the tokenizer of bytes."""

    async def check(self, vocabulary, grammar, asker):
        byte_guides().prepare(grammar)


def structure(*tools, form="hermes", **fields):
    asked = {"tools": list(tools), **fields} if tools else fields
    found = structure_of(asked, token_of=token_of, form=CALL_FORMS[form])
    return asyncio.run(check_structure(Checker(), found, None, Asker("", b"")))


def call(arguments, name="f"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# ---------------------------------------------------------------- allowed answers


@pytest.mark.parametrize(
    "said",
    [
        call('{"b":2,"a":1}'),
        call('{"b": 2, "z": [1, {"y": null}], "a": 1}'),
        '<tool_call>{"name":"f","arguments":{"b":2,"a":1}}</tool_call>',
        '<tool_call>{"arguments": {"b": 2, "a": 1}, "name": "f"}</tool_call>',
        '<tool_call>\n{\n  "name" : "f",\n  "arguments" : {\n    "b" : 2\n  }\n}\n</tool_call>',
        call(r'{"z": "\u0061\/\u001b[31m\ud83d\ude00"}'),
        f"Well.\n{call('{}')}\n{call('{}')}",
    ],
)
def test_with_auto_any_order_and_spelling_is_kept(said):
    assert allows(structure(tool(OPTIONAL)).grammar, said)


@pytest.mark.parametrize(
    "said",
    [
        call('{"a": "x"}'),
        call('{"a": 1, "a": 2}'),
        call(r'{"\u0061": "x"}'),
        call("{}", "g"),
        call("[]"),
    ],
)
def test_with_auto_arguments_still_fit_the_schema(said):
    assert not allows(structure(tool(OPTIONAL)).grammar, said)


def test_the_same_holds_for_objects_inside_and_for_other_forms():
    inner = {"type": "object", "properties": {"o": {"type": "array", "items": OPTIONAL}}}
    found = structure(tool(inner), form="llama3_json").grammar
    assert allows(found, '{"name":"f","parameters":{"o":[{"b":2,"a":1}]}}')
    assert allows(found, '{"parameters": {"o": [{"b": 2}]}, "name": "f"}')
    assert not allows(found, '{"name":"f","parameters":{"o":[{"b":"x"}]}}')
    found = structure(tool(OPTIONAL), form="pythonic").grammar
    assert allows(found, "[f(b=2, a=1)]")
    assert allows(found, "[ f( b = 2 ) ]")
    assert not allows(found, "[f(b=2, b=1)]")


@pytest.mark.parametrize("form", ["llama3_json", "pythonic"])
@pytest.mark.parametrize(
    "text", ['{"name": "Paris"}', '{"a": 1}', "[1] says so", "[g(1)]", " <b>", "{", "[f"]
)
def test_text_that_only_begins_like_a_call_is_text(form, text):
    found = structure(tool(OPTIONAL), form=form)
    assert allows(found.grammar, text)
    parser = CALL_FORMS[form].parser(found.calling, None)
    shown = [delta.text for char in text for delta in parser.feed(char)]
    assert "".join([*shown, *(delta.text for delta in parser.finish())]) == text


# ---------------------------------------------------------------- odd schemas


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "pythonic", "mistral_args", "openai"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_an_odd_tool_is_served_and_what_is_not_held_is_named(form, choice):
    found = structure(tool(OPTIONAL, "g"), tool(ODD), form=form, tool_choice=choice)
    places = {"mail.pattern", "word.pattern", "tags.uniqueItems", "some.contains", "kind.type"}
    named = {name.removeprefix("tools[1].function.parameters.properties.") for name in found.unheld}
    assert places <= named


def test_other_parts_of_an_odd_schema_are_enforced():
    found = structure(tool(ODD)).grammar
    assert allows(found, call('{"kind": [1], "tags": ["a", "a"], "mail": "b"}'))
    assert not allows(found, call('{"tags": [1]}'))
    assert not allows(found, call('{"mail": 1}'))


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_tool_is_held_or_refused(choice):
    with pytest.raises(InvalidRequest, match="look-around") as caught:
        structure(
            tool({"type": "object", "properties": {"m": EMAIL}}, strict=True), tool_choice=choice
        )
    assert caught.value.param == "tools[0].function.parameters"
    found = structure(tool(OPTIONAL, strict=True), tool_choice=choice)
    assert found.unheld == ()
    assert not allows(found.grammar, call('{"c": 1}'))


def test_what_only_the_compiler_refuses_is_loosened_too():
    apart = {"patternProperties": {"^a": {"type": "null"}, "b$": {"type": "integer"}}}
    found = structure(tool({"type": "object", **apart}), tool_choice="required")
    assert found.unheld == ("tools[0].function.parameters.patternProperties",)
    assert allows(found.grammar, call('{"ab": 1}'))


def test_many_large_tools_are_served():
    wide = {
        "type": "object",
        "properties": {f"{'p' * 40}{i}": {"type": "integer"} for i in range(60)},
    }
    found = structure(*(tool(wide, f"f{i}") for i in range(30)))
    assert len(found.grammar.source) < 128 * 2**10
    assert found.unheld[-1].endswith(".function.parameters")


REFER = {"$ref": "#/$defs/a"}
HOSTILE = {
    "chain": {
        "properties": {"x": {"$ref": "#/$defs/a0"}},
        "$defs": {
            f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(2_000)
        },
    },
    "branches": {
        "properties": {"x": REFER},
        "$defs": {"a": {"anyOf": [{"anyOf": [REFER] * 30, "title": str(i)} for i in range(30)]}},
    },
    "names": {"properties": {"é\x00" * 20_000: {"enum": ["\ud83d" * 9_000]}}},
    "many": {"properties": {f"p{i}": {"enum": [f"{i}" * 90]} for i in range(700)}},
    "wrong": {"properties": [], "required": [1], "anyOf": {}, "enum": 3, "items": [{}]},
    "inner": {"properties": {"x": {"properties": 3, "required": {}, "minItems": -1, "items": 1}}},
    "counts": {"properties": {"x": {"type": "string", "minLength": 9**9, "maxLength": 10**9}}},
}


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tool_costs_little(form, name):
    begin_s = time.thread_time()
    with contextlib.suppress(InvalidRequest):
        structure(tool({"type": "object", **HOSTILE[name]}), form=form)
    assert time.thread_time() - begin_s < 5.0


def test_names_are_fit_for_a_header():
    found = structure(tool({"type": "object", "properties": {"a\r\nb, é": {"type": "str"}}}))
    assert found.unheld == ("tools[0].function.parameters.properties.a%0D%0Ab%2C%20%C3%A9.type",)


# ---------------------------------------------------------------- tools beside other fields

FIELDS = [
    {"response_format": ANSWER},
    {"guided_json": ANSWER["json_schema"]["schema"]},
    {"guided_regex": r'\{ ?"x": ?null\}'},
    {
        "guided_grammar": 'start: BODY "}"\nBODY: "{" gap "\\"x\\": null"\ngap: " "?'.replace(
            "BODY: ", "body: "
        ).replace("BODY", "body")
    },
    {"guided_grammar": 'root ::= "{\\"x\\": null}"'},
]


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "mistral", "deepseek_v31"])
@pytest.mark.parametrize("fields", FIELDS)
def test_an_answer_follows_the_field_or_a_tool_is_called(form, fields):
    found = structure(tool(OPTIONAL), form=form, **fields).grammar
    assert allows(found, '{"x": null}')
    assert not allows(found, '{"y": null}')
    assert not allows(found, "Hello")
    calls = {
        "hermes": call('{"b": 1}'),
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=b>\n1\n</parameter>\n"
        "</function>\n</tool_call>",
        "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"b": 1}}]',
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }
    assert allows(found, calls[form])


@pytest.mark.parametrize(
    ("form", "said"),
    [("llama3_json", '{"name": "f", "parameters": {"b": 1}}'), ("pythonic", "[f(b=1)]")],
)
def test_calls_without_a_mark_may_come_instead_of_json(form, said):
    found = structure(tool(OPTIONAL), form=form, response_format=ANSWER).grammar
    assert allows(found, said)
    assert allows(found, '{"x": null}')
    assert not allows(found, '{"y": null}')
    assert not allows(found, "Hello")


def test_a_tool_that_must_be_called_is_called_whatever_an_answer_would_be():
    found = structure(tool(OPTIONAL), response_format=ANSWER, tool_choice="required").grammar
    assert allows(found, call("{}"))
    assert not allows(found, '{"x": null}')


def test_the_field_that_cannot_be_followed_is_named():
    odd = {"type": "json_schema", "json_schema": {"strict": True, "schema": {"pattern": "(?=a)"}}}
    with pytest.raises(InvalidRequest) as caught:
        structure(tool(OPTIONAL), response_format=odd)
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("tools", [(), (tool(OPTIONAL),)])
@pytest.mark.parametrize("form", ["hermes", "openai"])
def test_an_answer_that_is_not_strict_is_served_too(tools, form):
    odd = {"type": "json_schema", "json_schema": {"schema": ODD}}
    found = structure(*tools, form=form, response_format=odd)
    assert "response_format.json_schema.schema.properties.mail.pattern" in found.unheld
    assert allows(found.grammar, '{"kind": 1, "tags": ["a"]}')
    assert not allows(found.grammar, '{"tags": [1]}')


# ---------------------------------------------------------------- models that write messages


@pytest.mark.parametrize("fields", [*FIELDS, {"guided_choice": ['{"x": null}', "b"]}])
def test_a_message_holds_what_a_field_asks_for(fields):
    found = structure(form="openai", **fields).grammar
    said = "<|channel|>analysis<|message|>Is {x} right?<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    assert allows(found, f'{said}{final}{{"x": null}}')
    assert allows(found, f'{final}{{"x": null}}')
    assert allows(found, '<|channel|>final <|constrain|>json<|message|>{"x": null}')
    assert allows(found, '{"x": null}')
    # the answer may end after these tokens
    assert allows(found, "<|channel|>analysis<|message|>Is {x} right?")
    assert not allows(found, f'{said}{final}{{"y": null}}')
    assert not allows(found, f"{said}{final}Hello")
    assert not allows(found, said)


def test_a_message_or_a_call_follows_reasoning():
    found = structure(tool(OPTIONAL), form="openai", response_format=ANSWER).grammar
    final = '<|channel|>final<|message|>{"x": null}'
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert allows(found, f"{said}{final}")
    for head in (
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>analysis to=functions.f json<|message|>",
        " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
    ):
        assert allows(found, f'{said}{head}{{"b": 2, "a": 1}}'), head
    assert not allows(found, "<|channel|>final<|message|>Hello")


def test_without_tokens_for_marks_an_answer_is_the_grammar_alone():
    asked = {"guided_json": json.dumps({"type": "null"})}
    found = structure_of(asked, form=CALL_FORMS["openai"])
    assert found.grammar.kind is GrammarKind.JSON_SCHEMA


@pytest.mark.parametrize(
    "definitions",
    [{"n": {"$ref": "#/$defs/n"}}, {"n": {"$ref": "#/$defs/m"}, "m": {"$ref": "#/$defs/n"}}],
)
def test_an_answer_that_no_finite_value_could_be_is_refused(definitions):
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "required": ["a"],
        "$defs": definitions,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(InvalidRequest, match="no finite value satisfies the schema"):
        structure(response_format=form)

"""Fields that constrain an answer's form become one grammar, or an error that names the field."""

import asyncio
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import engine.model
from engine.errors import InvalidRequest
from engine.grammar.guides import LlGuides
from router.gateway.requests.grammar_checker import Asker, check_structure
from router.text.forms.chosen import HERMES
from router.text.forms.deltas import CallArguments, CallBegun, Content
from router.text.forms.json_calls import JsonCallParser
from router.text.structured import Structure, check_combination, structure_of
from tests.kits.grammar_checks import CheckedAtOnce
from tests.kits.schemas import faults, terseness, write_answer

TOKENIZER = Path(engine.model.__path__[0]) / "bundled" / "target" / "tokenizer.json"
EOS = [0, 1]
ASKER = Asker("", b"")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Łódź", "Rome, Italy", "</tool_call>", 'quo"te', "%json {"]}},
}
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get", "description": "%json"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
NESTED = json.loads("[" * 700 + "]" * 700)
NAMED = {"type": "function", "function": {"name": "get"}}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call. `arguments` is JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


def parse_tool_calls(text, rng, size=10_000) -> tuple[str | None, list[ToolCall]]:
    """Returns the content or None, and the tool calls of a whole answer."""
    parser = JsonCallParser(HERMES, rng)
    content, begun, arguments = "", dict[int, CallBegun](), dict[int, str]()
    pieces = (text[i : i + size] for i in range(0, len(text), size))
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    for delta in deltas:
        match delta:
            case Content(more):
                content += more
            case CallBegun(index):
                begun[index] = delta
            case CallArguments(index, more):
                arguments[index] = arguments.get(index, "") + more
    calls = [ToolCall(call.id, call.name, arguments.get(i, "")) for i, call in begun.items()]
    return content or None, calls


@cache
def tokenizer():
    return Tokenizer.from_file(str(TOKENIZER))


@cache
def guides():
    return LlGuides(TOKENIZER, vocab_size=4096, eos_token_ids=EOS)


def accepts(structure, text):
    """Returns True if the text is a complete answer under the grammar."""
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    guide = guides().open(structure.grammar, ())
    return guide.num_allowed([*ids, EOS[0]]) == len(ids) + 1


def structure(**fields):
    result = structure_of(fields)
    check_combination(result, fields)
    return asyncio.run(check_structure(CheckedAtOnce(), result, None, ASKER))


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None, "guided_json": None, "tools": None},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
    ],
)
def test_fields_that_ask_for_nothing_give_no_grammar(fields):
    assert structure(**fields) == Structure()


@pytest.mark.parametrize(
    ("fields", "param", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", '{"a": [1]}', "[1]"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "w", "strict": True, "schema": WEATHER},
                }
            },
            "response_format.json_schema.schema",
            '{"city": "Łódź", "days": 3}',
            '{"city": "Łódź", "days": 10}',
        ),
        (
            {"structured_outputs": {"json": WEATHER}},
            "structured_outputs.json",
            '{"city":"Łódź"}',
            "{}",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            "{}",
            "1",
        ),
        ({"structured_outputs": {"regex": "a+b"}}, "structured_outputs.regex", "aab", "ab!"),
        ({"guided_json": json.dumps(WEATHER)}, "guided_json", '{"city":"Łódź"}', "{}"),
        ({"guided_regex": r"\d{2}"}, "guided_regex", "12", "123"),
        ({"guided_choice": ["yes", 'n"o%json', "maybe\n"]}, "guided_choice", 'n"o%json', "maybe"),
        ({"guided_choice": ["a\x7fb\x85\x1b"]}, "guided_choice", "a\x7fb\x85\x1b", "ab"),
        ({"guided_grammar": 'start: "a" b\nb: /[0-9]+/'}, "guided_grammar", "a12", "a"),
        ({"guided_grammar": 'root ::= "a" b\nb ::= [0-9]+'}, "guided_grammar", "a12", "a"),
        (
            {"structured_outputs": {"grammar": "root ::= [^a]", "disable_fallback": True}},
            "structured_outputs.grammar",
            "b",
            "a",
        ),
        ({"ebnf": 'root ::= "a"{2}'}, "ebnf", "aa", "a"),
        ({"regex": "a+b"}, "regex", "aab", "ab!"),
        ({"json_schema": json.dumps(WEATHER)}, "json_schema", '{"city":"Łódź"}', "{}"),
        ({"json_schema": WEATHER}, "json_schema", '{"city":"Łódź"}', "{}"),
        ({"json_schema": "$$ANY$$"}, "json_schema", "[1]", "[1"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"strict": True, "schema": OPEN},
                }
            },
            "response_format.json_schema.schema",
            '{"a": 1}',
            '{"a": 1, "b": 1}',
        ),
        (
            {
                "structured_outputs": {
                    "json": json.dumps(OPEN),
                    "disable_additional_properties": True,
                }
            },
            "structured_outputs.json",
            '{"a": 1}',
            '{"a": 1, "b": 1}',
        ),
    ],
)
def test_each_way_of_asking_leads_to_a_grammar(fields, param, good, bad):
    result = structure(**fields)
    assert result.param == param
    assert result.calling is None
    assert accepts(result, good)
    assert not accepts(result, bad)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"strict": True, "schema": {"not": {}}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        (
            {"structured_outputs": {"json": "{", "disable_additional_properties": True}},
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"strict": 1}}},
            "response_format.json_schema.strict",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS * 100}, "tools"),
        ({"tools": ""}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": {}}}]},
            "tools[0].function.description",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "x": NESTED}]}, "tools[0]"),
        ({"guided_json": {"const": NESTED}}, "guided_json"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (
            {"tools": [{"type": "function", "function": {"name": 'a"b'}}]},
            "tools[0].function.name",
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "a", "strict": True, "parameters": {"not": {}}},
                    }
                ]
            },
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_an_impossible_structure_is_refused_with_its_field(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        structure(**fields)
    assert caught.value.param == param
    assert param.split(".")[0].split("[")[0] in caught.value.message


# ---------------------------------------------------------------- tools


def test_with_auto_an_answer_is_text_or_text_and_calls():
    result = structure(tools=TOOLS)
    assert result.calling is not None
    assert result.tools == tuple(TOOLS)
    for text in ("", "Hello.", "a < b", "<tool_cal", CALL, f"Let me see.\n{CALL}\n{OTHER_CALL}"):
        assert accepts(result, text), text
    for text in (
        "<tool_call>",
        f"{CALL} and that was it",
        CALL.replace("Łódź", "Paris"),
        CALL.replace("get_weather", "get_wealth"),
        f"{CALL}\n<tool_call>hello",
    ):
        assert not accepts(result, text), text


def test_required_calls_are_all_that_an_answer_is():
    result = structure(tools=TOOLS, tool_choice="required")
    assert accepts(result, CALL)
    assert accepts(result, CALL + "\n" + OTHER_CALL + OTHER_CALL)
    for text in ("", "Hello.", f"Well. {CALL}"):
        assert not accepts(result, text)


def test_without_parallel_calls_there_is_one():
    for fields in ({}, {"tool_choice": "required"}):
        result = structure(tools=TOOLS, parallel_tool_calls=False, **fields)
        assert accepts(result, CALL)
        assert not accepts(result, CALL + "\n" + OTHER_CALL)


def test_a_named_function_is_called_once_and_no_other():
    result = structure(tools=TOOLS, tool_choice=NAMED)
    assert accepts(result, OTHER_CALL)
    assert not accepts(result, CALL)
    assert not accepts(result, OTHER_CALL + OTHER_CALL)


def test_marks_that_are_tokens_become_tokens_of_the_grammar(tmp_path):
    added = tokenizer().from_file(str(TOKENIZER))
    added.add_tokens(["<tool_call>", "</tool_call>"])
    added.save(str(tmp_path / "tokenizer.json"))
    makes = LlGuides(tmp_path / "tokenizer.json", vocab_size=4098, eos_token_ids=EOS)
    for choice in ("auto", "required"):
        result = structure_of({"tools": TOOLS, "tool_choice": choice}, token_of=added.token_to_id)
        ids = added.encode(f"{CALL}\n{OTHER_CALL}", add_special_tokens=False).ids
        assert ids[0] == 4096
        assert makes.open(result.grammar, ()).num_allowed([*ids, 1]) == len(ids) + 1
        assert makes.open(result.grammar, ()).num_allowed([*ids[1:], 1]) <= (
            0 if choice == "required" else 99
        )


@pytest.mark.parametrize("name", ["get_weather", "get"])
def test_random_calls_can_be_parsed_and_their_arguments_validate(name):
    choice = {"type": "function", "function": {"name": name}}
    result = structure(tools=TOOLS, tool_choice=choice)
    texts = [tokenizer().decode([i], skip_special_tokens=False) for i in range(4096)]
    wanted = WEATHER if name == "get_weather" else {"type": "object", "maxProperties": 0}
    rng, ids = np.random.default_rng(0), random.Random(0)
    for _ in range(15):
        guide = guides().open(result.grammar, ())
        answer = write_answer(guide, terseness(texts), rng, max_tokens=500, eos=EOS)
        assert answer is not None
        content, calls = parse_tool_calls(tokenizer().decode(answer), ids)
        assert content is None
        assert [call.name for call in calls] == [name]
        assert not faults(wanted, calls[0].arguments)


# ---------------------------------------------------------------- calls in text

TEXTS = {
    "": (None, []),
    "Hello <tool": ("Hello <tool", []),
    CALL: (None, [("get_weather", '{"city": "Łódź"}')]),
    f"See:\n{CALL}\n{OTHER_CALL}\n": (
        "See:\n",
        [("get_weather", '{"city": "Łódź"}'), ("get", "{}")],
    ),
    '<tool_call>{"name": "get", "arguments": {"s": "}</tool_call>"}}</tool_call>': (
        None,
        [("get", '{"s": "}</tool_call>"}')],
    ),
    r'<tool_call>{"name": "get", "arguments": {"s": ["\\\"}", "\\\\"]}}</tool_call>': (
        None,
        [("get", r'{"s": ["\\\"}", "\\\\"]}')],
    ),
    '<tool_call>{"name": "get", "arguments": "}"}</tool_call>': (None, [("get", '"}"')]),
    CALL[:-15]: (None, [("get_weather", '{"city": "Łódź"')]),
    CALL[:-5]: (None, [("get_weather", '{"city": "Łódź"}')]),
    CALL[:49]: (None, [("get_weather", "")]),
    "<tool_call>\n{": (None, []),
    CALL + "\n<tool_c": (None, [("get_weather", '{"city": "Łódź"}')]),
    "Rome <tool_c": ("Rome <tool_c", []),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_calls_are_found_in_an_answer_however_it_is_cut(text, size):
    content, calls = parse_tool_calls(text, random.Random(0), size)
    assert (content, [(call.name, call.arguments) for call in calls]) == TEXTS[text]
    assert len({call.id for call in calls}) == len(calls)


def test_text_is_sent_at_once_and_a_name_before_its_arguments():
    parser = JsonCallParser(HERMES, random.Random(0))
    assert parser.feed("Hello <b") == [Content("Hello <b")]
    assert parser.feed("> <tool") == [Content("> ")]
    assert parser.feed("s>") == [Content("<tools>")]
    assert parser.feed('<tool_call>{"name": "get", "arg') == []
    begun, some = parser.feed('uments": {"a"')
    assert begun == CallBegun(0, begun.id, "get")
    assert begun.id.startswith("call_")
    assert some == CallArguments(0, '{"a"')
    assert parser.feed(": 1}}") == [CallArguments(0, ": 1}")]
    assert parser.feed("</tool_call>") == []
    assert parser.finish() == []


def test_long_arguments_are_passed_on_as_they_come():
    parser, length = JsonCallParser(HERMES, random.Random(0)), 20_000
    parser.feed('<tool_call>{"name": "get", "arguments": {"s": "')
    for _ in range(length):
        assert parser.feed(">") == [CallArguments(0, ">")]
    assert parser.feed('"}}</tool_call>') == [CallArguments(0, '"}')]

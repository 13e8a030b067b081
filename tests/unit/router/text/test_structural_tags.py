"""Structural tags: their grammars allow what the parts allow, and errors name the wrong part."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import engine.model
from engine.errors import GrammarError, InvalidRequest
from engine.grammar.guides import LlGuides
from engine.messages import Grammar, GrammarKind
from router.text.structural_tags import grammar_of_tag, newer_form

TOKENIZER = Path(engine.model.__path__[0]) / "bundled" / "target" / "tokenizer.json"
GUIDES = LlGuides(TOKENIZER, vocab_size=4096, eos_token_ids=[0])
TEXTS = Tokenizer.from_file(str(TOKENIZER))
CONST = {"type": "const_string", "value": 'so "it" is\n'}
SCHEMA = {"type": "json_schema", "json_schema": {"enum": [1, "a%b"]}}
ANY = {"type": "any_text"}


def allows(form, text):
    grammar = Grammar(GrammarKind.LARK, grammar_of_tag(form, "format"))
    try:
        guide = GUIDES.open(grammar, TEXTS.encode(text, add_special_tokens=False).ids)
    except GrammarError:
        return False
    return guide.num_allowed([0]) == 1


def tag(content, end="</a>"):
    return {"type": "tag", "begin": "<a>", "content": content, "end": end}


FIRST = {"at_least_one": True, "stop_after_first": True}
OBJECT = {"type": "json_schema", "json_schema": {"type": "object", "maxProperties": 0}}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<a>", "<b "],
    "tags": [tag(SCHEMA), {"begin": "<b n>", "content": OBJECT, "end": "</b>"}],
}
OLDER = newer_form(
    {
        "structures": [{"begin": "<a>", "schema": SCHEMA["json_schema"], "end": "</a>"}],
        "triggers": ["<a"],
    },
    "format",
)


@pytest.mark.parametrize(
    ("form", "allowed", "refused"),
    [
        (CONST, ['so "it" is\n'], ["", "so"]),
        (SCHEMA, ["1", '"a%b"'], ["2", "a"]),
        (ANY, ["", "any\nthing"], []),
        ({"type": "sequence", "elements": [CONST, SCHEMA]}, ['so "it" is\n1'], ["1"]),
        ({"type": "or", "elements": [CONST, SCHEMA]}, ['so "it" is\n', "1"], ["", "11"]),
        (tag(SCHEMA), ["<a>1</a>"], ["<a>2</a>", "1"]),
        (tag(ANY, end="/x\n"), ["<a>b/x\n", "<a>/x\n"], ["<a>b"]),
        (
            {"type": "sequence", "elements": [tag(ANY), tag(SCHEMA), ANY]},
            ["<a>x</a><a>1</a>", "<a>x</a><a>1</a> and more"],
            ["<a>x</a>", "<a>x</a><a>3</a>"],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag(SCHEMA)], "separator": ", "},
            ["", "<a>1</a>", "<a>1</a>, <a>1</a>"],
            ["<a>1</a><a>1</a>", "<a>1</a>, ", "x"],
        ),
        (
            {"type": "tags_with_separator", "tags": [tag(SCHEMA)], "separator": "", **FIRST},
            ["<a>1</a>"],
            ["", "<a>1</a><a>1</a>"],
        ),
        (
            TRIGGERED,
            ["", "text", "x<a>1</a>", "x<a>1</a>y<b n>{}</b>z", "<a>1</a><a>1</a>"],
            ["x<a>", "x<a>2</a>", "x<a>1</a>y<b n>1</b>", "<b >"],
        ),
        (TRIGGERED | FIRST, ["x<a>1</a>"], ["x", "", "<a>1</a>y"]),
        (TRIGGERED | {"stop_after_first": True}, ["x", "x<a>1</a>"], ["<a>1</a>y", "<a>2</a>"]),
        (OLDER, ["", "x<a>1</a>y"], ["x<a>2</a>"]),
    ],
)
def test_an_answer_is_made_of_the_parts(form, allowed, refused):
    assert all(allows(form, text) for text in allowed)
    assert not any(allows(form, text) for text in refused)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (None, "format"),
        ({"type": "triggered_tags"}, "format.type"),
        (TRIGGERED | {"triggers": ["<", "<a"]}, "format.tags[0].begin"),
        (TRIGGERED | {"triggers": [""]}, "format.triggers[0]"),
        (TRIGGERED | {"triggers": ["<c"]}, "format.tags[0].begin"),
        (TRIGGERED | {"tags": [3]}, "format.tags[0]"),
        (TRIGGERED | {"tags": []}, "format.tags"),
        (TRIGGERED | {"at_least_one": 1}, "format.at_least_one"),
        ({"type": "sequence", "elements": [TRIGGERED, CONST]}, "format.elements[0].type"),
        (ANY | {"excludes": ["x"]}, "format.excludes"),
        (CONST | {"whim": 1}, "format.whim"),
        (SCHEMA | {"style": "xml"}, "format.style"),
        ({"type": "sequence", "elements": [tag(ANY | {"a": 1})]}, "format.elements[0].content.a"),
        (TRIGGERED | {"excludes": ["x"]}, "format.excludes"),
        (TRIGGERED | {"tags": [{"begin": "<a>", "x": 1}]}, "format.tags[0].x"),
        ({"type": "const_string", "value": 3}, "format.type"),
        ({"type": "sequence", "elements": []}, "format.type"),
        ({"type": "sequence", "elements": [ANY, CONST]}, "format.elements[0]"),
        ({"type": "or", "elements": [CONST, 7]}, "format.elements[1]"),
        (tag({"type": "regex"}), "format.content.type"),
        (tag(CONST, end=""), "format.type"),
    ],
)
def test_a_part_that_cannot_be_followed_is_named(form, param):
    with pytest.raises(InvalidRequest) as caught:
        grammar_of_tag(form, "format")
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"structures": 3}, "tag.structures"),
        ({"structures": [{"begin": "<a>", "end": ">", "style": 1}]}, "tag.structures[0].style"),
        ({"structures": [{}]}, "tag.structures[0]"),
    ],
)
def test_an_older_form_that_is_wrong_is_named(value, param):
    with pytest.raises(InvalidRequest) as caught:
        newer_form(value, "tag")
    assert caught.value.param == param

"""Structural tags: their grammars allow what the parts say, and errors name the part."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import engine.model
from engine.errors import GrammarError, InvalidRequest
from engine.grammar.guides import LlGuides
from engine.messages import Grammar, GrammarKind
from router.text.structural_tags import grammar_of_tag

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

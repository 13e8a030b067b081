"""Reasoning between marks: in the prompt, in the answer, or optional; then a grammar."""

import random

import numpy as np
import pytest

from engine.grammar.thinking import ThinkingGuide
from engine.grammar.tokens import TokenGuide, TokenRules
from engine.messages import ThinkingMarks
from router.text.forms.calling import Calling
from router.text.forms.chosen import CALL_FORMS
from router.text.forms.deltas import CallBegun, Content, Reasoning
from router.text.forms.thinking import PlainParser, ThinkingForm, ThinkingParser

QWEN, R1 = ThinkingForm("qwen3"), ThinkingForm("deepseek_r1", always_thinks=True)


def read(text, *, is_thinking, size=1, is_cut=False):
    parser = ThinkingParser(PlainParser(), is_thinking=is_thinking)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [d for piece in pieces for d in parser.feed(piece)] + parser.finish(is_cut=is_cut)
    thoughts = "".join(d.text for d in deltas if isinstance(d, Reasoning))
    return thoughts, "".join(d.text for d in deltas if isinstance(d, Content))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "is_thinking", "expected"),
    [
        ("so.\n</think>\n\nHi", True, ("so.\n", "Hi")),
        ("<think>so.</think>Hi", None, ("so.", "Hi")),
        ("\n<think>so.</think>Hi", True, ("so.", "Hi")),
        ("Hi <think>so</think>", None, ("", "Hi <think>so</think>")),
        ("<thing>", None, ("", "<thing>")),
        ("Hi </think>", False, ("", "Hi </think>")),
        ("a <b </thin", True, ("a <b </thin", "")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_is_parted_from_the_answer_in_any_pieces(text, is_thinking, expected, size):
    assert read(text, is_thinking=is_thinking, size=size) == expected


@pytest.mark.parametrize("text", ["<thi", "so </thi", "<think>so</"])
def test_a_mark_that_is_cut_is_not_shown(text):
    thoughts, content = read(text, is_thinking=True, is_cut=True)
    assert "<" not in thoughts + content


@pytest.mark.parametrize(
    ("form", "prompt_end", "expected"),
    [
        (QWEN, "<|im_start|>assistant\n", None),
        (QWEN, "assistant\n<think>\n", True),
        (QWEN, "assistant\n<think>\n\n</think>\n\n", False),
        (R1, "<｜Assistant｜>", True),
        (R1, "<｜Assistant｜></think>", False),
        (R1, "<｜Assistant｜><think>\n", True),
    ],
)
def test_the_end_of_the_prompt_decides_where_reasoning_begins(form, prompt_end, expected):
    assert form.is_thinking(prompt_end) is expected


def test_calls_behind_reasoning_are_read():
    calls = CALL_FORMS["hermes"].parser(
        Calling({}, at_least_one=False, at_most_one=False), random.Random(0)
    )
    parser = ThinkingParser(calls, is_thinking=True)
    text = '<tool_call> not yet</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    deltas = [d for char in text for d in parser.feed(char)]
    assert [d.name for d in deltas if isinstance(d, CallBegun)] == ["f"]
    assert parser.num_calls == 1
    assert "".join(d.text for d in deltas if isinstance(d, Reasoning)) == "<tool_call> not yet"


# ---------------------------------------------------------------- guides

BEGIN, END, EOS, VOCAB_SIZE = 40, 41, 42, 45
ONLY = TokenRules(allowed=(7, EOS))


def guide(*, is_inside):
    inner = TokenGuide(ONLY, VOCAB_SIZE)
    marks = ThinkingMarks(BEGIN, END, is_inside)
    return ThinkingGuide(inner, marks, vocab_size=VOCAB_SIZE)


def ids(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


ANY = set(range(VOCAB_SIZE))
AFTER = {7, EOS}


def test_anything_may_be_thought_and_an_answer_may_end_there():
    inside = guide(is_inside=True)
    assert [ids(row) for row in inside.masks([3, END, 7])] == [ANY, ANY, AFTER, AFTER]
    assert inside.num_allowed([3, END, 7, 8]) == 3
    for token_id in (3, 4, END):
        inside.consume(token_id)
    assert [ids(row) for row in inside.masks([7])] == [AFTER, AFTER]


def test_an_answer_may_begin_with_reasoning_or_without():
    outside = guide(is_inside=False)
    assert ids(outside.masks([])[0]) == {*AFTER, BEGIN}
    rows = [ids(row) for row in outside.masks([BEGIN, 3, END, 7])]
    assert rows == [{*AFTER, BEGIN}, ANY, ANY, AFTER, AFTER]
    assert [ids(row) for row in outside.masks([7])] == [{*AFTER, BEGIN}, AFTER]
    assert outside.num_allowed([BEGIN, 3, 4]) == 3
    assert outside.num_allowed([8]) == 0
    outside.consume(7)
    assert ids(outside.masks([])[0]) == AFTER

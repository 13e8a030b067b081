"""Forms of tool calls: grammars allow only valid calls; parsers accept text in any pieces."""

import json
import random

import pytest

from engine.errors import ConfigError, InvalidRequest
from engine.messages import Grammar, GrammarKind
from router.text.forms.calling import Calling
from router.text.forms.chosen import CALL_FORMS, forms_of
from router.text.forms.deltas import CallArguments, CallBegun, Content, Reasoning
from tests.kits.router.forms import allows as is_allowed
from tests.kits.router.forms import token_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "flags": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = {"weather": WEATHER, "now": NOTHING}
DEEP = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
ONE = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"

# For each form, an answer with two tool calls in the notation of its model family.
TRANSCRIPTS = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Łódź", "days": 2}}; '
        '{"name": "now", "parameters": {}}'
    ),
    "mistral": (
        'Let me see.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Łódź", "days": 2}}, '
        '{"name": "now", "arguments": {}}]'
    ),
    "mistral_args": (
        'Let me see.[TOOL_CALLS]weather[ARGS]{"city": "Łódź", "days": 2}[TOOL_CALLS]now[ARGS]{}'
    ),
    "qwen3_coder": (
        "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nŁódź\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "deepseek_v3": "Let me see."
    + DEEP.format(
        ONE.format('function<｜tool▁sep｜>weather\n```json\n{"city": "Łódź", "days": 2}\n```')
        + "\n"
        + ONE.format("function<｜tool▁sep｜>now\n```json\n{}\n```")
    ),
    "deepseek_v31": "Let me see."
    + DEEP.format(
        ONE.format('weather<｜tool▁sep｜>{"city": "Łódź", "days": 2}')
        + ONE.format("now<｜tool▁sep｜>{}")
    ),
    "pythonic": '[weather(city="Łódź", days=2), now()]',
}
HARMONY = (
    "<|channel|>analysis<|message|>Weather, so a call.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Łódź"}<|call|>'
)
EXPECTED = [("weather", {"city": "Łódź", "days": 2}), ("now", {})]
BARE = ("llama3_json", "pythonic")


def calling(*, forced=False, single=False):
    return Calling(FUNCTIONS, at_least_one=forced, at_most_one=single)


def parsed(name, pieces, *, is_cut=False):
    """Returns content, reasoning and calls of an answer that arrived in these pieces."""
    parser = CALL_FORMS[name].parser(calling(), random.Random(0))
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(
        is_cut=is_cut
    )
    assert all(isinstance(delta, CallBegun) or delta.text for delta in deltas)
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    thoughts = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    names = [delta.name for delta in deltas if isinstance(delta, CallBegun)]
    arguments = [""] * len(names)
    for delta in deltas:
        if isinstance(delta, CallArguments):
            arguments[delta.index] += delta.text
    assert parser.num_calls == len(names)
    return content, thoughts, list(zip(names, arguments, strict=True))


def decoded(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


# ---------------------------------------------------------------- parsers


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_calls_are_read_from_a_transcript(name):
    content, _, calls = parsed(name, [TRANSCRIPTS[name]])
    assert decoded(calls) == EXPECTED
    assert content == ("" if name in BARE else TRANSCRIPTS[name][: len(content)])
    assert "Let me see." in content or name in BARE


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_any_pieces_are_read_alike(name):
    text = TRANSCRIPTS[name]
    whole = parsed(name, [text])
    assert parsed(name, text) == whole
    for at in range(len(text)):
        assert parsed(name, [text[:at], text[at:]]) == whole
    rng = random.Random(name)
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(text)), 5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(name, pieces) == whole


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_an_answer_that_is_cut_anywhere_shows_no_mark(name):
    text = TRANSCRIPTS[name]
    before, _, calls = parsed(name, [text])
    for at in range(len(text)):
        content, _, some = parsed(name, [text[:at]], is_cut=True)
        assert before.startswith(content)
        for (name_of, arguments), (expected_name, expected) in zip(some, calls, strict=False):
            assert name_of == expected_name
            assert expected.startswith(arguments)


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_args", "deepseek_v31"])
def test_arguments_are_passed_on_as_they_come(name):
    parser = CALL_FORMS[name].parser(calling(), random.Random(0))
    numbers = [len(parser.feed(char)) for char in TRANSCRIPTS[name]]
    assert sum(numbers) > len('{"city": "Łódź", "days": 2}')


@pytest.mark.parametrize("name", CALL_FORMS)
def test_an_answer_without_calls_is_its_text(name):
    text = "The weather in Łódź is < 10 °C [sic] {really}; say `x`.\n"
    if name == "openai":
        text = f"<|channel|>final<|message|>{text}"
    content, _, calls = parsed(name, text)
    assert (content, calls) == (text.rpartition("<|message|>")[2], [])


@pytest.mark.parametrize("name", CALL_FORMS)
@pytest.mark.parametrize("mark", ["", "<", "[", "{", "<tool_call>", "[TOOL_CALLS]", "<|channel|>"])
def test_a_hostile_text_costs_linear_time_and_is_bounded(name, mark):
    parser = CALL_FORMS[name].parser(calling(), random.Random(0))
    for _ in range(3_000):
        parser.feed(mark + '"\\[{(' * 3)
    parser.finish()


def test_values_that_are_no_json_become_json():
    text = (
        "[weather(city='it\\'s \"so\"', days=2, flags=[True, False]), "
        'weather(city="a, b) c", flags=[])]'
    )
    _, _, calls = parsed("pythonic", text)
    assert decoded(calls) == [
        ("weather", {"city": 'it\'s "so"', "days": 2, "flags": [True, False]}),
        ("weather", {"city": "a, b) c", "flags": []}),
    ]
    xml = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n"
        'two "lines"\nof\\text\n</parameter>\n<parameter=flags>\n[true]\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    _, _, calls = parsed("qwen3_coder", xml)
    assert decoded(calls) == [("weather", {"city": 'two "lines"\nof\\text', "flags": [True]})]


@pytest.mark.parametrize("pieces", [[HARMONY], HARMONY])
def test_channels_part_reasoning_calls_and_answer(pieces):
    content, thoughts, calls = parsed("openai", pieces)
    assert (content, thoughts) == ("", "Weather, so a call.")
    assert decoded(calls) == [("weather", {"city": "Łódź"})]
    final = HARMONY.partition("<|start|>")[0] + "<|start|>assistant<|channel|>final<|message|>Hi"
    assert parsed("openai", final + "<|return|>") == ("Hi", "Weather, so a call.", [])


SPELLINGS = [
    (
        "hermes",
        'Hi <tool_call>{"name":"weather","arguments":{"days":2,"city":"}"}}</tool_call>\n'
        '<tool_call>\n{\n "arguments" : { } ,\n "name" : "now"\n}\n</tool_call>',
    ),
    (
        "llama3_json",
        '{"parameters" : {"days":2,"city":"}"}, "name": "weather"}; {"name":"now","parameters":{}}',
    ),
    (
        "mistral",
        'Hi [TOOL_CALLS] [{"arguments": {"days": 2, "city":"}"}, "name": "weather"} ,\n'
        '{"name":"now","arguments":{}}]',
    ),
    ("mistral_args", '[TOOL_CALLS]weather[ARGS] {"days":2,"city":"}"}[TOOL_CALLS]now[ARGS]{}'),
    ("pythonic", "[ weather( days = 2 , city='}' ) , now() ]"),
    (
        "qwen3_coder",
        "Hi <tool_call><function=weather><parameter=days>2</parameter><parameter=city>}"
        "</parameter></function></tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
]


@pytest.mark.parametrize(("name", "text"), SPELLINGS)
def test_other_orders_and_spellings_are_allowed_and_read_in_any_pieces(name, text):
    assert allows(name, text)
    whole = parsed(name, [text])
    assert whole[0] == ("Hi " if text.startswith("Hi") else "")
    assert decoded(whole[2]) == [("weather", {"days": 2, "city": "}"}), ("now", {})]
    assert parsed(name, text) == whole
    for at in range(len(text)):
        assert parsed(name, [text[:at], text[at:]]) == whole


@pytest.mark.parametrize("text", ["Hi", "to", "t", "", "Hello <b> a|b", "{}"])
def test_text_without_channels_is_content(text):
    assert parsed("openai", text) == (text, "", [])
    assert parsed("openai", [text]) == (text, "", [])


OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
UNIONS = {
    "type": "object",
    "properties": {
        "x": OPTIONAL_TEXT,
        "y": {"type": ["string", "integer"]},
        "z": {"$ref": "#/$defs/z"},
        "any": {},
        "uri": {"type": "string", "format": "uri", "pattern": "^h"},
        "list": {"type": "array", "items": {"type": "string"}},
    },
    "$defs": {"z": {"oneOf": [{"type": "null"}, {"enum": ["up", "down"]}]}},
}


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("x", "Paris", "Paris"),
        ("x", "null", None),
        ("x", '"Paris"', "Paris"),
        ("x", "5", "5"),
        ("x", "two\nlines <b>", "two\nlines <b>"),
        ("y", "5", 5),
        ("y", "5 km", "5 km"),
        ("y", "true", "true"),
        ("z", "up", "up"),
        ("z", "null", None),
        ("any", "Paris", "Paris"),
        ("any", '{"a": [1]}', {"a": [1]}),
        ("uri", "https://x", "https://x"),
        ("uri", "no uri", "no uri"),
        ("uri", "5", "5"),
        ("list", '[ "a" ]', ["a"]),
        ("unnamed", "5", 5),
        ("unnamed", "a b", "a b"),
    ],
)
@pytest.mark.parametrize("blank", ["\n", ""])
def test_a_value_without_quotes_is_kept_and_read_by_its_types(key, value, read, blank):
    asked = Calling({"f": UNIONS}, at_least_one=False, at_most_one=False)
    said = (
        f"<tool_call>\n<function=f>\n<parameter={key}>{blank}{value}{blank}</parameter>\n"
        "</function>\n</tool_call>"
    )
    form = CALL_FORMS["qwen3_coder"]
    source = form.grammar(asked, token_of).source
    assert is_allowed(Grammar(GrammarKind.LARK, source), said)
    for pieces in ([said], said):
        parser = form.parser(asked, random.Random(0))
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
        text = "".join(d.text for d in deltas if isinstance(d, CallArguments))
        assert json.loads(text) == {key: read}


def test_values_that_fit_no_type_are_masked():
    asked = Calling({"f": UNIONS}, at_least_one=False, at_most_one=False)
    grammar = Grammar(GrammarKind.LARK, CALL_FORMS["qwen3_coder"].grammar(asked, token_of).source)
    said = "<tool_call>\n<function=f>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert not is_allowed(grammar, said.format("list", "[1]"))
    twice = said.format("x", "a").replace("</function>", "<parameter=x>b</parameter></function>")
    assert not is_allowed(grammar, twice)


@pytest.mark.parametrize("value", ["'Paris'", '"Paris"', "None", "'it\\'s'"])
def test_python_writes_texts_in_both_quotes(value):
    asked = Calling({"f": UNIONS}, at_least_one=False, at_most_one=False)
    grammar = Grammar(GrammarKind.LARK, CALL_FORMS["pythonic"].grammar(asked, token_of).source)
    assert is_allowed(grammar, f"[f(list=[], x={value}), f(other=[{value}, True])]")
    assert not is_allowed(grammar, f"[f(list={value})]")


# ---------------------------------------------------------------- grammars


def allows(name, text, **options):
    source = CALL_FORMS[name].grammar(calling(**options), token_of).source
    return is_allowed(Grammar(GrammarKind.LARK, source), text)


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_grammar_allows_the_transcript_and_plain_text(name):
    assert allows(name, TRANSCRIPTS[name])
    assert allows(name, "Just text.")
    assert allows(name, "")


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_forced_calls_are_calls(name):
    text = TRANSCRIPTS[name].removeprefix("Let me see.").removeprefix("\n")
    assert allows(name, text, forced=True)
    assert not allows(name, "Just text.", forced=True)
    assert not allows(name, text, forced=True, single=True)


@pytest.mark.parametrize("name", TRANSCRIPTS)
@pytest.mark.parametrize(("old", "new"), [("2", "12"), ("2", '"x"'), ("weather", "whether")])
def test_the_grammar_refuses_wrong_calls(name, old, new):
    is_text = name in BARE and old == "weather"  # text without a tool call is not a call
    assert allows(name, TRANSCRIPTS[name].replace(old, new, 1)) is is_text


def test_harmonys_grammar_allows_reasoning_and_then_a_call_or_an_answer():
    text = HARMONY.removesuffix("<|call|>")
    assert allows("openai", text)
    assert allows("openai", text, forced=True)
    final = "<|channel|>final<|message|>Hi"
    assert allows("openai", final)
    assert not allows("openai", final, forced=True)
    assert not allows("openai", text.replace("city", "town"))


def test_what_a_form_cannot_hold_to_is_refused():
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    asked = Calling({"f": schema}, at_least_one=True, at_most_one=True, held=frozenset({"f"}))
    with pytest.raises(InvalidRequest, match="pattern"):
        CALL_FORMS["qwen3_coder"].grammar(asked, token_of)


# ---------------------------------------------------------------- choice of the form

TEMPLATES = {
    "hermes": 'return a json object within <tool_call></tool_call>: {"name": …, "arguments": …}',
    "llama3_json": 'Environment: ipython … {"name": function name, "parameters": dictionary}',
    "mistral": "{{ '[TOOL_CALLS] [' }}",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=a>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>…\\n```json\\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>",
    "openai": "<|start|>assistant<|channel|>analysis<|message|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_form_is_chosen_by_the_template(name):
    source = TEMPLATES[name].replace('parameters":', 'parameters": ')
    assert forms_of(source, lambda _: None).calls.name == name


def test_a_form_is_chosen_by_the_operator():
    found = forms_of(None, lambda _: None, calls="pythonic", thinking="deepseek-r1")
    assert found.calls.name == "pythonic"
    assert found.thinking.always_thinks
    assert forms_of("<think>", lambda _: None).thinking.name == "qwen3"
    assert forms_of("<think>", lambda _: None, thinking="none").thinking is None
    with pytest.raises(ConfigError, match="known are auto, none, hermes"):
        forms_of(None, lambda _: None, calls="fortran")

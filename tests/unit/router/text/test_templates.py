"""Templates receive reasoning and arguments in their own form, and final messages stay open."""

import pytest

from engine.errors import InvalidRequest
from router.text.templates import ChatTemplate, TemplateOptions, shown_end

CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
OF_GPT_OSS = (
    "{% for message in messages %}"
    "{% if message.tool_calls and message.content and message.thinking %}"
    "{{ raise_exception('one of both') }}{% endif %}"
    "{{ message.thinking }}|{{ message.content }};{% endfor %}"
)
OF_QWEN = "{% for message in messages %}{{ message.reasoning_content }}{% endfor %}"


@pytest.mark.parametrize(
    ("message", "written"),
    [
        ({"role": "assistant", "content": "a", "reasoning_content": "hm"}, "hm|a;"),
        (
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
            "hm|;",
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [CALL]},
            "|a;",
        ),
        ({"role": "user", "content": "a"}, "|a;"),
    ],
)
def test_a_template_of_gpt_oss_gets_it_as_thinking(message, written):
    assert ChatTemplate(OF_GPT_OSS, {}).render([message]) == written


def test_another_template_gets_the_message_as_it_is():
    template = ChatTemplate(OF_QWEN, {})
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    assert template.render([message]) == "hm"


# ---------------------------------------------------------------- arguments of earlier calls

ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
OF_ITEMS = f"{{% for k, v in {ARGUMENTS}|items %}}{{{{ k }}}}={{{{ v }}}};{{% endfor %}}"
OF_METHOD = f"{{% for k, v in {ARGUMENTS}.items() %}}{{{{ k }}}}={{{{ v }}}};{{% endfor %}}"
OF_JSON = f"{{{{ {ARGUMENTS} | tojson }}}}"
OF_TEXT = f"{{{{ 'call ' + {ARGUMENTS} }}}}"


def written_call(source, function):
    call = {"id": "c", "type": "function", "function": {"name": "f", **function}}
    return ChatTemplate(source, {}).render([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("arguments", "items", "json", "text"),
    [
        ('{"a":1}', "a=1;", '{"a": 1}', '{"a":1}'),
        ({"a": 1}, "a=1;", '{"a": 1}', '{"a": 1}'),
        ("", "", "{}", "{}"),
        (" ", "", "{}", "{}"),
        (None, "", "{}", "{}"),
        ('{"a": ', "", r'"{\"a\": "', '{"a": '),  # truncated JSON
        ("[1, 2]", "", "[1, 2]", "[1, 2]"),
        ([1], "", "[1]", "[1]"),
        ("5", "", "5", "5"),
        ("null", "", "null", "null"),
        ("true", "", "true", "true"),
    ],
)
def test_arguments_have_the_form_that_a_template_reads(arguments, items, json, text):
    function = {"arguments": arguments}
    for source in (OF_ITEMS, OF_METHOD):
        assert written_call(source, function) == items
    assert written_call(OF_JSON, function) == json
    assert written_call(OF_TEXT, function) == f"call {text}"


def test_a_text_in_json_is_no_mapping_either():
    assert written_call(OF_ITEMS, {"arguments": '"x"'}) == ""


def test_a_call_without_arguments_has_none():
    assert written_call(OF_ITEMS, {}) == ""
    assert written_call(OF_JSON, {}) == "{}"


def test_a_template_that_takes_no_form_refuses_with_its_first_reason():
    source = f"{{{{ raise_exception('no ' ~ {ARGUMENTS} | tojson) }}}}"
    with pytest.raises(InvalidRequest, match=r"no \[1\]"):
        written_call(source, {"arguments": "[1]"})


# ---------------------------------------------------------------- the final message

KEEPS = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</s>{% endfor %}"
STRIPS = "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}</s>{% endfor %}"
STRIPS_BEGIN = "{% for m in messages %}<{{ m.role }}>\n{{ m.content.lstrip() }}</s>{% endfor %}"
HIDES = "{% for m in messages %}<{{ m.role }}>{% endfor %}"


def continued(source, content):
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    return ChatTemplate(source, {}).render(
        [{"role": "assistant", "content": content}], options=options
    )


@pytest.mark.parametrize(
    ("source", "content", "prompt", "shown"),
    [
        (KEEPS, "so I", "<assistant>\nso I", "so I"),
        (KEEPS, "def f(x):\n    ", "<assistant>\ndef f(x):\n    ", "def f(x):\n    "),
        (KEEPS, " so ", "<assistant>\n so ", " so "),
        (KEEPS, "", "<assistant>\n", ""),
        (KEEPS, "  ", "<assistant>\n  ", "  "),
        (STRIPS, "def f(x):\n    ", "<assistant>\ndef f(x):", "def f(x):"),
        (STRIPS, " so ", "<assistant>\nso", "so"),
        (STRIPS, "", "<assistant>", ""),
        (STRIPS, "\n", "<assistant>", ""),
        (STRIPS_BEGIN, "  so ", "<assistant>\nso ", "so "),
    ],
)
def test_a_final_message_is_continued_as_by_transformers(source, content, prompt, shown):
    assert continued(source, content) == prompt
    assert shown_end(prompt, content) == shown


def test_a_final_message_that_is_not_shown_cannot_be_continued():
    with pytest.raises(InvalidRequest, match="does not show the final message"):
        continued(HIDES, "so")

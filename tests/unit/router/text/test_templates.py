"""Templates get the reasoning of earlier answers under the name that they read."""

import pytest

from router.text.templates import ChatTemplate

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

"""A body of responses becomes one of chat completions; errors name the client's own fields."""

import msgspec
import pytest

from router.gateway.responses.body import decode_response_body
from router.gateway.responses.conversion import chat_form, repeated_fields
from router.gateway.responses.items import items_of, messages_of
from router.inbox.api_errors import ApiError, invalid_value

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "description": "d"}


def form(**fields):
    body, extras = decode_response_body(msgspec.json.encode({"input": "yo", **fields}))
    made = messages_of(body.instructions, items_of(body.input, {}, lambda prefix: prefix))
    return chat_form(body, extras, made)


def chat(**fields):
    return msgspec.json.decode(form(**fields).data)


def test_fields_get_chats_names():
    made = chat(
        model="m",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        user="u",
        reasoning={"effort": "low"},
        parallel_tool_calls=False,
        top_logprobs=2,
        top_k=3,
        stop=["x"],
    )
    assert made == {
        "model": "m",
        "messages": [{"role": "user", "content": "yo"}],
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "user": "u",
        "reasoning_effort": "low",
        "parallel_tool_calls": False,
        "logprobs": True,
        "top_logprobs": 2,
        "top_k": 3,
        "stop": ["x"],
    }


def test_a_schema_moves_to_the_response_format():
    schema = {"type": "object", "properties": {}}
    made = chat(
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    )
    assert made["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {
        "type": "json_object"
    }
    assert "response_format" not in chat(text={"format": {"type": "text"}, "verbosity": "medium"})


def test_tools_are_nested_as_chat_wants_them():
    made = chat(tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    assert made["tools"] == [{"type": "function", "function": function}]
    assert made["tool_choice"] == {"type": "function", "function": {"name": "f"}}


def test_only_allowed_tools_are_offered():
    tools = [{**TOOL, "name": name} for name in "abc"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "c"}]}
    made = form(tools=tools, tool_choice=allowed)
    body = msgspec.json.decode(made.data)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["c"]
    assert body["tool_choice"] == "required"
    error = made.translated(invalid_value("x", "tools[0].function.parameters"))
    assert error.param == "tools[2].parameters"


@pytest.mark.parametrize(
    ("ours", "chats"),
    [
        ("input", "messages"),
        ("input", "messages[1].content"),
        ("instructions", "messages[0].content"),
        ("text.format.schema", "response_format.json_schema.schema"),
        ("text.format", "response_format"),
        ("max_output_tokens", "max_tokens"),
        ("reasoning.effort", "reasoning_effort"),
        ("tools[1].parameters", "tools[1].function.parameters"),
        ("temperature", "temperature"),
        (None, None),
    ],
)
def test_errors_get_our_names(ours, chats):
    made = form(instructions="i", tools=[TOOL, {**TOOL, "name": "g"}])
    error = made.translated(invalid_value(f"{chats}: it is wrong", chats))
    assert error.param == ours
    assert error.message.startswith(str(ours))


def test_errors_name_the_item():
    made = form(input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    error = made.translated(invalid_value("content is missing", "messages[1].content"))
    assert error.param == "input[1].content"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]},
            },
            "tool_choice.tools[0]",
        ),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"echo": True}, "echo"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": ""}, "input"),
        ({"input": [{"content": 5}]}, "input[0].content"),
        ({"input": 5}, "input"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"metadata": {"k": "v" * 513}}, "metadata[...]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as caught:
        form(**fields)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input": "\xff"}', b"5"])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(ApiError) as caught:
        decode_response_body(body)
    assert caught.value.code == "invalid_json"


def test_a_long_body_is_read_as_a_short_one():
    items = [{"role": "user", "content": "a" * 1000} for _ in range(100)]
    made = chat(input=items, temperature=0.5, top_k=4)
    assert len(made["messages"]) == 100
    assert (made["temperature"], made["top_k"]) == (0.5, 4)


def test_a_response_repeats_its_request():
    body, _ = decode_response_body(
        msgspec.json.encode({"input": "x", "tools": [TOOL], "metadata": {"a": "b"}})
    )
    repeated = repeated_fields(body)
    assert repeated["tools"] == [{"strict": None, **TOOL}]
    assert repeated["metadata"] == {"a": "b"}
    assert repeated["text"] == {"format": {"type": "text"}}
    assert repeated["store"] is True

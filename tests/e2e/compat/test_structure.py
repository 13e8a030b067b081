"""Structured output and tools with the requests of vLLM's and SGLang's own tests."""

import json
import re

import jsonschema
import openai
import pytest

from tests.kits.tree.compat import like

pytestmark = pytest.mark.torch

CHAT = "entrypoints/openai/chat_completion/test_chat.py"
COMPLETION = "entrypoints/openai/completion/test_completion.py"
MODEL = "baton-bundled"
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Answer."}], "max_tokens": 400}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "skills": {
            "type": "array",
            "items": {"type": "string", "maxLength": 10},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
CHOICES = ["Python", "Java", "JavaScript", "C++", "C#", "Rust"]
IP = (
    r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}"
    r"(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"
)


def content(client, **extra):
    answer = client.chat.completions.create(**ASKED, extra_body=extra)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content


@like("vllm", CHAT, "test_structured_outputs_choice_chat", "test_structured_outputs_json_chat")
@like("vllm", CHAT, "test_structured_outputs_regex_chat")
def test_vllms_structured_outputs(client):
    assert content(client, structured_outputs={"choice": CHOICES}) in CHOICES
    assert re.fullmatch(IP, content(client, structured_outputs={"regex": IP}))
    jsonschema.validate(json.loads(content(client, structured_outputs={"json": SCHEMA})), SCHEMA)


@like("vllm", CHAT, "test_structured_outputs_choice_chat_logprobs")
def test_logprobs_under_a_grammar_are_numbers(client):
    extra = {"structured_outputs": {"choice": CHOICES}}
    answer = client.chat.completions.create(
        **ASKED, logprobs=True, top_logprobs=5, extra_body=extra
    )
    tops = answer.choices[0].logprobs.content[0].top_logprobs
    assert all(item.logprob >= -9999.0 for item in tops)


@like("vllm", CHAT, "test_structured_outputs_type_error")
@like("vllm", COMPLETION, "test_invalid_json_schema", "test_invalid_regex", "test_invalid_grammar")
@pytest.mark.parametrize(
    "wrong",
    [
        {"regex": {"1": "Python", "2": "C++"}},
        {"json": {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}},
        {"regex": r"[.*"},
        {"grammar": 'root ::= select_statementinvalidsyntax\nother ::= "SELECT "'},
    ],
)
def test_what_cannot_be_followed_is_refused(client, wrong):
    with pytest.raises(openai.BadRequestError, match="structured_outputs"):
        content(client, structured_outputs=wrong)


@like("vllm", CHAT, "test_response_format_json_object", "test_response_format_json_schema")
@like("vllm", CHAT, "test_response_format_text")
@like("sglang", "openai_server/basic/test_protocol.py", "test_chat_completion_json_format")
def test_response_formats(client):
    schema = {"name": "foo", "schema": SCHEMA}
    text = content(client, response_format={"type": "json_schema", "json_schema": schema})
    jsonschema.validate(json.loads(text), SCHEMA)
    strict = {"name": "foo", "strict": True, "schema": {"type": "object", "properties": {}}}
    text = content(client, response_format={"type": "json_schema", "json_schema": strict})
    assert json.loads(text) == {}
    answer = client.chat.completions.create(**ASKED, response_format={"type": "text"})
    assert answer.choices[0].message.content is not None


@like(
    "sglang",
    "openai_server/features/test_json_mode.py",
    "test_json_mode_response",
    "test_json_mode_with_streaming",
)
def test_json_mode_whole_and_streamed(client):
    asked = {**ASKED, "temperature": 0.0, "response_format": {"type": "json_object"}}
    asked["max_tokens"] = 2000
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.message.content
    if whole.finish_reason == "stop":
        assert isinstance(json.loads(streamed), dict)


@like("sglang", "openai_server/basic/test_openai_server.py", "test_regex")
def test_sglangs_regex(client):
    regex = r'\{\n   "name": "[\w]{1,9}",\n   "population": [1-9][0-9]{0,8}\n\}'
    found = json.loads(content(client, regex=regex))
    assert isinstance(found["name"], str)
    assert isinstance(found["population"], int)


EBNF = "openai_server/features/test_openai_server_ebnf.py"


@like("sglang", EBNF, "test_ebnf", "test_ebnf_strict_json")
@pytest.mark.parametrize("field", ["ebnf", "structured_outputs"])
def test_ebnf(client, field):
    def asked(grammar):
        return {field: grammar if field == "ebnf" else {"grammar": grammar}}

    greeting = content(client, **asked('root ::= "Hello" | "Hi" | "Hey"'))
    assert greeting in ("Hello", "Hi", "Hey")
    pair = r"""
        root    ::= "{" pair "}"
        pair    ::= "\"name\"" ":" string
        string  ::= "\"" [A-Za-z]{1,8} "\""
    """
    assert re.fullmatch(r'\{"name":"[A-Za-z]+"\}', content(client, **asked(pair)))


def test_sglangs_json_schema(client):
    found = json.loads(content(client, json_schema=json.dumps(SCHEMA)))
    jsonschema.validate(found, SCHEMA)
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        content(client, json_schema="INVALID")


@like(
    "sglang",
    "openai_server/features/test_structural_tag.py",
    "test_stag_constant_str_openai",
    "test_stag_json_schema_openai",
)
def test_structural_tags(client):
    saying = "The capital of France is Berlin."
    form = {"type": "const_string", "value": saying}
    assert content(client, response_format={"type": "structural_tag", "format": form}) == saying
    form = {"type": "json_schema", "json_schema": SCHEMA}
    text = content(client, response_format={"type": "structural_tag", "format": form})
    jsonschema.validate(json.loads(text), SCHEMA)


# ---------------------------------------------------------------- tools

CALLS = "entrypoints/openai/chat_completion/test_completion_with_function_calling.py"
SGLANG_CALLS = "openai_server/function_call/test_openai_function_calling.py"
SGLANG_CHOICE = "openai_server/function_call/test_tool_choice.py"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12, "default": "Vienna"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "options": {"$ref": "#/$defs/Options"},
            },
            "required": ["city", "unit"],
            "$defs": {
                "Options": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"language": {"enum": ["zh-CN", "en-US"]}},
                }
            },
            "additionalProperties": False,
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["a", "b"],
        },
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "get_current_time"}}
NAMED = {"type": "function", "function": {"name": "get_current_weather"}}
SCHEMAS = {
    "get_current_weather": WEATHER["function"]["parameters"],
    "add": {**ADD["function"]["parameters"], "additionalProperties": False},
}


def calls_of(client, stream, **asked):
    """Returns an answer's calls as (name, arguments), its content and its finish reason."""
    asked = {**ASKED, "tools": [WEATHER, ADD], **asked}
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        calls = choice.message.tool_calls or []
        found = [(call.function.name, call.function.arguments) for call in calls]
        return found, choice.message.content, choice.finish_reason
    names, arguments, text, reasons = {}, {}, "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    (reason,) = reasons
    return [(names[i], arguments[i]) for i in sorted(names)], text, reason


@like("vllm", CALLS, "test_function_tool_use", "test_named_tool_use")
@like(
    "sglang",
    SGLANG_CALLS,
    "test_function_calling_format",
    "test_function_calling_streaming_simple",
    "test_function_calling_streaming_args_parsing",
    "test_function_call_required",
    "test_function_call_specific",
    "test_function_call_strict",
)
@like(
    "sglang",
    SGLANG_CHOICE,
    "test_tool_choice_required_non_streaming",
    "test_tool_choice_required_streaming",
    "test_tool_choice_specific_function_non_streaming",
    "test_tool_choice_specific_function_streaming",
    "test_multi_tool_scenario_required",
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_are_valid(client, stream, choice):
    asked = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 0.0}
    calls, text, reason = calls_of(client, stream, **asked)
    assert calls
    assert not text
    assert reason in ("tool_calls", "stop")
    for name, arguments in calls:
        assert choice == "required" or name == "get_current_weather"
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@like("vllm", CALLS, "test_function_tool_use")
@like(
    "sglang",
    SGLANG_CHOICE,
    "test_tool_choice_auto_non_streaming",
    "test_tool_choice_auto_streaming",
    "test_multi_tool_scenario_auto",
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_model_may_answer_without_a_call(client, stream):
    calls, text, reason = calls_of(client, stream, tool_choice="auto", temperature=0.0)
    assert calls or text
    assert reason in ("tool_calls", "stop", "length")


@like(
    "sglang",
    SGLANG_CALLS,
    "test_streaming_multiple_choices_finish_reason",
    "test_streaming_multiple_choices_without_tools",
)
@pytest.mark.parametrize("tools", [{"tools": [WEATHER], "tool_choice": "required"}, {}])
def test_each_choice_of_a_stream_has_its_reason(client, tools):
    asked = {**ASKED, **tools, "n": 2}
    reasons = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert sorted(reasons) == [0, 1]


@like("sglang", SGLANG_CALLS, "test_function_calling_streaming_no_tool_call")
def test_without_a_choice_of_tools_there_are_no_calls(client):
    calls, text, reason = calls_of(client, True, tool_choice="none", max_tokens=20)
    assert not calls
    assert text
    assert reason in ("stop", "length")


@like(
    "sglang",
    "openai_server/function_call/test_parallel_tool_calls.py",
    "test_parallel_tool_calls_required",
)
def test_one_call_if_calls_in_parallel_are_not_wanted(client):
    calls, _, _ = calls_of(client, False, tool_choice="required", parallel_tool_calls=False)
    assert len(calls) == 1


@like("vllm", CALLS, "test_no_args_tool_call")
@pytest.mark.parametrize("arguments", ["{}", ""])
def test_a_tool_without_arguments_and_its_result(client, arguments):
    asked = {**ASKED, "tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_current_time", {})
    call.function.arguments = arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
    # the bundled model's template concatenates contents, so None would fail
    message.content = message.content or ""
    messages = [*ASKED["messages"], message, result]
    final = client.chat.completions.create(**{**ASKED, "messages": messages, "max_tokens": 8})
    assert final.choices[0].message.content is not None


@like("vllm", CALLS, "test_inconsistent_tool_choice_and_tools")
@like(
    "vllm",
    "entrypoints/openai/chat_completion/test_tool_choice_null.py",
    "test_invalid_tool_choice_is_still_rejected",
)
@like(
    "sglang",
    "openai_server/basic/test_protocol.py",
    "test_invalid_tool_choice_type",
    "test_chat_completion_tool_choice_validation",
)
@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": None, "tool_choice": NAMED},
        {"tool_choice": "bogus"},
        {"tool_choice": 123},
        {"tool_choice": {"type": "function", "function": {"name": "nondefined"}}},
        {"tool_choice": {}},
    ],
)
def test_a_choice_that_does_not_fit_the_tools_is_refused(client, wrong):
    asked = {**ASKED, "tools": [WEATHER], **wrong}
    asked = {name: value for name, value in asked.items() if value is not None}
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(**asked)


@like("vllm", CALLS, "test_max_tokens_with_tool_choice_required")
@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_a_call_that_is_cut_leaks_no_mark(client, choice, stream, length):
    calls, text, reason = calls_of(client, stream, tool_choice=choice, max_tokens=length)
    assert reason == "length"
    assert not text
    assert not any("<" in arguments for _, arguments in calls)


def test_parameters_of_all_types(client):
    parameters = {
        "type": "object",
        "properties": {
            "text": {"type": "string", "maxLength": 5},
            "count": {"type": "integer", "minimum": 0, "maximum": 9},
            "share": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5},
            "flag": {"type": "boolean"},
            "nothing": {"type": "null"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
            "inner": {"$ref": "#/$defs/Inner"},
        },
        "required": ["text", "count", "share", "flag", "nothing", "tags", "inner"],
        "additionalProperties": False,
        "$defs": {
            "Inner": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2]}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    }
    tool = {"type": "function", "function": {"name": "all", "parameters": parameters}}
    asked = {"tools": [tool], "parallel_tool_calls": False, "max_tokens": 1500}
    calls, _, reason = calls_of(client, False, **asked, tool_choice="required")
    assert reason != "length"
    for _, arguments in calls:
        jsonschema.validate(json.loads(arguments), parameters)

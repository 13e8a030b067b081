"""A responses body becomes a chat completion body; errors name the client's own fields."""

import msgspec
import pytest

from router.gateway.responses.body import decode_response_body
from router.gateway.responses.conversation import chat_form, messages_of, repeated_fields
from router.gateway.responses.items import items_of
from router.gateway.responses.tools import flat_name
from router.inbox.api_errors import ApiError, invalid_value
from tests.kits.tree.compat import like

SIMPLE = "entrypoints/openai/responses/test_simple.py"
STATEFUL = "entrypoints/openai/responses/test_stateful.py"
SGLANG = "openai_server/basic/test_openai_server.py"

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "description": "d"}

CUSTOM = {"type": "custom", "name": "patch", "description": "Edits files."}
SPACE = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [TOOL, CUSTOM]}


def form(**fields):
    body, extras = decode_response_body(msgspec.json.encode({"input": "yo", **fields}))
    made = messages_of(body.instructions, items_of(body.input, {}, lambda prefix: prefix))
    return chat_form(body, extras, made)


def chat(**fields):
    return msgspec.json.decode(form(**fields).data)


@like("vllm", SIMPLE, "test_extra_sampling_params")
@like("sglang", SGLANG, "TestOpenAIServerv1Responses.test_penalty")
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


def functions(made):
    return [tool["function"] for tool in msgspec.json.decode(made.data).get("tools", [])]


def test_a_custom_tool_is_a_function_of_one_text():
    made = form(tools=[CUSTOM])
    text = {"type": "string"}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    closed = {**schema, "additionalProperties": False}
    assert functions(made) == [
        {"name": "patch", "description": "Edits files.", "parameters": closed}
    ]
    assert made.origins == {"patch": ("patch", None, True)}
    assert made.ignored == ()


def test_the_format_of_a_custom_tool_is_followed_or_told():
    regex = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: X"}
    made = form(tools=[{**CUSTOM, "format": each} for each in ({"type": "text"}, regex, lark)])
    plain, matched, told = functions(made)
    assert "pattern" not in plain["parameters"]["properties"]["input"]
    assert matched["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert [function.get("strict") for function in (plain, matched, told)] == [None, True, None]
    assert told["description"].endswith("grammar in Lark:\nstart: X")
    assert made.ignored == ("tools[2].format",)


def test_tools_of_a_namespace_have_its_name_before_theirs():
    made = form(tools=[SPACE])
    first, second = functions(made)
    assert (first["name"], first["description"]) == ("agents__f", "Helpers.\n\nd")
    assert (second["name"], second["description"]) == ("agents__patch", "Edits files.")
    assert made.origins == {
        "agents__f": ("f", "agents", False),
        "agents__patch": ("patch", "agents", True),
    }
    error = made.translated(invalid_value("x", "tools[1].function.parameters"))
    assert error.param == "tools[0].tools[1].parameters"


def test_a_name_that_is_too_long_stays_one_of_its_own():
    one, other = (flat_name("space" * 20, f"{'f' * 20}{end}") for end in "ab")
    assert len(one) == len(other) == 64
    assert one != other
    assert flat_name("my tools/1", "f") == "my_tools_1__f"
    assert flat_name(None, "f") == "f"


FOREIGN = [
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search"),
    *("image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell"),
    *("tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
    "web_search_preview_2025_03_11",
]


@pytest.mark.parametrize("kind", FOREIGN)
def test_tools_of_other_servers_are_left_out_and_named(kind):
    made = form(tools=[{"type": kind, "more": 1}, TOOL])
    assert [function["name"] for function in functions(made)] == ["f"]
    assert made.ignored == (f"tools[0].{kind}",)
    assert made.translated(invalid_value("x", "tools[0].function.name")).param == "tools[1].name"
    assert "tools" not in chat(tools=[{"type": kind}])


def test_hints_for_other_servers_are_passed_over():
    hints = {"defer_loading": True, "allowed_callers": ["direct"], "output_schema": {"a": 1}}
    assert functions(form(tools=[{**TOOL, **hints}])) == functions(form(tools=[TOOL]))


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "custom", "name": "patch"}, "agents__patch"),
        ({"type": "function", "name": "f", "namespace": "agents"}, "agents__f"),
        ({"type": "function", "name": "x"}, "x"),  # refused later, when the chat body is checked
    ],
)
def test_a_tool_is_chosen_by_the_clients_name(choice, name):
    made = chat(tools=[SPACE], tool_choice=choice)
    assert made["tool_choice"] == {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        ([{"type": "custom", "name": "patch"}], ["patch"]),
        ([{"type": "namespace", "name": "agents"}], ["agents__f", "agents__patch"]),
        ([{"type": "function", "name": "f"}, {"type": "web_search"}], ["f"]),
        ([{"type": "web_search"}], []),
    ],
)
def test_allowed_tools_may_be_of_any_kind(allowed, names):
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    made = form(tools=[TOOL, CUSTOM, {"type": "web_search"}, SPACE], tool_choice=choice)
    assert [function["name"] for function in functions(made)] == names


def test_tools_that_items_bring_are_offered_too():
    brought = {"type": "additional_tools", "role": "developer", "tools": [TOOL, CUSTOM]}
    made = form(input=[{"role": "user", "content": "x"}, brought], tools=[TOOL])
    assert [function["name"] for function in functions(made)] == ["f", "patch"]
    assert made.tools == ["tools[0]", "input[1].tools[1]"]
    with pytest.raises(ApiError, match=r"input\[0\]\.tools must be a list"):
        form(input=[{**brought, "tools": 5}])


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


@like("vllm", STATEFUL, "test_background_error")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "frobnicate"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{**TOOL, "examples": ["x"]}]}, "tools[0].examples"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
            "tools[0].tools[0].type",
        ),
        ({"tools": [{**CUSTOM, "format": {"type": "xml"}}]}, "tools[0].format"),
        ({"tools": [{**CUSTOM, "parameters": {"type": "object"}}]}, "tools[0].parameters"),
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
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
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
        msgspec.json.encode({"input": "x", "tools": [TOOL, CUSTOM], "metadata": {"a": "b"}})
    )
    repeated = repeated_fields(body)
    assert repeated["tools"] == [{"strict": None, **TOOL}, CUSTOM]
    assert repeated["metadata"] == {"a": "b"}
    assert repeated["text"] == {"format": {"type": "text"}}
    assert repeated["store"] is True

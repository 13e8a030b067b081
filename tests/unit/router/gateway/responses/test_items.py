"""Items of a conversation become chat messages; wrong items are refused by their position."""

import msgspec
import pytest

from router.gateway.responses.conversation import messages_of
from router.gateway.responses.items import (
    HIDDEN,
    MAX_REFERENCES,
    decode_input,
    items_of,
    references_in,
)
from router.inbox.api_errors import ApiError
from tests.kits.tree.compat import like

BASIC = "entrypoints/openai/responses/test_basic.py"
SIMPLE = "entrypoints/openai/responses/test_simple.py"


def bodies(*fields):
    return decode_input(msgspec.json.encode(fields))


def items(*fields, kept=None):
    return items_of(bodies(*fields), kept or {}, lambda prefix: f"{prefix}new")


def messages(*fields, instructions=None):
    return messages_of(instructions, items(*fields)).messages


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


@like("vllm", BASIC, "test_chat_with_input_type")
def test_text_is_a_message_of_the_user():
    located = items_of("hello", {}, lambda prefix: f"{prefix}1")
    assert [one.item for one in located] == [
        {
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "hello"}],
        }
    ]
    made = messages_of("be kind", located)
    assert made.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
    ]
    assert made.paths == ["instructions", "input"]


def test_parts_of_text_stay_apart():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    [message] = messages({"role": "developer", "content": parts})
    assert message["role"] == "developer"
    assert [part["text"] for part in message["content"]] == ["a", "b"]


def test_a_message_and_its_calls_become_one_message():
    said = {"role": "assistant", "content": "let me see"}
    second = {**CALL, "call_id": "c2"}
    made = messages(said, CALL, second, OUTPUT, {**OUTPUT, "call_id": "c2"})
    assert [message["role"] for message in made] == ["assistant", "tool", "tool"]
    assert made[0]["content"] == "let me see"
    assert [call["id"] for call in made[0]["tool_calls"]] == ["c1", "c2"]
    assert made[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert made[1] == {"role": "tool", "tool_call_id": "c1", "content": "42"}


def answered(call, output):
    """Returns a call and its output as chat messages."""
    asked, told = messages(call, output)
    [made] = asked["tool_calls"]
    assert (told["role"], told["tool_call_id"]) == ("tool", made["id"])
    return made["function"]["name"], made["function"]["arguments"], told["content"]


@pytest.mark.parametrize("parts", ["42", [{"type": "input_text", "text": "42"}]])
@pytest.mark.parametrize(("namespace", "name"), [(None, "f"), ("n", "n__f")])
def test_calls_have_the_name_that_the_model_knows(parts, namespace, name):
    fields = {"call_id": "c", "name": "f", "namespace": namespace}
    custom = {"type": "custom_tool_call", "input": 'a "b"', **fields}
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": parts}
    assert answered(custom, output) == (name, r'{"input":"a \"b\""}', "42")
    function = {"type": "function_call", "arguments": "{}", **fields}
    assert answered(function, {**output, "type": "function_call_output"}) == (name, "{}", "42")


@pytest.mark.parametrize("arguments", ["", None])
def test_a_call_may_come_without_arguments(arguments):
    assert answered({**CALL, "arguments": arguments}, OUTPUT) == ("f", "{}", "42")


@pytest.mark.parametrize(
    ("call", "output", "shown"),
    [
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            {"type": "function_call_output", "call_id": "c", "output": "a.py"},
            ("local_shell", '{"command":["ls"]}', "a.py"),
        ),
        (
            {"type": "local_shell_call", "id": "c", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": "a.py"},
            ("local_shell", '{"command":["ls"]}', "a.py"),
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]},
            ("shell", '{"commands":["ls"]}', '[{"stdout":"a"}]'),
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "operation": {"path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
            ("apply_patch", '{"path":"a"}', "failed"),
        ),
    ],
)
def test_calls_of_tools_that_clients_run_stay_in_the_prompt(call, output, shown):
    assert answered(call, output) == shown


@pytest.mark.parametrize("kind", sorted(HIDDEN))
def test_items_of_other_servers_are_kept_and_not_shown(kind):
    foreign = {"type": kind, "id": "x_1", "status": "failed", "action": {"query": "q"}}
    said = {"role": "user", "content": "x"}
    located = items(said, foreign)
    assert located[1].item == foreign
    made = messages_of(None, located)
    assert made.messages == [said]
    assert made.left_out == [f"input[1].{kind}"]


def test_reasoning_that_cannot_be_read_is_kept_and_named():
    thought = {"type": "reasoning", "id": "rs_1", "encrypted_content": "zz", "summary": []}
    located = items(thought, {"role": "assistant", "content": "x"})
    assert located[0].item["encrypted_content"] == "zz"
    made = messages_of(None, located)
    assert made.messages == [{"role": "assistant", "content": "x"}]
    assert made.left_out == ["input[0].encrypted_content"]


def test_a_message_after_calls_is_another_one():
    made = messages(CALL, OUTPUT, {"role": "assistant", "content": "42"})
    assert [message["role"] for message in made] == ["assistant", "tool", "assistant"]


def test_reasoning_goes_to_the_template_with_the_answer_behind_it():
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    [located] = items(reasoning)
    assert located.item["content"] == [{"type": "reasoning_text", "text": "hm"}]
    said = {"role": "assistant", "content": "x"}
    asked = {"role": "user", "content": "y"}
    thought = said | {"reasoning_content": "hm"}
    assert messages(reasoning, said, asked) == [thought, asked]
    assert messages(reasoning, asked, said) == [asked, said]  # the reasoning's answer is missing
    [called] = messages(reasoning, reasoning, CALL)
    assert called["reasoning_content"] == "hmhm"
    assert messages(said, reasoning, said) == [said, thought]


@like(
    "vllm",
    SIMPLE,
    "test_input_history_openai_shape_e2e",
    "test_input_history_openresponses_shape_e2e",
    "test_multiturn_history_replay_without_ids_e2e",
)
def test_items_come_back_in_the_form_in_which_they_were_given_out():
    given = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
    }
    [located] = items(given)
    assert located.item == given


def test_a_reference_is_replaced_by_the_item():
    kept = {"msg_7": {"id": "msg_7", "type": "message", "role": "user", "content": []}}
    for reference in ({"type": "item_reference", "id": "msg_7"}, {"id": "msg_7"}):
        assert references_in(bodies(reference)) == ["msg_7"]
        [located] = items(reference, kept=kept)
        assert located.item is kept["msg_7"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "frobnicate_call", "id": "x"}, "input[1].type"),
        ({"type": "web_search_call", "id": 5}, "input[1].id"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[1].input"),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "x"}, "input[1].call_id"),
        ({"type": "shell_call_output", "call_id": "c", "output": []}, "input[1].call_id"),
        ({"type": "shell_call", "call_id": 5, "action": {}}, "input[1].call_id"),
        ({"role": "robot", "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"type": "function_call", "call_id": "c"}, "input[1].name"),
        ({"type": "function_call_output", "call_id": "c1"}, "input[1].output"),
        ({"type": "item_reference", "id": "msg_9"}, "input[1].id"),
        ({"role": "user", "content": "x", "id": ""}, "input[1].id"),
        (OUTPUT, "input[1].call_id"),
    ],
)
def test_errors_name_the_place(item, param):
    with pytest.raises(ApiError) as caught:
        messages({"role": "user", "content": "hello"}, item)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_references_are_bounded():
    many = [{"type": "item_reference", "id": f"msg_{i}"} for i in range(MAX_REFERENCES + 1)]
    with pytest.raises(ApiError) as caught:
        references_in(bodies(*many))
    assert caught.value.param == "input"

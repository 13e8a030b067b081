"""Items of a conversation become chat messages; wrong ones are refused by their place."""

import msgspec
import pytest

from router.gateway.responses.items import (
    MAX_REFERENCES,
    ItemBody,
    items_of,
    messages_of,
    references_in,
)
from router.inbox.api_errors import ApiError


def items(*fields, kept=None):
    bodies = msgspec.convert(list(fields), list[ItemBody])
    return items_of(bodies, kept or {}, lambda prefix: f"{prefix}new")


def messages(*fields, instructions=None):
    return messages_of(instructions, items(*fields)).messages


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def test_text_is_a_message_of_the_user():
    placed = items_of("hello", {}, lambda prefix: f"{prefix}1")
    assert [one.item for one in placed] == [
        {
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": "hello"}],
        }
    ]
    made = messages_of("be kind", placed)
    assert made.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
    ]
    assert made.places == ["instructions", "input"]


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


def test_a_message_after_calls_is_another_one():
    made = messages(CALL, OUTPUT, {"role": "assistant", "content": "42"})
    assert [message["role"] for message in made] == ["assistant", "tool", "assistant"]


def test_reasoning_goes_to_the_template_with_the_answer_behind_it():
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    [placed] = items(reasoning)
    assert placed.item["content"] == [{"type": "reasoning_text", "text": "hm"}]
    said = {"role": "assistant", "content": "x"}
    asked = {"role": "user", "content": "y"}
    thought = said | {"reasoning_content": "hm"}
    assert messages(reasoning, said, asked) == [thought, asked]
    assert messages(reasoning, asked, said) == [asked, said]  # its answer is missing
    [called] = messages(reasoning, reasoning, CALL)
    assert called["reasoning_content"] == "hmhm"
    assert messages(said, reasoning, said) == [said, thought]


def test_items_come_back_in_the_form_in_which_they_were_given_out():
    given = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
    }
    [placed] = items(given)
    assert placed.item == given


def test_a_reference_is_replaced_by_the_item():
    kept = {"msg_7": {"id": "msg_7", "type": "message", "role": "user", "content": []}}
    for reference in ({"type": "item_reference", "id": "msg_7"}, {"id": "msg_7"}):
        assert references_in(msgspec.convert([reference], list[ItemBody])) == ["msg_7"]
        [placed] = items(reference, kept=kept)
        assert placed.item is kept["msg_7"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "web_search_call", "id": "x"}, "input[1].type"),
        ({"role": "robot", "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"type": "function_call", "call_id": "c"}, "input[1].name"),
        ({"type": "function_call_output", "call_id": "c1"}, "input[1].output"),
        ({"type": "item_reference", "id": "msg_9"}, "input[1].id"),
        ({"role": "user", "content": "x", "id": ""}, "input[1].id"),
        ({"type": "reasoning", "encrypted_content": "zz"}, "input[1].encrypted_content"),
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
        references_in(msgspec.convert(many, list[ItemBody]))
    assert caught.value.param == "input"

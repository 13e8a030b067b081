"""Pieces of an answer become output items, and events from which clients build the same items."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.gateway.answers.choice import AnswerPiece
from router.gateway.responses.draft import OutputItems
from router.gateway.responses.tools import CustomInput, ToolOrigin
from router.text.forms.deltas import CallArguments, CallBegun

ORIGINS = {"n__f": ToolOrigin("f", "n", False), "patch": ToolOrigin("patch", None, True)}


def new_output():
    count = iter(range(1000))
    return OutputItems(lambda prefix: f"{prefix}{next(count)}", lambda entries: [], ORIGINS)


def piece(text="", *calls):
    return AnswerPiece(0, text, 1, calls=calls)


def names(events):
    return [event["type"].removeprefix("response.") for event in events]


def rebuilt(events):
    """Returns the items that a client would build from the events alone."""
    items = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(copy.deepcopy(event["item"]))
            continue
        item = items[event["output_index"]]
        if "item_id" in event:
            assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"].append(dict(event["part"]))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "custom_tool_call_input.delta":
            item["input"] += event["delta"]
        elif kind == "output_item.done":
            assert item | {"status": event["item"]["status"]} == event["item"]
            item["status"] = event["item"]["status"]
    return items


def test_reasoning_is_an_item_before_the_message():
    output = new_output()
    events = [
        *output.append(AnswerPiece(0, "", 1, reasoning="h")),
        *output.append(AnswerPiece(0, "", 1, reasoning="m")),
        *output.append(piece("yes")),
        *output.close("completed"),
    ]
    assert names(events)[:7] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    reasoning, message = output.items
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (reasoning["type"], reasoning["summary"]) == ("reasoning", [])
    assert message["content"][0]["text"] == "yes"
    assert rebuilt(events) == output.items


def test_the_call_of_a_custom_tool_has_its_input():
    output = new_output()
    begun = (CallBegun(0, "c0", "patch"), CallArguments(0, '{"input": "a'))
    events = [
        *output.append(piece("", *begun)),
        *output.append(piece("", CallArguments(0, '\\nb"}'))),
    ]
    events += output.close("completed")
    assert names(events) == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert [event["delta"] for event in events[1:3]] == ["a", "\nb"]
    assert events[3]["input"] == "a\nb"
    [item] = output.items
    assert item == {
        "id": "ctc_0",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "c0",
        "name": "patch",
        "input": "a\nb",
    }
    assert rebuilt(events) == output.items


@given(st.text(), st.lists(st.integers(1, 9)), st.booleans(), st.sampled_from([None, 1]))
def test_an_input_is_the_same_in_all_pieces(text, lengths, ascii_only, indent):
    written = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent)
    reader, shown = CustomInput(), ""
    for length in [*lengths, len(written)]:
        shown += reader.feed(written[:length])
        written = written[length:]
    assert shown + reader.finish() == text


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (r'{"input": "a\ud83d', "a"),  # cut inside a surrogate pair
        (r'{"input": "a\ud83d"}', "a\ufffd"),
        (r'{"input": "\udc00b"}', "\ufffdb"),
        (r'{"input": "\ud83d\u0041"}', "\ufffdA"),
        ('{"inp', '{"inp'),
        ('{"other": 1}', '{"other": 1}'),
    ],
)
def test_an_input_that_is_cut_or_no_text_is_shown_as_far_as_it_goes(written, shown):
    reader = CustomInput()
    assert reader.feed(written) + reader.finish() == shown


def test_an_answer_that_fails_at_once_has_no_items():
    output = new_output()
    assert output.close("incomplete") == []
    assert output.items == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.text(min_size=1)),
        st.tuples(st.just("reasoning"), st.text(min_size=1)),
        st.tuples(st.sampled_from(["f", "n__f", "patch"]), st.text()),
    )
)


@given(STEPS, st.sampled_from(["completed", "incomplete"]))
def test_events_alone_give_the_items(steps, status):
    output, events, num_calls = new_output(), [], 0
    for kind, text in steps:
        if kind == "text":
            events += output.append(piece(text))
        elif kind == "reasoning":
            events += output.append(AnswerPiece(0, "", 1, reasoning=text))
        else:
            begun = CallBegun(num_calls, f"c{num_calls}", kind)
            events += output.append(piece("", begun, CallArguments(num_calls, text)))
            num_calls += 1
    events += output.close(status)
    assert rebuilt(events) == output.items
    assert [item["status"] for item in output.items[-1:]] == [status] * bool(output.items)
    assert len(output.items) >= (status == "completed")

"""Pieces of an answer become output items, and events that put together the same items."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from router.gateway.answers.choice import AnswerPiece
from router.gateway.responses.output import OutputItems
from router.text.forms.deltas import CallArguments, CallBegun


def new_output():
    count = iter(range(1000))
    return OutputItems(lambda prefix: f"{prefix}{next(count)}", lambda entries: [])


def piece(text="", *calls):
    return AnswerPiece(0, text, 1, calls=calls)


def names(events):
    return [event["type"].removeprefix("response.") for event in events]


def rebuilt(events):
    """The items as a client knows them from events alone."""
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
        elif kind == "output_item.done":
            assert item | {"status": event["item"]["status"]} == event["item"]
            item["status"] = event["item"]["status"]
    return items


def test_text_is_one_message():
    output = new_output()
    events = [*output.take(piece("a")), *output.take_text("b"), *output.close("completed")]
    assert names(events) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert output.items[0]["content"][0]["text"] == "ab"


def test_reasoning_is_an_item_before_the_message():
    output = new_output()
    events = [
        *output.take_reasoning("h"),
        *output.take_reasoning("m"),
        *output.take_text("yes"),
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


def test_two_calls_are_two_items():
    output = new_output()
    first = (CallBegun(0, "c0", "f"), CallArguments(0, "{}"))
    second = (CallBegun(1, "c1", "g"), CallArguments(1, "[1"))
    events = [*output.take(piece("so", *first)), *output.take(piece("", *second))]
    events += output.close("incomplete")
    assert [item["type"] for item in output.items] == ["message"] + ["function_call"] * 2
    assert [item["status"] for item in output.items] == ["completed", "completed", "incomplete"]
    assert [item.get("arguments") for item in output.items[1:]] == ["{}", "[1"]
    assert [item.get("call_id") for item in output.items[1:]] == ["c0", "c1"]


def test_an_answer_that_fails_at_once_has_no_items():
    output = new_output()
    assert output.close("incomplete") == []
    assert output.items == []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.text(min_size=1)),
        st.tuples(st.just("reasoning"), st.text(min_size=1)),
        st.tuples(st.just("call"), st.text()),
    )
)


@given(STEPS, st.sampled_from(["completed", "incomplete"]))
def test_events_alone_give_the_items(steps, status):
    output, events, num_calls = new_output(), [], 0
    for kind, text in steps:
        if kind == "text":
            events += output.take_text(text)
        elif kind == "reasoning":
            events += output.take_reasoning(text)
        else:
            begun = CallBegun(num_calls, f"c{num_calls}", "f")
            events += output.take(piece("", begun, CallArguments(num_calls, text)))
            num_calls += 1
    events += output.close(status)
    assert rebuilt(events) == output.items
    assert [item["status"] for item in output.items[-1:]] == [status] * bool(output.items)
    assert len(output.items) >= (status == "completed")

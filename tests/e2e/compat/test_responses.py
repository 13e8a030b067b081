"""The Responses API as vLLM's and SGLang's own tests ask for it."""

import json

import openai
import pytest

from tests.kits.services.served import poll_until
from tests.kits.tree.compat import like

pytestmark = pytest.mark.torch

BASIC = "entrypoints/openai/responses/test_basic.py"
SIMPLE = "entrypoints/openai/responses/test_simple.py"
STATEFUL = "entrypoints/openai/responses/test_stateful.py"
CALLS = "entrypoints/openai/responses/test_function_call.py"
SGLANG = "openai_server/basic/test_openai_server.py"
SGLANG_CALLS = "openai_server/function_call/test_responses_function_calling.py"
ASKED = {"model": "baton-bundled", "temperature": 0.0, "max_output_tokens": 24}
ENDED = ("completed", "incomplete")
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "maxLength": 8}},
        "required": ["location"],
        "additionalProperties": False,
    },
    "strict": True,
}
PAIRS = {
    "response.completed": "response.created",
    "response.incomplete": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.output_text.done": "response.output_text.delta",
    "response.content_part.done": "response.content_part.added",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}


def said(text, role="user", kind="input_text", **rest):
    content = [{"type": kind, "text": text}]
    return {"type": "message", "role": role, "content": content, **rest}


def check_nesting(events):
    """Each event that ends something follows the event that began it."""
    stack = []
    for kind in (event.type for event in events):
        if kind.endswith((".created", ".added")):
            stack.append(kind)
        elif kind.endswith(".delta"):
            if stack[-1] != kind:
                stack.append(kind)
        elif kind in PAIRS:
            assert stack.pop() == PAIRS[kind]
    assert stack == []


@like("vllm", BASIC, "test_instructions", "test_chat", "test_chat_with_input_type")
@like(
    "vllm",
    SIMPLE,
    "test_basic",
    "test_input_history_openai_shape_e2e",
    "test_input_history_openresponses_shape_e2e",
    "test_multiturn_history_replay_without_ids_e2e",
)
@like(
    "sglang",
    SGLANG,
    "TestOpenAIServerv1Responses.test_response",
    "TestOpenAIServerv1Responses.test_response_completion",
    "TestOpenAIServerv1Responses.test_penalty",
)
@pytest.mark.parametrize(
    "asked",
    [
        {"input": "What is 13 * 24?"},
        {"input": "What is 13 * 24?", "instructions": "Finish the answer with QED."},
        {
            "input": [
                {"role": "system", "content": "Finish the answer with QED."},
                {"role": "user", "content": "What is 5 * 3?"},
                {"role": "assistant", "content": "15. QED."},
                {"role": "user", "content": "Multiply the result by 2."},
            ]
        },
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]}]},
        {
            "input": [
                said("You are a concise assistant."),
                said("Acknowledged.", "assistant", "output_text", id="msg_1", status="completed"),
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
                said("Reply with one short sentence."),
            ]
        },
        {
            "input": [
                said("You are a concise assistant."),
                said("Acknowledged.", "assistant", "output_text"),
                {"type": "reasoning", "summary": []},
                said("Reply with one short sentence."),
            ]
        },
        {"input": "x", "extra_body": {"frequency_penalty": 1.0}},
    ],
)
def test_inputs_of_all_shapes_are_answered(client, asked):
    response = client.responses.create(**ASKED, **asked)
    assert (response.object, response.error) == ("response", None)
    assert response.status in ENDED
    assert isinstance(response.output_text, str)
    assert response.usage.total_tokens == (
        response.usage.input_tokens + response.usage.output_tokens
    )


@like("vllm", SIMPLE, "test_max_tokens")
def test_an_answer_that_is_cut_is_incomplete(client):
    response = client.responses.create(
        **{**ASKED, "max_output_tokens": 3}, input="def", extra_body={"ignore_eos": True}
    )
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


@like("vllm", SIMPLE, "test_extra_sampling_params")
def test_sampling_parameters_of_vllm_pass(client):
    extra = {"top_k": 40, "repetition_penalty": 1.2, "seed": 42, "ignore_eos": True}
    asked = {**ASKED, "temperature": 0.7, "top_p": 0.9}
    response = client.responses.create(**asked, input="Write.", extra_body=extra)
    assert response.output[0].content[0].text


@like("vllm", BASIC, "test_logprobs", "test_streaming")
@like("vllm", SIMPLE, "test_streaming_output_consistency", "test_streaming_logprobs")
@like("vllm", SIMPLE, "test_streaming_types")
@like(
    "sglang",
    SGLANG,
    "TestOpenAIServerv1Responses.test_response_stream",
    "TestOpenAIServerv1Responses.test_response_completion_stream",
)
def test_a_stream_nests_and_sums_to_its_response(client):
    asked = {**ASKED, "input": "Say hello.", "top_logprobs": 3}
    asked["include"] = ["message.output_text.logprobs"]
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created"
    assert any(event.type == "response.in_progress" for event in events)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    check_nesting(events)
    final = events[-1].response
    assert events[-1].type in ("response.completed", "response.incomplete")
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == final.output_text
    scored = [item for event in deltas for item in event.logprobs]
    assert scored
    assert all(item.logprob <= 0 and len(item.top_logprobs) <= 3 for item in scored)
    whole = client.responses.create(**asked)
    assert whole.output_text == final.output_text
    assert len(whole.output[-1].content[-1].logprobs[0].top_logprobs) == 3


@like("vllm", STATEFUL, "test_store")
def test_responses_are_kept_unless_the_client_says_no(client):
    kept = client.responses.create(**ASKED, input="Hello!")
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    gone = client.responses.create(**ASKED, input="Hello!", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)


@like("vllm", STATEFUL, "test_background", "test_background_cancel", "test_background_error")
def test_responses_in_the_background(client):
    begun = client.responses.create(**ASKED, input="Hello!", background=True)
    assert begun.status in ("queued", "in_progress")

    def has_ended():
        return client.responses.retrieve(begun.id).status in ENDED

    poll_until(has_ended, "the response ends")
    long = {**ASKED, "max_output_tokens": 3500}
    story = client.responses.create(
        **long, input="Write.", background=True, extra_body={"ignore_eos": True}
    )
    assert client.responses.cancel(story.id).status == "cancelled"
    assert client.responses.retrieve(story.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="store"):
        client.responses.create(**ASKED, input="x", background=True, store=False)


@like("vllm", STATEFUL, "test_cancel_completed")
def test_only_background_responses_are_cancelled(client):
    response = client.responses.create(**ASKED, input="Hello")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(response.id)


@like("vllm", STATEFUL, "test_previous_response_id", "test_two_responses_with_same_prev_id")
@like("sglang", SGLANG, "TestOpenAIServerv1Responses.test_error")
def test_a_response_goes_on_from_another(client):
    first = client.responses.create(**ASKED, input="Hello, my name is John.")
    answers = [
        client.responses.create(**ASKED, input="What is it?", previous_response_id=first.id)
        for _ in range(2)
    ]
    assert answers[0].output_text == answers[1].output_text
    assert answers[0].usage.input_tokens > first.usage.total_tokens
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
        client.responses.create(**ASKED, input="Hi", previous_response_id="bad")


@like(
    "vllm",
    "entrypoints/openai/responses/test_structured_output.py",
    "test_structured_output",
    "test_structured_output_with_parse",
)
def test_structured_text(client):
    schema = {
        "type": "object",
        "properties": {"date": {"type": "string", "maxLength": 8}},
        "required": ["date"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "event", "schema": schema, "strict": True}
    asked = {**ASKED, "max_output_tokens": 400}
    response = client.responses.create(**asked, input="When?", text={"format": form})
    assert set(json.loads(response.output_text)) == {"date"}


@like(
    "vllm",
    CALLS,
    "test_function_tool_use",
    "test_named_tool_use",
    "test_function_calling_with_streaming_expected_arguments",
    "test_function_calling_with_streaming_types",
)
@like(
    "sglang",
    SGLANG_CALLS,
    "test_function_tool_schema_validation",
    "test_function_tool_non_streaming",
    "test_function_tool_streaming",
    "test_multiple_function_tools",
    "test_builtin_and_function_tools_mixed",
    "test_function_tool_with_strict_mode",
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_function_calls_whole_and_streamed_and_their_output(client, choice):
    asked = {**ASKED, "max_output_tokens": 200, "tools": [WEATHER], "tool_choice": choice}
    asked["parallel_tool_calls"] = False
    response = client.responses.create(**asked, input="What's the weather in Paris?")
    call = next(item for item in response.output if item.type == "function_call")
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"location"}
    events = list(client.responses.create(**asked, input="The weather in Paris?", stream=True))
    check_nesting(events)
    kind = "response.function_call_arguments.delta"
    streamed = "".join(event.delta for event in events if event.type == kind)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.arguments for item in done if item.type == "function_call"] == [streamed]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    history = [said("What's the weather in Paris?"), call.model_dump(), output]
    assert client.responses.create(**ASKED, input=history).status in ENDED


@like("vllm", CALLS, "test_max_tokens_with_tool_choice_required")
def test_a_call_that_is_cut_is_incomplete(client):
    asked = {**ASKED, "max_output_tokens": 4, "tools": [WEATHER], "tool_choice": "required"}
    response = client.responses.create(**asked, input="The weather?")
    assert response.status == "incomplete"
    assert not response.output_text


@like("sglang", SGLANG_CALLS, "test_tool_choice_none")
def test_without_a_choice_of_tools_there_are_no_calls(client):
    response = client.responses.create(**ASKED, input="x", tools=[WEATHER], tool_choice="none")
    assert all(item.type != "function_call" for item in response.output)

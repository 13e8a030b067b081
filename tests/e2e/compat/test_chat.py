"""Chat completions with the requests of vLLM's and SGLang's own tests."""

from collections import defaultdict

import openai
import pytest

from tests.kits.services.served import HTTP
from tests.kits.tree.compat import like

pytestmark = pytest.mark.torch

VLLM = "entrypoints/openai/chat_completion/test_chat.py"
SGLANG = "openai_server/basic/test_openai_server.py"
MODEL = "baton-bundled"
MESSAGES = [
    {"role": "system", "content": "you are a helpful assistant"},
    {"role": "user", "content": "what is 1+1?"},
]
FEW = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 5, "temperature": 0.0}


@like("vllm", VLLM, "test_no_logprobs_chat", "test_zero_logprobs_chat", "test_some_logprobs_chat")
@pytest.mark.parametrize("wanted", [None, 0, 5])
def test_logprobs_of_as_many_alternatives_as_asked(client, wanted):
    asked = {} if wanted is None else {"top_logprobs": wanted}
    answer = client.chat.completions.create(**FEW, logprobs=wanted is not None, **asked)
    logprobs = answer.choices[0].logprobs
    if wanted is None:
        assert logprobs is None
    else:
        assert [len(item.top_logprobs) for item in logprobs.content] == [wanted] * 5


@like("vllm", VLLM, "test_prompt_logprobs_chat", "test_more_than_one_prompt_logprobs_chat")
@pytest.mark.parametrize("wanted", [-1, 0, 1, 2, None])
def test_prompt_logprobs(client, wanted):
    extra = {} if wanted is None else {"prompt_logprobs": wanted}
    if wanted == -1:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**FEW, extra_body=extra)
        return
    found = getattr(
        client.chat.completions.create(**FEW, extra_body=extra), "prompt_logprobs", None
    )
    assert (found is None) == (wanted is None)
    # If the chosen token is not among the best, the list has it in addition.
    assert wanted is None or len(found[3]) in (max(wanted, 1), wanted + 1)


@like("vllm", VLLM, "test_single_chat_session")
@like("sglang", SGLANG, "test_chat_completion")
@pytest.mark.parametrize(("logprobs", "n"), [(None, 1), (5, 1), (None, 2), (5, 2)])
def test_a_session_of_two_turns(client, logprobs, n):
    scored = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    answer = client.chat.completions.create(**FEW, **scored, n=n)
    assert answer.id
    assert answer.created
    assert len(answer.choices) == n
    choice = answer.choices[0]
    assert choice.finish_reason in ("length", "stop")
    assert choice.message.role == "assistant"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    if logprobs:
        assert len(choice.logprobs.content[0].top_logprobs) == logprobs
        assert isinstance(choice.logprobs.content[0].top_logprobs[0].token, str)
    said = {"role": "assistant", "content": choice.message.content}
    messages = [*MESSAGES, said, {"role": "user", "content": "express your result in json"}]
    answer = client.chat.completions.create(**{**FEW, "messages": messages})
    assert isinstance(answer.choices[0].message.content, str)


@like("vllm", VLLM, "test_chat_streaming")
def test_a_stream_is_the_whole_answer_and_its_last_chunk_has_text_and_reason(client):
    asked = {**FEW, "max_completion_tokens": 10, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.finish_reason]
    assert deltas[-1].content


@like("sglang", SGLANG, "test_chat_completion_stream")
@pytest.mark.parametrize(("logprobs", "n"), [(None, 1), (5, 1), (None, 2), (5, 2)])
def test_streams_have_one_role_and_one_reason_for_each_choice(client, logprobs, n):
    scored = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    usage = {"include_usage": True}
    *parts, last = client.chat.completions.create(
        **FEW, **scored, n=n, stream=True, stream_options=usage
    )
    by_choice = defaultdict(list)
    for chunk in parts:
        assert chunk.id
        assert chunk.created
        by_choice[chunk.choices[0].index].append(chunk.choices[0])
    assert sorted(by_choice) == list(range(n))
    for choices in by_choice.values():
        assert choices[0].delta.role == "assistant"
        assert sum(choice.finish_reason is not None for choice in choices) == 1
        if logprobs:
            scored_ones = [choice for choice in choices if choice.delta.content]
            assert all(choice.logprobs.content for choice in scored_ones)
            assert all(
                len(item.top_logprobs) == logprobs
                for choice in scored_ones
                for item in choice.logprobs.content
            )
    assert last.choices == []
    assert last.usage.completion_tokens > 0


@like("vllm", VLLM, "test_chat_completion_stream_options")
@like(
    "sglang",
    "openai_server/features/test_continuous_usage_stats.py",
    "test_continuous_usage_stats_enabled",
    "test_continuous_usage_stats_async",
    "test_continuous_usage_stats_disabled",
    "test_async_runner",
)
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("every", [False, True])
def test_usage_in_streams(client, usage, every):
    options = {"include_usage": usage, "continuous_usage_stats": every}
    asked = {**FEW, "max_completion_tokens": 10, "extra_body": {"min_tokens": 10}}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    *parts, last = chunks if usage else [*chunks, None]
    assert all((part.usage is not None) == (usage and every) for part in parts)
    if last is not None:
        assert last.choices == []
        assert last.usage.completion_tokens == 10
    if usage and every:
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert all(
            chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
            for chunk in chunks
        )


@like("vllm", VLLM, "test_extra_fields_allowed")
def test_fields_of_their_own_in_messages_pass(client):
    messages = [{"role": "user", "content": "what is 1+1?", "extra_field": "0"}]
    answer = client.chat.completions.create(**{**FEW, "messages": messages})
    assert answer.choices[0].message.content is not None


@like("vllm", VLLM, "test_complex_message_content", "test_custom_role")
@pytest.mark.parametrize("role", ["user", "my-custom-role"])
def test_parts_of_text_are_the_text_also_in_a_role_of_ones_own(client, role):
    contents = []
    for content in ("what is 1+1?", [{"type": "text", "text": "what is 1+1?"}]):
        messages = [{"role": role, "content": content}]
        answer = client.chat.completions.create(**{**FEW, "messages": messages})
        contents.append(answer.choices[0].message.content)
    assert contents[0] == contents[1]


@like(
    "vllm",
    VLLM,
    "test_chat_completion_n_parameter_non_streaming",
    "test_chat_completion_n_parameter_streaming",
    "test_chat_completion_n_with_seed",
    "test_chat_completion_n_equals_1",
    "test_chat_completion_request_n_parameter_to_sampling_params",
    "test_chat_completion_request_n_parameter_default",
)
@pytest.mark.parametrize("n", [None, 1, 3])
def test_as_many_choices_as_asked(client, n):
    asked = {**FEW, "temperature": 0.9, "seed": 42, "max_completion_tokens": 12}
    answer = client.chat.completions.create(**asked, **({} if n is None else {"n": n}))
    assert [choice.index for choice in answer.choices] == list(range(n or 1))
    texts = defaultdict(str)
    stream = client.chat.completions.create(**asked, n=n or 1, stream=True)
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [texts[i] for i in range(n or 1)] == [c.message.content for c in answer.choices]
    assert n != 3 or len(set(texts.values())) > 1


@like(
    "vllm",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "test_chat_session_with_echo_and_continue_final_message",
)
@like("sglang", SGLANG, "test_response_prefill")
@pytest.mark.parametrize("echo", [False, True])
def test_the_final_message_is_continued(client, echo):
    saying = "Here is a common saying about apple. An apple a day, keeps"
    messages = [
        {"role": "user", "content": "tell me a common saying"},
        {"role": "assistant", "content": saying},
    ]
    extra = {"echo": echo, "continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(**{**FEW, "messages": messages}, extra_body=extra)
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert (saying in message.content) is echo


BIASES = "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py"


STOP_IDS = "entrypoints/openai/chat_completion/test_chat_stop_token_ids_validation.py"


@like("vllm", BIASES, "test_chat_logit_bias_valid")
@like("vllm", STOP_IDS, "test_chat_stop_token_ids_valid")
def test_a_bias_of_the_last_token_is_taken(client):
    extra = {"stop_token_ids": [4095]}
    answer = client.chat.completions.create(**FEW, logit_bias={"4095": 1.0}, extra_body=extra)
    assert answer.choices[0].message.content is not None


TOKEN_IDS = "entrypoints/openai/basic/test_return_token_ids.py"


@like(
    "vllm",
    TOKEN_IDS,
    "test_chat_completion_with_tool_use",
    "test_chat_completion_with_emoji_and_token_ids",
)
def test_token_ids_of_messages(client, served):
    messages = [
        {"role": "system", "content": "You like to use emojis in your responses."},
        {"role": "user", "content": "Repeat after me: I love cats 🐱"},
    ]
    asked = {**FEW, "messages": messages}
    ids = {"return_token_ids": True}
    answer = client.chat.completions.create(**asked, logprobs=True, extra_body=ids)
    url = f"{served.url}/detokenize"
    text = HTTP.post(url, json={"tokens": answer.prompt_token_ids}, timeout=30).json()["prompt"]
    assert "I love cats 🐱" in text
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens
    without = client.chat.completions.create(**asked)
    assert getattr(without, "prompt_token_ids", None) is None
    first, *others = client.chat.completions.create(**asked, stream=True, extra_body=ids)
    assert first.prompt_token_ids == answer.prompt_token_ids
    assert all(getattr(chunk, "prompt_token_ids", None) is None for chunk in others)
    chunks = [first, *others]
    streamed = [i for c in chunks for i in getattr(c.choices[0], "token_ids", None) or ()]
    assert streamed == answer.choices[0].token_ids


@like("sglang", SGLANG, "test_penalty")
def test_a_penalty_is_taken(client):
    answer = client.chat.completions.create(**FEW, frequency_penalty=1.0)
    assert isinstance(answer.choices[0].message.content, str)


BODIES = "entrypoints/openai/chat_completion/test_non_object_body_validation.py"


@like("vllm", BODIES, "test_chat_completion_request_rejects_non_object_body")
@pytest.mark.parametrize("body", ["[]", "1", "{", '"text"', "{}", '{"messages": 3}'])
def test_a_body_that_is_no_request_is_refused(served, body):
    url = f"{served.url}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    answer = HTTP.post(url, content=body, headers=headers, timeout=30)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@like(
    "vllm",
    "entrypoints/openai/chat_completion/test_tool_choice_null.py",
    "test_null_tool_choice_defaults_to_auto_like_an_absent_one",
    "test_null_tool_choice_without_tools_matches_an_absent_one",
    "test_null_tool_choice_does_not_conflict_with_structured_outputs",
    "test_explicit_none_tool_choice_is_untouched",
)
def test_null_is_absent_and_parts_may_have_more_fields(client):
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part]}]
    extra = {"tool_choice": None, "tools": None, "response_format": None, "stop": None}
    answer = client.chat.completions.create(**{**FEW, "messages": messages}, extra_body=extra)
    assert answer.choices


PROTOCOL = "openai_server/basic/test_protocol.py"


@like(
    "sglang",
    PROTOCOL,
    "test_basic_chat_completion_request",
    "test_sampling_param_build",
    "test_chat_completion_sglang_extensions",
)
def test_sglangs_fields_are_taken(client):
    extra = {
        "top_k": 40,
        "min_p": 0.05,
        "min_tokens": 5,
        "separate_reasoning": False,
        "stream_reasoning": False,
        "chat_template_kwargs": {"custom_param": "value"},
    }
    asked = {**FEW, "temperature": 0.8, "top_p": 0.9, "stop": ["</s>"]}
    assert client.chat.completions.create(**asked, extra_body=extra).choices

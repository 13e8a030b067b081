"""Completions with the requests of vLLM's and SGLang's own tests."""

import itertools
from collections import defaultdict

import openai
import pytest

from tests.kits.services.served import HTTP
from tests.kits.tree.compat import like

pytestmark = pytest.mark.torch

VLLM = "entrypoints/openai/completion/test_completion.py"
SGLANG = "openai_server/basic/test_openai_server.py"
MODEL = "baton-bundled"
IDS = [5, 5, 5, 5, 5]
FEW = {"model": MODEL, "max_tokens": 5, "temperature": 0.0}


def ids_of(served, text):
    answer = HTTP.post(f"{served.url}/tokenize", json={"prompt": text}, timeout=30)
    return answer.raise_for_status().json()["tokens"]


@like("vllm", VLLM, "test_single_completion")
@like(
    "vllm",
    "entrypoints/openai/completion/test_empty_prompt_list.py",
    "test_nonempty_prompt_list_ok",
)
def test_one_completion_of_a_text_and_of_ids(client, served):
    answer = client.completions.create(**FEW, prompt="Hello, my name is")
    (choice,) = answer.choices
    num_prompt = len(ids_of(served, "Hello, my name is"))
    assert answer.id
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.total_tokens == num_prompt + 5
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    answer = client.completions.create(**FEW, prompt=IDS)
    assert answer.choices[0].text
    assert getattr(answer.choices[0], "prompt_logprobs", None) is None


@like("vllm", VLLM, "test_completion_truncation_side_controls_prompt_truncation")
def test_a_prompt_is_truncated_on_the_side_that_was_asked_for(client):
    prompt = list(range(5, 13))
    for side, kept in (("right", prompt[:4]), ("left", prompt[-4:])):
        extra = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
        answer = client.completions.create(**FEW, prompt=prompt, extra_body=extra)
        assert answer.choices[0].prompt_token_ids == kept


@like("vllm", VLLM, "test_no_logprobs", "test_zero_logprobs", "test_some_logprobs")
@pytest.mark.parametrize("wanted", [None, 0, 5])
def test_logprobs_of_as_many_alternatives_as_asked(client, wanted):
    answer = client.completions.create(**FEW, prompt=IDS, logprobs=wanted)
    logprobs = answer.choices[0].logprobs
    if wanted is None:
        assert logprobs is None
        return
    assert len(logprobs.token_logprobs) == 5
    assert max(wanted, 1) <= len(logprobs.top_logprobs[0]) <= wanted + 1


@like("vllm", VLLM, "test_prompt_logprobs_completion")
@pytest.mark.parametrize("wanted", [-1, 0, 1, None])
def test_prompt_logprobs_of_two_prompts(client, wanted):
    prompts = ["A robot may not injure another robot", "My name is"]
    extra = {} if wanted is None else {"prompt_logprobs": wanted}
    if wanted == -1:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt=prompts, extra_body=extra)
        return
    answer = client.completions.create(model=MODEL, prompt=prompts, extra_body=extra)
    for choice in answer.choices:
        found = getattr(choice, "prompt_logprobs", None)
        assert (found is None) == (wanted is None)
        assert wanted is None or len(found) > 0


@like("vllm", VLLM, "test_completion_streaming")
def test_a_stream_is_the_whole_answer_and_its_last_chunk_has_text_and_reason(client):
    asked = {**FEW, "prompt": "What is an LLM?"}
    whole = client.completions.create(**asked).choices[0].text
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].choices[0].text


@like("vllm", VLLM, "test_parallel_no_streaming")
def test_several_choices_differ(client):
    asked = {"model": MODEL, "prompt": "What is an LLM?", "n": 3, "max_tokens": 30, "seed": 42}
    answer = client.completions.create(**asked, temperature=1.0, logprobs=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.finish_reason for choice in answer.choices)
    assert len({choice.text for choice in answer.choices}) == 3


@like("vllm", VLLM, "test_parallel_streaming")
def test_several_choices_in_one_stream(client):
    asked = {"model": MODEL, "prompt": "What is an LLM?", "n": 3, "max_tokens": 30, "seed": 42}
    whole = client.completions.create(**asked, temperature=1.0)
    texts, reasons = defaultdict(str), []
    for chunk in client.completions.create(**asked, temperature=1.0, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert [texts[i] for i in range(3)] == [choice.text for choice in whole.choices]
    assert len(reasons) == 3


@like("vllm", VLLM, "test_completion_stream_options")
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("every", [False, True])
def test_usage_in_streams(client, usage, every):
    options = {"include_usage": usage, "continuous_usage_stats": every}
    asked = {**FEW, "prompt": "What is the capital of France?"}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    *parts, last = chunks if usage else [*chunks, None]
    assert parts[-1].choices[0].finish_reason
    assert all((part.usage is not None) == (usage and every) for part in parts)
    for chunk in (*(parts if usage and every else ()), *([last] if usage else ())):
        counts = chunk.usage
        assert counts.prompt_tokens > 0
        assert counts.completion_tokens > 0
        assert counts.total_tokens == counts.prompt_tokens + counts.completion_tokens
    assert last is None or last.choices == []


@like("vllm", VLLM, "test_batch_completions")
@pytest.mark.parametrize("prompts", [["Hello, my name is"] * 2, [IDS] * 2])
def test_a_batch_of_equal_prompts_gets_equal_answers(client, prompts):
    whole = client.completions.create(**FEW, prompt=prompts)
    first, second = whole.choices
    assert first.text == second.text
    texts = ["", ""]
    for chunk in client.completions.create(**FEW, prompt=prompts, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [first.text, second.text]


@like("vllm", VLLM, "test_batch_completions")
@pytest.mark.parametrize("prompts", [["Hello, my name is"] * 2, [IDS] * 2])
def test_beams_of_a_batch(client, prompts):
    extra = {"use_beam_search": True}
    answer = client.completions.create(**FEW, prompt=prompts, n=2, extra_body=extra)
    texts = [choice.text for choice in answer.choices]
    assert len(texts) == 4
    assert texts[0] != texts[1]
    assert texts[:2] == texts[2:]


@like("vllm", VLLM, "test_echo_logprob_completion")
@pytest.mark.parametrize("wanted", [1, 0])
@pytest.mark.parametrize("prompt", ["Hello, my name is", IDS])
def test_echo_with_logprobs(client, prompt, wanted):
    answer = client.completions.create(**FEW, prompt=prompt, echo=True, logprobs=wanted)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert isinstance(prompt, list) or choice.text.startswith(prompt)
    num = len(logprobs.tokens)
    assert num > 5
    assert len(logprobs.text_offset) == len(logprobs.token_logprobs) == num
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(max(wanted, 1) <= len(top) <= wanted + 1 for top in logprobs.top_logprobs[1:])


@like("sglang", SGLANG, "test_completion")
@pytest.mark.parametrize(("echo", "logprobs"), [(False, None), (False, 5), (True, None), (True, 5)])
@pytest.mark.parametrize("num_prompts", [1, 2])
def test_echo_logprobs_prompts_and_choices_in_any_combination(
    client, served, echo, logprobs, num_prompts
):
    text = "The capital of France is"
    ids = ids_of(served, text)
    for prompt, n in itertools.product((text, ids), (1, 2)):
        asked = {**FEW, "prompt": prompt if num_prompts == 1 else [prompt] * num_prompts, "n": n}
        answer = client.completions.create(**asked, echo=echo, logprobs=logprobs)
        assert [choice.index for choice in answer.choices] == list(range(num_prompts * n))
        assert answer.usage.prompt_tokens == len(ids) * num_prompts
        for choice in answer.choices:
            assert choice.text.startswith(text) is echo
            assert (choice.logprobs is None) == (logprobs is None)
            if logprobs:
                assert (choice.logprobs.token_logprobs[0] is None) is echo
                assert len(choice.logprobs.tokens) == 5 + echo * len(ids)


@like("sglang", SGLANG, "test_completion_stream")
@pytest.mark.parametrize(("echo", "logprobs"), [(False, None), (False, 5), (True, None), (True, 5)])
def test_streams_in_any_combination_are_the_whole_answers(client, echo, logprobs):
    text = "The capital of France is"
    for prompt, n in itertools.product((text, [text, text]), (1, 2)):
        asked = {**FEW, "prompt": prompt, "n": n, "echo": echo, "logprobs": logprobs}
        whole = client.completions.create(**asked)
        texts, tokens = defaultdict(str), defaultdict(list)
        usage = {"include_usage": True}
        *parts, last = client.completions.create(**asked, stream=True, stream_options=usage)
        for chunk in parts:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            if choice.logprobs:
                tokens[choice.index] += choice.logprobs.tokens
        assert [texts[i] for i in range(len(whole.choices))] == [c.text for c in whole.choices]
        if logprobs:
            for choice in whole.choices:
                assert tokens[choice.index] == choice.logprobs.tokens
        assert last.usage.completion_tokens == whole.usage.completion_tokens
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens


TOKEN_IDS = "entrypoints/openai/basic/test_return_token_ids.py"


@like("vllm", TOKEN_IDS, "test_basic_completion_with_emoji")
def test_token_ids_of_a_text_with_emoji(client, served):
    prompt = "Complete this sentence with emojis: I love coding 🚀"
    asked = {**FEW, "prompt": prompt, "logprobs": 1}
    (choice,) = client.completions.create(**asked, extra_body={"return_token_ids": True}).choices
    assert choice.prompt_token_ids == ids_of(served, prompt)
    assert len(choice.token_ids) == 5
    (choice,) = client.completions.create(**asked, extra_body={"return_token_ids": False}).choices
    assert getattr(choice, "token_ids", None) is None
    assert getattr(choice, "prompt_token_ids", None) is None


@like("vllm", TOKEN_IDS, "test_comparison_with_prompt_logprobs_and_logprobs")
def test_token_ids_are_those_of_the_logprobs(client):
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    asked = {**FEW, "prompt": "Hello, world! How are you today?", "logprobs": 1}
    answer = client.completions.create(
        **asked, echo=True, extra_body={**extra, "prompt_logprobs": 1}
    )
    (choice,) = answer.choices
    named = [int(name.removeprefix("token_id:")) for name in choice.logprobs.tokens]
    assert named == choice.prompt_token_ids + choice.token_ids
    assert choice.prompt_logprobs
    chunks = list(client.completions.create(**asked, stream=True, extra_body=extra))
    assert chunks[0].choices[0].prompt_token_ids == choice.prompt_token_ids
    ids = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", None) or ()]
    scores = [chunk.choices[0].logprobs for chunk in chunks]
    named = [name for each in scores if each for name in each.tokens]
    assert [f"token_id:{token_id}" for token_id in ids] == named


STOPS = "openai_server/validation/test_matched_stop.py"


@like("sglang", STOPS, "test_finish_stop_str", "test_finish_length", "test_finish_stop_eos")
def test_the_reason_of_a_stop(client):
    asked = {"model": MODEL, "prompt": "def add(a, b):", "temperature": 0}
    free = client.completions.create(**asked, max_tokens=30, extra_body={"return_token_ids": True})
    text = free.choices[0].text
    mark = text[len(text) // 2 :][:2]
    stopped = client.completions.create(**asked, max_tokens=30, stop=mark).choices[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", mark)
    cut = client.completions.create(**asked, max_tokens=3).choices[0]
    assert (cut.finish_reason, getattr(cut, "stop_reason", None)) == ("length", None)
    token = free.choices[0].token_ids[3]
    extra = {"stop_token_ids": [token]}
    ended = client.completions.create(**asked, max_tokens=30, extra_body=extra).choices[0]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", token)


@like("sglang", STOPS, "test_finish_stop_regex_str")
def test_a_stop_by_regular_expression_is_refused_by_name(client):
    with pytest.raises(openai.BadRequestError, match="stop_regex"):
        client.completions.create(**FEW, prompt="x", extra_body={"stop_regex": "and|or"})


@like("sglang", "openai_server/validation/test_openai_server_ignore_eos.py", "test_ignore_eos")
def test_an_answer_goes_on_over_its_end(client):
    asked = {"model": MODEL, "prompt": "x = 1\n", "temperature": 0, "max_tokens": 64}
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 64
    assert answer.choices[0].finish_reason == "length"


@like("sglang", "openai_server/validation/test_large_max_new_tokens.py", "test_chat_completion")
def test_answers_that_may_be_long_run_side_by_side(client, served):
    asked = {"model": MODEL, "prompt": "def f():", "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**asked, max_tokens=3000, n=4, stream=True)
    seen = set()
    for chunk in stream:
        seen.add(chunk.choices[0].index)
        if len(seen) == 4:
            break
    stream.close()
    assert seen == {0, 1, 2, 3}


@like(
    "sglang",
    "openai_server/features/test_cache_report.py",
    "test_cache_report_openai",
    "test_cache_split_prefill_openai",
)
def test_cached_tokens_are_reported(client):
    asked = {**FEW, "prompt": "a prompt that nobody else asks for " * 20}
    counts = [client.completions.create(**asked).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in counts]
    assert cached[0] < cached[1] <= counts[1].prompt_tokens


@like("sglang", "openai_server/features/test_cache_report.py", "test_cache_salt_effectiveness")
def test_a_salt_keeps_cached_prefixes_apart(client):
    cached = []
    for salt in ("salt1", "salt1", "salt2"):
        asked = {**FEW, "prompt": "what is asked for with two salts " * 20}
        usage = client.completions.create(**asked, extra_body={"cache_salt": salt}).usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[2] == 0 < cached[1]


PROTOCOL = "openai_server/basic/test_protocol.py"


@like("sglang", PROTOCOL, "test_basic_completion_request", "test_negative_token_limits")
@like("sglang", PROTOCOL, "test_completion_request_validation_errors")
def test_defaults_and_bounds_of_a_completion(client):
    answer = client.completions.create(
        model=MODEL, prompt="x", extra_body={"ignore_eos": True}, temperature=0
    )
    assert answer.usage.completion_tokens == 16
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=-1)


@like("sglang", PROTOCOL, "test_completion_request_sglang_extensions")
def test_sglangs_fields_are_honoured_or_refused(client):
    extra = {"top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "regex": r"\d{1,3}"}
    text = client.completions.create(**FEW, prompt="x", extra_body=extra).choices[0].text
    assert text.isdigit()
    with pytest.raises(openai.BadRequestError, match="lora_path"):
        client.completions.create(**FEW, prompt="x", extra_body={"lora_path": "/lora"})

"""Pages and headers with the requests of vLLM's and SGLang's own tests."""

import httpx
import openai
import pytest

from tests.kits.tree.compat import like

pytestmark = pytest.mark.torch

BASIC = "entrypoints/serve/instrumentator/test_basic.py"
TOKENS = "entrypoints/serve/tokenize/test_tokenization.py"
SGLANG = "openai_server/basic/test_openai_server.py"
MODEL = "baton-bundled"
TALK = [
    {"role": "user", "content": "Hi there!"},
    {"role": "assistant", "content": "Nice to meet you!"},
    {"role": "user", "content": "Can I ask a question? vllm1"},
]


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served.url, timeout=30) as client:
        yield client


@like("vllm", BASIC, "test_show_version", "test_check_health")
def test_version_and_health(http):
    assert set(http.get("/version").raise_for_status().json()) == {"version"}
    for path in ("/health", "/ping"):
        assert http.get(path).status_code == 200
    assert http.post("/ping").status_code == 200


@like("vllm", BASIC, "test_request_wrong_content_type")
def test_a_body_of_another_type_is_refused(client, http):
    wrong = {"content-type": "application/x-www-form-urlencoded"}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=MODEL, messages=TALK, extra_headers=wrong)
    assert caught.value.status_code == 415


@like("vllm", BASIC, "test_server_load")
def test_the_load_is_that_of_running_requests(http):
    assert http.get("/load").raise_for_status().json()["server_load"] == 0
    body = {"prompt": "Give me a long story", "max_tokens": 3500, "stream": True, "n": 4}
    body["ignore_eos"] = True
    with http.stream("POST", "/v1/completions", json=body) as answer:
        # keeps the iterator, because its deletion would close the connection
        lines = answer.iter_lines()
        next(lines)
        assert http.get("/load").json()["server_load"] == 1


@like("vllm", BASIC, "test_request_cancellation")
def test_requests_that_timed_out_leave_room_for_others(client, served):
    story = {"model": MODEL, "messages": TALK, "max_tokens": 3000}
    hasty = client.with_options(timeout=0.3)
    for _ in range(20):
        with pytest.raises(openai.APITimeoutError):
            hasty.chat.completions.create(**story, extra_body={"ignore_eos": True})
    quick = client.with_options(timeout=10)
    assert quick.chat.completions.create(model=MODEL, messages=TALK, max_tokens=10).choices


@like("sglang", SGLANG, "test_model_list", "test_retrieve_model")
def test_models(client):
    (model,) = client.models.list()
    assert isinstance(model.max_model_len, int)
    found = client.models.retrieve(model.id)
    assert (found.id, found.root) == (model.id, model.id)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("non-existent-model")


@like("vllm", TOKENS, "test_tokenize_completions", "test_detokenize")
@pytest.mark.parametrize("special", [False, True])
def test_a_text_is_tokenized_and_back(http, special):
    text = "vllm1 This is a test prompt."
    asked = {"prompt": text, "model": MODEL, "add_special_tokens": special}
    found = http.post("/tokenize", json=asked).raise_for_status().json()
    assert found["count"] == len(found["tokens"]) > 0
    assert found["max_model_len"] == 4096
    assert found["token_strs"] is None
    back = http.post("/detokenize", json={"model": MODEL, "tokens": found["tokens"]})
    assert back.raise_for_status().json() == {"prompt": text}


@like("vllm", TOKENS, "test_tokenize_with_return_token_strs")
def test_tokens_by_name(http):
    asked = {"prompt": "This is a token_strs test prompt! vllm1", "return_token_strs": True}
    found = http.post("/tokenize", json=asked).raise_for_status().json()
    assert len(found["token_strs"]) == found["count"]


@like("vllm", TOKENS, "test_tokenize_chat", "test_tokenize_chat_with_tools")
@pytest.mark.parametrize(("generation", "final"), [(False, False), (True, False), (False, True)])
def test_messages_are_tokenized_as_answers_would_see_them(http, generation, final):
    messages = [*TALK, {"role": "assistant", "content": "Sure,"}] if final else TALK
    asked = {
        "messages": messages,
        "model": MODEL,
        "add_generation_prompt": generation,
        "continue_final_message": final,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    found = http.post("/tokenize", json=asked).raise_for_status().json()
    text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert "Can I ask a question? vllm1" in text
    assert text.endswith("Sure,") is final
    assert text.endswith("<|assistant|>") is generation


X_ID = "entrypoints/serve/middleware/test_x_request_id.py"


@like("vllm", X_ID, "test_response_has_one_request_id")
def test_the_clients_id_comes_back(client):
    asked = {"model": MODEL, "messages": TALK, "max_tokens": 2}
    raw = client.chat.completions.with_raw_response.create(
        **asked, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    raw = client.chat.completions.with_raw_response.create(**asked)
    assert raw.headers["x-request-id"]


@like("vllm", "entrypoints/openai/chat_completion/test_chat.py", "test_invocations")
def test_invocations_answer_as_the_endpoints_do(http):
    asked = {"model": MODEL, "messages": TALK, "max_tokens": 5, "temperature": 0.0}
    direct = http.post("/v1/chat/completions", json=asked).raise_for_status().json()
    invoked = http.post("/invocations", json=asked).raise_for_status().json()
    assert invoked.keys() == direct.keys()
    assert invoked["choices"] == direct["choices"]


@like(
    "sglang",
    "openai_server/validation/test_request_body_validation.py",
    "test_input_body_size_larger_than_maximum_allowed_payload_size_limit",
)
def test_a_body_that_is_too_long_is_refused(http):
    content = b'{"prompt": "' + b"x" * 9 * 2**20 + b'"}'
    json = {"content-type": "application/json"}
    assert http.post("/v1/completions", content=content, headers=json).status_code == 413

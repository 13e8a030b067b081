"""Prefill workers serve an embedding model, with the requests of vLLM's own tests."""

import base64

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from tests.kits.checkpoints import COMMON, KINDS, make_embedding, save_checkpoint
from tests.kits.services.served import serve
from tests.kits.tree.compat import like

pytestmark = pytest.mark.torch

ONLINE = "entrypoints/pooling/embed/test_online.py"
DIMENSIONS = "entrypoints/pooling/embed/test_online_dimensions.py"
TALK = [{"role": "user", "content": "Hi there!"}]
HIDDEN = 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "embeds"
    save_checkpoint(path, COMMON | KINDS["qwen3"])
    make_embedding(path, is_matryoshka=True)
    return path


@pytest.fixture(scope="module")
def served(lent, checkpoint):
    with serve("--launcher", "process", model=str(checkpoint), command=lent) as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served.url, timeout=30) as made:
        yield made


def expected(path, text):
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        state = model(input_ids=torch.tensor([list(text.encode())])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(state, dim=0).numpy()


def ask(http, **body):
    answer = http.post("/v1/embeddings", json={"encoding_format": "float", **body})
    return np.array([each["embedding"] for each in answer.raise_for_status().json()["data"]])


@like("vllm", ONLINE, "test_basic")
def test_the_model_is_listed_and_counts_tokens(client, http):
    assert [model.id for model in client.models.list()] == ["embeds"]
    found = http.post("/tokenize", json={"model": "embeds", "prompt": "abc"}).json()
    assert found["tokens"] == list(b"abc")


@like(
    "vllm",
    ONLINE,
    "test_completion_request",
    "test_completion_request_batched",
    "test_base64_embedding",
)
def test_embeddings_point_where_transformers_does(client, checkpoint):
    texts = ["The cat sat on the mat.", "x", "A long text. " * 20]
    # in base64, the client's default
    answer = client.embeddings.create(model="embeds", input=texts)
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    for text, each in zip(texts, answer.data, strict=True):
        found = np.array(each.embedding)
        assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-5)
        assert found @ expected(checkpoint, text) > 0.98  # not 1, because weights are quantised
    # A cached prefix must not change the result.
    again = client.embeddings.create(model="embeds", input=texts[2], encoding_format="float")
    np.testing.assert_allclose(again.data[0].embedding, answer.data[2].embedding, atol=1e-5)


@like("vllm", DIMENSIONS, "test_matryoshka")
def test_a_part_and_many_inputs(client):
    whole = client.embeddings.create(model="embeds", input=[f"text {i}" for i in range(300)])
    assert len(whole.data) == 300
    part = client.embeddings.create(model="embeds", input="text 7", dimensions=8).data[0].embedding
    expected_part = np.array(whole.data[7].embedding[:8])
    np.testing.assert_allclose(part, expected_part / np.linalg.norm(expected_part), atol=1e-4)
    for wrong in (-1, HIDDEN + 1):
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="embeds", input="a", dimensions=wrong)


def test_there_is_no_text(client):
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.completions.create(model="embeds", prompt="a")


@like("vllm", ONLINE, "test_truncate_prompt_tokens")
def test_a_long_input_is_cut(client):
    for text in ("a" * 30, list(b"a" * 30)):
        asked = {"model": "embeds", "input": text}
        answer = client.embeddings.create(**asked, extra_body={"truncate_prompt_tokens": 10})
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 10
        with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
            client.embeddings.create(**asked, extra_body={"truncate_prompt_tokens": 8193})


@like(
    "vllm",
    ONLINE,
    "test_chat_request",
    "test_invocations_completion_request",
    "test_invocations_chat_request",
)
def test_messages_and_invocations(http):
    chat = ask(http, messages=TALK)
    text = "<turn>user: Hi there!<turn>assistant: "
    np.testing.assert_allclose(chat, ask(http, input=text, add_special_tokens=False), atol=1e-5)
    for body in ({"input": text}, {"messages": TALK}):
        fields = {**body, "encoding_format": "float"}
        direct = http.post("/v1/embeddings", json=fields).json()
        invoked = http.post("/invocations", json=fields).json()
        assert direct.keys() == invoked.keys()
        np.testing.assert_allclose(
            direct["data"][0]["embedding"], invoked["data"][0]["embedding"], atol=1e-5
        )
    both = {"add_generation_prompt": True, "continue_final_message": True}
    refused = http.post("/v1/embeddings", json={"messages": TALK, **both})
    assert "continue_final_message" in refused.json()["error"]["message"]


def test_bytes_have_the_type_and_order_asked_for(http):
    numbers = ask(http, input="a")[0]
    for name, kind in (("float32", "f4"), ("float16", "f2")):
        for order, sign in (("native", "<"), ("little", "<"), ("big", ">")):
            fields = {"embed_dtype": name, "endianness": order, "encoding_format": "base64"}
            answer = http.post("/v1/embeddings", json={"input": "a", **fields}).json()
            data = base64.b64decode(answer["data"][0]["embedding"])
            np.testing.assert_allclose(np.frombuffer(data, f"{sign}{kind}"), numbers, atol=1e-3)


@like("vllm", ONLINE, "test_params_not_supported")
def test_wrong_forms_are_named(http):
    for name in ("encoding_format", "embed_dtype", "endianness"):
        refused = http.post("/v1/embeddings", json={"input": "a", name: f"bad_{name}"})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, name)
        assert f"bad_{name}" in error["message"]


@like("vllm", ONLINE, "test_use_activation")
def test_the_length_is_one_or_the_models_own(http):
    default = ask(http, input="a")
    scaled, plain = (ask(http, input="a", use_activation=each) for each in (True, False))
    np.testing.assert_allclose(default, scaled, atol=1e-5)
    assert abs(np.linalg.norm(plain) - 1) > 0.1
    np.testing.assert_allclose(scaled, plain / np.linalg.norm(plain), atol=1e-4)

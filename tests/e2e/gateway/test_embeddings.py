"""A model of embeddings is served through prefill workers, to OpenAI's client."""

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from tests.kits.checkpoints import COMMON, KINDS, make_embedding, save_checkpoint
from tests.kits.services.served import serve

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "embeds"
    save_checkpoint(path, COMMON | KINDS["qwen3"])
    make_embedding(path, is_matryoshka=True)
    return path


@pytest.fixture(scope="module")
def client(checkpoint):
    with serve(str(checkpoint), "--launcher", "process") as served:
        yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def expected(path, text):
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        state = model(input_ids=torch.tensor([list(text.encode())])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(state, dim=0).numpy()


def test_embeddings_point_where_transformers_does(client, checkpoint):
    texts = ["The cat sat on the mat.", "x", "A long text. " * 20]
    answer = client.embeddings.create(model="embeds", input=texts)  # as base64, by default
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    for text, each in zip(texts, answer.data, strict=True):
        found = np.array(each.embedding)
        assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-5)
        assert found @ expected(checkpoint, text) > 0.98  # weights are rounded
    # A prefix from the cache changes nothing.
    again = client.embeddings.create(model="embeds", input=texts[2], encoding_format="float")
    np.testing.assert_allclose(again.data[0].embedding, answer.data[2].embedding, atol=1e-5)


def test_a_part_and_many_inputs(client):
    whole = client.embeddings.create(model="embeds", input=[f"text {i}" for i in range(300)])
    assert len(whole.data) == 300
    part = client.embeddings.create(model="embeds", input="text 7", dimensions=8).data[0].embedding
    expected_part = np.array(whole.data[7].embedding[:8])
    np.testing.assert_allclose(part, expected_part / np.linalg.norm(expected_part), atol=1e-4)


def test_there_is_no_text(client):
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.completions.create(model="embeds", prompt="a")

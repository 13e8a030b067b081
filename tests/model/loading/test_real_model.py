"""SmolLM2-135M-Instruct, from its GGUF file: known token ids, equal answers, and good English."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, LlamaForCausalLM

from engine.config import WeightFormat
from engine.model.loading.gguf import lazy_weights
from router.text.tokenizer import load_text_model
from tests.kits.models.real import real_model
from tests.kits.models.served import Served

pytestmark = pytest.mark.torch

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TEXT = (
    "Water is a liquid at room temperature. When it is cooled below zero degrees Celsius, it"
    " freezes and becomes ice. When it is heated to one hundred degrees, it boils and turns into"
    " steam. Plants need water and light to grow. They take up water through their roots and"
    " carbon dioxide from the air, and they make sugar and oxygen."
)
CONTEXT_LEN = 8192
MAX_PERPLEXITY = 11.0  # per token: right weights have 10.6, rows in the wrong order 32


@pytest.fixture(scope="module")
def folder():
    return real_model()


@pytest.fixture(scope="module")
def text(folder):
    return load_text_model(folder)


@pytest.fixture(scope="module")
def reference(folder):
    """Loads transformers' own model, with the weights of the file in fp32."""
    [file] = folder.glob("*.gguf")
    config = AutoConfig.from_pretrained(folder)
    weights = {name: weight[...].float() for name, weight in lazy_weights(file).items()}
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello world 12345", [19556, 905, 216, 33, 34, 35, 36, 37]),  # each digit is one token
        ("<|im_start|>user\nHi<|im_end|>", [1, 4093, 198, 26843, 2]),
    ],
)
def test_texts_have_the_tokens_of_the_published_tokenizer(folder, words, ids):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(words).ids == ids


@pytest.mark.parametrize("words", ["naïve café 日本語 😀\n\n  x", "don't  stop 2²", "\t\tif x:\n"])
def test_tokens_of_any_text_give_the_text(folder, words):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(words).ids, skip_special_tokens=False) == words


def test_a_chat_is_rendered_with_the_files_template(folder, text):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert text.encode_chat(QUESTION, CONTEXT_LEN) == tokenizer.encode(PROMPT).ids
    assert text.eos_token_ids == (2,)


def test_clients_that_say_nothing_get_its_authors_sampling(folder):
    found = json.loads((folder / "generation_config.json").read_text())
    assert (found["temperature"], found["top_p"]) == (0.2, 0.9)


@torch.inference_mode()
def test_greedy_answers_equal_generate(folder, text, reference):
    ids = text.encode_chat(QUESTION, CONTEXT_LEN)
    output = reference.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=None,
        pad_token_id=0,
    )
    with Served(folder, weights=WeightFormat.FP32) as served:
        assert served.answer(ids, 24) == output[0, len(ids) :].tolist()


def test_the_answer_of_packed_weights_is_right_and_ends_by_itself(folder, text):
    with Served(folder, weights=WeightFormat.INT8) as served:
        answer = served.answer(text.encode_chat(QUESTION, CONTEXT_LEN), 12)
    end = answer.index(text.eos_token_ids[0])
    assert text.decode_text(answer[:end]).startswith("The capital of France is Paris")


@torch.inference_mode()
def test_english_is_as_likely_as_only_the_right_weights_make_it(text, reference):
    ids = torch.tensor([text.encode_text(TEXT, CONTEXT_LEN)])
    logits = reference(input_ids=ids, use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    assert math.exp(loss) < MAX_PERPLEXITY

"""Tokenizers built from a GGUF file's tokens: known ids, special tokens, refusals by name."""

import json

import pytest
from tokenizers import Tokenizer

from engine.errors import CheckpointError
from engine.gguf.architecture import described
from engine.gguf.container import read_gguf
from tests.kits.models.gguf import tiny

BOS, EOS, HE, SPACE_HE, TWELVE = range(256, 261)
TEXTS = [
    "hello he 12",
    "naïve café 日本語 😀",
    "a\n\n  b\tc ",
    "it's 2² ½",
    "<s>he</s>",
    "don't  STOP",
]


def files_of(tmp_path, contents=None, **values):
    contents = contents or tiny()
    contents.values |= {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return described(read_gguf(contents.write(tmp_path / "a.gguf")))


def tokenizer_of(tmp_path, **values):
    return Tokenizer.from_str(files_of(tmp_path, **values)["tokenizer.json"].decode())


def refusal(tmp_path, **values):
    with pytest.raises(CheckpointError) as caught:
        files_of(tmp_path, **values)
    return str(caught.value).removeprefix(f"{tmp_path / 'a.gguf'}: ")


@pytest.mark.parametrize("pre", ["default", "gpt-2", "llama-bpe", "qwen2", "smollm"])
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_any_text_give_the_text(pre, text, tmp_path):
    tokenizer = tokenizer_of(tmp_path, pre=pre)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "ids"),
    [
        ("smollm", [SPACE_HE, 32, 49, 50]),  # each digit is one token
        ("qwen2", [SPACE_HE, 32, 49, 50]),
        ("gpt-2", [SPACE_HE, 32, TWELVE]),
        ("llama-bpe", [SPACE_HE, 32, TWELVE]),  # up to three digits are one token
        ("default", [SPACE_HE, 32, TWELVE]),
    ],
)
def test_words_are_cut_as_the_files_kind_says(pre, ids, tmp_path):
    assert tokenizer_of(tmp_path, pre=pre).encode(" he 12", add_special_tokens=False).ids == ids


def test_control_tokens_are_special_and_found_in_text(tmp_path):
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer.encode("<s>he</s>").ids
    assert ids == [BOS, HE, EOS]
    assert tokenizer.decode(ids) == "he"


def test_user_defined_tokens_are_found_and_shown(tmp_path):
    tokenizer = tokenizer_of(tmp_path, token_type=[1] * 256 + [3, 4, 1, 1, 1])
    ids = tokenizer.encode("he</s>he").ids
    assert ids == [HE, EOS, HE]
    assert tokenizer.decode(ids) == "he</s>he"


@pytest.mark.parametrize(
    ("values", "begins"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_prompts_begin_with_a_token_if_the_file_says_so(values, begins, tmp_path):
    ids = tokenizer_of(tmp_path, **values).encode("he").ids
    assert ids == ([BOS, HE] if begins else [HE])


def test_all_tokens_that_end_an_answer_are_listed(tmp_path):
    files = files_of(tmp_path, eot_token_id=256, eom_token_id=257)
    for name in ("config.json", "generation_config.json"):
        assert json.loads(files[name])["eos_token_id"] == [EOS, BOS]
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


def test_chat_templates_are_kept(tmp_path):
    contents = tiny()
    config = json.loads(files_of(tmp_path, contents)["tokenizer_config.json"])
    assert config["chat_template"] == "{{ messages[0].content }}"
    contents.values["tokenizer.chat_template.tool_use"] = "tools"
    config = json.loads(files_of(tmp_path, contents)["tokenizer_config.json"])
    assert config["chat_template"] == [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools"},
    ]


def test_a_chat_template_that_is_no_text_is_refused(tmp_path):
    contents = tiny()
    contents.values["tokenizer.chat_template.tool_use"] = 7
    with pytest.raises(CheckpointError, match="the chat template tool_use is no text"):
        files_of(tmp_path, contents)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'; read is gpt2"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; read are default, gpt-2, llama-bpe, "),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token is not supported"),
        ({"tokens": ["a"]}, "tokenizer.ggml.token_type is not of the length of the tokens"),
        ({"tokens": ["a"] * 261}, "tokenizer.ggml.tokens has a token twice"),
        ({"tokens": 3}, "tokenizer.ggml.tokens is not a list of strings"),
        ({"merges": [1]}, "tokenizer.ggml.merges is not a list of strings"),
        ({"merges": ["h"]}, "tokenizer.ggml.merges has 'h', which makes no token"),
        ({"merges": ["e h"]}, "tokenizer.ggml.merges has 'e h', which makes no token"),
        ({"eos_token_id": 261}, "tokenizer.ggml.eos_token_id is 261"),
        ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id is '2'"),
    ],
)
def test_vocabularies_that_are_not_understood_are_refused_by_name(values, why, tmp_path):
    assert refusal(tmp_path, **values).startswith(why)


def test_as_many_tokens_are_listed_as_embedded(tmp_path):
    contents = tiny()
    contents.values["tokenizer.ggml.tokens"] = contents.values["tokenizer.ggml.tokens"][:-1]
    contents.values["tokenizer.ggml.token_type"] = contents.values["tokenizer.ggml.token_type"][:-1]
    contents.values["tokenizer.ggml.merges"] = ["h e"]
    with pytest.raises(CheckpointError, match="lists 260 tokens, and embeds 261"):
        files_of(tmp_path, contents)

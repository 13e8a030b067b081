"""The defaults of sampling options, as recommended by the model's authors."""

import json

import pytest

from engine.errors import CheckpointError
from router.text.checkpoint_files import NO_DEFAULTS, SamplingDefaults, sampling_defaults


def test_the_file_says_how_long_answers_are(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 20}')
    assert sampling_defaults(tmp_path).max_new_tokens == 20


def test_the_file_says_how_to_sample(tmp_path):
    assert sampling_defaults(tmp_path) == NO_DEFAULTS
    fields = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)


@pytest.mark.parametrize(
    "wrong", ['{"temperature": -1}', '{"max_new_tokens": 0}', '{"top_p": "x"}', "[]", "{"]
)
def test_a_wrong_file_is_named(tmp_path, wrong):
    (tmp_path / "generation_config.json").write_text(wrong)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        sampling_defaults(tmp_path)

"""Errors in a model's small files are reported before any process starts."""

import json
import shutil

import msgspec
import pytest

from deploy.local.deployment import check_models, plan_of
from deploy.model_source import BUNDLED_MODEL
from engine.config import Config, DeviceKind, Speculate
from engine.errors import CheckpointError

CPU = Config()
CPU = msgspec.structs.replace(
    CPU, worker=msgspec.structs.replace(CPU.worker, device=DeviceKind.CPU)
)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(BUNDLED_MODEL, tmp_path / "model")


def check(folder, config=CPU):
    plan = plan_of(str(folder), config, cores=2, memory_bytes=2**34, num_gpus=0)
    check_models(plan, lambda _: None)


def edit(path, **changes):
    found = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(found | changes))


def test_a_right_folder_passes(folder):
    check(folder)
    (folder / "tokenizer_config.json").unlink()
    check(folder)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("tokenizer.json", lambda path: path.write_text('{"model": {"type": "none"}}')),
        ("tokenizer.json", lambda path: path.unlink()),
        ("tokenizer_config.json", lambda path: path.write_text("[")),
        ("tokenizer_config.json", lambda path: edit(path, chat_template="{% if %}")),
        ("generation_config.json", lambda path: edit(path, temperature=2.5)),
        ("config.json", lambda path: edit(path, dtype="auto")),
        ("config.json", lambda path: edit(path, eos_token_id="</s>")),
        ("config.json", lambda path: edit(path, max_position_embeddings=None)),
        ("config.json", lambda path: edit(path, rope_parameters={"rope_type": "nonsense"})),
    ],
)
def test_a_wrong_small_file_is_named_in_a_sentence(folder, name, spoil):
    spoil(folder / name)
    with pytest.raises(CheckpointError) as caught:
        check(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert name.removesuffix("_config.json") in message or "chat template" in message


def test_a_draft_is_checked_too(folder, tmp_path):
    draft = shutil.copytree(BUNDLED_MODEL.parent / "draft", tmp_path / "draft")
    edit(draft / "config.json", dtype="auto")
    worker = msgspec.structs.replace(CPU.worker, draft_model=str(draft), speculate=Speculate.DRAFT)
    with pytest.raises(CheckpointError, match=r"draft/config\.json: dtype is 'auto'"):
        check(folder, msgspec.structs.replace(CPU, worker=worker))

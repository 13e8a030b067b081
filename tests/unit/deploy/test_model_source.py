"""How a model's name is interpreted, and names that are refused before a download."""

import sys
from pathlib import Path

import pytest

from deploy.fetching.cache import Parts, is_wanted
from deploy.fetching.names import Directory, HubModel, StoredModel, is_remote, parse_source
from deploy.model_source import default_cache, local_model, name_of, pinned
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("models/llama", Directory(Path("models/llama"))),
        ("/nfs/models/llama", Directory(Path("/nfs/models/llama"))),
        ("hf://org/name", HubModel("org/name", "main")),
        ("hf://org/Name-1.5B@v2", HubModel("org/Name-1.5B", "v2")),
        ("hf://org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
        ("s3://bucket/models/llama/", StoredModel("s3://bucket/models/llama")),
        ("gs://bucket/llama", StoredModel("gs://bucket/llama")),
    ],
)
def test_a_models_name_says_where_it_is(text, source):
    assert parse_source(text) == source
    assert is_remote(text) is not isinstance(source, Directory)


@pytest.mark.parametrize("text", ["hf://name", "hf://org/name@", "hf://a/b/c", "hf://", "s3:///"])
def test_a_name_that_names_nothing_is_refused(text):
    with pytest.raises(ConfigError, match=f"^{text}: "):
        parse_source(text)


def test_only_weights_configuration_and_tokenizer_are_wanted():
    files = {
        "config.json": True,
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "tokenizer.json": True,
        "tokenizer.model": True,
        "merges.txt": True,
        "chat_template.jinja": True,
        "pytorch_model.bin": False,
        "modeling_custom.py": False,
        "consolidated.00.safetensors": False,
        "additional_chat_templates/tool_use.jinja": True,
        "additional_chat_templates/notes.json": False,
        "additional_chat_templates/more/tool_use.jinja": False,
        "1_Pooling/config.json": True,
        "2_Dense/model.safetensors": False,
        "original/params.json": False,
        "onnx/model.safetensors": False,
        "README.md": False,
    }
    assert {name: is_wanted(name, Parts.ALL) for name in files} == files


def test_a_gateway_wants_no_weights():
    assert is_wanted("tokenizer.json", Parts.TEXT)
    assert not is_wanted("model.safetensors", Parts.TEXT)


def test_a_directory_is_used_where_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert local_model(str(tmp_path), cache=Path("/nonexistent")) == tmp_path


def test_a_directory_that_is_missing_or_holds_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such model directory"):
        local_model(str(tmp_path / "gone"), cache=tmp_path)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        local_model(str(tmp_path), cache=tmp_path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Qwen/Qwen3-0.6B", "say hf://Qwen/Qwen3-0.6B"),
        ("org/name@v1", "say hf://org/name@v1"),
        ("/org/name", None),
        ("./name", None),
        ("name", None),
        ("a/b/c", None),
    ],
)
def test_a_missing_directory_may_be_the_name_of_a_hubs_model(name, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        local_model(name, cache=tmp_path)
    assert str(caught.value).endswith(hint or "no such model directory")


@pytest.mark.parametrize(
    ("source", "package"), [("hf://org/name", "huggingface_hub"), ("s3://bucket/name", "fsspec")]
)
def test_a_missing_package_is_named_with_what_installs_it(source, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[hub\]'"):
        local_model(source, cache=tmp_path)


def test_clients_call_a_model_by_the_last_of_its_name_and_a_hubs_by_all():
    assert name_of("/models/llama") == "llama"
    assert name_of("hf://org/name@v2") == "org/name"
    assert name_of("s3://bucket/models/llama/") == "llama"


def test_names_with_a_version_are_already_pinned(tmp_path, monkeypatch):
    commit = f"hf://org/name@{'0f' * 20}"
    monkeypatch.chdir(tmp_path)
    assert pinned(commit) == commit
    assert pinned("s3://bucket/model/") == "s3://bucket/model"
    assert pinned(".") == str(tmp_path)


def test_cache_folder_is_the_operators_or_the_default():
    assert default_cache({"BATON_CACHE": "/scratch", "XDG_CACHE_HOME": "/c"}) == Path("/scratch")
    assert default_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/baton")
    assert default_cache({}) == Path.home() / ".cache" / "baton"

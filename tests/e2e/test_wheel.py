"""The wheel contains what serving needs and nothing else.

An empty environment can serve with it.
"""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.kits.services.served import HTTP, serve
from tests.kits.tree.wheels import TREE, build_wheel, install, outside_environment

pytest.importorskip("setuptools", reason="setuptools is not installed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def files(*folders: str | Path) -> set[str]:
    found = [path for folder in folders for path in (TREE / folder).glob("*") if path.is_file()]
    return {str(path.relative_to(TREE)) for path in found}


def test_wheel_holds_every_module(names):
    floors = ("engine", "kvtransfer", "prefill", "decode", "router", "deploy", "bench")
    modules = {
        str(path.relative_to(TREE)) for floor in floors for path in (TREE / floor).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules


def test_wheel_holds_model_cpp_sources_and_cluster_files(names):
    native = files(*(TREE / "engine/native/src").iterdir())
    assert any(name.endswith(".cpp") for name in native)
    model = files("engine/model/bundled/target", "engine/model/bundled/draft")
    assert "engine/model/bundled/target/model.safetensors" in model
    assert native | model | files("deploy/cluster") <= names
    assert "engine/model/bundled/MODEL_CARD.md" in names


def test_wheel_holds_no_tests_results_or_compiled_files(names):
    folders = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert folders == {"engine", "kvtransfer", "prefill", "decode", "router", "deploy", "bench"}
    assert not [name for name in names if name.startswith("bench/results/")]
    assert not [name for name in names if name.endswith((".pyc", ".so"))]


def test_wheel_names_the_baton_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "baton = deploy.commands.main:main" in archive.read(path).decode()


@pytest.mark.torch
def test_installed_wheel_serves_the_bundled_model(wheel, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    commands = install(wheel, tmp_path / "environment")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    where = subprocess.run(
        [
            commands / "python",
            "-c",
            "import deploy, engine; print(deploy.__file__, engine.__file__)",
        ],
        env=outside_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert all(Path(each).is_relative_to(tmp_path) for each in where.stdout.split())
    question = {
        "model": "baton-bundled",
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Write a Python function `add`."}],
    }
    with serve("--launcher", "process", command=(str(commands / "baton"),)) as served:
        answer = HTTP.post(f"{served.url}/v1/chat/completions", json=question, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0

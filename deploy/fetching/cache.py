"""The cache of fetched models: locks, free space, and folders that never change.

1. Lock the version of the model. If the version's folder exists by now, use that folder.
2. Download into the folder `….partial`. After a failure, complete files stay for the next attempt
   if the source supports this.
3. Rename the folder `….partial` to its final name.

Only files that Baton reads are downloaded: safetensors, configuration, tokenizer, and the files of
`FOLDERS`. None of these files can be run as code.
"""

import contextlib
import errno
import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.ownership import make_folder

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS = ("*.safetensors",)
TEXT = ("*.json", "*.jinja", "*.model", "*.txt")
# Folders inside a model's folder that Baton reads, with the pattern of the files in each folder.
FOLDERS = {"additional_chat_templates": "*.jinja", "1_Pooling": CONFIG}
UNUSED = ("consolidated*.safetensors", "adapter_*")  # files in the author's own format
SPARE_BYTES = 64 * 2**20  # a download must leave at least this much of the disk free
FETCH_TIMEOUT_S = 4 * 3600.0  # time limit of a download

Report = Callable[[str], None]


class Parts(Enum):
    """A selection of a model's files. A gateway needs no weights."""

    ALL = auto()
    TEXT = auto()


@dataclass(frozen=True, slots=True)
class RemoteVersion:
    """A version of a remote model: its name, and its files with their sizes in bytes."""

    name: str
    files: Mapping[str, int]

    def of(self, parts: Parts) -> "RemoteVersion":
        """Returns the version without the files that are not wanted."""
        files = {name: size for name, size in self.files.items() if is_wanted(name, parts)}
        return RemoteVersion(self.name, files)

    @property
    def num_bytes(self) -> int:
        """The total size of all files in bytes."""
        return sum(self.files.values())


def is_wanted(name: str, parts: Parts) -> bool:
    """Returns true if Baton reads a file of this name in a model's folder."""
    folder, slash, inner = name.rpartition("/")
    if slash:
        return folder in FOLDERS and fnmatch(inner, FOLDERS[folder])
    patterns = TEXT if parts is Parts.TEXT else WEIGHTS + TEXT
    return any(fnmatch(name, pattern) for pattern in patterns) and not any(
        fnmatch(name, pattern) for pattern in UNUSED
    )


def stored(
    source: str,
    version: RemoteVersion,
    folder: Path,
    parts: Parts,
    report: Report,
    *,
    download: Callable[[RemoteVersion, Path], None],
) -> Path:
    """Returns the version's folder; downloads the version if necessary.

    `folder` is cache/kind/name.
    """
    require_config(source, version.files)
    there = folder / folder_name(version.name, parts)
    if there.is_dir():
        return there
    partial = there.with_name(f"{there.name}.partial")
    with storing(source, folder):
        make_folder(folder, top=folder.parent.parent, mode=0o755)
    with storing(source, folder), locked(there.with_name(f"{there.name}.lock")):
        if there.is_dir():
            return there
        partial.mkdir(mode=0o755, exist_ok=True)
        require_space(source, version.num_bytes - _size_of(partial), folder)
        report(f"downloading {source}, {version.num_bytes / 2**20:.0f} MiB")
        try:
            download(version, partial)
        except Exception as error:  # the type of the error depends on the source's library
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            raise ConfigError(f"{source}: the download failed: {one_line(error)}") from error
        if odd := [
            name for name, size in version.files.items() if not _is_whole(partial / name, size)
        ]:
            raise ConfigError(f"{source}: {odd[0]} is missing or has another size than announced")
        for path in (partial / name for name in version.files):
            path.parent.chmod(0o755)  # whatever the umask is, other users cannot write
            path.chmod(0o644)
        partial.rename(there)
    return there


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a version against all processes that share the cache.

    The kernel frees the lock if the process ends.
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def storing(source: str, folder: Path) -> Iterator[None]:
    """Turns an OSError that the cache causes into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{source}: cannot be stored in {folder}: {error.strerror}") from error


def require_space(source: str, num_bytes: int, folder: Path) -> None:
    """Raises ConfigError if the disk lacks room for `num_bytes` more bytes."""
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free_bytes:
        raise ConfigError(
            f"{source}: {num_bytes / 2**30:.1f} GiB more are needed, and {folder} has"
            f" {free_bytes / 2**30:.1f} GiB left (BATON_CACHE sets another folder)"
        )


def require_config(source: str, names: Iterable[str]) -> None:
    """Raises ConfigError unless one of the files is config.json."""
    if CONFIG not in names:
        raise ConfigError(f"{source}: has no {CONFIG}, so it is no model that transformers reads")


def folder_name(version: str, parts: Parts) -> str:
    """Returns the folder name of a version, or of the part of the version without weights."""
    return version if parts is Parts.ALL else f"{version}-text"


def one_line(error: Exception) -> str:
    """Returns the first line of an error."""
    return (str(error) or repr(error)).strip().splitlines()[0].rstrip(".")


def _is_whole(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def library(package: str, source: str, *, extra: str) -> Any:
    """Imports a package. Raises ConfigError with the extra that installs it."""
    try:
        import_module(f"{package}.errors" if package == "huggingface_hub" else f"{package}.core")
        return import_module(package)
    except ImportError as error:
        raise missing(source, str(error), extra) from error


def missing(source: str, why: str, extra: str) -> ConfigError:
    """Returns an error that names Baton's extra (pip) which must be installed for a source."""
    return ConfigError(f"{source}: needs `pip install 'baton-serve[{extra}]'` ({why})")

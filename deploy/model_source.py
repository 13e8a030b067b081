"""Finds a model in a directory, a model hub or an object store, and returns a local directory.

    /models/llama            a directory, perhaps shared by all nodes: used in place
    hf://org/name@revision   a repository of a hub, by huggingface_hub; default revision: `main`
    s3://…, gs://…           a folder that fsspec can list; its other schemes work too

A remote model is stored under `cache`, in a folder named after its contents: a hub's commit, or a
hash of the names, sizes and versions of its files. So a folder never changes, and a new version
never touches one that is being served. Processes that want the same version share its folder:

1. Ask for the version and its files. This needs the network, except for a commit of a hub.
2. Take a lock on that version. If the folder exists by now, use it.
3. Download to `….partial`. Complete files are kept for the next attempt if the source can tell.
4. Rename it to its final name.

Only top-level files that Baton reads are taken: safetensors, configuration, tokenizer. None of them
can be run as code. huggingface_hub and fsspec are imported only when such a source is given.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import ConfigError
from engine.ownership import make_folder, require_trusted_files

CONFIG = "config.json"
WEIGHTS = ("*.safetensors",)
TEXT = ("*.json", "*.jinja", "*.model", "*.txt")
UNUSED = ("consolidated*.safetensors", "adapter_*")  # second copies in the author's own format
SPARE_BYTES = 64 * 2**20  # left free on the disk
FETCH_TIMEOUT_S = 4 * 3600.0  # deadline of a download

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")

Report = Callable[[str], None]


class Parts(Enum):
    """The wanted files of a model. A gateway needs no weights."""

    ALL = auto()
    TEXT = auto()


@dataclass(frozen=True, slots=True)
class Directory:
    """A model in a local directory."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of a hub; `revision` is a branch, a tag or a commit."""

    name: str  # org/name
    revision: str = "main"

    def __str__(self) -> str:
        return f"hf://{self.name}@{self.revision}"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A folder that fsspec can read."""

    url: str

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class RemoteVersion:
    """A version of a remote model: its name, and its files with their sizes in bytes."""

    name: str
    files: Mapping[str, int]

    def of(self, parts: Parts) -> "RemoteVersion":
        """Returns the version with only the wanted files."""
        files = {name: size for name, size in self.files.items() if is_wanted(name, parts)}
        return RemoteVersion(self.name, files)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def parse_source(text: str) -> Directory | HubModel | StoredModel:
    """Parses the name of a model. Raises ConfigError."""
    found = _SCHEME.fullmatch(text)
    if found is None:
        return Directory(Path(text))
    scheme, rest = found.groups()
    if scheme == "hf":
        name, at, revision = rest.partition("@")
        if not _HUB_NAME.fullmatch(name) or (at and not revision):
            raise ConfigError(f"{text}: a model of a hub is named hf://org/name[@revision]")
        return HubModel(name, revision) if at else HubModel(name)
    if not rest.strip("/"):
        raise ConfigError(f"{text}: names no folder")
    return StoredModel(text.rstrip("/"))


def is_remote(text: str) -> bool:
    """Returns true if the model must be fetched, which may take hours."""
    return _SCHEME.fullmatch(text) is not None


def is_wanted(name: str, parts: Parts) -> bool:
    """Returns true if Baton reads this file of a model's folder."""
    patterns = TEXT if parts is Parts.TEXT else WEIGHTS + TEXT
    return (
        "/" not in name
        and any(fnmatch(name, pattern) for pattern in patterns)
        and not any(fnmatch(name, pattern) for pattern in UNUSED)
    )


def default_cache(environment: Mapping[str, str]) -> Path:
    """Returns BATON_CACHE, or a folder in the user's cache directory."""
    chosen = environment.get("BATON_CACHE")
    if chosen:
        return Path(chosen)
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def local_model(
    source: str, *, cache: Path, parts: Parts = Parts.ALL, report: Report = lambda _: None
) -> Path:
    """Returns the model's directory after downloading it if necessary. Has no deadline.

    Raises ConfigError if the source cannot be reached, or lacks the model, its revision or its
    config.json. The same if a package is missing, space runs out, or other users can write to the
    cache.
    """
    match parse_source(source):
        case Directory(path):
            directory = _directory(path)
            _require_config(source, {entry.name for entry in directory.iterdir()})
            return directory
        case HubModel() | StoredModel() as model:
            remote = _Hub(model) if isinstance(model, HubModel) else _Store(model)
            top = cache.resolve()
            folder = remote.fetch(top, parts, report)
            require_trusted_files(folder, top=top)
            return folder


def pinned(source: str) -> str:
    """Returns a name that later changes do not affect: a branch or tag becomes its commit.

    Directories become absolute. Models in object stores have no versions and stay as they are.
    Raises ConfigError.
    """
    match parse_source(source):
        case Directory(path):
            return str(_directory(path))
        case HubModel(name, revision) as model:
            if _COMMIT.fullmatch(revision):
                return source
            return str(HubModel(name, _Hub(model).version(folder=None).name))
        case StoredModel(url):
            return url


def name_of(source: str) -> str:
    """Returns the default name of the model in the API."""
    match parse_source(source):
        case Directory(path):
            return path.name
        case HubModel(name, _):
            return name
        case StoredModel(url):
            return url.rpartition("/")[2]


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"{path}: no such model directory{_hub_hint(str(path))}")
    return path.resolve()


def _hub_hint(text: str) -> str:
    """Says how to name a model of a hub, if the text has the form of its name."""
    name, at, revision = text.partition("@")
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        return ""
    return f"; if this is the name of a model on a hub, say hf://{name}{at}{revision}"


class _Hub:
    """Downloads from a hub: $HF_ENDPOINT, with $HF_TOKEN or the token of `hf auth login`."""

    def __init__(self, model: HubModel) -> None:
        self._model = model
        self._library = _import("huggingface_hub", str(model), extra="hub")
        self._endpoint = os.environ.get("HF_ENDPOINT") or None

    def fetch(self, cache: Path, parts: Parts, report: Report) -> Path:
        folder = cache / "hub" / self._model.name.replace("/", "--")
        if _COMMIT.fullmatch(self._model.revision):
            there = folder / _folder_name(self._model.revision, parts)
            if there.is_dir():
                return there
        version = self.version(folder).of(parts)
        return _stored(str(self._model), version, folder, parts, report, download=self._download)

    def version(self, folder: Path | None) -> RemoteVersion:
        """Asks for the revision's commit. `folder` may hold other versions of the model."""
        library, model = self._library, self._model
        try:
            info = library.HfApi(endpoint=self._endpoint).model_info(
                model.name, revision=model.revision, files_metadata=True
            )
        except library.errors.GatedRepoError as error:
            raise ConfigError(
                f"{model}: its authors must grant access first; then set HF_TOKEN"
            ) from error
        except library.errors.RevisionNotFoundError as error:
            raise ConfigError(f"{model}: there is no revision {model.revision!r}") from error
        except library.errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"{model}: the hub has no such public model; set HF_TOKEN if it is private"
            ) from error
        # Other failures have the types of its HTTP library, which differs between major versions.
        except Exception as error:
            why = f"{_one_line(error)}{_cached_commits(folder, model)}"
            raise ConfigError(f"{model}: the hub cannot be asked: {why}") from error
        return RemoteVersion(info.sha, {file.rfilename: file.size or 0 for file in info.siblings})

    def _download(self, version: RemoteVersion, to: Path) -> None:
        self._library.snapshot_download(
            self._model.name,
            revision=version.name,
            local_dir=to,
            allow_patterns=[_literal(name) for name in version.files],
            endpoint=self._endpoint,
        )
        shutil.rmtree(to / ".cache", ignore_errors=True)  # its notes on complete files


class _Store:
    """Downloads through fsspec, with the credentials of the store's own tools."""

    def __init__(self, model: StoredModel) -> None:
        self._model = model
        fsspec = _import("fsspec", str(model), extra="hub")
        scheme = model.url.partition(":")[0]
        try:
            self._files, self._root = fsspec.core.url_to_fs(model.url)
        except ImportError as error:
            extra = scheme if scheme in ("s3", "gs") else "hub"
            raise _missing(str(model), str(error), extra) from error
        except ValueError as error:
            raise ConfigError(f"{model}: {_one_line(error)}") from error
        except Exception as error:  # a type of the store's library
            self._refuse(error)

    def fetch(self, cache: Path, parts: Parts, report: Report) -> Path:
        version = self._version()
        folder = cache / "store" / _slug(self._model.url)
        return _stored(
            str(self._model), version.of(parts), folder, parts, report, download=self._download
        )

    def _version(self) -> RemoteVersion:
        try:
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError as error:
            raise ConfigError(f"{self._model}: there is no such folder") from error
        except Exception as error:  # a type of the store's library
            self._refuse(error)
        entries = [entry for entry in found if entry["type"] == "file"]
        files = {entry["name"].rpartition("/")[2]: entry["size"] for entry in entries}
        wanted = {name: size for name, size in files.items() if is_wanted(name, Parts.ALL)}
        told = sorted((e["name"], e["size"], _version_of(e)) for e in entries)
        seen = [each for each in told if each[0].rpartition("/")[2] in wanted]
        return RemoteVersion(hashlib.sha256(repr(seen).encode()).hexdigest()[:40], wanted)

    def _download(self, version: RemoteVersion, to: Path) -> None:
        for name in version.files:
            self._files.get_file(f"{self._root.rstrip('/')}/{name}", str(to / name))

    def _refuse(self, error: Exception) -> NoReturn:
        raise ConfigError(f"{self._model}: cannot be read: {_one_line(error)}") from error


def _stored(
    source: str,
    version: RemoteVersion,
    folder: Path,
    parts: Parts,
    report: Report,
    *,
    download: Callable[[RemoteVersion, Path], None],
) -> Path:
    """Returns the folder of that version, downloaded if necessary. `folder` is cache/kind/name."""
    _require_config(source, version.files)
    there = folder / _folder_name(version.name, parts)
    if there.is_dir():
        return there
    partial = there.with_name(f"{there.name}.partial")
    with _storing(source, folder):
        make_folder(folder, top=folder.parent.parent, mode=0o755)
    with _storing(source, folder), _locked(there.with_name(f"{there.name}.lock")):
        if there.is_dir():
            return there
        partial.mkdir(mode=0o755, exist_ok=True)
        _require_space(source, version.num_bytes - _size_of(partial), folder)
        report(f"downloading {source}, {version.num_bytes / 2**20:.0f} MiB")
        try:
            download(version, partial)
        except Exception as error:  # a type of the source's library
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            raise ConfigError(f"{source}: the download failed: {_one_line(error)}") from error
        if odd := [name for name in version.files if not _is_whole(partial / name, version)]:
            raise ConfigError(f"{source}: {odd[0]} is missing or has another size than announced")
        for name in version.files:
            (partial / name).chmod(0o644)  # not writable by others, whatever the umask
        partial.rename(there)
    return there


def _is_whole(path: Path, version: RemoteVersion) -> bool:
    return path.is_file() and path.stat().st_size == version.files[path.name]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock among all processes that share the cache. It ends with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _storing(source: str, folder: Path) -> Iterator[None]:
    """Turns an OSError of the cache into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{source}: cannot be stored in {folder}: {error.strerror}") from error


def _require_space(source: str, num_bytes: int, folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free_bytes:
        raise ConfigError(
            f"{source}: {num_bytes / 2**30:.1f} GiB more are needed, and {folder} has"
            f" {free_bytes / 2**30:.1f} GiB left (BATON_CACHE sets another folder)"
        )


def _require_config(source: str, names: Any) -> None:
    if CONFIG not in names:
        raise ConfigError(f"{source}: has no {CONFIG}, so it is no model that transformers reads")


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _folder_name(version: str, parts: Parts) -> str:
    return version if parts is Parts.ALL else f"{version}-text"


def _slug(url: str) -> str:
    """Returns a readable folder name that is unique for the URL."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', url)[-80:].strip('-.')}-{digest}"


def _version_of(entry: Mapping[str, Any]) -> str:
    """Returns the field that changes with a file's contents. Its name differs among stores."""
    keys = ("ETag", "etag", "generation", "md5Hash", "LastModified", "mtime", "created")
    return next((f"{key}={entry[key]}" for key in keys if entry.get(key) is not None), "")


def _cached_commits(folder: Path | None, model: HubModel) -> str:
    """Names the commits that are available without the hub."""
    if folder is None:
        return ""
    commits = [path.name for path in sorted(folder.glob("*")) if _COMMIT.fullmatch(path.name)]
    if not commits:
        return ""
    return f"; stored here is {', '.join(f'hf://{model.name}@{commit}' for commit in commits)}"


def _literal(name: str) -> str:
    """Returns a pattern that matches this name only."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _import(package: str, source: str, *, extra: str) -> Any:
    try:
        import_module(f"{package}.errors" if package == "huggingface_hub" else f"{package}.core")
        return import_module(package)
    except ImportError as error:
        raise _missing(source, str(error), extra) from error


def _missing(source: str, why: str, extra: str) -> ConfigError:
    return ConfigError(f"{source}: needs `pip install 'baton-serve[{extra}]'` ({why})")


def _one_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().splitlines()[0].rstrip(".")

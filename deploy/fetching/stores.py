"""Fetches models from object stores by the package fsspec."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from deploy.fetching.cache import (
    FOLDERS,
    Parts,
    RemoteVersion,
    Report,
    is_wanted,
    library,
    missing,
    one_line,
    stored,
)
from deploy.fetching.names import StoredModel
from engine.errors import ConfigError


class ObjectStore:
    """Downloads by fsspec, with the credentials that the store's own tools use."""

    def __init__(self, model: StoredModel) -> None:
        self._model = model
        fsspec = library("fsspec", str(model), extra="hub")
        scheme = model.url.partition(":")[0]
        try:
            self._files, self._root = fsspec.core.url_to_fs(model.url)
        except ImportError as error:
            extra = scheme if scheme in ("s3", "gs") else "hub"
            raise missing(str(model), str(error), extra) from error
        except ValueError as error:
            raise ConfigError(f"{model}: {one_line(error)}") from error
        except Exception as error:  # a type of the store's library
            self._refuse(error)

    def fetch(self, cache: Path, parts: Parts, report: Report) -> Path:
        """Returns the model's folder, downloaded if necessary. Raises ConfigError."""
        version = self._version()
        folder = cache / "store" / _slug(self._model.url)
        return stored(
            str(self._model), version.of(parts), folder, parts, report, download=self._download
        )

    def _version(self) -> RemoteVersion:
        try:
            self._files.invalidate_cache()
            found = self._files.ls(self._root, detail=True)
            folders = [e["name"] for e in found if e["name"].rstrip("/").split("/")[-1] in FOLDERS]
            found += [each for name in folders for each in self._files.ls(name, detail=True)]
        except FileNotFoundError as error:
            raise ConfigError(f"{self._model}: there is no such folder") from error
        except Exception as error:  # a type of the store's library
            self._refuse(error)
        entries = [entry for entry in found if entry["type"] == "file"]
        files = {self._inner_name(entry["name"]): entry["size"] for entry in entries}
        wanted = {name: size for name, size in files.items() if is_wanted(name, Parts.ALL)}
        told = sorted((e["name"], e["size"], _version_of(e)) for e in entries)
        seen = [each for each in told if self._inner_name(each[0]) in wanted]
        return RemoteVersion(hashlib.sha256(repr(seen).encode()).hexdigest()[:40], wanted)

    def _inner_name(self, name: str) -> str:
        """Returns the path of a file relative to the model's folder."""
        return name.lstrip("/").removeprefix(self._root.strip("/") + "/")

    def _download(self, version: RemoteVersion, to: Path) -> None:
        for name in version.files:
            (to / name).parent.mkdir(mode=0o755, exist_ok=True)
            self._files.get_file(f"{self._root.rstrip('/')}/{name}", str(to / name))

    def _refuse(self, error: Exception) -> NoReturn:
        raise ConfigError(f"{self._model}: cannot be read: {one_line(error)}") from error


def _slug(url: str) -> str:
    """Returns a readable folder name that is unique for the URL."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', url)[-80:].strip('-.')}-{digest}"


def _version_of(entry: Mapping[str, Any]) -> str:
    """Returns a value that changes when the file's contents change.

    Stores report this value in different fields.
    """
    keys = ("ETag", "etag", "generation", "md5Hash", "LastModified", "mtime", "created")
    return next((f"{key}={entry[key]}" for key in keys if entry.get(key) is not None), "")

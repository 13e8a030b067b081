"""Fetches models from a hub by the package huggingface_hub."""

import os
import re
import shutil
from pathlib import Path

from deploy.fetching.cache import (
    Parts,
    RemoteVersion,
    Report,
    folder_name,
    library,
    one_line,
    stored,
)
from deploy.fetching.names import COMMIT, HubModel
from engine.errors import ConfigError


class Hub:
    """Downloads from the hub at $HF_ENDPOINT, with $HF_TOKEN or the token of `hf auth login`."""

    def __init__(self, model: HubModel) -> None:
        self._model = model
        self._library = library("huggingface_hub", str(model), extra="hub")
        self._endpoint = os.environ.get("HF_ENDPOINT") or None

    def fetch(self, cache: Path, parts: Parts, report: Report) -> Path:
        """Returns the model's folder, downloaded if necessary. Raises ConfigError."""
        folder = cache / "hub" / self._model.name.replace("/", "--")
        if COMMIT.fullmatch(self._model.revision):
            there = folder / folder_name(self._model.revision, parts)
            if there.is_dir():
                return there
        version = self.version(folder).of(parts)
        return stored(str(self._model), version, folder, parts, report, download=self._download)

    def version(self, folder: Path | None) -> RemoteVersion:
        """Queries the hub for the revision's commit.

        `folder` may contain other versions of the model.
        """
        hub, model = self._library, self._model
        try:
            info = hub.HfApi(endpoint=self._endpoint).model_info(
                model.name, revision=model.revision, files_metadata=True
            )
        except hub.errors.GatedRepoError as error:
            raise ConfigError(
                f"{model}: its authors must grant access first; then set HF_TOKEN"
            ) from error
        except hub.errors.RevisionNotFoundError as error:
            raise ConfigError(f"{model}: there is no revision {model.revision!r}") from error
        except hub.errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"{model}: the hub has no such public model; set HF_TOKEN if it is private"
            ) from error
        # Other errors have types of the HTTP library, which depends on huggingface_hub's version.
        except Exception as error:
            why = f"{one_line(error)}{_cached_commits(folder, model)}"
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
        # huggingface_hub's records of complete files.
        shutil.rmtree(to / ".cache", ignore_errors=True)


def _cached_commits(folder: Path | None, model: HubModel) -> str:
    """Returns a text that lists the commits available in the cache, without the hub."""
    if folder is None:
        return ""
    commits = [path.name for path in sorted(folder.glob("*")) if COMMIT.fullmatch(path.name)]
    if not commits:
        return ""
    return f"; stored here is {', '.join(f'hf://{model.name}@{commit}' for commit in commits)}"


def _literal(name: str) -> str:
    """Returns a glob pattern that matches only this name."""
    return re.sub(r"([*?[])", r"[\1]", name)

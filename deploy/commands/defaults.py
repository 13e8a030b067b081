"""Defaults of commands: the bundled model and one worker of each role. Imports little."""

from pathlib import Path

from engine.config import ModelConfig, PoolsConfig
from engine.control import Pools

_BUNDLED = Path(__file__).parents[2] / "engine" / "model" / "bundled"
BUNDLED_MODEL, BUNDLED_DRAFT = _BUNDLED / "target", _BUNDLED / "draft"


def pools_of(config: PoolsConfig | ModelConfig) -> Pools:
    """Returns the configured numbers of workers. Raises ConfigError if they cannot serve."""
    default = 0 if config.mixed else 1
    return Pools(
        prefill=default if config.prefill is None else config.prefill,
        decode=default if config.decode is None else config.decode,
        mixed=config.mixed,
    ).check()

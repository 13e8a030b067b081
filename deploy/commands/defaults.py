"""What is served where nothing is said: for commands, which must start at once."""

from pathlib import Path

from engine.config import PoolsConfig
from engine.control import Pools

_BUNDLED = Path(__file__).parents[2] / "engine" / "model" / "bundled"
BUNDLED_MODEL, BUNDLED_DRAFT = _BUNDLED / "target", _BUNDLED / "draft"


def pools_of(config: PoolsConfig) -> Pools:
    """What is wanted at first. Raises ConfigError if it could not serve anything."""
    default = 0 if config.mixed else 1
    return Pools(
        prefill=default if config.prefill is None else config.prefill,
        decode=default if config.decode is None else config.decode,
        mixed=config.mixed,
    ).check()

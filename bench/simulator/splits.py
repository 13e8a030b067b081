"""Splits of workers into pools, as options name them."""

from bench.common.command import values_of
from engine.errors import ConfigError


def splits_of(text: str) -> tuple[tuple[int, int], ...]:
    """Returns the (prefill, decode) pairs in a text such as "1+1,2+2". Raises ConfigError."""
    splits = values_of("--splits", text, _split, "PREFILL+DECODE,…")
    if not splits or min(map(min, splits)) < 1:
        raise ConfigError("--splits: workers of both roles are needed")
    return splits


def _split(text: str) -> tuple[int, int]:
    prefill, decode = text.split("+")
    return int(prefill), int(decode)

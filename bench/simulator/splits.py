"""Splits of workers into pools, as options name them."""

from engine.errors import ConfigError


def splits_of(text: str) -> tuple[tuple[int, int], ...]:
    """Returns the (prefill, decode) pairs in a text such as "1+1,2+2". Raises ConfigError."""
    try:
        parts = [part.split("+") for part in text.split(",")]
        splits = tuple((int(prefill), int(decode)) for prefill, decode in parts)
    except ValueError as error:
        raise ConfigError(f"--splits: {text!r} is not PREFILL+DECODE,…") from error
    if min(min(split) for split in splits) < 1:
        raise ConfigError("--splits: workers of both roles are needed")
    return splits

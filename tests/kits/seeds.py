"""The seeds of random runs: more of them when `make fuzz` searches."""

from hypothesis import settings


def seeds(per_hundred: int) -> range:
    """Returns `num` seeds for every hundred examples of the hypothesis profile."""
    return range(settings().max_examples * per_hundred // 100)

"""The seeds of random runs. `make fuzz` uses more seeds."""

from hypothesis import settings


def seeds(per_hundred: int) -> range:
    """Returns `num` seeds for every hundred examples of the hypothesis profile."""
    return range(settings().max_examples * per_hundred // 100)

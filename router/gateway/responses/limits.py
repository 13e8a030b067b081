"""Bounds of what a gateway keeps and runs of responses."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResponseLimits:
    """How much is kept, and for how long after its last use."""

    max_kept: int = 20_000
    max_kept_bytes: int = 256 * 2**20
    max_kept_of_key: int = 5_000
    max_kept_bytes_of_key: int = 64 * 2**20
    keep_s: float = 30 * 86_400.0
    max_events_bytes: int = 8 * 2**20  # of one response
    max_background: int = 256  # at once, in each process

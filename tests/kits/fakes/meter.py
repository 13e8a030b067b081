"""A memory meter of a device that returns fixed numbers."""

from collections.abc import Callable

from engine.model.profiling import MemoryUse


class FakeMeter:
    """A meter with fixed numbers that counts how often it measured a call."""

    def __init__(self, use: MemoryUse, peak_bytes: int) -> None:
        self.use = use
        self.peak = peak_bytes
        self.num_calls = 0

    def read(self) -> MemoryUse:
        return self.use

    def peak_bytes(self, call: Callable[[], object]) -> int:
        call()
        self.num_calls += 1
        return self.peak

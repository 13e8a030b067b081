"""Measures this machine's peaks, with as many threads as an engine has.

    read_bytes_per_s    memory of a given size is read repeatedly; like an engine's weights, a part
                        of it may be read from caches
    fp32_flops_per_s    multiply-adds of full vectors in registers
    int8_flops_per_s    byte products in registers, by AMX if the processor has it
    bf16_flops_per_s    bf16 products in AMX's registers; 0 without it

`src/peaks.cpp` has the loops. Each result is the median of a few runs. Clocks change with the load
of all cores and with neighbours on the same machine, so ceilings are measured right before and
after each job. The probe runs in its own process and takes commands like an engine:

    python -m bench.engine.ceilings THREADS
"""

import ctypes
import mmap
import statistics
import sys
from collections.abc import Callable

from bench.peers.driver import drive, stdout_for_answers
from engine.native.library import library

MOST_READ_BYTES = 512 * 2**20  # more bytes than any cache holds
PAGE = 2**21
NUM_TIMES = 5
NUM_PASSES = 3
ROUNDS = {  # loop counts; each run takes some 4 ms
    "peaks_fp32": 150_000,
    "peaks_int8": 150_000,
    "peaks_int8_tiles": 60_000,
    "peaks_bf16_tiles": 60_000,
}
AHEAD_BYTES = (0, 4096)  # prefetch distances in bytes; the fastest one is used


class CeilingProbe:
    """The compiled loops and the memory that they read. Made once and reused."""

    def __init__(self, threads: int) -> None:
        """Compiles the loops. Raises BuildError without a C++ compiler, or on a processor other
        than x86-64.
        """
        self.facts: dict[str, object] = {"version": "peaks"}
        self._threads = threads
        self._library = library()
        self._memory = mmap.mmap(-1, MOST_READ_BYTES + PAGE)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        view = ctypes.c_uint8.from_buffer(self._memory)
        self._address = ctypes.addressof(view)
        self._address += -self._address % PAGE
        ctypes.memset(self._address, 1, MOST_READ_BYTES)

    def measure(self, read_bytes: int) -> dict[str, object]:
        """Returns the measured peaks, by the names above. Reads `num_bytes` of memory."""
        return {
            "read_bytes_per_s": self._read(min(read_bytes, MOST_READ_BYTES)),
            "fp32_flops_per_s": self._peak("peaks_fp32"),
            "int8_flops_per_s": max(self._peak("peaks_int8"), self._peak("peaks_int8_tiles")),
            "bf16_flops_per_s": self._peak("peaks_bf16_tiles"),
        }

    def _peak(self, name: str) -> float:
        loop: Callable[[int, int], float] = getattr(self._library, name)
        return statistics.median(loop(self._threads, ROUNDS[name]) for _ in range(NUM_TIMES))

    def _read(self, num_bytes: int) -> float:
        read = self._library.peaks_read
        rates: dict[int, list[float]] = {ahead: [] for ahead in AHEAD_BYTES}
        read(self._threads, self._address, num_bytes, 0)  # loads the memory into the caches
        for _ in range(NUM_PASSES):
            for ahead, found in rates.items():
                found.append(read(self._threads, self._address, num_bytes, ahead))
        return max(statistics.median(found) for found in rates.values())


def main() -> None:
    """Answers `measure` commands until standard input is closed."""
    out = stdout_for_answers()
    drive(lambda: CeilingProbe(threads=int(sys.argv[1])), sys.stdin, out)


if __name__ == "__main__":
    main()

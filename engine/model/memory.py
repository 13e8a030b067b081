"""Memory on a CPU for large tensors."""

import contextlib
import mmap

import torch

ALIGNMENT = 64
HUGE_PAGE = 2**21


def aligned_bytes(num_bytes: int) -> torch.Tensor:
    """Zeros that start on a cache line, or on a huge page if they fill one and the kernel has them.

    Without huge pages, every few KiB of a long context need a walk through the page tables.
    """
    if num_bytes < HUGE_PAGE:
        alignment = ALIGNMENT
        raw = torch.zeros(num_bytes + alignment, dtype=torch.uint8)
    else:
        alignment = HUGE_PAGE
        memory = mmap.mmap(-1, num_bytes + alignment)
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(memory, dtype=torch.uint8)
    start = -raw.data_ptr() % alignment
    return raw[start : start + num_bytes]

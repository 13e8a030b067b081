"""Memory on a CPU for large tensors, asynchronous copies from the host to a device, and a limit on
torch's threads, which would compete with the kernels' team of threads.
"""

import contextlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

ALIGNMENT = 64
HUGE_PAGE = 2**21
CHUNK = 16 * HUGE_PAGE  # bytes; pages that were never written use no memory


def aligned_bytes(num_bytes: int) -> torch.Tensor:
    """Allocates zeros that start on a cache line. They start on a huge page if they fill one and
    Linux has huge pages.

    Without huge pages, reading a long context walks the page tables every few KiB.
    """
    if num_bytes < HUGE_PAGE:
        alignment = ALIGNMENT
        raw = torch.zeros(num_bytes + alignment, dtype=torch.uint8)
    else:
        alignment = HUGE_PAGE
        memory = mmap.mmap(-1, num_bytes + alignment)
        with contextlib.suppress(OSError):  # Linux may be built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(memory, dtype=torch.uint8)
    start = -raw.data_ptr() % alignment
    return raw[start : start + num_bytes]


class Pieces:
    """Divides large chunks of memory into pieces, so that small pieces share huge pages.

    The system gets a chunk's memory back when the last piece of the chunk is freed.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """Allocates zeros that start on a cache line."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._rest):
            self._rest = aligned_bytes(max(size, CHUNK))
        piece, self._rest = self._rest[:num_bytes], self._rest[size:]
        return piece


def brought(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies an array to `device`. A copy to a GPU uses pinned memory, which torch frees after the
    copy.

    A copy from unpinned memory would first wait for all work that is queued on the GPU.
    """
    memory = held(array, pinned=device.type == "cuda")
    return memory.to(device, non_blocking=True)


def held(array: np.ndarray, *, pinned: bool) -> torch.Tensor:
    """Returns a copy of an array in host memory, which is pinned on request."""
    memory = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name), pin_memory=pinned)
    memory.numpy()[...] = array
    return memory


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Returns a context in which torch computes with one thread, between jobs of the team of
    threads.

    torch's threads would spin against the threads of the team. Also, where threads divide a tensor,
    functions such as silu give the elements next to the cut other last bits. Results would then
    depend on the number of tokens in a batch.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

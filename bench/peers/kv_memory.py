"""Memory with scattered blocks for the movers of `baton bench kv`; stdlib and numpy only.

Movers import this file in Baton's own Python, and peers' scripts import it in their own Python.
"""

import mmap
from hashlib import blake2b
from typing import Any

import numpy as np


class PoolMemory:
    """Anonymous memory, in huge pages if the system allows. Every page is written once.

    `array` is [num_bytes] uint8; `blocks` is a view of it, [num_blocks, block_bytes].
    """

    def __init__(self, num_bytes: int) -> None:
        mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        self.array: Any = np.frombuffer(mapped, np.uint8)
        self.array[:] = 0

    @property
    def address(self) -> int:
        """Returns the address of the first byte."""
        return int(self.array.ctypes.data)

    def blocks(self, block_bytes: int) -> Any:
        """Returns the whole blocks that fit, as rows."""
        num_blocks = len(self.array) // block_bytes
        return self.array[: num_blocks * block_bytes].reshape(num_blocks, block_bytes)


def fill(array: Any, seed: int) -> None:
    """Fills the memory with random bytes: all blocks differ from each other and from blocks of
    another seed.
    """
    flat = array.reshape(-1)
    rng = np.random.Generator(np.random.SFC64(seed))
    flat[:] = np.frombuffer(rng.bytes(flat.nbytes), np.uint8)


def digest(rows: Any, blocks: list[int]) -> str:
    """Hashes the bytes of these blocks, in this order."""
    hashed = blake2b(digest_size=16)
    for block in blocks:
        hashed.update(rows[block])
    return hashed.hexdigest()


class TransferEnd:
    """One end of a transfer, with the commands that are the same for nearly all movers."""

    def __init__(self) -> None:
        self.memory: Any = None  # PoolMemory, after the end has been opened

    def rows(self, end: str, block_bytes: int) -> Any:
        """Returns the blocks of the `source` or the `sink`, [num_blocks, block_bytes] uint8."""
        return self.memory.blocks(block_bytes)

    def offer(self, block_bytes: int, pulls: list[list[int]], way: str) -> dict[str, object]:
        """Prepares the source for these pulls. By default, nothing needs to be prepared."""
        return {"offers": [None] * len(pulls)}

    def digest(self, end: str, block_bytes: int, blocks: list[int]) -> dict[str, object]:
        """Hashes these blocks of the source or the sink, in this order."""
        return {"digest": digest(self.rows(end, block_bytes), blocks)}

    def wipe(self, block_bytes: int, blocks: list[int]) -> dict[str, object]:
        """Sets these blocks of the sink to zero."""
        self.rows("sink", block_bytes)[blocks] = 0
        return {}

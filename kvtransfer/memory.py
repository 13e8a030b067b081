"""The bytes of a worker's KV pool, and other workers' pools mapped from the same host.

A pool in host memory is a memfd: anonymous shared memory with no name in any file system. So a
process that is killed at any moment leaves no file behind. Another process of the host opens the
memfd through /proc/PID/fd/FD, and checks its inode and size, in case the process id was reused.
Pools are sealed against shrinking, and only sealed memory is mapped: reading a page that no longer
exists kills the process (SIGBUS). `kvtransfer.device` has pools in a GPU's memory.
"""

import ctypes
import mmap
import os
from dataclasses import dataclass
from fcntl import F_ADD_SEALS, F_GET_SEALS, F_SEAL_SHRINK, fcntl
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.config import Transport
from engine.errors import BatonError
from engine.layout import ALIGNMENT_BYTES
from kvtransfer.messages import ShmOffer

HUGE_PAGE_BYTES = 2 * 2**20
MADV_POPULATE_WRITE = 23  # constant of linux/mman.h, since Linux 5.14
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Blocks = npt.NDArray[np.uint8]  # shape [num_blocks, block_bytes]


class ShmUnavailable(BatonError):
    """A pool cannot be mapped into this process; the message says why."""


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory, up to a bound, instead of returning it to the system.

    ZeroMQ allocates a message for each incoming frame. By default glibc returns such large
    allocations to the system, and the next frame gets new zeroed pages. That costs a tenth of a
    pull's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only glibc has this function
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the maximum that glibc accepts, in bytes
        mallopt(M_TRIM_THRESHOLD, 128 * 2**20)


def boot_id() -> str:
    """Returns an id of this host that lasts until the host restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class Region:
    """The location of a pool's memory. `kind` is DRAM, or VRAM of device `device_id`."""

    address: int
    num_bytes: int
    kind: str = "DRAM"
    device_id: int = 0


class Pool(Protocol):
    """Memory of KV blocks, which remains valid after the endpoint that uses it is closed."""

    num_blocks: int
    block_bytes: int

    @property
    def blocks(self) -> Blocks | None:
        """The pool as [num_blocks, block_bytes] bytes; None if the host cannot reach the memory."""
        ...

    def region(self) -> Region:
        """Returns the location of the pool in this process."""
        ...

    def offer(self) -> ShmOffer | None:
        """Returns the data that another process needs to map the pool; None if no process can."""
        ...


class PrivatePool:
    """A pool's memory for one process only, in huge pages: faster to read, write and register."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        assert block_bytes % ALIGNMENT_BYTES == 0
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._map: mmap.mmap | None = None

    def open(self) -> None:
        """Allocates the memory; pages are zero until written."""
        num_bytes = _in_huge_pages(self.num_blocks * self.block_bytes)
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)  # takes effect if the system allows huge pages

    @property
    def blocks(self) -> Blocks:
        """The pool as [num_blocks, block_bytes] bytes."""
        return _rows(self._map, self.num_blocks, self.block_bytes)

    def region(self) -> Region:
        """Returns the location of the pool in this process."""
        blocks = self.blocks
        return Region(blocks.ctypes.data, blocks.nbytes)

    def offer(self) -> None:
        """Returns None: no other process can map the pool."""

    def close(self) -> None:
        """Releases the memory, which is freed with its last view."""
        self._map = None


class SharedMemory:
    """Memory without a name, which processes of this host can map by its descriptor.

    The memory is freed once no process has the descriptor open or the memory mapped.
    """

    def __init__(self, fd: int, mapped: mmap.mmap, page_bytes: int) -> None:
        self.fd = fd
        self.mapped = mapped
        self.page_bytes = page_bytes

    @classmethod
    def make(cls, num_bytes: int) -> "SharedMemory":
        """Allocates zeroed memory, in huge pages if the system has reserved some.

        Raises OSError.
        """
        try:
            return cls._take(_in_huge_pages(num_bytes), os.MFD_HUGETLB, HUGE_PAGE_BYTES)
        except OSError:  # the usual case: no huge pages are reserved
            try:
                memory = cls._take(num_bytes, 0, mmap.PAGESIZE)
            except OSError as error:
                what = f"the KV memory of {num_bytes / 2**20:.0f} MiB"
                raise OSError(error.errno, error.strerror, what) from error
            # huge pages, if the setting `shmem_enabled` allows them
            memory.mapped.madvise(mmap.MADV_HUGEPAGE)
            return memory

    @classmethod
    def in_small_pages(cls, num_bytes: int) -> "SharedMemory":
        """Allocates a small amount of zeroed memory. Raises OSError."""
        return cls._take(num_bytes, 0, mmap.PAGESIZE)

    @classmethod
    def of(cls, fd: int) -> "SharedMemory":
        """Maps memory that another process made. Takes ownership of its descriptor. Raises
        OSError.
        """
        return cls(fd, mmap.mmap(fd, os.fstat(fd).st_size), mmap.PAGESIZE)

    @classmethod
    def _take(cls, num_bytes: int, flags: int, page_bytes: int) -> "SharedMemory":
        fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK)
            mapped = mmap.mmap(fd, num_bytes)  # fails if huge pages cannot be reserved
        except OSError:
            os.close(fd)
            raise
        return cls(fd, mapped, page_bytes)

    def close(self) -> None:
        """Closes the descriptor. The memory is freed with its last view."""
        os.close(self.fd)


class SharedPool:
    """A pool's memory, made by `open` and readable by other processes of this host."""

    def __init__(
        self, num_blocks: int, block_bytes: int, memory: SharedMemory | None = None
    ) -> None:
        """`memory` must have room for these blocks. Without `memory`, `open` allocates the pool."""
        assert block_bytes % ALIGNMENT_BYTES == 0
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._memory = memory

    def open(self) -> None:
        """Allocates the memory, unless `__init__` was given memory. Raises OSError."""
        if self._memory is None:
            self._memory = SharedMemory.make(self.num_blocks * self.block_bytes)

    @property
    def page_bytes(self) -> int:
        """The size of the memory's pages."""
        return mmap.PAGESIZE if self._memory is None else self._memory.page_bytes

    @property
    def _map(self) -> mmap.mmap | None:
        return None if self._memory is None else self._memory.mapped

    @property
    def blocks(self) -> Blocks:
        """The pool as [num_blocks, block_bytes] bytes."""
        return _rows(self._map, self.num_blocks, self.block_bytes)

    def region(self) -> Region:
        """Returns the location of the pool in this process."""
        blocks = self.blocks
        return Region(blocks.ctypes.data, blocks.nbytes)

    def offer(self) -> ShmOffer:
        """Returns the data that another process needs to map this pool."""
        assert self._memory is not None, "open() first"
        return shm_offer(self._memory)

    def close(self) -> None:
        """Closes the descriptor. The memory is freed with its last view."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def shm_offer(memory: SharedMemory) -> ShmOffer:
    """Returns the data that another process needs to map this memory."""
    stat = os.fstat(memory.fd)
    return ShmOffer(boot_id(), os.getpid(), memory.fd, stat.st_ino, stat.st_size)


def address_of(mapped: mmap.mmap) -> int:
    """Returns the address of mapped memory."""
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


def map_offer(offer: ShmOffer, num_blocks: int, block_bytes: int) -> Blocks:
    """Maps another worker's pool, read-only. Raises ShmUnavailable."""
    if offer.boot_id != boot_id():
        raise ShmUnavailable("source is on another host")
    num_bytes = num_blocks * block_bytes
    # the memory may be larger than all blocks together
    surplus_bytes = HUGE_PAGE_BYTES + block_bytes
    if num_blocks < 1 or not num_bytes <= offer.num_bytes < num_bytes + surplus_bytes:
        raise ShmUnavailable("offered size does not match the layout")
    try:
        # In another PID namespace (a container) the path may name an unrelated process's pipe.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", flags)
    except OSError as error:
        raise ShmUnavailable(f"cannot open the source's memory: {error.strerror}") from error
    try:
        stat = os.fstat(fd)
        if (stat.st_ino, stat.st_size) != (offer.inode, offer.num_bytes):
            raise ShmUnavailable("the source's memory is gone")
        if not fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK:
            raise ShmUnavailable("the source's memory may shrink")
        mapped = mmap.mmap(fd, offer.num_bytes, prot=mmap.PROT_READ)
    # ValueError: the memory became smaller before it was sealed
    except (OSError, ValueError) as error:
        raise ShmUnavailable(f"cannot map the source's memory: {error}") from error
    finally:
        os.close(fd)
    return _rows(mapped, num_blocks, block_bytes)


def touch(blocks: Blocks, block: int) -> bool:
    """Makes the system allocate a block's pages. Their contents do not change.

    Without this, the first write to a page waits for its allocation, which takes four times as long
    as a copy of the page. Other threads run during the call. Returns False if the system cannot
    allocate pages in advance.
    """
    num_bytes = blocks.shape[1]
    address = blocks.ctypes.data + block * blocks.strides[0]
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_madvise(begin, address + num_bytes - begin, MADV_POPULATE_WRITE) == 0)


def host_pool(num_blocks: int, block_bytes: int, transport: Transport) -> PrivatePool | SharedPool:
    """Returns a pool for that transport, in shared memory only if other processes may map it."""
    may_share = transport in (Transport.AUTO, Transport.SHM)
    return (SharedPool if may_share else PrivatePool)(num_blocks, block_bytes)


def _in_huge_pages(num_bytes: int) -> int:
    """Returns `num_bytes`, rounded up to whole huge pages."""
    return -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _rows(mapped: mmap.mmap | None, num_blocks: int, block_bytes: int) -> Blocks:
    """Returns the first bytes of mapped memory as blocks."""
    assert mapped is not None, "open() first"
    flat = np.frombuffer(mapped, np.uint8, count=num_blocks * block_bytes)
    return flat.reshape(num_blocks, block_bytes)

"""The files of one identity: a table of headers, and slabs of slots.

    directory/headers            128 bytes a slot, see `format`
    directory/slab-00000 …       `slab_slots` slots each; the last slab may have fewer

Files are allocated before use, slab by slab. So a full disk is detected here and not in the middle
of a write. If a whole slab does not fit, the part that fits is allocated now, and the rest once
there is room. All files are opened relative to a descriptor of the directory, which is also locked
(flock). So two processes never use one directory, and a removed directory gets no new files.
"""

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.errors import BatonError
from engine.messages import HASH_BYTES
from kvtransfer.store.disk.format import HEADER, HEADER_BYTES, DiskGeometry, Headers

SLAB_BYTES = 1 << 30  # size of a slab, unless a single block is larger
LEAVES_BYTES = 16 << 20  # bytes that the store leaves free on a full disk
# full disk, exceeded quota, exceeded limit of file size
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TABLE_NAME = "headers"
_SLAB_NAME = re.compile(r"slab-(\d{5})")
_IDENTITY_NAME = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700  # private, since KV reveals what users wrote
_PIECE = 1 << 13  # number of headers read at once, which fit the processor's cache


class DiskUnusable(BatonError):
    """A directory cannot store blocks. `reason` is an errno's name, for counters."""

    def __init__(self, directory: Path, error: OSError) -> None:
        super().__init__(f"{directory} cannot hold blocks: {error.strerror or error}")
        self.reason = errno.errorcode.get(error.errno or 0, "unknown")


class DirectoryInUse(BatonError):
    """A directory of blocks is open in another process, or in another part of this process."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory} is in use by another store")


def identity_directory(root: Path, identity: bytes) -> Path:
    """Returns the directory below `root` of an identity (16 bytes)."""
    return root / identity.hex()


def directories(root: Path) -> dict[Path, int]:
    """Returns the directories of identities below `root`, each with its size on disk in bytes.

    Directories that cannot be read are left out.
    """
    with suppress(OSError):
        return {path: _taken_bytes(path) for path in root.iterdir() if _is_identity(path)}
    return {}


def remove_directory(directory: Path) -> None:
    """Deletes an identity's files, and the directory unless it has other files.

    Raises DirectoryInUse, and DiskUnusable if files cannot be deleted.
    """
    try:
        directory_fd = _locked(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DiskUnusable(directory, error) from error
    try:
        for name in os.listdir(directory_fd):
            if name == TABLE_NAME or _SLAB_NAME.fullmatch(name):
                os.unlink(name, dir_fd=directory_fd)
        directory.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise DiskUnusable(directory, error) from error
    finally:
        os.close(directory_fd)


class NewSlots(NamedTuple):
    """Newly allocated slots of a slab. The slab may have had slots before."""

    slab_fd: int
    slots: int  # number of slots in the slab, including old slots
    is_new_slab: bool = False


class SlabFiles:
    """The open files of one identity. The table is `table_fd`; slab i is `slab_fds[i]`.

    `is_direct` is False if the file system has no direct I/O. Slabs then use the page cache.
    """

    def __init__(self, directory: Path, geometry: DiskGeometry) -> None:
        self.table_fd = -1
        self.slab_fds: list[int] = []
        self.is_direct = True
        self.directory = directory
        self.geometry = geometry
        self._directory_fd = -1
        self._last_slots = 0  # number of slots in the last slab

    def open(self) -> None:
        """Locks the directory and opens the table. Makes both if they are absent.

        Raises DirectoryInUse, DiskUnusable.
        """
        try:
            self.directory.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            self._directory_fd = _locked(self.directory)
            self.table_fd = os.open(TABLE_NAME, _FLAGS, _FILE_MODE, dir_fd=self._directory_fd)
        except OSError as error:
            self.close()
            raise DiskUnusable(self.directory, error) from error

    def close(self) -> None:
        """Closes all files. This also unlocks the directory."""
        for fd in (*self.slab_fds, self.table_fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self.table_fd = self._directory_fd = -1
        self.slab_fds, self._last_slots = [], 0

    @property
    def num_slots(self) -> int:
        """The number of allocated slots."""
        num_full = max(len(self.slab_fds) - 1, 0)
        return num_full * self.geometry.slab_slots + self._last_slots

    @property
    def is_whole(self) -> bool:
        """True if all slots are allocated."""
        return self.num_slots == self.geometry.max_slots

    def count_slabs(self) -> int:
        """Returns the number of slabs on disk: the last slab's index plus one. Raises OSError."""
        names = map(_SLAB_NAME.fullmatch, os.listdir(self._directory_fd))
        return max((int(name[1]) + 1 for name in names if name), default=0)

    def drop_slabs(self) -> None:
        """Deletes slabs that belonged to an earlier, larger store. Raises OSError."""
        geometry = self.geometry
        for index in range(-(-geometry.max_slots // geometry.slab_slots), self.count_slabs()):
            with suppress(FileNotFoundError):
                os.unlink(_slab_name(index), dir_fd=self._directory_fd)
        if os.fstat(self.table_fd).st_size > geometry.max_slots * HEADER_BYTES:
            os.ftruncate(self.table_fd, geometry.max_slots * HEADER_BYTES)

    def allocate(self) -> NewSlots:
        """Allocates the next slab with its part of the table, or the part of it that fits.

        If the last slab is incomplete, its missing slots are allocated first. Another thread may
        call this, so new slots count only once they are passed to `add`. Raises OSError.
        """
        geometry = self.geometry
        index, have = divmod(self.num_slots, geometry.slab_slots)
        most = min(geometry.slab_slots, geometry.max_slots - index * geometry.slab_slots)
        if have:
            fd = self.slab_fds[index]
            return NewSlots(fd, self._allocate_some(fd, index, have, most))
        fd = self._open_slab(_slab_name(index))
        there = min(os.fstat(fd).st_size // geometry.stride_bytes, most)
        try:
            try:
                slots = self._allocate_some(fd, index, there, most)
            except OSError as error:
                if not there or error.errno not in NO_ROOM:
                    raise
                slots = there  # number of slots that an earlier process allocated
                _allocate(self.table_fd, self._table_bytes(index, slots))
        except OSError:
            os.close(fd)
            raise
        return NewSlots(fd, slots, is_new_slab=True)

    def add(self, new: NewSlots) -> None:
        """Makes newly allocated slots usable."""
        if new.is_new_slab:
            self.slab_fds.append(new.slab_fd)
        self._last_slots = new.slots

    def _allocate_some(self, fd: int, index: int, have: int, most: int) -> int:
        """Allocates more slots of a slab. Returns its new number of slots. Raises OSError."""
        slots = most
        while True:
            before_bytes = os.fstat(fd).st_size
            try:
                _allocate(fd, slots * self.geometry.stride_bytes)
                _allocate(self.table_fd, self._table_bytes(index, slots))
            except OSError as error:
                os.ftruncate(fd, before_bytes)  # frees the bytes allocated before the error
                slots = have + self._fewer(slots - have)
                if error.errno not in NO_ROOM or slots == have:
                    raise
            else:
                return slots

    def _fewer(self, num_slots: int) -> int:
        """Returns the number of slots to try after `num_slots` did not fit; 0 if the disk is
        full.
        """
        found = os.fstatvfs(self._directory_fd)
        free_bytes = found.f_bavail * found.f_frsize - LEAVES_BYTES
        fitting = max(free_bytes, 0) // (self.geometry.stride_bytes + HEADER_BYTES)
        return fitting if fitting < num_slots else num_slots // 2  # statvfs does not show quotas

    def _table_bytes(self, index: int, slots: int) -> int:
        return (index * self.geometry.slab_slots + slots) * HEADER_BYTES

    def slab_place(self, slot: int) -> tuple[int, int]:
        """Returns the descriptor of the slot's slab, and the slot's offset there in bytes."""
        index, row = divmod(slot, self.geometry.slab_slots)
        return self.slab_fds[index], row * self.geometry.stride_bytes

    def headers(self) -> Iterator[tuple[int, Headers]]:
        """Yields the table in pieces, each with the number of its first slot. Raises OSError.

        Only allocated slots have an entry. If the table file is too short, some entries are
        missing.
        """
        for first in range(0, self.num_slots, _PIECE):
            wanted = min(_PIECE, self.num_slots - first) * HEADER_BYTES
            piece = os.pread(self.table_fd, wanted, first * HEADER_BYTES)
            num_headers = len(piece) // HEADER_BYTES
            yield first, np.frombuffer(piece, HEADER, num_headers)
            if len(piece) < wanted:
                return

    def empty_table(self) -> None:
        """Clears the headers of all slots. Raises OSError."""
        os.ftruncate(self.table_fd, 0)
        _allocate(self.table_fd, self.num_slots * HEADER_BYTES)

    def _open_slab(self, name: str) -> int:
        if self.is_direct:
            try:
                return os.open(name, _FLAGS | os.O_DIRECT, _FILE_MODE, dir_fd=self._directory_fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_direct = False
        return os.open(name, _FLAGS, _FILE_MODE, dir_fd=self._directory_fd)


def _slab_name(index: int) -> str:
    return f"slab-{index:05}"


def _allocate(fd: int, num_bytes: int) -> None:
    """Allocates disk space for at least `num_bytes` of a file. Raises OSError."""
    if num_bytes > os.fstat(fd).st_size:
        os.posix_fallocate(fd, 0, num_bytes)


def _locked(directory: Path) -> int:
    """Locks a directory; returns its descriptor. Raises DirectoryInUse, OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the directory was replaced after it was opened
        if os.fstat(fd).st_ino != directory.stat().st_ino:
            raise DirectoryInUse(directory)
    except BlockingIOError as error:
        os.close(fd)
        raise DirectoryInUse(directory) from error
    except (OSError, DirectoryInUse):
        os.close(fd)
        raise
    return fd


def _is_identity(path: Path) -> bool:
    return bool(_IDENTITY_NAME.fullmatch(path.name)) and stat.S_ISDIR(path.lstat().st_mode)


def _taken_bytes(directory: Path) -> int:
    return sum(file.lstat().st_blocks * 512 for file in directory.iterdir())

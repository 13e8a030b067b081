"""Keeps the latest log lines of a process in its deployment's log folder, within bounds.

Each service has a *ring*: at most two files, `NAME.GENERATION.log`. Each line is one JSON object,
appended in one call. When a file is full, the ring starts a file of the next generation, and
removes the older file. A restarted service appends to the ring of its earlier process, so the last
lines of a dead process are kept.

If a line cannot be written, for example on a full disk, the line is counted. The count is written
after the next successful line. No call but `write` itself may wait for a disk.
"""

import contextlib
import json
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from engine.errors import ConfigError

log = logging.getLogger(__name__)

FILE_BYTES = 2 * 2**20  # size limit of each of the two files
MAX_LINE_BYTES = 32 * 2**10
MAX_RINGS = 256  # maximum number of rings in a folder; the least recently written rings are removed
SUFFIX = ".log"


class RingFile(NamedTuple):
    """One file of a ring."""

    generation: int
    path: Path


def open_log_folder(folder: Path) -> None:
    """Makes a folder that only this user can read. Raises ConfigError if others can change it."""
    try:
        for each in [*reversed(folder.parents), folder]:
            each.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ConfigError(f"{folder} must be a directory of yours to which no other user can write")


def rings(folder: Path) -> dict[str, list[RingFile]]:
    """Returns the files of each service's ring, oldest first.

    Empty if the folder does not exist.
    """
    found: dict[str, list[RingFile]] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    for name in names:
        quoted, _, generation = name.removesuffix(SUFFIX).rpartition(".")
        if name.endswith(SUFFIX) and quoted and generation.isascii() and generation.isdecimal():
            file = RingFile(int(generation), folder / name)
            found.setdefault(unquote(quoted), []).append(file)
    return {name: sorted(files) for name, files in sorted(found.items())}


class LogRing(logging.Handler):
    """Appends lines to the ring of a service. The first line opens the ring's file."""

    def __init__(
        self,
        folder: Path,
        name: str,
        formatter: logging.Formatter,
        *,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._folder = folder
        self._name = name
        self._file_bytes = file_bytes
        self._fd: int | None = None
        self._generation = 0
        self._is_torn = False  # True if only a part of the last line was written
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, or only counts the record.

        Never raises and never logs an error, because other handlers write the record too.
        """
        try:
            line = bounded_line(self.format(record))
        except Exception:  # like `StreamHandler`: logging must not raise in its caller
            self.handleError(record)
            return
        try:
            self._write(line)
            if self._num_lost:
                self._tell_lost()
        except OSError:
            self._num_lost += 1

    def close(self) -> None:
        """Closes the ring's file. The file stays on disk."""
        self.acquire()
        try:
            self._let_go()
        finally:
            self.release()
        super().close()

    def _write(self, line: str) -> None:
        """Appends a line in one call. Raises OSError."""
        data = line.encode("ascii", "backslashreplace") + b"\n"
        fd = self._opened()
        facts = os.fstat(fd)
        if facts.st_nlink == 0:  # removed by another process of this name, which writes later files
            self._let_go()
            fd = self._opened()
        elif facts.st_size and facts.st_size + len(data) > self._file_bytes:
            fd = self._next_file()
        if self._is_torn:
            data = b"\n" + data
        num_written = os.write(fd, data)
        self._is_torn = num_written < len(data)
        if self._is_torn:
            raise OSError("the line was written in part")

    def _opened(self) -> int:
        if self._fd is None:
            _remove_old_rings(self._folder, self._name)
            files = rings(self._folder).get(self._name, [])
            self._generation = files[-1].generation if files else 1
            self._fd = self._open(self._generation)
            size = os.fstat(self._fd).st_size
            # A killed process may have left a partial line.
            self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        return self._fd

    def _next_file(self) -> int:
        """Starts the next file, and removes all files except this file and the previous file."""
        self._let_go()
        self._generation += 1
        self._fd = self._open(self._generation)
        self._is_torn = False
        for file in rings(self._folder).get(self._name, []):
            if file.generation < self._generation - 1:
                file.path.unlink(missing_ok=True)
        return self._fd

    def _open(self, generation: int) -> int:
        path = self._folder / f"{quoted_name(self._name)}.{generation}{SUFFIX}"
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o600)

    def _let_go(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _tell_lost(self) -> None:
        """Writes the number of lost lines. Raises OSError."""
        text = "%d lines could not be kept: no room, or no folder, for them"
        args = (self._num_lost,)
        told = logging.LogRecord(__name__, logging.WARNING, "", 0, text, args, None)
        self._write(self.format(told))
        self._num_lost = 0


def bounded_line(line: str) -> str:
    """Returns a line. Shortens the line if it is too long for a ring."""
    if len(line) <= MAX_LINE_BYTES:
        return line
    told: Mapping[str, object] = json.loads(line)
    kept = {name: told[name] for name in ("time", "level", "process", "pid", "logger")}
    for name, most in (("message", 1000), ("request", 400), ("exception", 1500)):  # 12 bytes a char
        if name in told:
            kept[name] = str(told[name])[:most]
    return json.dumps({**kept, "is_cut": True})


def quoted_name(name: str) -> str:
    """Returns a service's name, quoted for use in a file name."""
    return quote(name, safe="")


def _remove_old_rings(folder: Path, own: str) -> None:
    """Removes the least recently written rings if one more ring would exceed `MAX_RINGS`."""
    found = rings(folder)
    found.pop(own, None)
    if len(found) < MAX_RINGS:
        return
    written_s = {name: _written_s(files[-1].path) for name, files in found.items()}
    for name in sorted(found, key=written_s.__getitem__)[: len(found) + 1 - MAX_RINGS]:
        for file in found[name]:
            with contextlib.suppress(OSError):
                file.path.unlink()


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has just removed the file
        return 0.0

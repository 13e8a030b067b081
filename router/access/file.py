"""The file that holds API keys: checked on reading, replaced atomically, watched for changes.

The file is used only if this user or root owns it, no other user may read it, and only the owner
may write it. A user who could write it could add keys.

A gateway checks for changes of the file when a request comes, at most once a second. If the new
contents are unusable, the last good ones stay in use. If the file is missing, no key is valid.
"""

import fcntl
import logging
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from engine.clock import Clock, MonotonicClock, unix_time_s
from router.access.keys import KeyRecord, KeysError, KeyTable, decode_keys, encode_keys
from router.access.limits import Tenant

LOOK_EVERY_S = 1.0
MAX_FILE_BYTES = 8 * 2**20
LOCK_TIMEOUT_S = 10.0
_LOCK_EVERY_S = 0.05
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IRWXO

log = logging.getLogger(__name__)

_Signature = tuple[int, int, int, int, int, int]


class KeyFile:
    """The keys of a gateway, reloaded when the file changes."""

    def __init__(self, path: Path, clock: Clock, unix_s: Callable[[], float] = unix_time_s) -> None:
        self._path = path
        self._clock = clock
        self._unix_s = unix_s
        self._table = KeyTable()
        self._signature: _Signature | None = None
        self._complaint: str | None = None
        self._looked_s = clock.now_s()
        self.counters: Counter[str] = Counter()  # numbers of reloads and refused requests

    def open(self) -> None:
        """Reads the file, which may be missing. Raises KeysError if it is unusable."""
        self._load()
        if self._signature is None:
            log.warning("%s does not exist: every request is refused", self._path)

    def find(self, key: bytes) -> Tenant | None:
        """Returns the tenant of a key; None for an unknown or expired key."""
        now_s = self._clock.now_s()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._check()
        return self._table.find(key, self._unix_s())

    def _check(self) -> None:
        try:
            self._load()
            self._complaint = None
        except KeysError as error:
            self.counters["reload failed"] += 1
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.error("the keys stay as they were: %s", error)

    def _load(self) -> None:
        """Reloads the file if it has changed. Raises KeysError."""
        try:
            signature = _signature(os.stat(self._path))
        except FileNotFoundError:
            if self._signature is not None:
                self.counters["file gone"] += 1
                log.error("%s is gone: every request is refused", self._path)
            self._signature, self._table = None, KeyTable()
            return
        except OSError as error:
            raise KeysError(f"{self._path}: {error.strerror}") from error
        if signature == self._signature:
            return
        self._table = KeyTable(read_keys(self._path))
        if self._signature is not None:
            self.counters["reloaded"] += 1
            log.warning("%s was read again: it holds %d keys", self._path, len(self._table))
        self._signature = signature


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Returns the keys in a file. Raises KeysError."""
    try:
        data = _read_checked(path)
        if len(data) > MAX_FILE_BYTES:
            raise KeysError(f"it is longer than {MAX_FILE_BYTES} bytes")
        return decode_keys(data)
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error
    except KeysError as error:
        raise KeysError(f"{path}: {error}") from error


def change_keys(path: Path, change: Callable[[Sequence[KeyRecord]], Sequence[KeyRecord]]) -> None:
    """Replaces the keys in a file with the result of `change`. Raises KeysError.

    Readers see either the old file or the new file. Writers wait for each other.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.with_name(path.name + ".lock")):
            before = path.stat() if path.exists() else None
            records = change(() if before is None else read_keys(path))
            _replace(path, encode_keys(records), before)
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error


def _replace(path: Path, data: bytes, before: os.stat_result | None) -> None:
    """Writes a file that only its owner can read, then renames it to the path."""
    path = path.resolve()
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            if before is not None and before.st_uid != os.geteuid():
                os.fchown(descriptor, before.st_uid, before.st_gid)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    clock, pause = MonotonicClock(), Event()
    end_s = clock.now_s() + LOCK_TIMEOUT_S
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while not _try_lock(descriptor):
            if clock.now_s() > end_s:
                raise KeysError(f"{path} has been locked for {LOCK_TIMEOUT_S:g} s")
            pause.wait(_LOCK_EVERY_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_checked(path: Path) -> bytes:
    """Reads at most one byte more than is allowed. Never blocks, even on a named pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)


def _check(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeysError("it is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise KeysError(f"it belongs to another user ({status.st_uid})")
    if status.st_mode & _FORBIDDEN_MODE:
        mode = stat.S_IMODE(status.st_mode)
        raise KeysError(f"others may read or change it (mode {mode:o}); `chmod 600` mends that")


def _signature(status: os.stat_result) -> _Signature:
    """Returns a value that changes when the file is written, replaced or given to another owner."""
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mode, *times)

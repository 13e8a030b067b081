"""Accounts of keys, shared by all gateway processes of one port, so that limits are exact.

The accounts are fixed-size records in a file that each process maps. A process locks the file for
some microseconds while it reads and changes an account. All processes use the same monotonic clock.

    record   hash of the key's name; size, level and time of each bucket; number of requests in
             flight in each process. A starting process clears the number of its predecessor

A record is in one of the `NUM_PROBES` slots that follow its hash. If all these slots are used, the
record of the key that was idle for longest is replaced. If all their keys have requests in flight,
each process counts the new key alone.
"""

import contextlib
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from router.access.limits import Account, Bucket

log = logging.getLogger(__name__)

NUM_SLOTS = 2**14
NUM_PROBES = 16
KEY_BYTES = 16
MAX_LOCK_TRIES = 10_000  # some milliseconds; a process may have been paused while holding the lock


class _Level(NamedTuple):
    """The shared state of a bucket: its size, its level, and the time of that level."""

    size: float
    level: float
    at_s: float


NO_BUCKET = _Level(0.0, 0.0, 0.0)  # for a key without this limit


class _Record(NamedTuple):
    """The shared state of a key's account."""

    name: bytes  # hash of the key's name; all zeros in a free slot
    requests: _Level
    tokens: _Level
    streams: list[int]  # number of requests in flight in each process


class SharedAccounts:
    """The file of accounts, as mapped by one process."""

    def __init__(self, path: Path, process: int, num_processes: int) -> None:
        self._path = path
        self._process = process
        self._record = Struct(f"={KEY_BYTES}s6d{num_processes}I")
        self.num_unlocked = 0  # number of changes after giving up waiting for the lock

    def open(self) -> None:
        """Maps the file and clears the requests in flight of this process's predecessor.

        Raises OSError.
        """
        num_bytes = NUM_SLOTS * self._record.size
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, num_bytes)
        self._map = mmap.mmap(self._fd, num_bytes)
        with self._locked():
            for slot in range(NUM_SLOTS):
                record = self._read(slot)
                if record.streams[self._process]:
                    record.streams[self._process] = 0
                    self._write(slot, record)

    def close(self) -> None:
        """Unmaps the file; other processes keep using it."""
        self._map.close()
        os.close(self._fd)

    @contextlib.contextmanager
    def held(self, key: str, account: Account) -> Iterator[None]:
        """Updates the account on entry to the context, and shares its changes on exit."""
        name = blake2b(key.encode(), digest_size=KEY_BYTES).digest()
        with self._locked():
            slot = self._slot_of(name)
            if slot is None:
                yield
                return
            record = self._read(slot)
            if record.name != name:
                record = _Record(name, NO_BUCKET, NO_BUCKET, [0] * len(record.streams))
            record.streams[self._process] = account.num_streams
            account.num_others = sum(record.streams) - account.num_streams
            _read_level(account.requests, record.requests)
            _read_level(account.tokens, record.tokens)
            try:
                yield
            finally:
                record.streams[self._process] = account.num_streams
                requests, tokens = _level_of(account.requests), _level_of(account.tokens)
                self._write(slot, _Record(name, requests, tokens, record.streams))

    def _slot_of(self, name: bytes) -> int | None:
        """Returns the slot of a key's record, or else a slot to use for it.

        Returns None if all slots have keys with requests in flight. An earlier slot may have become
        free since the record was written, so all slots are read.
        """
        first = int.from_bytes(name[:8], "little")
        idle: list[tuple[float, int]] = []  # time of the last change, and slot
        for probe in range(NUM_PROBES):
            slot = (first + probe) % NUM_SLOTS
            record = self._read(slot)
            if record.name == name:
                return slot
            if not any(record.streams):
                idle.append((max(record.requests.at_s, record.tokens.at_s), slot))
        return min(idle)[1] if idle else None

    def _read(self, slot: int) -> "_Record":
        name, *values = self._record.unpack_from(self._map, slot * self._record.size)
        return _Record(name, _Level(*values[:3]), _Level(*values[3:6]), values[6:])

    def _write(self, slot: int, record: "_Record") -> None:
        values = (*record.requests, *record.tokens, *record.streams)
        self._record.pack_into(self._map, slot * self._record.size, record.name, *values)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the file in the context, or gives up if another process keeps the lock too long."""
        has_lock = False
        for _ in range(MAX_LOCK_TRIES):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.sched_yield()
            else:
                has_lock = True
                break
        if not has_lock:
            self.num_unlocked += 1
            log.warning("another gateway process keeps the lock of the keys' limits")
        try:
            yield
        finally:
            if has_lock:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


def _read_level(bucket: Bucket | None, known: "_Level") -> None:
    """Sets a bucket to the shared level. Does nothing if the limit has changed."""
    if bucket is not None and bucket.size == known.size:
        bucket.level, bucket.at_s = known.level, known.at_s


def _level_of(bucket: Bucket | None) -> "_Level":
    return NO_BUCKET if bucket is None else _Level(bucket.size, bucket.level, bucket.at_s)

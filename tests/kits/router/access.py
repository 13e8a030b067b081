"""A keys file for tests, a clock and a calendar that the test sets, and lines of the access log."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.log_context import ACCESS
from router.access.file import KeyFile, change_keys
from router.access.keys import KeyRecord, hash_of

CREATED = datetime(2026, 1, 1, tzinfo=UTC)


class SetClock:
    """A clock whose monotonic seconds and time of day are set by the test."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.unix_s = CREATED.timestamp()

    def now_s(self) -> float:
        return self.seconds


def record(key: str, name: str, **fields: Any) -> KeyRecord:
    return KeyRecord(name=name, hash=hash_of(key.encode()), created=CREATED, **fields)


def write_keys(path: Path, *records: KeyRecord) -> None:
    change_keys(path, lambda _: records)


def key_file(path: Path, *keys: str, clock: SetClock | None = None, **fields: Any) -> KeyFile:
    """Returns an open file with these keys, named `one`, `two` and so on."""
    names = ("one", "two", "three")
    write_keys(path, *(record(k, n, **fields) for k, n in zip(keys, names, strict=False)))
    return open_keys(path, clock or SetClock())


def open_keys(path: Path, clock: SetClock) -> KeyFile:
    keys = KeyFile(path, clock, lambda: clock.unix_s)
    keys.open()
    return keys


@contextmanager
def access_lines() -> Iterator[list[dict[str, Any]]]:
    """Collects the fields and texts of the access lines that are logged inside the block."""
    found: list[dict[str, Any]] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.fields | {"text": record.getMessage()})

    keeper, level = Keeper(), ACCESS.level
    ACCESS.addHandler(keeper)
    ACCESS.setLevel(logging.INFO)
    yield found
    ACCESS.removeHandler(keeper)
    ACCESS.setLevel(level)

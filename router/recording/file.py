"""A recording on disk, written while the gateway works.

The event loop encodes a record and appends it to a list. A thread writes the list from time to time
and at the end. The recording stops if the disk is full or too slow, or if an event cannot be
encoded. It never has a gap, since no event after a gap could be replayed. Serving continues.

Only the gateway's user may read the file, as it contains prompts and answers.
"""

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from engine.config import RouterConfig
from engine.errors import ConfigError
from router.machine.events import RouterEffect, RouterEvent
from router.recording.records import Recorder

log = logging.getLogger(__name__)

WRITE_EVERY_S = 0.5
MAX_UNWRITTEN_BYTES = 256 * 2**20  # maximum size of the list, reached if the disk is too slow
NOT_WRITTEN_IN_TIME = "the disk does not finish"
CLOSE_TIMEOUT_S = 5.0


class Disk(Protocol):
    """The interface of a file for records. `flush` writes them to the disk."""

    def write(self, data: bytes) -> object:
        """Writes records. Raises OSError."""
        ...

    def flush(self) -> None:
        """Writes records to the disk that are in memory buffers. Raises OSError."""
        ...

    def close(self) -> None:
        """Closes the file. Raises OSError."""
        ...


class RecordingFile:
    """Records the events and effects of a machine, from `open` to `close`."""

    def __init__(
        self, path: Path, config: RouterConfig, *, max_unwritten_bytes: int = MAX_UNWRITTEN_BYTES
    ) -> None:
        """`config` is the machine's configuration, with the seed in use."""
        self.path = path
        self.failure: str | None = None  # the reason for an early end of the recording
        self._config = config
        self._max_unwritten_bytes = max_unwritten_bytes
        self._lock = threading.Lock()
        self._unwritten: list[bytes] = []  # protected by the lock, like the next field
        self._num_unwritten_bytes = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)

    def open(self) -> None:
        """Creates the file, which must not exist yet. Raises ConfigError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = _create(self.path)
        except OSError as error:
            raise ConfigError(f"cannot record to {self.path}: {error.strerror}") from error
        self._begin(file)

    def _begin(self, file: Disk) -> None:
        self._file = file
        self._recorder = Recorder(self._config, self._put)
        self._thread.start()

    def record(self, event: RouterEvent, now_s: float, effects: Sequence[RouterEffect]) -> None:
        """Appends an event and its effects to the recording."""
        if self.failure is not None:
            return
        try:
            self._recorder.record(event, now_s, effects)
        except Exception as error:  # the effects must be carried out in any case
            # The text of the error may contain a client's text.
            self._fail(f"{type(event).__name__} cannot be encoded: {type(error).__name__}")

    def close(self) -> None:
        """Writes the remaining records, and waits up to CLOSE_TIMEOUT_S."""
        if not self._thread.is_alive():
            return
        self._closing.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._fail(NOT_WRITTEN_IN_TIME)

    def _put(self, record: bytes) -> None:
        with self._lock:
            self._unwritten.append(record)
            self._num_unwritten_bytes += len(record)
            fits = self._num_unwritten_bytes <= self._max_unwritten_bytes
        if not fits:
            self._fail("the disk does not keep up")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        for work in (
            self._write_all,
            self._file.close,
        ):  # some disks report only on closing that they are full
            try:
                work()
            except Exception as error:  # there may also be too little memory
                self._fail(_reason(error))
        with self._lock:  # nothing will write the list any more
            self._unwritten.clear()

    def _write_all(self) -> None:
        while not self._closing.wait(WRITE_EVERY_S) and self.failure is None:
            self._write()
        self._write()

    def _write(self) -> None:
        with self._lock:
            records, self._unwritten = self._unwritten, []
            self._num_unwritten_bytes = 0
        if records:
            self._file.write(b"".join(records))
            self._file.flush()

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            log.error("the recording %s ends here: %s", self.path, reason)


def _reason(error: Exception) -> str:
    """Returns the reason of a failure, without any recorded data."""
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__


def _create(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

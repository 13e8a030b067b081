"""Allocates slabs beside the caller's thread: a file system may take long, or be full."""

import os
import threading

from kvtransfer.store.disk.engine import reason_of
from kvtransfer.store.disk.health import DiskHealth
from kvtransfer.store.disk.slabs import NewSlots, SlabFiles


class SlabGrowth:
    """Allocates one slab at a time, or a part of one. After a failure it pauses, ever longer.

    `done_fd` is an eventfd that is signalled when `finish` has something to do.
    """

    def __init__(self, files: SlabFiles, done_fd: int, health: DiskHealth) -> None:
        self._files = files
        self._done_fd = done_fd
        self._health = health
        self._thread: threading.Thread | None = None
        self._found: NewSlots | OSError | None = None
        self.fault: str | None = None  # why the last try failed

    def start(self, now_s: float) -> None:
        """Starts to allocate the next slab, if there is one to come and it is time to try."""
        if self._thread is None and not self._files.is_whole and self._health.admits(now_s):
            self._found = None
            self._thread = threading.Thread(target=self._run, name="disk-growth", daemon=True)
            self._thread.start()

    def finish(self, now_s: float) -> str | None:
        """Adds the allocated slots to the tier, or returns why the allocation failed."""
        if self._thread is None or self._found is None:
            return None
        self._thread.join()
        self._thread = None
        return self._take(self._found, now_s)

    def grow_now(self, now_s: float) -> str | None:
        """Allocates the next slab on this thread. Returns why that failed, or None."""
        return self._take(self._allocated(), now_s)

    def close(self, timeout_s: float) -> bool:
        """Waits for what is under way. Returns False if that has not ended in time."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if isinstance(self._found, NewSlots) and self._found.is_new_slab:
            os.close(self._found.slab_fd)
        return True

    def _run(self) -> None:
        self._found = self._allocated()
        os.eventfd_write(self._done_fd, 1)

    def _allocated(self) -> NewSlots | OSError:
        try:
            return self._files.allocate()
        except OSError as error:
            return error

    def _take(self, found: NewSlots | OSError, now_s: float) -> str | None:
        if isinstance(found, OSError):
            self.fault = reason_of(found.errno or 0)
            self._health.failed(self.fault, now_s)
            return self.fault
        self._files.add(found)
        self._health.succeeded()
        self.fault = None
        return None

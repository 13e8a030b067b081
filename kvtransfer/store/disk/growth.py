"""Allocates slabs on a separate thread, because a file system may be slow or full."""

import logging
import os
import threading
from collections import Counter

from kvtransfer.store.disk.engine import DiskHealth, reason_of
from kvtransfer.store.disk.slabs import NewSlots, SlabFiles

log = logging.getLogger(__name__)


class SlabGrowth:
    """Allocates one slab at a time, or the part of a slab that fits. The pause after each failure
    is longer.

    `done_fd` is an eventfd that is signalled when `finish` has something to do.
    """

    def __init__(
        self, files: SlabFiles, done_fd: int, health: DiskHealth, counters: Counter[str]
    ) -> None:
        """`counters` counts failures by reason."""
        self._files = files
        self._counters = counters
        self._done_fd = done_fd
        self._health = health
        self._thread: threading.Thread | None = None
        self._found: NewSlots | OSError | None = None
        self.fault: str | None = None  # reason if the latest allocation failed

    def open_known(self, now_s: float) -> None:
        """Opens the existing slabs, and allocates a first slab if none exists.

        After a fault there are fewer slots.
        """
        try:
            self._files.drop_slabs()
            num_slabs = self._files.count_slabs()
        except OSError as error:
            self._report(reason_of(error.errno or 0))
            return
        while not self._files.is_whole and len(self._files.slab_fds) < max(1, num_slabs):
            if not self._take(self._allocated(), now_s):
                return

    def follow(self, num_used: int, slab_slots: int, now_s: float) -> None:
        """Adds the slots of a finished allocation. Starts the next one once the last slab is in
        use.
        """
        if self._thread is not None and self._found is not None:
            self._thread.join()
            self._thread = None
            self._take(self._found, now_s)
        is_late = num_used > self._files.num_slots - slab_slots
        if is_late and self._thread is None and not self._files.is_whole:
            self._start(now_s)

    def _start(self, now_s: float) -> None:
        """Starts to allocate the next slab, unless the pause after a failure is not over."""
        if self._health.admits(now_s):
            self._found = None
            self._thread = threading.Thread(target=self._run, name="disk-growth", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Waits for a running allocation. Returns False if it does not end in time."""
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

    def _take(self, found: NewSlots | OSError, now_s: float) -> bool:
        """Adds the allocated slots, or reports the error of the allocation."""
        if isinstance(found, OSError):
            self.fault = reason_of(found.errno or 0)
            self._health.failed(self.fault, now_s)
            self._report(self.fault)
            return False
        self._files.add(found)
        self._health.succeeded()
        self.fault = None
        return True

    def _report(self, reason: str) -> None:
        self._counters[f"growth_errors:{reason}"] += 1
        files = self._files
        log.warning(
            "%s stays at %d of %d slots: %s",
            files.directory,
            files.num_slots,
            files.geometry.max_slots,
            reason,
        )

"""Puts each worker of a deployment into a network place of its own, for `bench chaos`.

`baton serve --launcher process --places bench.chaos.placed:own_places` loads it (the hook is
described in `deploy/local/launcher.py`). The command runs in a hub (`bench/chaos/netns.py`). The
gateways, which share a port, and the controller stay in the hub. Each worker gets a place with the
worker's name, and a worker that is started again returns to it.

The command ends when the bench ends, so a killed bench leaves neither processes nor namespaces. The
bench's process id is in the environment as `STARTED_BY`. One exception: if the bench has just
stopped the command (`stop-controller`), processes and namespaces stay until the command is
continued.
"""

import ctypes
import os
import signal
import sys
import threading

from bench.chaos.netns import NetworkPlace, place
from bench.processes.deployment import STARTED_BY

PR_SET_PDEATHSIG = 1


class OwnPlaces:
    """A network place for each worker, made at first use. Thread-safe."""

    def __init__(self) -> None:
        self._places: dict[str, NetworkPlace] = {}
        self._lock = threading.Lock()

    def __call__(self, kind: str, name: str) -> NetworkPlace | None:
        """Returns a worker's place; None for a gateway. Raises CommandFailed."""
        if kind != "worker":
            return None
        with self._lock:
            if name not in self._places:
                self._places[name] = place(name, len(self._places) + 1)
            return self._places[name]


def own_places() -> OwnPlaces:
    """Makes this process end with the bench, and returns the places."""
    _end_with(int(os.environ[STARTED_BY]))
    return OwnPlaces()


def _end_with(parent: int) -> None:
    """Asks the kernel to send SIGTERM to this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent has ended before the call
        sys.exit(1)

"""Single workers and gateways as processes, without `baton serve` around them.

Each gets its spec on standard input (`deploy.services.spec`), and ends when
that is closed.
"""

import queue
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal

import msgspec

from bench.processes.child import ChildProcess
from engine.errors import BatonError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


class ServiceFailed(BatonError):
    """A service did not start; the message holds its reason."""


class DirectService:
    """A worker or gateway process that waits for its spec."""

    def __init__(self, kind: Literal["worker", "gateway"]) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the end
        command = [sys.executable, "-m", "deploy.local.process_main", kind]
        self._child = ChildProcess(command, on_stdout=self._lines.put)

    @property
    def pid(self) -> int:
        """Process id, and id of the session."""
        return self._child.pid

    def start(self, spec: Mapping[str, object]) -> dict[str, Any]:
        """Sends the spec and returns the answer once it listens. Raises ServiceFailed."""
        self._child.send(msgspec.json.encode(spec).decode())
        try:
            line = self._lines.get(timeout=START_TIMEOUT_S)
        except queue.Empty:
            raise ServiceFailed(f"it did not start in {START_TIMEOUT_S:g} s") from None
        if line is None:
            raise ServiceFailed("it ended while starting")
        answer = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in answer:
            raise ServiceFailed(answer["error"])
        return answer

    def end(self) -> None:
        """Ends the process, by force if it does not end by itself."""
        self._child.close(STOP_TIMEOUT_S)


def launched(kind: Literal["worker", "gateway"], stack: ExitStack) -> DirectService:
    """Starts a process that waits for its spec, and ends with the stack."""
    service = DirectService(kind)
    stack.callback(service.end)
    return service

"""Single services of the product as processes, without `baton serve` around them.

Each reads its spec from standard input (`deploy.services.spec`), and ends
when that is closed.
"""

import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from engine.errors import BatonError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


class ServiceFailed(BatonError):
    """A service did not start; the message holds its reason."""


@dataclass(frozen=True, slots=True)
class Service:
    """A process, which ends with the stack that it was started on."""

    process: "subprocess.Popen[bytes]"

    def tell(self, spec: Mapping[str, object]) -> dict[str, Any]:
        """Tells it what it is; what it answers when it listens. Raises ServiceFailed."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.start()
        line = b""
        try:
            with suppress(OSError):  # it died before it read all
                stdin.write(msgspec.json.encode(spec) + b"\n")
                stdin.flush()
                line = stdout.readline()
        finally:
            watchdog.cancel()
        answer = msgspec.json.decode(line, type=dict[str, Any]) if line else None
        if answer is None or "error" in answer:
            raise ServiceFailed("it ended while starting" if answer is None else answer["error"])
        return answer

    def end(self) -> None:
        """Ends it, by force if it does not end by itself."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(OSError):  # it has ended
            stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        stdout.close()


def launched(kind: Literal["worker", "gateway"], stack: ExitStack) -> Service:
    """A process that waits to be told what it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.local.process_main", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    service = Service(process)
    stack.callback(service.end)
    return service

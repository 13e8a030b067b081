"""A worker or a gateway as a process: `python -m deploy.local.process_main worker|gateway`.

The nursery's children run it too (`deploy.local.nursery_main`).

The spec comes as one line of JSON on standard input, so that no secret shows in a process list. The
answer goes as one line to standard output. If the model has to be fetched, `Fetching` and `Fetched`
come before it.

Standard input stays open. When it ends, the parent is gone or wants this process to stop, and the
process stops, even during a download. A gateway finishes its answers first. SIGTERM has the same
effect; a second SIGTERM ends answers at once.
"""

import os
import select
import signal
import sys
import threading
from concurrent.futures import Future, wait

import msgspec

from deploy.logs import configure_logging
from deploy.services.build import service_of
from deploy.services.model import fetch, has_to_fetch
from deploy.services.spec import Fetched, Fetching
from deploy.services.thread import ServiceThread, freeze_heap
from engine.clock import MonotonicClock
from engine.errors import BatonError

LOOK_EVERY_S = 0.5  # how often a download looks for the end of standard input


class StartRefusal(msgspec.Struct, frozen=True):
    """Sent instead of an answer: the reason why the service did not start."""

    error: str


def main(kind: str) -> int:
    """Runs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which closes stdin
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the service runs
    spec = sys.stdin.buffer.readline()
    if not spec:  # the parent has given it up
        return 0
    service, log_level = service_of(kind, spec)
    configure_logging(log_level, MonotonicClock())
    thread = ServiceThread(service, kind)
    try:
        if has_to_fetch(kind, spec):
            _answer(Fetching())
            _fetch_while_wanted(kind, spec)
            _answer(Fetched())
        ready = thread.open()
    except BatonError as error:
        _answer(StartRefusal(str(error)))
        return 1
    freeze_heap()
    stopping = _Stopping(thread)
    signal.signal(signal.SIGTERM, stopping.on_signal)
    try:
        _answer(ready)
        while sys.stdin.buffer.read(4096):
            pass
    except _Stop:
        pass
    stopping.has_begun = True
    thread.close()
    return 0


class _Stop(BaseException):
    """SIGTERM came while the service ran."""


class _Stopping:
    """The handler of SIGTERM: the first stops the service, later ones end its answers at once."""

    def __init__(self, thread: ServiceThread[object]) -> None:
        self.has_begun = False
        self._thread = thread

    def on_signal(self, *_: object) -> None:
        if self.has_begun:
            self._thread.hurry()
        else:
            self.has_begun = True
            raise _Stop


def _fetch_while_wanted(kind: str, spec: bytes) -> None:
    """Fetches the model; ends the process if standard input ends first. Raises ConfigError."""
    fetched: Future[None] = Future()

    def run() -> None:
        try:
            fetch(kind, spec)
            fetched.set_result(None)
        except BaseException as error:
            fetched.set_exception(error)

    threading.Thread(target=run, name="fetch", daemon=True).start()
    while not wait([fetched], LOOK_EVERY_S).done:
        if select.select([sys.stdin], [], [], 0)[0]:
            os._exit(0)  # complete files of the download are kept
    fetched.result()


def _answer(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

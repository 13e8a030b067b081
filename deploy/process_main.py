"""A worker or a gateway as a plain process: `python -m deploy.process_main worker|gateway`, or a
child of `deploy.nursery_main`.

The spec comes as one line of JSON on standard input, so that no secret shows in a process list; the
answer goes as one line of JSON to standard output. Standard input stays open as a life line: when
it ends the parent is gone or wants this process to stop, and the process stops.
"""

import signal
import sys

import msgspec

from deploy.processes import ServiceThread, configure_logging, freeze_heap, service_of
from engine.errors import BatonError


class StartFailed(msgspec.Struct, frozen=True):
    """Instead of an answer: why the service did not start."""

    error: str


def main(kind: str) -> int:
    """Runs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which closes stdin
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    spec = sys.stdin.buffer.readline()
    if not spec:  # whoever started it does not want it any more
        return 0
    service, log_level = service_of(kind, spec)
    configure_logging(log_level)
    thread = ServiceThread(service, kind)
    try:
        ready = thread.open()
    except BatonError as error:
        _answer(StartFailed(str(error)))
        return 1
    freeze_heap()
    _answer(ready)
    try:
        while sys.stdin.buffer.read(4096):
            pass
    finally:
        thread.close()
    return 0


def _answer(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

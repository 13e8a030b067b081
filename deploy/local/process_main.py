"""The process of a worker or a gateway: `python -m deploy.local.process_main worker|gateway`.

Children of the nursery run this module too (`deploy.local.nursery_main`).

The process reads its spec as one line of JSON from standard input, so that no secret appears in a
process list. It writes its answer as one line to standard output. If the model must be fetched, the
process writes `Fetching` and `Fetched` before the answer. If the model is large, the process writes
`Starting` before the answer.

Standard input stays open. The process stops on `STOP_WORD` or SIGTERM, even during a download.
During a start, SIGTERM kills the process at once, with the ranks and compilers that the start has
launched. Later, a gateway that must stop finishes its answers first; a second SIGTERM cuts the
answers off. If standard input ends without `STOP_WORD`, the parent and the workers have died, so a
gateway cuts its answers off too.
"""

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import MutableMapping
from concurrent.futures import Future, wait

import msgspec

from deploy.base.gpus import VISIBLE
from deploy.base.reasons import explain
from deploy.base.spec import (
    READY_TIMEOUT_S,
    Fetched,
    Fetching,
    ServiceSpec,
    Starting,
    WorkerSpec,
    decode_spec,
)
from deploy.base.thread import ServiceThread, freeze_heap
from deploy.local.leaving import leave
from deploy.local.nursery import STOP_WORD
from deploy.logs.lines import configure_logging
from deploy.services.build import service_of
from deploy.services.model import fetch, has_to_fetch, start_limit_s
from engine.clock import MonotonicClock
from engine.errors import BatonError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5  # interval at which a download checks standard input


class StartRefusal(msgspec.Struct, frozen=True):
    """Sent instead of an answer. Has the reason why the service did not start."""

    error: str


def main(kind: str) -> int:
    """Runs a service of that kind until standard input ends. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent closes stdin
    signal.signal(signal.SIGTERM, leave)  # this handler is in force until the service runs
    line = sys.stdin.buffer.readline()
    if line in (b"", STOP_WORD):  # the parent has cancelled this start
        return 0
    spec = decode_spec(kind, line)
    limit_gpus(spec, os.environ)
    service, source = service_of(spec)
    thread = ServiceThread(service, kind)
    try:
        configure_logging(source, MonotonicClock())
        if has_to_fetch(spec):
            _answer(Fetching())
            _fetch_while_wanted(spec)
            _answer(Fetched())
        limit_s = start_limit_s(spec)
        if limit_s > READY_TIMEOUT_S:
            _answer(Starting(limit_s))
        ready = thread.open(limit_s)
    except BatonError as error:
        _answer(StartRefusal(str(error)))
        return 1
    except (OSError, MemoryError) as error:
        log.exception("the service did not start")
        _answer(StartRefusal(explain(error)))
        return 1
    freeze_heap()
    stopping = _Stopping(thread)
    signal.signal(signal.SIGTERM, stopping.on_signal)
    try:
        _answer(ready)
        is_orphan = sys.stdin.buffer.readline() != STOP_WORD
    except BrokenPipeError:  # the parent died during the start
        is_orphan = True
    except _Stop:
        is_orphan = False
    stopping.has_begun = True
    if is_orphan and service.drain_timeout_s:
        log.error("the controller died: answers that run are ended")
        thread.stop_draining()
    thread.close()
    return 0


def limit_gpus(spec: ServiceSpec, environment: MutableMapping[str, str]) -> None:
    """Limits the GPUs that a worker sees to its own GPUs.

    CUDA reads CUDA_VISIBLE_DEVICES on first use.
    """
    if isinstance(spec, WorkerSpec) and spec.gpus is not None:
        environment[VISIBLE] = ",".join(spec.gpus)


class _Stop(BaseException):
    """SIGTERM arrived while the service ran."""


class _Stopping:
    """Handles SIGTERM. The first signal stops the service, later signals cut its answers off."""

    def __init__(self, thread: ServiceThread[object]) -> None:
        self.has_begun = False
        self._thread = thread

    def on_signal(self, *_: object) -> None:
        if self.has_begun:
            self._thread.stop_draining()
        else:
            self.has_begun = True
            raise _Stop


def _fetch_while_wanted(spec: ServiceSpec) -> None:
    """Fetches the model.

    If standard input ends during the fetch, ends the process. Raises ConfigError.
    """
    fetched: Future[None] = Future()

    def run() -> None:
        try:
            fetch(spec)
            fetched.set_result(None)
        except BaseException as error:
            fetched.set_exception(error)

    threading.Thread(target=run, name="fetch", daemon=True).start()
    while not wait([fetched], LOOK_EVERY_S).done:
        if select.select([sys.stdin], [], [], 0)[0]:
            leave()  # files that are complete stay for the next download
    fetched.result()


def _answer(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

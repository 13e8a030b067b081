"""The nursery: a process that imports the services' modules and forks the services.

`python -m deploy.local.nursery_main FD` runs the nursery. FD is the nursery's end of a socket pair.
`deploy.local.nursery` describes the messages. A child runs `deploy.local.process_main`, in its own
session.

A fork copies only one thread, but every lock in its present state. So a nursery only imports: it
starts no second thread, makes no object of grpc, ZeroMQ or torch, and uses no GPU. The nursery
refuses a fork if another thread runs or CUDA is initialised.

All children inherit the same hash seed, memory addresses, and states of numpy's and torch's random
generators. Values that must differ between children come from `os.urandom`. `random` reseeds itself
after a fork.
"""

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.local.leaving import end
from deploy.local.nursery import CLOSE_WORD, ChildEnded, ChildRefused, ChildStarted, News
from engine.errors import BatonError

OPENBLAS_THREADS = "OPENBLAS_NUM_THREADS"
MAX_REQUEST_BYTES = 64
LAST_LINE = "error: process %d, which ran the deployment, ended without a word: its services end"

log = logging.getLogger(__name__)

Prepare = Callable[[str], None]  # imports the modules of a kind of service; may raise ImportError


def main() -> int:
    """Runs until the parent closes the socket.

    In a child, runs the service and returns its status.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # services ignore SIGINT too
    # By default OpenBLAS starts threads when numpy is imported. Services' small products need none.
    os.environ[OPENBLAS_THREADS] = "1"
    kind = fork_until_closed(socket.socket(fileno=int(sys.argv[1])), import_services)
    if kind is None:
        return 0
    from deploy.local import process_main

    return process_main.main(kind)


def import_services(kind: str) -> None:
    """Imports the modules of a kind of service. A gateway needs no torch, which may be absent."""
    import deploy.local.process_main  # noqa: F401
    from deploy.services.build import import_service

    import_service(kind)
    if kind == "worker":
        from deploy.worker.opening import import_before_forks

        import_before_forks()


def fork_until_closed(requests: socket.socket, prepare: Prepare) -> str | None:
    """Forks a child for each request. Returns the kind of service in a child. Returns None in the
    nursery when the socket is closed.

    In the nursery the garbage collector is off: collections would take a fifth of the imports'
    time. In a child the collector skips all inherited objects. A collection writes to each object,
    so it would copy every shared page.
    """
    gc.disable()
    with _Children(requests, prepare) as children:
        kind = children.serve()
    if kind is not None:
        gc.enable()
    return kind


@dataclass(frozen=True, slots=True)
class _Request:
    """A request for a child. `stdin` and `stdout` are descriptors for the child."""

    kind: str
    stdin: int
    stdout: int
    news: socket.socket

    def refuse(self, why: str) -> None:
        _post(self.news, ChildRefused(why))
        self.news.close()


def _request(kind: str, descriptors: list[int]) -> _Request:
    stdin, stdout, news = descriptors
    return _Request(kind, stdin, stdout, socket.socket(fileno=news))


class _Children:
    """The forked children that have not ended.

    In a child, leaving the context closes the nursery's sockets.
    """

    def __init__(self, requests: socket.socket, prepare: Prepare) -> None:
        self._requests = requests
        self._prepare = prepare
        self._news: dict[int, socket.socket] = {}  # sockets for news, by the child's pidfd
        self._expected: list[str] = []  # kinds to import, the next kind last
        self._poll = select.poll()  # not epoll, whose state children would share
        self._poll.register(requests, select.POLLIN)

    def __enter__(self) -> "_Children":
        return self

    def __exit__(self, *_error: object) -> None:
        self._requests.close()
        for pidfd, news in self._news.items():
            os.close(pidfd)
            news.close()

    def serve(self) -> str | None:
        parent = os.getppid()
        while True:
            events = self._poll.poll(0 if self._expected else None)
            if not events:
                self._import(self._expected.pop())
            for descriptor, _ in events:
                if descriptor != self._requests.fileno():
                    self._tell_end(descriptor)
                    continue
                kind, descriptors = self._receive()
                if not kind:
                    log.error(LAST_LINE, parent)
                    return None
                if kind == CLOSE_WORD.decode():
                    return None
                if not descriptors:
                    self._expected.insert(0, kind)
                elif self._fork(_request(kind, descriptors)) == 0:
                    return kind

    def _receive(self) -> tuple[str, list[int]]:
        kind, descriptors, *_ = socket.recv_fds(
            self._requests, MAX_REQUEST_BYTES, 3, socket.MSG_CMSG_CLOEXEC
        )
        return kind.decode(), descriptors

    def _import(self, kind: str) -> None:
        """Imports the modules of a kind of service in advance.

        After a failed import, requests are refused.
        """
        try:
            self._prepare(kind)
        except ImportError as error:
            log.warning("what a %s needs cannot be imported: %s", kind, error)

    def _fork(self, request: _Request) -> int | None:
        """Forks a child.

        Returns the child's process id, 0 in the child itself, None if the fork is refused.
        """
        with ExitStack() as stack:
            stack.callback(os.close, request.stdin)
            stack.callback(os.close, request.stdout)
            try:
                self._prepare(request.kind)
                _check_fork()
                gc.freeze()
                pid = os.fork()
            except (ImportError, OSError, UnsafeFork) as error:
                request.refuse(f"{type(error).__name__}: {error}")
                return None
            if pid == 0:
                request.news.close()
                _become(request)
                return 0
        pidfd = os.pidfd_open(pid)
        self._news[pidfd] = request.news
        self._poll.register(pidfd, select.POLLIN)
        _post(request.news, ChildStarted(pid), pidfd)
        return pid

    def _tell_end(self, pidfd: int) -> None:
        """Reaps an ended child and sends the child's exit status."""
        self._poll.unregister(pidfd)
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert ended is not None
        by_signal = ended.si_code != os.CLD_EXITED
        os.close(pidfd)
        with self._news.pop(pidfd) as news:
            _post(news, ChildEnded(-ended.si_status if by_signal else ended.si_status))


class UnsafeFork(BatonError):
    """A fork was refused, because other threads and CUDA state do not survive a fork."""


def _check_fork() -> None:
    """Raises UnsafeFork if another thread runs or CUDA is initialised."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise UnsafeFork(f"{threads} threads run where services are forked; an import started them")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise UnsafeFork("CUDA is initialised where services are forked")


def _become(request: _Request) -> None:
    """Gives the child its own session, pipes and process name."""
    os.setsid()
    os.dup2(request.stdin, sys.stdin.fileno())
    os.dup2(request.stdout, sys.stdout.fileno())
    Path("/proc/self/comm").write_text(f"baton-{request.kind}")  # the process name in ps and top


def _post(news: socket.socket, message: News, *descriptors: int) -> None:
    with contextlib.suppress(ConnectionError):  # the parent has closed the child
        socket.send_fds(news, [msgspec.json.encode(message)], descriptors)


if __name__ == "__main__":
    end(main())

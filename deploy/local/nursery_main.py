"""A process that has imported what services need, and forks them: the side that is asked.

`python -m deploy.local.nursery_main FD`, where FD is its end of a socket pair;
`deploy.local.nursery` has what
goes over that. A child becomes what `deploy.local.process_main` is, in a session of its own.

A fork copies one thread, and every lock as it is at the moment. So a nursery imports, and does
nothing else: no second thread, nothing of grpc's, ZeroMQ's or torch's is made, no GPU is touched.
Whether threads run or CUDA is initialised it looks before each fork, and refuses if so.

Children have hash seed, addresses and the generators of numpy and torch in common. Whatever has to
differ comes from `os.urandom`; `random` seeds itself again after a fork.
"""

import contextlib
import gc
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

from deploy.local.nursery import ChildEnded, ChildRefused, ChildStarted, News
from engine.errors import BatonError

OPENBLAS_THREADS = "OPENBLAS_NUM_THREADS"
MAX_REQUEST_BYTES = 64

Prepare = Callable[[str], None]  # imports what a kind of service needs. May raise ImportError


def main() -> int:
    """Until nobody can ask any more; in a child, what the service returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as services do
    # OpenBLAS starts its threads when numpy is imported; the few small products here need none.
    os.environ[OPENBLAS_THREADS] = "1"
    import_services("gateway")
    kind = fork_until_closed(socket.socket(fileno=int(sys.argv[1])), import_services)
    if kind is None:
        return 0
    from deploy.local import process_main

    return process_main.main(kind)


def import_services(kind: str) -> None:
    """Imports what services of a kind need: a gateway does without torch, also where it is not."""
    import deploy.local.process_main  # noqa: F401

    if kind == "worker":
        import engine.model.runner  # noqa: F401


def fork_until_closed(requests: socket.socket, prepare: Prepare) -> str | None:
    """Forks whatever is asked for. Returns in a child, its kind; else None, when nobody can ask.

    Garbage is not collected here, and in a child never among what it was forked with: a collection
    writes to each object, and so would copy every page.
    """
    gc.disable()
    with _Children(requests, prepare) as children:
        kind = children.serve()
    if kind is not None:
        gc.enable()
    return kind


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked for; the two descriptors are the child's."""

    kind: str
    stdin: int
    stdout: int
    news: socket.socket

    def refuse(self, why: str) -> None:
        _post(self.news, ChildRefused(why))
        self.news.close()


class _Children:
    """Those that were forked and have not ended. In a child, on leaving, nothing of the others."""

    def __init__(self, requests: socket.socket, prepare: Prepare) -> None:
        self._requests = requests
        self._prepare = prepare
        self._news: dict[int, socket.socket] = {}  # by descriptor of the child
        self._poll = select.poll()  # no epoll: a fork would share it
        self._poll.register(requests, select.POLLIN)

    def __enter__(self) -> "_Children":
        return self

    def __exit__(self, *_error: object) -> None:
        self._requests.close()
        for pidfd, news in self._news.items():
            os.close(pidfd)
            news.close()

    def serve(self) -> str | None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor != self._requests.fileno():
                    self._tell_end(descriptor)
                    continue
                request = self._receive()
                if request is None:
                    return None
                if self._fork(request) == 0:
                    return request.kind

    def _receive(self) -> _Request | None:
        kind, descriptors, *_ = socket.recv_fds(
            self._requests, MAX_REQUEST_BYTES, 3, socket.MSG_CMSG_CLOEXEC
        )
        if not kind:
            return None
        stdin, stdout, news = descriptors
        return _Request(kind.decode(), stdin, stdout, socket.socket(fileno=news))

    def _fork(self, request: _Request) -> int | None:
        """The id of the child, in which it is 0; None if there is none."""
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
        """Waits for a child that has ended, and tells."""
        self._poll.unregister(pidfd)
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert ended is not None
        by_signal = ended.si_code != os.CLD_EXITED
        os.close(pidfd)
        with self._news.pop(pidfd) as news:
            _post(news, ChildEnded(-ended.si_status if by_signal else ended.si_status))


class UnsafeFork(BatonError):
    """A fork would copy what must not be copied."""


def _check_fork() -> None:
    """Raises UnsafeFork."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise UnsafeFork(f"{threads} threads run where services are forked; an import started them")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise UnsafeFork("CUDA is initialised where services are forked")


def _become(request: _Request) -> None:
    """In the child: what a process of its own would have been started with."""
    os.setsid()
    os.dup2(request.stdin, sys.stdin.fileno())
    os.dup2(request.stdout, sys.stdout.fileno())
    Path("/proc/self/comm").write_text(f"baton-{request.kind}")  # for ps and top


def _post(news: socket.socket, message: News, *descriptors: int) -> None:
    with contextlib.suppress(ConnectionError):  # nobody wants to know any more
        socket.send_fds(news, [msgspec.json.encode(message)], descriptors)


if __name__ == "__main__":
    sys.exit(main())

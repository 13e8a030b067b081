"""The parent's side of the nursery, a process that imports the services' modules and forks them.

Most of a worker's start is the import of torch and transformers, which takes seconds of CPU. The
nursery (`deploy.local.nursery_main`) imports them once. Launcher and nursery share a socket pair:

    request   the kind of service and three descriptors: the child's standard input, its standard
              output, and one end of another socket pair, for news of this child. A request
              without descriptors is a hint: the idle nursery imports the modules of that kind
    close     `CLOSE_WORD`: the launcher is being closed in order
    news      ChildStarted with a descriptor of the child, or else ChildRefused. When the child
              has ended: ChildEnded

The launcher watches and kills a child through the child's pidfd, which never refers to another
process. If the nursery dies, only the exit statuses of its children are lost: the children keep
running, and the next request starts a new nursery. If the launcher dies, the nursery ends, and each
child ends when its standard input ends. If the launcher died without closing the nursery, the
nursery logs that the launcher's process may have been killed. If the launcher stops a child in
order, the child reads `STOP_WORD` before its input ends. So a gateway that reads no `STOP_WORD`
knows that no worker computes its answers any more.

`multiprocessing.forkserver` is not used: when it dies, it reports all children as dead. It also
imports the parent's main module into each child, and ignores failed preloads.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import BinaryIO, Protocol

import msgspec

from engine.errors import BatonError
from engine.socket_child import start_with_socket

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 10.0  # long, because a request waits in the socket while the nursery imports
REAPED_WITHIN_S = 5.0  # longest time from a child's end until the nursery reports its exit status
MAX_NEWS_BYTES = 4096
SERVICES = ("worker", "gateway")  # kinds of services that each deployment starts, in this order
CLOSE_WORD = b"close"  # sent instead of a kind of service
STOP_WORD = b"stop\n"  # last input of a child that is asked to stop; if missing, the parent died


class ChildStarted(msgspec.Struct, frozen=True, tag=True):
    """Reports that the child runs. The message carries a pidfd of the child."""

    pid: int


class ChildRefused(msgspec.Struct, frozen=True, tag=True):
    """Reports that the nursery refused to fork."""

    why: str


class ChildEnded(msgspec.Struct, frozen=True, tag=True):
    """Reports that the child ended. The child's process id may be reused from now on."""

    exit_status: int  # as in subprocess: negative if a signal ended it


News = ChildStarted | ChildRefused | ChildEnded


class NoChild(BatonError):
    """The nursery has not started a process; the text has the reason."""


class Child:
    """A process that a nursery forks. Any thread may call methods, even while another thread waits.

    `stdin` and `stdout` are the parent's ends of the child's pipes.
    """

    def __init__(self, *, stdin: BinaryIO, stdout: BinaryIO, news: socket.socket) -> None:
        self.stdin = stdin
        self.stdout = stdout
        # Known after the child's end, if the nursery was alive then.
        self.exit_status: int | None = None
        self._news = news
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._is_wanted = True
        self._has_read_end = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The process id of the started child."""
        assert self._pid is not None
        return self._pid

    def await_start(self, timeout_s: float) -> None:
        """Waits until the child runs. Raises NoChild or TimeoutError."""
        self._news.settimeout(timeout_s)
        try:
            message, descriptors, *_ = socket.recv_fds(
                self._news, MAX_NEWS_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            message, descriptors = b"", []
        match msgspec.json.decode(message, type=News) if message else None:
            case ChildStarted(pid) if descriptors:
                with self._lock:
                    self._pid, self._pidfd = pid, descriptors[0]
                    if not self._is_wanted:
                        _send(self._pidfd, signal.SIGKILL)
            case ChildStarted():  # `close` ends the child's standard input, so the child ends
                raise NoChild("its descriptor did not come: too many are open here")
            case ChildRefused(why):
                raise NoChild(why)
            case _:
                raise NoChild("stopped" if not self._is_wanted else "the nursery ended")

    def is_running(self) -> bool:
        """Returns true if the child has started and not ended."""
        return self._pid is not None and not self._has_ended(0.0)

    def wait(self, timeout_s: float) -> None:
        """Waits until the child has ended.

        Returns at once if the child never started. Raises TimeoutError.
        """
        if self._pid is not None and not self._has_ended(timeout_s):
            raise TimeoutError(f"process {self._pid} has not ended in {timeout_s:g} s")

    def kill(self) -> None:
        """Kills the child now, or as soon as the child starts.

        A running `await_start` stops waiting.
        """
        with self._lock:
            self._is_wanted = False
            if self._pidfd is not None:
                _send(self._pidfd, signal.SIGKILL)
            elif self._pid is None:
                with contextlib.suppress(OSError):  # the nursery has closed its end of the socket
                    self._news.shutdown(socket.SHUT_RDWR)

    def terminate(self) -> None:
        """Sends SIGTERM to the child if it runs."""
        with self._lock:
            if self._pidfd is not None:
                _send(self._pidfd, signal.SIGTERM)

    def hang_up(self) -> None:
        """Asks the child to stop, and closes the child's standard input."""
        with contextlib.suppress(BrokenPipeError):  # the child died before it had read all input
            if not self.stdin.closed:
                self.stdin.write(STOP_WORD)
            self.stdin.close()

    def close(self) -> None:
        """Closes the pipes and descriptors. Afterwards a running child can no longer be reached."""
        self.hang_up()
        self.stdout.close()
        with self._lock:
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
        self._news.close()

    def _has_ended(self, timeout_s: float) -> bool:
        with self._lock:
            if self._pidfd is None:
                return True
            # Another thread may close the original descriptor meanwhile.
            pidfd = os.dup(self._pidfd)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                return False
        finally:
            os.close(pidfd)
        self._read_end()
        return True

    def _read_end(self) -> None:
        """Reads the child's exit status from the nursery. Later calls do nothing."""
        with self._lock:
            if self._has_read_end:
                return
            self._has_read_end = True
            self._news.settimeout(REAPED_WITHIN_S)
            try:
                message = self._news.recv(MAX_NEWS_BYTES)
            except OSError as error:
                log.warning("the exit status of process %d is unknown: %s", self._pid, error)
                return
        if message:
            self.exit_status = msgspec.json.decode(message, type=ChildEnded).exit_status
        else:
            log.warning("the exit status of process %d is unknown: the nursery ended", self._pid)


class Forks(Protocol):
    """An object that starts children: a nursery, or the port of another process's nursery."""

    def fork(self, kind: str) -> Child:
        """Requests a child, which becomes a service of that kind. Raises OSError."""
        ...

    def give_up(self) -> None:
        """Kills a nursery that does not answer. The next request starts a new nursery."""
        ...


def ask_for_child(kind: str, send: Callable[[bytes, Sequence[int]], object]) -> Child:
    """Makes a child's pipes, and sends the request with their descriptors.

    Raises the errors of `send`, and OSError.
    """
    with ExitStack() as theirs, ExitStack() as ours:
        stdin, to_child = os.pipe()
        theirs.callback(os.close, stdin)
        to_stdin = ours.enter_context(open(to_child, "wb"))
        from_child, stdout = os.pipe()
        theirs.callback(os.close, stdout)
        from_stdout = ours.enter_context(open(from_child, "rb"))
        news, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.enter_context(news)
        theirs.enter_context(told)
        send(kind.encode(), [stdin, stdout, told.fileno()])
        ours.pop_all()
    return Child(stdin=to_stdin, stdout=from_stdout, news=news)


class Nursery(Forks):
    """Starts the nursery process on demand, and requests children from it. Safe to use from any
    thread.

    `command` has Python's arguments; the number of the nursery's socket is appended. The nursery's
    process is started inside the context `entered`. So children inherit what the context sets, such
    as a network namespace.
    """

    def __init__(
        self,
        command: Sequence[str] = ("-m", "deploy.local.nursery_main"),
        *,
        entered: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.num_lost = 0  # number of nursery processes that ended by themselves or did not answer
        self._command = command
        self._entered = entered
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._has_children = False  # True once a child has been requested
        self._lock = threading.Lock()

    def open(self, *kinds: str) -> None:
        """Starts the nursery's process, which imports the modules of these kinds of services.

        Raises OSError.
        """
        with self._lock:
            asked = self._opened()
            for kind in kinds:
                asked.send(kind.encode())

    def fork(self, kind: str) -> Child:
        """Requests a child, which becomes a service of that kind. Raises OSError."""
        return ask_for_child(kind, self.pass_on)

    def pass_on(self, kind: bytes, descriptors: Sequence[int]) -> None:
        """Forwards a request for a child, which may come from another process. Raises OSError."""
        with self._lock:
            self._has_children = True
            asked = self._opened()
            asked.settimeout(SEND_TIMEOUT_S)
            socket.send_fds(asked, [kind], descriptors)

    def give_up(self) -> None:
        """Kills a nursery that does not answer. The next request starts a new nursery."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Ends the nursery. Each child keeps running until its standard input ends."""
        with self._lock:
            self._close()

    def _opened(self) -> socket.socket:
        """Returns the socket of the running nursery; starts a nursery if none runs."""
        if self._process is not None and self._process.poll() is not None:
            self.num_lost += 1
            log.warning(
                "the nursery ended with status %s; another one starts", self._process.poll()
            )
            self._close()
        if self._socket is None:
            with self._entered():
                self._process, self._socket = start_with_socket(
                    self._command, socket_type=socket.SOCK_SEQPACKET, new_session=True
                )
        return self._socket

    def _close(self) -> None:
        if self._process is None or self._socket is None:
            return
        with contextlib.suppress(OSError):  # the nursery has ended, or its socket's buffer is full
            self._socket.settimeout(0.0)
            self._socket.send(CLOSE_WORD)
        self._socket.close()
        if not self._has_children:  # nothing to keep alive: do not wait for the end of the imports
            self._process.kill()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # the nursery still imports
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None


def _send(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the process has ended
        signal.pidfd_send_signal(pidfd, number)

"""A process that has imported what services need, and forks them: the side that asks.

Nearly all of a worker's start is the import of torch and transformers, seconds of CPU. The nursery
(`deploy.local.nursery_main`) pays them once. Whoever asks it holds one end of a socket pair:

    a request   the kind of service, and descriptors: of the child's standard input, of its standard
                output, and of one end of another socket pair, for news of this child
    news        Started, with a descriptor of the child, or NotStarted; after its end Ended

A child is watched and killed by its descriptor, which never comes to mean another process. So
nothing but its exit status is lost with the nursery: its children go on, and who asks for another
one gets a new nursery. When whoever asks is gone the nursery ends, and the children by themselves,
as their standard input does.

`multiprocessing.forkserver` takes all children for dead when it dies, imports the main module of
whoever asks into each, and passes over whatever fails to be imported beforehand.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import BinaryIO

import msgspec

from engine.errors import BatonError

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 10.0  # what is asked of a nursery that still imports waits in the socket
REAPED_WITHIN_S = 5.0  # a child that ended has been waited for by its nursery
MAX_NEWS_BYTES = 4096


class Started(msgspec.Struct, frozen=True, tag=True):
    """There is a child, of whom a descriptor comes along."""

    pid: int


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """There is none."""

    why: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The child ended, and its id may come to mean another process."""

    exit_status: int  # as subprocess has it: of one that a signal ended, less than zero


News = Started | NotStarted | Ended


class NoChild(BatonError):
    """The nursery has not started a process; the text says why."""


class Child:
    """A process that a nursery was asked for. Any thread may ask, also while another waits."""

    def __init__(self, *, stdin: BinaryIO, stdout: BinaryIO, news: socket.socket) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.exit_status: int | None = None  # after its end, if the nursery was there to tell
        self._news = news
        self._pid: int | None = None
        self._pidfd: int | None = None
        self._is_wanted = True
        self._has_heard_of_end = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._pid is not None
        return self._pid

    def await_start(self, timeout_s: float) -> None:
        """Returns when it runs. Raises NoChild, and TimeoutError."""
        self._news.settimeout(timeout_s)
        try:
            message, descriptors, *_ = socket.recv_fds(
                self._news, MAX_NEWS_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            message, descriptors = b"", []
        match msgspec.json.decode(message, type=News) if message else None:
            case Started(pid) if descriptors:
                with self._lock:
                    self._pid, self._pidfd = pid, descriptors[0]
                    if not self._is_wanted:
                        _kill(self._pidfd)
            case Started():  # it ends when its standard input does, as it is let go
                raise NoChild("its descriptor did not come: too many are open here")
            case NotStarted(why):
                raise NoChild(why)
            case _:
                raise NoChild("stopped" if not self._is_wanted else "the nursery ended")

    def is_running(self) -> bool:
        """Whether it has started and not ended."""
        return self._pid is not None and not self._has_ended(0.0)

    def wait(self, timeout_s: float) -> None:
        """Returns when it has ended, or has never started. Raises TimeoutError."""
        if self._pid is not None and not self._has_ended(timeout_s):
            raise TimeoutError(f"process {self._pid} has not ended in {timeout_s:g} s")

    def kill(self) -> None:
        """Ends it at once, or as soon as it starts, for which nobody waits any longer."""
        with self._lock:
            self._is_wanted = False
            if self._pidfd is not None:
                _kill(self._pidfd)
            elif self._pid is None:
                with contextlib.suppress(OSError):  # the nursery has closed its end
                    self._news.shutdown(socket.SHUT_RDWR)

    def terminate(self) -> None:
        """Sends it SIGTERM, if it runs."""
        with self._lock:
            if self._pidfd is not None:
                _send(self._pidfd, signal.SIGTERM)

    def hang_up(self) -> None:
        """Ends its standard input."""
        with contextlib.suppress(BrokenPipeError):  # it died before it read all
            self.stdin.close()

    def close(self) -> None:
        """Lets go of it. One that runs still is out of reach then."""
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
            pidfd = os.dup(self._pidfd)  # somebody else may close that one meanwhile
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                return False
        finally:
            os.close(pidfd)
        self._hear_of_end()
        return True

    def _hear_of_end(self) -> None:
        with self._lock:
            if self._has_heard_of_end:
                return
            self._has_heard_of_end = True
            self._news.settimeout(REAPED_WITHIN_S)
            try:
                message = self._news.recv(MAX_NEWS_BYTES)
            except OSError as error:
                log.warning("nobody tells how process %d ended: %s", self._pid, error)
                return
        if message:
            self.exit_status = msgspec.json.decode(message, type=Ended).exit_status
        else:
            log.warning("nobody tells how process %d ended: the nursery ended before", self._pid)


class Nursery:
    """Starts a nursery when there is none, and asks it for children. From any thread."""

    def __init__(self, command: Sequence[str] = ("-m", "deploy.local.nursery_main")) -> None:
        """`command` is Python's, for a nursery; the number of its socket is added."""
        self.num_lost = 0  # nurseries that ended by themselves, or did not answer
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Lets it import meanwhile; whoever asks for a child does that, too. Raises OSError."""
        with self._lock:
            self._opened()

    def fork(self, kind: str) -> Child:
        """Asks for a child, which becomes a service of that kind. Raises OSError."""
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
            with self._lock:
                asked = self._opened()
                asked.settimeout(SEND_TIMEOUT_S)
                socket.send_fds(asked, [kind.encode()], [stdin, stdout, told.fileno()])
            ours.pop_all()
        return Child(stdin=to_stdin, stdout=from_stdout, news=news)

    def give_up(self) -> None:
        """Ends a nursery that does not answer; the next child is another one's."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Ends the nursery. Children go on until their standard input ends."""
        with self._lock:
            self._close()

    def _opened(self) -> socket.socket:
        """The socket of a nursery that runs."""
        if self._process is not None and self._process.poll() is not None:
            self.num_lost += 1
            log.warning(
                "the nursery ended with status %s; another one starts", self._process.poll()
            )
            self._close()
        if self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, ExitStack() as stack:
                stack.enter_context(ours)
                self._process = subprocess.Popen(
                    [sys.executable, *self._command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
                stack.pop_all()
            self._socket = ours
        return self._socket

    def _close(self) -> None:
        if self._process is None or self._socket is None:
            return
        self._socket.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it still imports
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None


def _kill(pidfd: int) -> None:
    _send(pidfd, signal.SIGKILL)


def _send(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(pidfd, number)

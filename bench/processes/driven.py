"""Child processes of a benchmark, which are ended with all their descendants: engines and services.

A `ChildProcess` has a session of its own. Its pipes are read and written in threads. So a child
that neither reads nor writes cannot block its parent beyond the parent's deadline.

`Driven` is an engine that takes JSON commands and gives JSON answers, one a line.
`bench.peers.driver` describes the protocol. Every wait has a deadline. A process that misses a
deadline is killed, with all processes in its session.

SIGTERM ends a benchmark like SIGINT. In an event loop, asyncio cancels the main task; elsewhere
Python raises KeyboardInterrupt. In both cases context managers exit in order and end their
processes. The exit status depends on the signal.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import FrameType
from typing import IO, Any, Literal, Self

import msgspec

from engine.errors import BatonError

JOIN_TIMEOUT_S = 5.0  # seconds for a thread to detect that its pipe is closed

# called with each line, then with None at the end of the pipe
OnLine = Callable[[str | None], None]


class ChildProcess:
    """A child process, which is started by the constructor. Raises OSError if it cannot be started.

    `on_stdout` and `on_stderr` are called in threads. Without `on_stdout`, standard output goes to
    /dev/null. Without `on_stderr`, standard error is the parent's. Without `environment`, the child
    inherits the parent's environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        on_stdout: OnLine | None = None,
        on_stderr: OnLine | None = None,
        has_stdin: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if on_stdout is None else subprocess.PIPE,
            stderr=None if on_stderr is None else subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=environment,
        )
        self._writer: threading.Thread | None = None
        self._readers: list[tuple[IO[str], threading.Thread]] = []
        for pipe, on_line in ((self.process.stdout, on_stdout), (self.process.stderr, on_stderr)):
            if pipe is not None and on_line is not None:
                self._readers.append((pipe, _started(_read, pipe, on_line)))

    @property
    def pid(self) -> int:
        """Returns the process id, which is also the id of the session and of the process group."""
        return self.process.pid

    def send(self, line: str) -> None:
        """Queues a line for the standard input. Does not wait until the child reads it."""
        self._writer = _started(_write, self.process.stdin, line)

    def ends_within(self, timeout_s: float) -> bool:
        """Waits for the end of the process. Returns False after the timeout."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """Closes the standard input and waits, up to the timeout, for the end of the process. Then
        kills all that is left in its session.
        """
        if self.process.stdin is not None and not self._is_writing():
            with suppress(OSError):
                self.process.stdin.close()
            self.ends_within(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kills the process and all processes in its session, and closes the pipes."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # also kills processes that the child started
        self.process.wait()
        for pipe, reader in self._readers:
            reader.join(JOIN_TIMEOUT_S)
            if not reader.is_alive():  # closing the pipe would wait for a running reader
                pipe.close()
        if self._writer is not None:
            self._writer.join(JOIN_TIMEOUT_S)
        if self.process.stdin is not None and not self._is_writing():
            with suppress(OSError):
                self.process.stdin.close()

    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()


def _started(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _read(pipe: IO[str], on_line: OnLine) -> None:
    for line in pipe:  # read to the end, because the child would block on a full pipe
        on_line(line)
    on_line(None)


def _write(pipe: IO[str], line: str) -> None:
    # the child has ended or the pipe is closed; the readers detect this
    with suppress(OSError, ValueError):
        pipe.write(line + "\n")
        pipe.flush()


class EndSignals:
    """The signals that have been sent to end this process. `last` is the most recent one."""

    def __init__(self) -> None:
        self.last = signal.SIGINT

    def install(self) -> None:
        """Installs handlers for both signals, even if our parent ignores SIGINT. For the main
        thread only.
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, self._on_term)

    @property
    def exit_status(self) -> int:
        """Returns the exit status that shells use for a command that this signal ended."""
        return 128 + self.last

    def _on_term(self, number: int, _: FrameType | None) -> None:
        self.last = signal.Signals(number)
        signal.raise_signal(signal.SIGINT)


END_SIGNALS = EndSignals()


NUM_LAST_LINES = 12
CLOSE_TIMEOUT_S = 5.0

Answer = dict[str, Any]


class DrivenFailed(BatonError):
    """An engine failed or did not answer in time. Has the last lines of the engine's standard
    error.
    """

    def __init__(self, name: str, reason: str, last_lines: Sequence[str]) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason
        self.last_lines = tuple(last_lines)


class Driven:
    """One engine process. Without `environment`, it inherits our environment."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._close_timeout_s = close_timeout_s
        # lines of output; None marks the end
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def session(self) -> int | None:
        """Returns the session id of the process and its descendants; None if it does not run."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts the process without waiting for it. If the start fails, `ready` raises."""
        try:
            self._child = ChildProcess(
                self._command,
                on_stdout=self._lines.put,
                on_stderr=self._keep,
                environment=self._environment,
            )
        except OSError as error:
            self._last_lines.append(str(error))

    def ready(self, timeout_s: float) -> Answer:
        """Waits until the engine is loaded. Returns the facts that it reports. Raises
        DrivenFailed.
        """
        if self._child is None:
            raise DrivenFailed(self.name, "it could not be started", self._last_lines)
        answer = self.answer(timeout_s)
        facts = answer.get("ready")
        if not isinstance(facts, dict):
            raise self._failed(f"it said {answer} when it should have been ready")
        return facts

    def ask(self, do: str, *, timeout_s: float, **arguments: object) -> Answer:
        """Sends one command and waits for the answer. Raises DrivenFailed."""
        return self.send({"do": do, **arguments}, timeout_s=timeout_s)

    def send(self, message: Mapping[str, object], *, timeout_s: float) -> Answer:
        """Sends one message and waits for the answer. Raises DrivenFailed."""
        if self._child is None:
            raise DrivenFailed(self.name, "it is not running", self._last_lines)
        self._child.send(msgspec.json.encode(message).decode())
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> Answer:
        """Waits for the next answer and returns it. Raises DrivenFailed."""
        if self._child is None:
            raise DrivenFailed(self.name, "it is not running", self._last_lines)
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"no answer in {timeout_s:g} s") from None
        if line is None:
            self._child.ends_within(CLOSE_TIMEOUT_S)
            raise self._failed(f"it ended with status {self._child.process.returncode}")
        try:
            answer = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise self._failed(f"it said {line[:200]!r}") from None
        if "error" in answer:
            raise DrivenFailed(self.name, str(answer["error"]), self._last_lines)
        return answer

    def close(self) -> None:
        """Ends the process and all that it started. Kills it if it does not end by itself."""
        child, self._child = self._child, None
        if child is not None:
            child.close(self._close_timeout_s)

    def _failed(self, reason: str) -> DrivenFailed:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
        return DrivenFailed(self.name, reason, self._last_lines)

    def _keep(self, line: str | None) -> None:
        if line is not None:
            self._last_lines.append(line.rstrip())


def started(process: Driven, stack: ExitStack) -> Driven:
    """Starts a process without waiting for it. The stack ends the process."""
    process.start()
    stack.callback(process.close)
    return process


def answer_parent(answer: object) -> None:
    """Prints an answer as one line. For processes that are driven."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


# ---------------------------------------------------------------- services of Baton

SERVICE = "deploy.local.process_main"
STOP_TIMEOUT_S = 30.0


def launched(kind: Literal["worker", "gateway"], stack: ExitStack) -> Driven:
    """Starts a service's process, which waits for its spec (`deploy.base.spec`). The stack ends the
    process.
    """
    command = [sys.executable, "-m", SERVICE, kind]
    return started(Driven(kind, command, close_timeout_s=STOP_TIMEOUT_S), stack)


def listening(service: Driven, spec: Mapping[str, object], *, timeout_s: float) -> Answer:
    """Sends a service its spec. Returns the service's answer, which it sends when it listens.
    Raises DrivenFailed.
    """
    answer = service.send(spec, timeout_s=timeout_s)
    while "type" in answer:  # skips messages about the start, such as its expected duration
        answer = service.answer(timeout_s)
    return answer

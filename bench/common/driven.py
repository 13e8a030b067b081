"""Drives an engine in a process of its own: sends commands, waits for answers with a deadline.

The protocol is that of `bench.peers.driver`. The process leads a session, so all its children end
with it. Threads read and write the pipes, so a process that does neither cannot block past the
deadline.
"""

import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Self

import msgspec

from engine.errors import BatonError

NUM_LAST_LINES = 12
CLOSE_TIMEOUT_S = 5.0

Answer = dict[str, Any]


class DrivenFailed(BatonError):
    """An engine could not carry out a command. Holds the last lines of its stderr."""

    def __init__(self, name: str, reason: str, last_lines: Sequence[str]) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason
        self.last_lines = tuple(last_lines)


class Driven:
    """One driven process. It is ended if it does not answer.

    `environment` None means that of this process.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: end of stdout
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._readers: list[threading.Thread] = []
        self._writer = threading.Thread()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def session(self) -> int | None:
        """Session id of the process and its children; None if it does not run."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process, without waiting for it."""
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
                env=self._environment,
            )
        except OSError as error:  # `ready` raises it, as it does for all other failures
            self._last_lines.append(str(error))
            return
        self._readers = [
            _started(self._read_answers, self._process.stdout),
            _started(self._read_log, self._process.stderr),
        ]

    def ready(self, timeout_s: float) -> Answer:
        """Waits until the engine is loaded; returns what it reports. Raises DrivenFailed."""
        if self._process is None:
            raise DrivenFailed(self.name, "it could not be started", self._last_lines)
        answer = self._wait(timeout_s)
        facts = answer.get("ready")
        if not isinstance(facts, dict):
            raise self._failed(f"it said {answer} instead of ready")
        return facts

    def ask(self, do: str, *, timeout_s: float, **arguments: object) -> Answer:
        """Sends one command and waits for its answer. Raises DrivenFailed."""
        if self._process is None:
            raise DrivenFailed(self.name, "it is not running", self._last_lines)
        command = msgspec.json.encode({"do": do, **arguments}).decode()
        self._writer = _started(_write, self._process.stdin, command)
        return self._wait(timeout_s)

    def close(self) -> None:
        """Ends the process and its children, by force after `CLOSE_TIMEOUT_S`."""
        if self._process is None:
            return
        if not self._writer.is_alive():  # otherwise closing stdin would wait for the writer
            with suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_TIMEOUT_S)
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its children may outlive it
        process.wait()
        users = zip(
            (process.stdin, process.stdout, process.stderr),
            (self._writer, *self._readers),
            strict=True,
        )
        for pipe, user in users:
            if user.ident is not None:
                user.join(CLOSE_TIMEOUT_S)
            if not user.is_alive():  # otherwise closing would wait for the thread
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def _wait(self, timeout_s: float) -> Answer:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"no answer in {timeout_s:g} s") from None
        if line is None:
            assert self._process is not None
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_TIMEOUT_S)
            status = self._process.returncode
            raise self._failed(f"it ended with status {status}")
        try:
            answer = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise self._failed(f"it said {line[:200]!r}") from None
        if "error" in answer:
            raise DrivenFailed(self.name, str(answer["error"]), self._last_lines)
        return answer

    def _failed(self, reason: str) -> DrivenFailed:
        self._kill()
        return DrivenFailed(self.name, reason, self._last_lines)

    def _read_answers(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines.put(line)
        self._lines.put(None)

    def _read_log(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._last_lines.append(line.rstrip())


def _started(function: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _write(pipe: IO[str], command: str) -> None:
    with suppress(OSError, ValueError):  # the process has ended: the reader reports it
        pipe.write(command + "\n")
        pipe.flush()

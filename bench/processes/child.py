"""A child process in a session of its own: lines in, lines out, and an end that leaves nothing.

Pipes are read and written in threads. So a child that neither reads nor writes holds up its parent
for no longer than the parent's deadline.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

JOIN_TIMEOUT_S = 5.0  # for a thread to see that its pipe has ended

Heard = Callable[[str | None], None]  # called with each line, then with None at the end


class ChildProcess:
    """Starts at once. Raises OSError if the command cannot be started.

    `on_stdout` and `on_stderr` are called in threads. Without the first, standard output goes to
    /dev/null; without the second, standard error is the parent's. Without `environment` the child
    inherits the parent's.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        on_stdout: Heard | None = None,
        on_stderr: Heard | None = None,
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
        for pipe, heard in ((self.process.stdout, on_stdout), (self.process.stderr, on_stderr)):
            if pipe is not None and heard is not None:
                self._readers.append((pipe, _started(_read, pipe, heard)))

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the session and of the process group."""
        return self.process.pid

    def send(self, line: str) -> None:
        """Writes a line to the standard input, without waiting until it is read."""
        self._writer = _started(_write, self.process.stdin, line)

    def ends_within(self, timeout_s: float) -> bool:
        """Waits for the end. Returns false after the timeout."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self, timeout_s: float) -> None:
        """Closes the standard input, waits up to the timeout, then kills the rest of the
        session.
        """
        if self.process.stdin is not None and not self._is_writing():
            with suppress(OSError):
                self.process.stdin.close()
            self.ends_within(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Kills the process and all that it started in its session, and closes the pipes."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # processes that it started may outlive it
        self.process.wait()
        for pipe, reader in self._readers:
            reader.join(JOIN_TIMEOUT_S)
            if not reader.is_alive():  # otherwise closing would wait for the reader
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


def _read(pipe: IO[str], heard: Heard) -> None:
    for line in pipe:  # read to the end: otherwise the child would block on a full pipe
        heard(line)
    heard(None)


def _write(pipe: IO[str], line: str) -> None:
    with suppress(OSError, ValueError):  # the child is gone or the pipe closed: readers see it
        pipe.write(line + "\n")
        pipe.flush()

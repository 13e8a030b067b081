"""An engine in a process of its own: JSON commands in, JSON answers out, one a line.

`bench.peers.driver` describes the protocol. Every wait has a deadline, and a process that misses it
is killed with everything that it started.
"""

import queue
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Self

import msgspec

from bench.processes.child import ChildProcess
from engine.errors import BatonError

NUM_LAST_LINES = 12
CLOSE_TIMEOUT_S = 5.0

Answer = dict[str, Any]


class DrivenFailed(BatonError):
    """An engine could not do what it was asked. Holds the last lines of its standard error."""

    def __init__(self, name: str, reason: str, last_lines: Sequence[str]) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason
        self.last_lines = tuple(last_lines)


class Driven:
    """One engine process. Without `environment` it inherits ours."""

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
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the end
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._child: ChildProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def session(self) -> int | None:
        """Session of the process and all that it started; None if it does not run."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts the process without waiting for it. `ready` raises if the start failed."""
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
        """Waits until the engine is loaded; returns its facts. Raises DrivenFailed."""
        if self._child is None:
            raise DrivenFailed(self.name, "it could not be started", self._last_lines)
        answer = self.answer(timeout_s)
        facts = answer.get("ready")
        if not isinstance(facts, dict):
            raise self._failed(f"it said {answer} when it should have been ready")
        return facts

    def ask(self, do: str, *, timeout_s: float, **arguments: object) -> Answer:
        """Sends one command and returns the answer. Raises DrivenFailed."""
        return self.tell({"do": do, **arguments}, timeout_s=timeout_s)

    def tell(self, message: Mapping[str, object], *, timeout_s: float) -> Answer:
        """Sends one message and returns the answer. Raises DrivenFailed."""
        if self._child is None:
            raise DrivenFailed(self.name, "it is not running", self._last_lines)
        self._child.send(msgspec.json.encode(message).decode())
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> Answer:
        """Waits for the next answer. Raises DrivenFailed."""
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
        """Ends the process and all that it started, by force if it does not end by itself."""
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


def begun(process: Driven, stack: ExitStack) -> Driven:
    """Starts the process, which ends with the stack, without waiting for it."""
    process.start()
    stack.callback(process.close)
    return process


def tell_parent(answer: object) -> None:
    """Prints an answer as one line, in the process that is driven."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


# ---------------------------------------------------------------- services of Baton

SERVICE = "deploy.local.process_main"
STOP_TIMEOUT_S = 30.0


def launched(kind: Literal["worker", "gateway"], stack: ExitStack) -> Driven:
    """Starts a process that ends with the stack. It waits for its spec (`deploy.base.spec`)."""
    command = [sys.executable, "-m", SERVICE, kind]
    return begun(Driven(kind, command, close_timeout_s=STOP_TIMEOUT_S), stack)


def listening(service: Driven, spec: Mapping[str, object], *, timeout_s: float) -> Answer:
    """Sends a service its spec; returns its answer once it listens. Raises DrivenFailed."""
    answer = service.tell(spec, timeout_s=timeout_s)
    while "type" in answer:  # messages about the start, such as its expected duration
        answer = service.answer(timeout_s)
    return answer

"""Runs a service as a child of a nursery; the child runs `deploy.local.process_main`.

`start` sends the spec to the child as one line of JSON, and reads the answer as another line. If
the child must fetch the model first, it reports the fetch, which has its own deadline. For a large
model, the child also reports how long its start may take.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from deploy.base.launcher import CUT_TIMEOUT_S, LOOK_EVERY_S, STOP_TIMEOUT_S
from deploy.base.reasons import explain_status
from deploy.base.spec import (
    READY_TIMEOUT_S,
    READY_TYPES,
    Fetched,
    Fetching,
    GatewayReady,
    ServiceReady,
    ServiceSpec,
    Starting,
    StartReport,
)
from deploy.fetching.cache import FETCH_TIMEOUT_S
from deploy.local.nursery import Child, Forks, NoChild
from engine.clock import MonotonicClock
from engine.errors import ConfigError

FORK_TIMEOUT_S = 120.0  # long, because the nursery may import from a cold disk
LOOK_FOR_END_S = 60.0


class ServiceProcess:
    """Starts, watches and stops the process of one service. Any thread may call the methods."""

    def __init__(self, spec: ServiceSpec, nursery: Forks) -> None:
        self.name = spec.name
        self.kind = spec.kind
        self.ready: ServiceReady | None = None  # the service's answer once it has started
        self._spec = spec
        self._nursery = nursery
        self._child: Child | None = None
        self._is_wanted = True
        self._lock = threading.Lock()  # makes `start` and `kill` exclude each other

    def start(self) -> ServiceReady:
        """Starts the process and waits for its answer. Raises ConfigError."""
        try:
            with self._lock:
                if not self._is_wanted:
                    raise ConfigError(f"{self.name} was stopped before it started")
                self._child = child = self._nursery.fork(self.kind)
        except (OSError, RuntimeError) as error:  # no memory, descriptor, process or thread is left
            raise ConfigError(f"{self.name} cannot be started: {error}") from error
        self.ready = ready = self._ask(child)
        return ready

    def is_running(self) -> bool:
        """Returns true if the process has started and not ended."""
        return self._child is not None and self._child.is_running()

    def await_end(self) -> None:
        """Waits until the started process has ended, without a time limit."""
        assert self._child is not None
        while True:
            with contextlib.suppress(TimeoutError):
                self._child.wait(LOOK_FOR_END_S)
                return

    @property
    def exit_status(self) -> int | str:
        """The exit status of the ended process."""
        assert self._child is not None
        status = self._child.exit_status
        return "unknown" if status is None else status

    def kill(self) -> None:
        """Kills the process. A running start fails."""
        with self._lock:
            self._is_wanted = False
            if self._child is not None:
                self._child.kill()

    def stop(self, stop_draining: threading.Event) -> None:
        """Asks the process to stop by closing its standard input. Kills the process after a
        deadline.

        Once `stop_draining` is set, the deadline is shorter, and a gateway cuts its answers off.
        """
        child = self._child
        if child is None:
            return
        child.hang_up()
        drain_s = self.ready.drain_timeout_s if isinstance(self.ready, GatewayReady) else 0.0
        if not _ends_within(STOP_TIMEOUT_S + drain_s, child, stop_draining):
            child.kill()
            child.wait(STOP_TIMEOUT_S)
        child.close()

    def _ask(self, child: Child) -> ServiceReady:
        """Sends the spec and returns the answer. Raises ConfigError."""
        try:
            child.await_start(FORK_TIMEOUT_S)
        except NoChild as error:
            raise ConfigError(f"{self.name} was not started: {error}") from error
        except TimeoutError as error:
            self._nursery.give_up()
            raise ConfigError(
                f"{self.name} was not started: the nursery gave no answer in {FORK_TIMEOUT_S:g} s"
            ) from error
        request, step, limit_s = msgspec.json.encode(self._spec) + b"\n", "start", READY_TIMEOUT_S
        while True:
            line = b""
            with self._deadline(limit_s, child, step):
                child.stdin.write(request)
                child.stdin.flush()
                line = child.stdout.readline()
            request, step = b"", "start"
            match self._answer(line, child):
                case Fetching():
                    step, limit_s = "fetch its model", FETCH_TIMEOUT_S
                case Fetched():
                    limit_s = READY_TIMEOUT_S
                case Starting(limit_s):
                    pass
                case ready:
                    return ready

    def _answer(self, line: bytes, child: Child) -> StartReport | ServiceReady:
        """Reads and decodes a line of the child.

        Raises ConfigError if the child refused or has ended.
        """
        if not line:
            with contextlib.suppress(TimeoutError):  # the child may still run with a closed output
                child.wait(STOP_TIMEOUT_S)
            raise ConfigError(
                f"{self.name} ended while starting ({explain_status(self.exit_status)})"
            )
        try:
            answer = msgspec.json.decode(line, type=dict[str, Any])
            if "error" in answer:
                raise ConfigError(f"{self.name}: {answer['error']}")
            kind: Any = StartReport if "type" in answer else READY_TYPES[self.kind]
            decoded: StartReport | ServiceReady = msgspec.convert(answer, kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.name} said {line[:200]!r} while starting") from error
        return decoded

    @contextlib.contextmanager
    def _deadline(self, timeout_s: float, child: Child, step: str) -> Iterator[None]:
        """Kills the child and raises ConfigError if the block takes longer than `timeout_s`."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            child.kill()

        watchdog = threading.Timer(timeout_s, end)
        watchdog.start()
        try:
            with contextlib.suppress(OSError):  # the child died before it had read all input
                yield
        finally:
            watchdog.cancel()
        if is_late.is_set():
            raise ConfigError(f"{self.name} did not {step} in {timeout_s:g} s")


def _ends_within(timeout_s: float, child: Child, stop_draining: threading.Event) -> bool:
    """Waits for the child's end.

    Once `stop_draining` is set, repeats SIGTERM, since a signal may be missed.
    """
    clock = MonotonicClock()
    end_s = clock.now_s() + timeout_s
    is_cut = False
    while clock.now_s() < end_s:
        with contextlib.suppress(TimeoutError):
            child.wait(LOOK_EVERY_S)
            return True
        if stop_draining.is_set():
            if not is_cut:
                is_cut, end_s = True, clock.now_s() + CUT_TIMEOUT_S
            child.terminate()
    return False

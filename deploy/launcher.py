"""Starts workers and gateways, and sees when one dies: as plain processes here, on Ray in
`ray_launcher`.
"""

import contextlib
import subprocess
import sys
import threading
from typing import Any, Protocol, TypeVar

import msgspec

from deploy.processes import (
    READY_TIMEOUT_S,
    GatewayReady,
    GatewaySpec,
    WorkerReady,
    WorkerSpec,
)
from engine.errors import ConfigError

STOP_TIMEOUT_S = 30.0

T = TypeVar("T")


class Launcher(Protocol):
    """Where services run. Services stop in the reverse order of their start."""

    def open(self) -> None:
        """Prepares to start services."""
        ...

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        """Starts a worker and waits until it listens. Raises ConfigError; then nothing is left."""
        ...

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway and waits until it listens. Raises ConfigError; then nothing is left."""
        ...

    def dead(self) -> dict[str, str]:
        """Services that ended by themselves since the last call: by name, how each ended.

        Their names are free again.
        """
        ...

    def close(self) -> None:
        """Stops everything that was started; returns when nothing of it is left."""
        ...


class ServiceProcess:
    """One `deploy.process_main` process."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    def start(self, spec: WorkerSpec | GatewaySpec, ready_type: type[T]) -> T:
        """Starts the process and waits for its answer. Raises ConfigError."""
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "deploy.process_main", self._kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
            watchdog.start()
        except (OSError, RuntimeError) as error:  # no memory, descriptors, processes or threads
            raise ConfigError(f"{self.name} cannot be started: {error}") from error
        try:
            line = self._ask(process, msgspec.json.encode(spec) + b"\n")
        finally:
            watchdog.cancel()
        try:
            answer = msgspec.json.decode(line, type=dict[str, Any])
            if "error" in answer:
                raise ConfigError(f"{self.name}: {answer['error']}")
            return msgspec.convert(answer, ready_type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.name} said {line[:200]!r} while starting") from error

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """The line that it answers with. Raises ConfigError if it ends without."""
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(OSError):  # it died before it read all
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            raise ConfigError(f"{self.name} ended while starting (exit status {process.wait()})")
        return line

    def exit_status(self) -> int | None:
        """None while the process runs."""
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> None:
        """Ends the process: by closing its standard input, and if that does not help, by force."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died before it read all
            process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class ProcessLauncher:
    """Runs every service as a child process."""

    def __init__(self) -> None:
        self.processes: list[ServiceProcess] = []

    def open(self) -> None:
        """Nothing to prepare."""

    def start_worker(self, spec: WorkerSpec) -> WorkerReady:
        """Starts a worker process."""
        return self._start(ServiceProcess(spec.worker_id, "worker"), spec, WorkerReady)

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway process."""
        return self._start(ServiceProcess(spec.name, "gateway"), spec, GatewayReady)

    def dead(self) -> dict[str, str]:
        """Processes that ended, each named once."""
        ended = [process for process in self.processes if process.exit_status() is not None]
        for process in ended:
            process.stop()  # which closes its pipes
            self.processes.remove(process)
        return {p.name: f"{p.name} ended with status {p.exit_status()}" for p in ended}

    def close(self) -> None:
        """Stops the gateways, then the workers."""
        for process in reversed(self.processes):
            process.stop()
        self.processes = []

    def _start(
        self, process: ServiceProcess, spec: WorkerSpec | GatewaySpec, ready_type: type[T]
    ) -> T:
        self.processes.append(process)  # before it starts: an interrupt leaves it to `close`
        try:
            return process.start(spec, ready_type)
        except ConfigError:
            self.processes.remove(process)
            process.stop()
            raise

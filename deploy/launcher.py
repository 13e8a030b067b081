"""Starts workers and gateways, and sees when one dies: as plain processes here, on Ray in
`ray_launcher`.
"""

import contextlib
import json
import subprocess
import sys
import threading
from typing import Protocol, TypeVar

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
        """Starts a worker and waits until it listens. Raises ConfigError."""
        ...

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway and waits until it listens. Raises ConfigError."""
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
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "deploy.process_main", self._kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
        watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
        watchdog.start()
        line = process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise ConfigError(f"{self.name} ended while starting (exit status {process.wait()})")
        answer = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"{self.name}: {answer['error']}")
        return msgspec.convert(answer, ready_type)

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
        return self._add(spec.worker_id, "worker").start(spec, WorkerReady)

    def start_gateway(self, spec: GatewaySpec) -> GatewayReady:
        """Starts a gateway process."""
        return self._add(spec.name, "gateway").start(spec, GatewayReady)

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

    def _add(self, name: str, kind: str) -> ServiceProcess:
        process = ServiceProcess(name, kind)
        self.processes.append(process)
        return process

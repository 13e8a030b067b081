"""Restarts Ray's GCS when it dies: `python -m deploy.ray.gcs_keeper --detach` on a cluster's head.

Ray does not restart its own GCS (the global control service). If the GCS stores its state in Redis
or RocksDB, a new GCS at the same address continues with that state. Raylets and actors wait for the
new GCS for RAY_gcs_rpc_server_reconnect_timeout_s. Baton's requests need no GCS. Under KubeRay, the
KubeRay operator restarts the GCS, so no keeper is needed.

1. Find the GCS on this machine and its Ray session.
2. Wait until it ends.
3. Pause. The pause gets longer if the GCS dies again soon. If no raylet of that session runs here
   after the pause, Ray was stopped, so the keeper ends too.
4. Start the GCS with its former arguments and environment. Continue with step 2.

If `baton serve` starts Ray, the keeper runs in a thread (`deploy.ray.own_ray`).
"""

import ctypes
import logging
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.logs.lines import LogSource, configure_logging
from deploy.pools.restarts import Restarts
from engine.clock import Clock, MonotonicClock
from engine.errors import ConfigError

log = logging.getLogger(__name__)

GCS, RAYLET = "gcs/gcs_server", "raylet/raylet"
_SESSION = re.compile(r"--session[-_]name=(\S+)")
_PORT = "--gcs_server_port="
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Command:
    """The id, command line and environment of a running process."""

    pid: int
    arguments: tuple[str, ...]
    environment: dict[str, str]

    @property
    def session(self) -> str:
        """The name of the process's Ray session; empty if the process belongs to no session."""
        found = _SESSION.search(" ".join(self.arguments))
        return found[1] if found else ""

    def at_port(self, port: int) -> "Command":
        """Returns the command of a GCS with this port instead of its self-chosen port."""
        ours = (f"{_PORT}{port}" if a.startswith(_PORT) else a for a in self.arguments)
        return replace(self, arguments=tuple(ours))


def running(program: str) -> list[Command]:
    """Returns the processes of this machine whose program's path ends with `program`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = _strings(folder / "cmdline")
            if arguments and arguments[0].endswith(program):
                environment = dict(s.split("=", 1) for s in _strings(folder / "environ"))
                found.append(Command(int(folder.name), arguments, environment))
        except OSError:  # the process has ended or belongs to another user
            continue
    return found


def parts_of_ray(session: str) -> dict[str, bool]:
    """Returns for each of Ray's processes if it runs here. Without a session's name, no process
    runs.

    This does not call Ray, because such a call waits a minute for a dead GCS.
    """
    programs = {"gcs": GCS, "raylet": RAYLET}
    return {
        part: bool(session) and any(each.session == session for each in running(program))
        for part, program in programs.items()
    }


class GcsSupervisor:
    """Restarts one GCS whenever it ends."""

    def __init__(self, gcs: Command, clock: Clock, *, shares_fate: bool = False) -> None:
        """With `shares_fate`, a restarted GCS ends when the thread ends that called `run`."""
        self._gcs = gcs
        self._clock = clock
        self._shares_fate = shares_fate
        self._restarts = Restarts()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = os.eventfd(0)
        self.num_restarts = 0

    def run(self) -> None:
        """Restarts the GCS whenever it ends. Returns once Ray was stopped or `stop` was called."""
        name = self._gcs.session
        while self._wait_for_end():
            delay_s = self._restarts.failed(name, self._clock.now_s())
            log.warning(
                "the GCS of %s ended; unless Ray stopped, it restarts in %g s", name, delay_s
            )
            if self._is_stopped_within(delay_s):
                return
            if not any(raylet.session == name for raylet in running(RAYLET)):
                log.warning("Ray's session %s ended", name)
                return
            self._child = subprocess.Popen(
                self._gcs.arguments,
                env=self._gcs.environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent if self._shares_fate else None,
            )
            self.num_restarts += 1
            self._restarts.started(name, self._clock.now_s())
            log.warning("the GCS of %s runs again as process %d", name, self._child.pid)

    def stop(self) -> None:
        """Makes `run` return, whichever thread runs it. The GCS keeps running."""
        os.eventfd_write(self._stopping, 1)

    def end_gcs(self) -> None:
        """Kills the GCS that `run` started, if any.

        Ray does not stop this GCS, because Ray did not start it.
        """
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def _wait_for_end(self) -> bool:
        """Waits until the GCS has ended. Returns false if `stop` was called before."""
        child = self._child
        try:
            descriptor = os.pidfd_open(self._gcs.pid if child is None else child.pid)
        except ProcessLookupError:
            return True
        try:
            ready, _, _ = select.select([descriptor, self._stopping], [], [])
        finally:
            os.close(descriptor)
        if self._stopping in ready:
            return False
        if child is not None:
            child.wait()
        return True

    def _is_stopped_within(self, seconds: float) -> bool:
        return bool(select.select([self._stopping], [], [], seconds)[0])


def _end_with_parent() -> None:
    """Called in a new process: makes the kernel kill the process when the thread that started it
    ends.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def find() -> Command:
    """Returns the GCS of this machine. Raises ConfigError unless exactly one GCS runs."""
    found = running(GCS)
    if len(found) != 1:
        pids = ", ".join(str(each.pid) for each in found) or "none"
        raise ConfigError(f"one GCS must run on this machine; found: {pids}")
    gcs = found[0]
    stores = any(argument.startswith("--redis_address=") for argument in gcs.arguments)
    if not stores and gcs.environment.get("RAY_gcs_storage") != "rocksdb":
        raise ConfigError(
            "the GCS stores nothing in Redis (RAY_REDIS_ADDRESS) or RocksDB (RAY_gcs_storage): "
            "a restart would lose the cluster"
        )
    return gcs


def _detach(gcs: Command) -> None:
    """Starts the keeper as a separate process, whose arguments contain the session's name."""
    folder = next(a.split("=", 1)[1] for a in gcs.arguments if a.startswith("--log_dir="))
    with (Path(folder) / "baton_gcs_keeper.log").open("ab") as out:
        subprocess.Popen(
            [sys.executable, "-m", "deploy.ray.gcs_keeper", "--session", gcs.session],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def _strings(path: Path) -> tuple[str, ...]:
    return tuple(os.fsdecode(each) for each in path.read_bytes().split(b"\0") if each)


def main() -> None:
    """Finds the GCS and keeps it alive, in this process or in a separate process."""
    configure_logging(LogSource("ray-keeper"), MonotonicClock())
    try:
        gcs = find()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if "--detach" in sys.argv:
        _detach(gcs)
    else:
        GcsSupervisor(gcs, MonotonicClock()).run()


if __name__ == "__main__":
    main()

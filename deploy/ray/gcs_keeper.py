"""Restarts Ray's GCS when it dies: `python -m deploy.ray.gcs_keeper --detach` on a cluster's head.

Ray does not restart its own GCS (the global control service). If the GCS stores its state in Redis
or RocksDB, a new one at the same address continues from there. Raylets and actors wait for it, for
as long as RAY_gcs_rpc_server_reconnect_timeout_s says. Baton's requests do not need it meanwhile.
Under KubeRay, the KubeRay operator does this.

1. Find the GCS on this machine and its Ray session.
2. Wait until it ends.
3. Pause, longer each time if it does not live long. If no raylet of that session runs here by then,
   Ray was stopped: end too.
4. Start it with its former arguments and environment; continue at 2.

A Ray that `baton serve` starts has a keeper in a thread (`deploy.ray.own_ray`).
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
    """The command and environment of a running process."""

    pid: int
    arguments: tuple[str, ...]
    environment: dict[str, str]

    @property
    def session(self) -> str:
        """Name of the Ray session that the process belongs to; empty if it has none."""
        found = _SESSION.search(" ".join(self.arguments))
        return found[1] if found else ""

    def at_port(self, port: int) -> "Command":
        """Returns the command of a GCS with this port in place of one that it chose itself."""
        ours = (f"{_PORT}{port}" if a.startswith(_PORT) else a for a in self.arguments)
        return replace(self, arguments=tuple(ours))


def running(program: str) -> list[Command]:
    """Returns this machine's processes whose program's path ends with `program`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = _strings(folder / "cmdline")
            if arguments and arguments[0].endswith(program):
                environment = dict(s.split("=", 1) for s in _strings(folder / "environ"))
                found.append(Command(int(folder.name), arguments, environment))
        except OSError:  # it has ended or belongs to another user
            continue
    return found


def parts_of_ray(session: str) -> dict[str, bool]:
    """Returns which of Ray's processes run here. A session without a name has none.

    Ray itself is not asked: a call waits for a dead GCS for a minute.
    """
    programs = {"gcs": GCS, "raylet": RAYLET}
    return {
        part: bool(session) and any(each.session == session for each in running(program))
        for part, program in programs.items()
    }


class GcsSupervisor:
    """Restarts one GCS whenever it ends."""

    def __init__(self, gcs: Command, clock: Clock, *, shares_fate: bool = False) -> None:
        """With `shares_fate`, a GCS that this starts ends with the thread that runs the keeper."""
        self._gcs = gcs
        self._clock = clock
        self._shares_fate = shares_fate
        self._restarts = Restarts()
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = os.eventfd(0)
        self.num_restarts = 0

    def run(self) -> None:
        """Returns after Ray was stopped, or `stop` was called."""
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
        """Makes `run` return in any thread. The GCS goes on."""
        os.eventfd_write(self._stopping, 1)

    def end_gcs(self) -> None:
        """Kills the GCS that `run` started, if any: Ray does not know it."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def _wait_for_end(self) -> bool:
        """Waits until the GCS has ended. Returns false if `stop` came first."""
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
    """Runs in a new process: the kernel kills it when the thread that made it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def find() -> Command:
    """Returns the GCS of this machine. Raises ConfigError unless there is exactly one."""
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
    """Starts the keeper as a process of its own. Its arguments name the session."""
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
    """Finds the GCS and keeps it alive, here or in a process of its own."""
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

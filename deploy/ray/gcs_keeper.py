"""Starts Ray's GCS again when it dies: `python -m deploy.ray.gcs_keeper --detach`, on a cluster's
head.

Ray watches its workers, and nobody watches the GCS. Where it keeps what it knows in Redis, a new
one under the same address goes on from there; raylets and actors wait for it, for as long as
RAY_gcs_rpc_server_reconnect_timeout_s says, and Baton's requests need none of it meanwhile. (Under
KubeRay its operator does this.)

1. find the GCS that runs here, and of which session of Ray it is
2. wait until it ends
3. pause, for longer each time if it does not live long; if no raylet of that session runs here any
   more by then, Ray was stopped: end, too
4. start it with the arguments and the environment that it had; on from 2
"""

import logging
import os
import re
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from deploy.logs import configure_logging
from deploy.pools.restarts import Restarts
from engine.clock import Clock, MonotonicClock
from engine.errors import ConfigError

log = logging.getLogger(__name__)

GCS, RAYLET = "gcs/gcs_server", "raylet/raylet"
_SESSION = re.compile(r"--session[-_]name=(\S+)")


@dataclass(frozen=True, slots=True)
class Command:
    """How a process was started."""

    pid: int
    arguments: tuple[str, ...]
    environment: dict[str, str]

    @property
    def session(self) -> str:
        """The name of the session of Ray that it belongs to, or nothing."""
        found = _SESSION.search(" ".join(self.arguments))
        return found[1] if found else ""


def running(program: str) -> list[Command]:
    """Processes of this machine whose program's path ends so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = _strings(folder / "cmdline")
            if arguments and arguments[0].endswith(program):
                environment = dict(s.split("=", 1) for s in _strings(folder / "environ"))
                found.append(Command(int(folder.name), arguments, environment))
        except OSError:  # it ended, or is somebody else's
            continue
    return found


class Keeper:
    """Keeps one GCS alive."""

    def __init__(self, gcs: Command, clock: Clock) -> None:
        self._gcs = gcs
        self._clock = clock
        self._restarts = Restarts()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Returns when Ray was stopped."""
        name = self._gcs.session
        while True:
            self._wait_for_end()
            delay_s = self._restarts.failed(name, self._clock.now_s())
            log.warning("the GCS of %s ended; if Ray stays, another is due in %g s", name, delay_s)
            threading.Event().wait(delay_s)
            if not any(raylet.session == name for raylet in running(RAYLET)):
                log.warning("Ray's session %s ended", name)
                return
            self._child = subprocess.Popen(
                self._gcs.arguments,
                env=self._gcs.environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._restarts.started(name, self._clock.now_s())
            log.warning("the GCS of %s runs again as process %d", name, self._child.pid)

    def _wait_for_end(self) -> None:
        if self._child is not None:
            self._child.wait()
            return
        try:
            descriptor = os.pidfd_open(self._gcs.pid)
        except ProcessLookupError:
            return
        try:
            select.select([descriptor], [], [])
        finally:
            os.close(descriptor)


def find() -> Command:
    """The GCS of this machine. Raises ConfigError if there is none, or more than one."""
    found = running(GCS)
    if len(found) != 1:
        pids = ", ".join(str(each.pid) for each in found) or "none"
        raise ConfigError(f"one GCS must run on this machine; found: {pids}")
    if not any(argument.startswith("--redis_address=") for argument in found[0].arguments):
        raise ConfigError("the GCS keeps nothing in Redis (RAY_REDIS_ADDRESS): no use to keep it")
    return found[0]


def _detach(gcs: Command) -> None:
    """A process of its own; the session's name shows in its arguments, and so whose it is."""
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
    """Finds the GCS, and keeps it here or in a process of its own."""
    configure_logging("warning", MonotonicClock())
    try:
        gcs = find()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if "--detach" in sys.argv:
        _detach(gcs)
    else:
        Keeper(gcs, MonotonicClock()).run()


if __name__ == "__main__":
    main()

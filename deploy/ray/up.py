"""Brings Baton up on a cluster of Ray, says how it is, and takes it down so that nothing stays.

The operator's side: it imports no Ray, but runs the `ray` command, which knows each provider, and
`deploy.ray.head` where the cluster is. A cluster is one of two:

    RayUp     a file for `ray up`: made, reached over ssh, and ended again
    Running   one that is there, reached from here as a driver; only what is Baton's is ended
"""

import hashlib
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from deploy.admin.schema import PoolsAnswer
from deploy.model_source import default_cache
from deploy.ray import leftovers
from deploy.ray.config import UpConfig, num_nodes_of, read_cluster
from deploy.ray.files import write_files
from deploy.ray.leftovers import Left
from engine.clock import MonotonicClock
from engine.errors import ConfigError

RAY_UP_TIMEOUT_S = 1800.0  # machines are made, and packages installed
NODES_TIMEOUT_S = 1800.0  # the same, of all nodes but the head
NODES_EVERY_S = 5.0
ANSWER_TIMEOUT_S = 5 * 3600.0  # models are downloaded and loaded
ANSWER = "BATON-ANSWER "  # begins the line on which deploy.ray.head answers
REMOTE_FILE = "~/.baton/baton.yaml"
_PRIVATE = "umask 077; mkdir -p ~/.baton && chmod 700 ~/.baton"  # it may have been there before
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Report = Callable[[str], None]


class Node(msgspec.Struct, frozen=True):
    """A node as Ray knows it."""

    address: str
    is_alive: bool
    resources: dict[str, float]


class Status(msgspec.Struct, frozen=True):
    """A cluster; `pools` is None where no controller runs, or nobody asked it."""

    session: str
    nodes: tuple[Node, ...]
    pools: PoolsAnswer | None


class Answer(msgspec.Struct, frozen=True):
    """Of `deploy.ray.head`: what is there now, or why what was asked was not done."""

    status: Status | None = None
    error: str | None = None


class OtherVersion(ConfigError):
    """A head answers, and in words that are not known here."""


class Cluster(Protocol):
    """Where Baton runs."""

    def is_up(self) -> bool:
        """Whether Ray answers there. Raises ConfigError where it runs and gives no answer."""
        ...

    def up(self) -> None:
        """Makes it. Raises ConfigError."""
        ...

    def ask(self, verb: str, file: Path | None = None) -> Status:
        """Runs a verb of `deploy.ray.head` there. Raises ConfigError."""
        ...

    def down(self) -> list[Left]:
        """Ends it; what is left. Raises ConfigError."""
        ...


class RayUp:
    """A cluster that `ray up` makes of a file.

    Its session is written down whenever the head says it, so that what belongs to it is known when
    the head says nothing any more.
    """

    def __init__(self, file: Path, notes: Path) -> None:
        self._file = file
        digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
        self._note = notes / f"{file.stem}-{digest}"

    def is_up(self) -> bool:
        """Whether its head answers, whatever becomes of the controller.

        `ray up` would end all. So where there is no answer, but something of the session that was
        seen last may run on the head, that is an error: ConfigError.
        """
        try:
            self.ask("look")
        except OtherVersion:
            raise
        except ConfigError as error:
            found = self._found_on_head()
            if found:
                raise ConfigError(
                    f"{error}, but it may run all the same ({found[0]}): try again, or `baton down`"
                    " first"
                ) from error
            return False
        return True

    def up(self) -> None:
        """`ray up`, until its nodes are there: how many workers there can be depends on them."""
        num_nodes = num_nodes_of(read_cluster(self._file))
        write_files(Path.home())
        _ray(["up", "--yes", "--disable-usage-stats", str(self._file)], RAY_UP_TIMEOUT_S)
        clock, pause = MonotonicClock(), threading.Event()
        end_s = clock.now_s() + NODES_TIMEOUT_S
        while (num_alive := sum(node.is_alive for node in self.ask("look").nodes)) < num_nodes:
            if clock.now_s() > end_s:
                raise ConfigError(
                    f"{num_alive} of {num_nodes} nodes have come (`ray monitor {self._file}` says"
                    " more); `baton up` again goes on with them"
                )
            pause.wait(NODES_EVERY_S)

    def ask(self, verb: str, file: Path | None = None) -> Status:
        """Over ssh, on the head."""
        command = f"python -m deploy.ray.head {verb}"
        if file is not None:
            self._put(file)
            command += f" {REMOTE_FILE}"
        status = _status(_ray(["exec", str(self._file), command], ANSWER_TIMEOUT_S, check=False))
        self._write_note(status.session)
        return status

    def down(self) -> list[Left]:
        """`ray down`, and then what that forgets."""
        cluster = read_cluster(self._file)
        _ray(["down", "--yes", str(self._file)], RAY_UP_TIMEOUT_S)
        session = self._session()
        if not session:  # of which one it would be, nobody knows
            return leftovers.look(cluster, leftovers.ANY_RAY)
        left = [*leftovers.end(cluster, session), *leftovers.forget(cluster)]
        if not left:
            self._note.unlink()
        return left

    def _found_on_head(self) -> list[Left]:
        """What of the last session runs there, or why that cannot be known."""
        session = self._session()
        return leftovers.look_at_head(read_cluster(self._file), session) if session else []

    def _session(self) -> str:
        """That of the last answer; empty if none is known."""
        return self._note.read_text().strip() if self._note.exists() else ""

    def _write_note(self, session: str) -> None:
        """At once or not at all."""
        self._note.parent.mkdir(parents=True, exist_ok=True)
        partial = self._note.with_name(f"{self._note.name}.{os.getpid()}")
        partial.write_text(session)
        partial.replace(self._note)

    def _put(self, file: Path) -> None:
        """The file may hold keys: nobody else there may read it."""
        _ray(["exec", str(self._file), _PRIVATE], ANSWER_TIMEOUT_S)
        _ray(["rsync-up", str(self._file), str(file), REMOTE_FILE], ANSWER_TIMEOUT_S)
        _ray(["exec", str(self._file), f"chmod 600 {REMOTE_FILE}"], ANSWER_TIMEOUT_S)


class Running:
    """A cluster that somebody else made."""

    def __init__(self, address: str) -> None:
        self._address = address

    def is_up(self) -> bool:
        """Assumed: if it is not, who asks anything says so."""
        return True

    def up(self) -> None:
        """Not ours to make."""
        raise ConfigError(f"no cluster of Ray answers at {self._address}")

    def ask(self, verb: str, file: Path | None = None) -> Status:
        """Here, as a driver."""
        command = [
            sys.executable,
            "-m",
            "deploy.ray.head",
            verb,
            *([] if file is None else [str(file)]),
        ]
        environment = {**os.environ, "BATON_RAY_ADDRESS": self._address}
        return _status(_run(command, ANSWER_TIMEOUT_S, environment)[1])

    def down(self) -> list[Left]:
        """Not ours to end."""
        return []


def cluster_of(config: UpConfig) -> Cluster:
    """The cluster that a configuration names."""
    if config.cluster is not None:
        return RayUp(config.cluster, default_cache(os.environ) / "clusters")
    assert config.address is not None
    return Running(config.address)


def bring_up(cluster: Cluster, file: Path, report: Report) -> Status:
    """The cluster, then Baton on it; each only if it is not there. Raises ConfigError."""
    report("looking for the cluster")
    if not cluster.is_up():
        report("making the cluster (ray up)")
        cluster.up()
    report("starting the controller, the workers and the gateway")
    return cluster.ask("start", file)


def take_down(cluster: Cluster, report: Report) -> list[Left]:
    """Baton, then the cluster if it is ours; what is left of it. Raises ConfigError."""
    report("stopping the gateway, the workers and the controller")
    try:
        cluster.ask("stop")
    except ConfigError as error:
        report(f"{error}; going on without")
    report("ending the cluster")
    return cluster.down()


def _ray(arguments: Sequence[str], timeout_s: float, *, check: bool = True) -> str:
    """What a command of Ray printed. Raises ConfigError."""
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    status, printed = _run(command, timeout_s, environment)
    if check and status != 0:
        raise ConfigError(f"`ray {shlex.join(arguments)}` failed: {_reason(printed)}")
    return printed


def _run(command: Sequence[str], timeout_s: float, environment: dict[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`{shlex.join(command)}` took longer than {timeout_s:g} s") from error
    return done.returncode, _ESCAPES.sub("", done.stdout.decode(errors="replace"))


def _status(printed: str) -> Status:
    """The answer, which is on the last line that begins as one. Raises ConfigError."""
    lines = [line for line in printed.splitlines() if line.startswith(ANSWER)]
    if not lines:
        raise ConfigError(f"the cluster's head gave no answer: {_reason(printed)}")
    try:
        answer = msgspec.json.decode(lines[-1].removeprefix(ANSWER).strip(), type=Answer)
    except msgspec.MsgspecError as error:
        raise OtherVersion(
            f"the cluster's head speaks another version of Baton: {error}"
        ) from error
    if answer.error is not None or answer.status is None:
        raise ConfigError(answer.error or "the cluster's head gave an empty answer")
    return answer.status


def _reason(printed: str) -> str:
    """Its last words, without those that ssh says at every end."""
    lines = [line.strip() for line in printed.splitlines()]
    said = [line for line in lines if line and not re.match(r"(Shared c|C)onnection to ", line)]
    return " / ".join(said[-3:]) or "it said nothing"

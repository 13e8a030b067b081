"""The operator's side of `baton up`, `status` and `down` on a Ray cluster.

This module does not import Ray. It runs the `ray` command, which supports each cloud provider, and
runs `deploy.ray.head` on the cluster. There are two kinds of clusters:

    RayUp     made from a file for `ray up`, reached over ssh, and ended by `down`
    Running   exists already and is joined from here as a driver; `down` ends only Baton's part
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

import msgspec

from deploy.admin.schema import Difference, PoolsAnswer
from deploy.base.defaults import UpConfig, num_nodes_of, read_cluster
from deploy.model_source import default_cache
from deploy.ray import cluster_nodes
from deploy.ray.cluster_nodes import LeftProcess, write_files, write_private
from engine.clock import MonotonicClock
from engine.errors import ConfigError

RAY_UP_TIMEOUT_S = 1800.0  # time limit for machines to start and install packages
NODES_TIMEOUT_S = 1800.0  # the same limit for all nodes but the head
NODES_EVERY_S = 5.0
ANSWER_TIMEOUT_S = 5 * 3600.0  # time limit of a verb: models may be downloaded and loaded
ANSWER = "BATON-ANSWER "  # prefix of the line with the answer of deploy.ray.head
REMOTE_FILE = "~/.baton/baton.yaml"
_PRIVATE = "umask 077; mkdir -p ~/.baton && chmod 700 ~/.baton"  # chmod too: the folder may exist
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Report = Callable[[str], None]


class ClusterNode(msgspec.Struct, frozen=True):
    """A node as Ray reports it."""

    address: str
    is_alive: bool
    resources: dict[str, float]


class Status(msgspec.Struct, frozen=True):
    """The state of a cluster. `pools` is None if no controller runs, or if the controller was not
    queried.

    `differences` are the settings whose declared values differed from the running ones before.
    `left` are the settings that still differ.
    """

    session: str
    nodes: tuple[ClusterNode, ...]
    pools: PoolsAnswer | None
    differences: tuple[Difference, ...] = ()
    left: tuple[Difference, ...] = ()


class HeadAnswer(msgspec.Struct, frozen=True):
    """The last line of `deploy.ray.head`'s output: the new state, or the error."""

    status: Status | None = None
    error: str | None = None


class OtherVersion(ConfigError):
    """The head answered in a form that this version of Baton cannot decode."""


class RayUp:
    """A cluster that `ray up` makes from a file.

    Each answer of the head contains the name of Ray's session, which is written to a file. If the
    head no longer answers, this name identifies the cluster's processes.
    """

    def __init__(self, file: Path, notes: Path) -> None:
        self._file = file
        digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
        self._record = notes / f"{file.stem}-{digest}"

    def is_up(self) -> bool:
        """Returns true if the head answers, with or without a controller.

        `ray up` would end all running processes of Ray. So if the head does not answer, but
        processes of the last session may run on it, raises ConfigError.
        """
        try:
            self.ask("look")
        except OtherVersion:
            raise
        except ConfigError as error:
            found = self._found_on_head()
            if found:
                raise ConfigError(
                    f"{error}, but it may still run ({found[0]}): try again, or `baton down` first"
                ) from error
            return False
        return True

    def up(self) -> None:
        """Runs `ray up` and waits for all nodes, because the number of nodes limits how many
        workers fit.
        """
        num_nodes = num_nodes_of(read_cluster(self._file))
        write_files(Path.home())
        _ray(["up", "--yes", "--disable-usage-stats", str(self._file)], RAY_UP_TIMEOUT_S)
        clock, pause = MonotonicClock(), threading.Event()
        end_s = clock.now_s() + NODES_TIMEOUT_S
        while (num_alive := sum(node.is_alive for node in self.ask("look").nodes)) < num_nodes:
            if clock.now_s() > end_s:
                raise ConfigError(
                    f"{num_alive} of {num_nodes} nodes have joined; see `ray monitor {self._file}`,"
                    " and run `baton up` again to continue"
                )
            pause.wait(NODES_EVERY_S)

    def ask(self, verb: str, file: Path | None = None) -> Status:
        """Runs the verb on the head over ssh."""
        command = f"python -m deploy.ray.head {verb}"
        if file is not None:
            self._put(file)
            command += f" {REMOTE_FILE}"
        status = _status(_ray(["exec", str(self._file), command], ANSWER_TIMEOUT_S, check=False))
        self._write_note(status.session)
        return status

    def down(self) -> list[LeftProcess]:
        """Runs `ray down`, then ends the processes that `ray down` has missed."""
        cluster = read_cluster(self._file)
        _ray(["down", "--yes", str(self._file)], RAY_UP_TIMEOUT_S)
        session = self._session()
        if not session:  # the session is unknown: any Ray process may belong to it
            return cluster_nodes.look(cluster, cluster_nodes.ANY_RAY)
        left = [*cluster_nodes.end(cluster, session), *cluster_nodes.remove(cluster)]
        if not left:
            self._record.unlink()
        return left

    def _found_on_head(self) -> list[LeftProcess]:
        """Returns the processes of the last session on the head, or the reason why the head cannot
        be searched.
        """
        session = self._session()
        return cluster_nodes.look(read_cluster(self._file), session, num_nodes=1) if session else []

    def _session(self) -> str:
        """The session's name in the head's last answer; empty if there was no answer."""
        return self._record.read_text().strip() if self._record.exists() else ""

    def _write_note(self, session: str) -> None:
        self._record.parent.mkdir(parents=True, exist_ok=True)
        write_private(self._record, session)

    def _put(self, file: Path) -> None:
        """Copies the file to the head. The file may contain keys, so only its user may read it."""
        _ray(["exec", str(self._file), _PRIVATE], ANSWER_TIMEOUT_S)
        _ray(["rsync-up", str(self._file), str(file), REMOTE_FILE], ANSWER_TIMEOUT_S)
        _ray(["exec", str(self._file), f"chmod 600 {REMOTE_FILE}"], ANSWER_TIMEOUT_S)


class Running:
    """A cluster that Baton did not make."""

    def __init__(self, address: str) -> None:
        self._address = address

    def is_up(self) -> bool:
        """Returns true without a check. If the cluster does not run, `ask` fails."""
        return True

    def up(self) -> None:
        """Raises ConfigError, because Baton does not make this cluster."""
        raise ConfigError(f"no cluster of Ray answers at {self._address}")

    def ask(self, verb: str, file: Path | None = None) -> Status:
        """Runs the verb on this machine, as a driver of the cluster."""
        command = [
            sys.executable,
            "-m",
            "deploy.ray.head",
            verb,
            *([] if file is None else [str(file)]),
        ]
        environment = {**os.environ, "BATON_RAY_ADDRESS": self._address}
        return _status(_run(command, ANSWER_TIMEOUT_S, environment)[1])

    def down(self) -> list[LeftProcess]:
        """Does nothing, because Baton did not make the cluster."""
        return []


Cluster = RayUp | Running


def cluster_of(config: UpConfig) -> Cluster:
    """Returns the cluster that a configuration selects."""
    if config.cluster is not None:
        return RayUp(config.cluster, default_cache(os.environ) / "clusters")
    assert config.address is not None
    return Running(config.address)


def bring_up(cluster: Cluster, file: Path, report: Report) -> Status:
    """Starts the cluster if it is not up, then Baton if it does not run.

    If Baton runs already, applies the file's changed settings. Raises ConfigError.
    """
    report("looking for the cluster")
    if not cluster.is_up():
        report("making the cluster (ray up)")
        cluster.up()
    report("starting the controller, the workers and the gateway, or changing what differs")
    return cluster.ask("start", file)


def take_down(cluster: Cluster, report: Report) -> list[LeftProcess]:
    """Stops Baton, then the cluster if Baton made it. Returns the processes that are left.

    Raises ConfigError.
    """
    report("stopping the gateway, the workers and the controller")
    try:
        cluster.ask("stop")
    except ConfigError as error:
        report(f"{error}; the cluster is taken down anyway")
    report("ending the cluster")
    return cluster.down()


def _ray(arguments: Sequence[str], timeout_s: float, *, check: bool = True) -> str:
    """Runs a command of Ray and returns its output. Raises ConfigError."""
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
    """Decodes the answer in the last line that starts with `ANSWER`. Raises ConfigError."""
    lines = [line for line in printed.splitlines() if line.startswith(ANSWER)]
    if not lines:
        raise ConfigError(f"the cluster's head gave no answer: {_reason(printed)}")
    try:
        answer = msgspec.json.decode(lines[-1].removeprefix(ANSWER).strip(), type=HeadAnswer)
    except msgspec.MsgspecError as error:
        raise OtherVersion(
            f"the cluster's head speaks another version of Baton: {error}"
        ) from error
    if answer.error is not None or answer.status is None:
        raise ConfigError(answer.error or "the cluster's head gave an empty answer")
    return answer.status


def _reason(printed: str) -> str:
    """Returns the last lines of an output, without the lines that ssh always prints at its end."""
    lines = [line.strip() for line in printed.splitlines()]
    said = [line for line in lines if line and not re.match(r"(Shared c|C)onnection to ", line)]
    return " / ".join(said[-3:]) or "it printed nothing"

"""Files that `baton up` copies to the nodes of a cluster, and processes that a stopped cluster left
on its nodes.

The cluster file's `file_mounts` copies two files of the operator to every node:

    ~/.baton/ray_auth_token    the token that each call to one of Ray's processes must carry
    ~/.baton/constraints.txt   exact versions of the packages that nodes install

Both files have the same path on all nodes, because the head copies the files to nodes that join
later.

Ray's own report is not enough: `ray down` says that no node remains even if it could not find the
`ray` command on a node. So each node is searched over ssh for processes of the cluster's session.
Such a process has the session's unique name in its arguments, or has a file of the session's folder
open. The cloud ends the nodes of a cloud, so these nodes are not searched.

Paths and options of ssh come from the cluster file, as Ray uses them.
"""

import os
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.ownership import make_folder, require_trusted

SSH_TIMEOUT_S = 60.0
ANY_RAY = "/ray/core/src/ray/"  # substring of the arguments of every GCS and raylet
GRACE_S = 15  # seconds between SIGTERM and SIGKILL

CONSTRAINTS = (
    Path(__file__).parents[1] / "cluster" / "constraints.txt"
)  # versions that the tests use

# The script reads `session` from standard input, so that the search does not find the script.
_LOOK = r"""
look() {
  for p in /proc/[0-9]*; do
    if tr '\0' ' ' < $p/cmdline | grep -qF -- "$session" || ls -l $p/fd | grep -qF -- "$session"
    then
      words=$(tr '\0' ' ' < $p/cmdline | cut -c -100)
      [ -z "$words" ] || echo "${p#/proc/} $words"
    fi
  done 2> /dev/null
}
"""
_END = r"""
pids() { look | cut -d ' ' -f 1; }
[ -z "$(pids)" ] || kill -TERM $(pids)
for i in $(seq $((2 * grace_s))); do [ -z "$(pids)" ] && break; sleep 0.5; done
[ -z "$(pids)" ] || kill -KILL $(pids)
for i in 1 2 3 4; do [ -z "$(pids)" ] && break; sleep 0.5; done
"""
_FORGET = r"""
cd ~/.baton 2> /dev/null && [ -s redis.conf ] || exit 0
port=$(sed -n 's/^tls-port //p' redis.conf)
ask() {
  redis-cli -p "$port" --tls --cacert redis.crt --cert redis.crt --key redis.key "$@" 2>&1
}
pid=$(ask info server | tr -d '\r' | sed -n 's/^process_id://p')
[ -z "$pid" ] || ask shutdown nosave > /dev/null
for i in $(seq 20); do [ -d "/proc/${pid:-none}" ] || break; sleep 0.5; done
rm -rf appendonlydir appendonly.aof dump.rdb
[ ! -d "/proc/${pid:-none}" ] || echo "$pid redis-server"
"""


@dataclass(frozen=True, slots=True)
class LeftProcess:
    """A process that is left on a node, or the reason why a node could not be searched."""

    node: str
    what: str  # process id and arguments, or the reason
    pid: int | None = None

    def __str__(self) -> str:
        return f"{self.node}: {self.what}"


def nodes_of(cluster: Mapping[str, Any]) -> list[str]:
    """Returns the addresses of nodes that are the operator's own machines, which outlive the
    cluster.
    """
    provider = cluster["provider"]
    if provider["type"] != "local":
        return []
    return [provider["head_ip"], *provider.get("worker_ips", [])]


def look(
    cluster: Mapping[str, Any], session: str, *, num_nodes: int | None = None
) -> list[LeftProcess]:
    """Returns the session's processes on the first nodes, of which the head is the first.

    None: on all nodes.
    """
    assert session, "every process would match"
    script = f"session={session}\n{_LOOK}\nlook"
    nodes = nodes_of(cluster)[:num_nodes]
    return [left for node in nodes for left in _ask(cluster, node, script)]


def end(cluster: Mapping[str, Any], session: str) -> list[LeftProcess]:
    """Ends the session's processes on all nodes by process id.

    Returns the processes that still run.
    """
    assert session, "every process would match"
    script = f"session={session} grace_s={GRACE_S}\n{_LOOK}{_END}\nlook"
    return [left for node in nodes_of(cluster) for left in _ask(cluster, node, script)]


def remove(cluster: Mapping[str, Any]) -> list[LeftProcess]:
    """Ends Baton's Redis on the head and deletes its data, so that the next cluster starts without
    old state.
    """
    nodes = nodes_of(cluster)
    return _ask(cluster, nodes[0], _FORGET) if nodes else []


def tell(cluster: Mapping[str, Any], node: str, script: str) -> "subprocess.CompletedProcess[str]":
    """Runs a script on a node over ssh. Raises OSError, subprocess.TimeoutExpired."""
    command = [*ssh_command(cluster["auth"]), f"{cluster['auth']['ssh_user']}@{node}", "bash -s"]
    return subprocess.run(
        command, input=script, capture_output=True, text=True, timeout=SSH_TIMEOUT_S, check=False
    )


def ssh_command(auth: Mapping[str, Any]) -> list[str]:
    """Returns the ssh command with Ray's options.

    Host keys are not stored, because addresses are reused.
    """
    options = {
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
        "BatchMode": "yes",
        "ConnectTimeout": "10",
    }
    if auth.get("ssh_proxy_command"):
        options["ProxyCommand"] = auth["ssh_proxy_command"]
    key = auth.get("ssh_private_key")
    identity = ["-i", os.path.expanduser(key)] if key else []
    return ["ssh", *identity, *(x for k, v in options.items() for x in ("-o", f"{k}={v}"))]


def _ask(cluster: Mapping[str, Any], node: str, script: str) -> list[LeftProcess]:
    try:
        done = tell(cluster, node, script)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [LeftProcess(node, f"cannot be searched: {error}")]
    if done.returncode != 0 and done.stderr.strip():
        return [LeftProcess(node, f"cannot be searched: {done.stderr.strip().splitlines()[-1]}")]
    found = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return [LeftProcess(node, f"process {pid}: {words}", int(pid)) for pid, words in found]


def write_files(home: Path) -> None:
    """Writes both files into `home`/.baton.

    Makes a new token if none exists. Raises ConfigError.
    """
    folder = home.resolve() / ".baton"
    token = folder / "ray_auth_token"
    try:
        make_folder(folder, top=folder.parent, mode=0o700)
        write_private(folder / "constraints.txt", CONSTRAINTS.read_text())
        if not token.exists():
            write_private(token, secrets.token_hex(32))
        require_trusted(token, top=folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from error
    if token.stat().st_mode & 0o077:
        raise ConfigError(f"{token} can be read by others: chmod 600 mends that")


def write_private(path: Path, text: str) -> None:
    """Writes a file atomically. Only this user can read the file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(partial, flags, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)

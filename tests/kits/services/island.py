"""An isolated machine for a test, with its own processes, network and home, reached by ssh.

The island is made of Linux namespaces:

- process ids: when the first process exits, the kernel kills all others;
- network: only loopback, with every port free;
- mounts: `/tmp/ray` and the user's home belong to the island.

An ssh server with a temporary key listens at 127.0.0.1:22 in the island. `PYTHON` is this
interpreter.
"""

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kits.services.served import poll_until

ROOT = Path(__file__).parents[3]
PROGRAMS = ("unshare", "nsenter", "ip", "sshd", "ssh", "ssh-keygen", "rsync", "redis-server")

# The shell stays the first process: it reaps processes whose parents have exited.
_FIRST = """
set -e
ip link set lo up
mkdir -p /tmp/ray /run/sshd
mount --bind ray /tmp/ray
mount --bind passwd /etc/passwd
$(command -v sshd) -f "$PWD/sshd_config" -E "$PWD/sshd.log"
touch ready
sleep infinity & wait
"""


def unavailable() -> str | None:
    """Returns the reason why this machine cannot run an island, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "not root: no namespaces, and no ssh server at port 22 of one"
    command = ["unshare", "--pid", "--net", "--mount", "--fork", "--mount-proc", "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        return "the kernel gives no namespaces"
    return None


@dataclass(frozen=True, slots=True)
class Island:
    """The folder of an island on this machine, and the id of its first process as seen from
    outside."""

    folder: Path
    pid: int

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def key(self) -> Path:
        return self.folder / "key"

    def command(self, *arguments: str) -> list[str]:
        """Returns the command line that runs a command in the island."""
        return ["nsenter", "-t", str(self.pid), "-p", "-n", "-m", *arguments]

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
        own = {"HOME": str(self.home), "BATON_RUN_DIR": str(self.home / ".baton/run")}
        return {**kept, **own, "PATH": _path(), "PYTHONPATH": str(ROOT)}

    def run(
        self, *arguments: str, timeout_s: float = 60, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment() | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def python(
        self, *arguments: str, timeout_s: float = 60, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        return self.run(sys.executable, *arguments, timeout_s=timeout_s, check=check)

    def processes(self) -> dict[int, str]:
        """Returns command lines by process id, without the first process, ssh and this query
        itself."""
        lines = self.run("ps", "-eo", "pid=,stat=,args=").stdout.splitlines()
        found = {int(words[0]): (words[1], words[2]) for words in (x.split(None, 2) for x in lines)}
        own = ("bash -c", "sleep infinity", "ps -eo", "sshd:", "ssh:", "ssh ")
        return {
            pid: line
            for pid, (state, line) in found.items()
            if not line.startswith(own) and "Z" not in state
        }


@contextmanager
def island(folder: Path) -> Iterator[Island]:
    """Makes an island, and removes it completely at the end."""
    _furnish(folder)
    outside = subprocess.Popen(
        [
            *("unshare", "--pid", "--net", "--mount", "--fork", "--mount-proc", "--kill-child"),
            *("bash", "-c", _FIRST),
        ],
        cwd=folder,
        env={"PATH": _path()},
        stdin=subprocess.DEVNULL,
    )
    try:
        poll_until((folder / "ready").exists, "the island is there")
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text()
        yield Island(folder, int(children))
    finally:
        outside.kill()
        outside.wait()


def _furnish(folder: Path) -> None:
    home = folder / "home"
    (home / ".baton").mkdir(parents=True)
    (folder / "ray").mkdir()
    (home / ".baton/venv").symlink_to(Path(sys.prefix))
    (home / ".bashrc").write_text(f"export PYTHONPATH={ROOT}\n")
    (home / ".bash_profile").write_text(". ~/.bashrc\n")
    user = pwd.getpwuid(0)
    passwd = Path("/etc/passwd").read_text()
    (folder / "passwd").write_text(passwd.replace(f":{user.pw_dir}:", f":{home}:"))
    for name in ("key", "host"):
        _keygen(folder / name)
    shutil.copy(folder / "key.pub", folder / "authorized")
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort 22\nHostKey {folder}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nPermitRootLogin yes\n"
        "PasswordAuthentication no\n"
    )


def _keygen(path: Path) -> None:
    command: Sequence[str] = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, timeout=20)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"

"""The run directory: how an operator's command finds a deployment on this machine.

Each deployment writes one file, named after the process that serves the admin API. The file
contains the admin key, so only the deployment's user can read the file. The directory is
`$BATON_RUN_DIR`, else `$XDG_RUNTIME_DIR/baton`, else `/tmp/baton-<user id>`.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from engine.errors import ConfigError


class AdminAccess(msgspec.Struct, frozen=True):
    """The address and key of a deployment's admin API."""

    admin_url: str
    key: str
    pid: int  # the process that serves the admin API
    url: str = ""  # where clients send requests
    name: str = ""  # the name that the operator gave, if any


def run_directory(environment: Mapping[str, str]) -> Path:
    """Returns the run directory, which may not exist yet."""
    if chosen := environment.get("BATON_RUN_DIR"):
        return Path(chosen)
    if private := environment.get("XDG_RUNTIME_DIR"):
        return Path(private) / "baton"
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def log_folder(name: str | None, node: str = "") -> Path | None:
    """Returns the folder in which services keep their log lines. The folder may not exist yet.

    A relative name is below this machine's run directory, with a folder for each node. Nodes of a
    cluster may have different run directories, or share a machine.
    """
    if name is None or Path(name).is_absolute():
        return None if name is None else Path(name)
    return run_directory(os.environ) / name / node


def announce(directory: Path, access: AdminAccess) -> Path:
    """Writes the file of a deployment. Removes files of ended deployments with the same URL.

    Returns the file's path. Raises ConfigError if another user can change the directory.
    """
    path = _path(directory, access)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        path.unlink(missing_ok=True)
        same = (each for each in ended(directory) if each.url == access.url)
        remove(directory, same)  # replaced by the new file
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(access))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return path


def announced(directory: Path) -> list[AdminAccess]:
    """Returns the running deployments, by process id.

    Raises ConfigError if another user can change the directory.
    """
    return [each for each in _all(directory) if _is_alive(each.pid)]


def ended(directory: Path) -> list[AdminAccess]:
    """Returns dead deployments whose file still exists. Raises ConfigError like `announced`."""
    return [each for each in _all(directory) if not _is_alive(each.pid)]


def remove(directory: Path, deployments: Iterable[AdminAccess]) -> None:
    """Removes the files of ended deployments."""
    for each in deployments:
        _path(directory, each).unlink(missing_ok=True)


def _path(directory: Path, access: AdminAccess) -> Path:
    return directory / f"{access.pid}.json"


def _all(directory: Path) -> list[AdminAccess]:
    if not directory.is_dir():
        return []
    _check_private(directory)
    found = []
    for path in sorted(directory.glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=AdminAccess))
    return found


def _check_private(directory: Path) -> None:
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise ConfigError(
            f"{directory} must be a directory of yours to which no other user can write"
        )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # the process belongs to another user
        return True
    except ProcessLookupError:
        return False
    return True

"""Makes private folders of a running deployment, and removes folders that dead deployments left.

Only the user of the deployment may enter a folder. While the deployment runs, it keeps a file in
the folder locked. The kernel frees the lock when the process ends or is killed. So a folder whose
lock is free belongs to a dead deployment. The next start of any deployment removes that folder, and
kills processes that still have one of its files open. Otherwise a gateway that was paused when its
deployment died would keep the port for ever.
"""

import contextlib
import fcntl
import logging
import os
import select
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from engine.clock import MonotonicClock

log = logging.getLogger(__name__)

PREFIX = "baton-"
LOCK = "alive"
GRACE_S = 2.0  # time that a process of a dead deployment has to end by itself
KILLED_WITHIN_S = 5.0
RAY = "/ray/core/src/ray/"  # substring of the path of each of Ray's programs


class PrivateFolder:
    """A private folder, which exists from `open` to `close`."""

    path: Path

    def open(self) -> None:
        """Makes the folder. Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        # Lock the file before it gets its final name: a concurrent start must not find it unlocked.
        partial = self.path / f".{LOCK}"
        self._lock = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        partial.rename(self.path / LOCK)

    def close(self) -> None:
        """Removes the folder."""
        _remove(self.path)
        os.close(self._lock)

    def leave(self) -> None:
        """Keeps the folder for debugging. Later starts do not remove it."""
        (self.path / LOCK).unlink(missing_ok=True)
        os.close(self._lock)


def sweep(parent: Path | None = None) -> list[Path]:
    """Removes the folders of this user's dead deployments, and returns the removed folders."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    swept = []
    for lock in sorted(parent.glob(f"{PREFIX}*/{LOCK}")):
        with contextlib.suppress(OSError), _held(lock) as is_free:  # the folder is removed
            if is_free:
                end_users_of(lock.parent, grace_s=GRACE_S)
                _remove(lock.parent)
                swept.append(lock.parent)
    return swept


def end_users_of(folder: Path, *, grace_s: float = 0.0, only_helpers: bool = False) -> None:
    """Kills services and Ray processes that have a file of the folder open.

    Each process has `grace_s` seconds to end by itself. `only_helpers`: only Python children of
    this process are killed.
    """
    with contextlib.ExitStack() as stack:
        found: dict[int, int] = {}  # process ids by pidfd
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended or belongs to another user
                pid = int(process.name)
                if only_helpers and not _is_helper(process):
                    continue
                if pid != os.getpid() and _uses(process, folder):
                    pidfd = os.pidfd_open(pid)
                    stack.callback(os.close, pidfd)
                    if _uses(process, folder):  # the process id was not reused
                        found[pidfd] = pid
        left = _left(list(found), grace_s)
        for pidfd in left:
            log.info("process %d of a deployment that ended is killed", found[pidfd])
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in _left(left, KILLED_WITHIN_S):
            log.warning("process %d was killed and has not ended", found[pidfd])


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[bool]:
    """Locks another deployment's lock file if the file is free.

    Yields True if it was free. Raises OSError.
    """
    if lock.parent.lstat().st_uid != os.getuid() or lock.parent.is_symlink():
        yield False
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_free = False
    else:
        is_free = True
    try:
        yield is_free
    finally:
        os.close(descriptor)


def _uses(process: Path, folder: Path) -> bool:
    """True if a Python or Ray process has a file of the folder open. Raises OSError."""
    if not _is_python(process) and RAY not in os.readlink(process / "exe"):
        return False
    files = (os.readlink(each) for each in (process / "fd").iterdir())
    return any(Path(file).is_relative_to(folder) for file in files)


def _is_helper(process: Path) -> bool:
    """True if the process is a child of this process, and runs Python too. Raises OSError."""
    parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
    return int(parent) == os.getpid() and _is_python(process)


def _is_python(process: Path) -> bool:
    """True if a process runs the same program as this process. Raises OSError."""
    return os.readlink(process / "exe") == os.readlink("/proc/self/exe")


def _left(pidfds: list[int], timeout_s: float) -> list[int]:
    """Waits for processes to end. Returns the processes that still run after the timeout."""
    poll = select.poll()
    left = set(pidfds)
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    clock = MonotonicClock()
    end_s = clock.now_s() + timeout_s
    while left:
        ended = poll.poll(max(0.0, end_s - clock.now_s()) * 1000)
        if not ended:
            break
        for pidfd, _ in ended:
            poll.unregister(pidfd)
            left.discard(pidfd)
    return [pidfd for pidfd in pidfds if pidfd in left]


def _remove(folder: Path) -> None:
    """Removes a folder, or logs that it could not be removed."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.warning("%s cannot be removed", folder)

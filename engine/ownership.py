"""Checks that only this user, or root, can have written a cached file.

The environment defines where a cache is, which may be a folder that other users can write to. A
user who can replace a library there runs code as this user. So each file is checked together with
the folders from the file up to the top of the cache. They must belong to the user or to root. Other
users must not be able to write to them. They must not be symbolic links. Only the top folder may be
shared like `/tmp`, whose sticky bit prevents other users from replacing files.

A group with the name of the user, without other members, is treated like the user. Many systems
create such a group for each user, with a umask that lets the group write.
"""

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path

from engine.errors import UntrustedFile

MAX_FILES = 10_000  # most files in a folder whose files are checked


def make_folder(folder: Path, *, top: Path, mode: int) -> None:
    """Makes the missing folders from `top` down to `folder`, writable by this user alone.

    Raises UntrustedFile if an existing file or folder on this path cannot be trusted, and OSError.
    """
    top.mkdir(parents=True, exist_ok=True)
    _require_own(top, may_be_sticky=True)
    for part in _from_top(folder, top)[1:]:
        # An existing path may be a link: `_require_own` checks that.
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=mode)
        _require_own(part)


def require_trusted(path: Path, *, top: Path) -> None:
    """Raises UntrustedFile if another user can have written `path`, or a folder above it up to
    `top`.

    Raises OSError if the path or a folder does not exist.
    """
    shared, *own = _from_top(path, top)
    _require_own(shared, may_be_sticky=True)
    for part in own:
        _require_own(part)


def require_trusted_files(folder: Path, *, top: Path) -> None:
    """Calls `require_trusted` for a folder and for all files in it."""
    require_trusted(folder, top=top)
    for number, path in enumerate(folder.rglob("*")):
        if number >= MAX_FILES:
            raise UntrustedFile(folder, f"it holds more than {MAX_FILES} files")
        _require_own(path)


def _from_top(path: Path, top: Path) -> list[Path]:
    below = path.relative_to(top)
    return [top, *(top.joinpath(*below.parts[:n]) for n in range(1, len(below.parts) + 1))]


def _require_own(path: Path, *, may_be_sticky: bool = False) -> None:
    facts = path.lstat()
    if stat.S_ISLNK(facts.st_mode):
        raise UntrustedFile(path, "it is a symbolic link")
    if facts.st_uid not in (0, os.geteuid()):
        raise UntrustedFile(path, f"it belongs to user {facts.st_uid}")
    if may_be_sticky and facts.st_mode & stat.S_ISVTX:
        return
    if facts.st_mode & stat.S_IWOTH:
        raise UntrustedFile(path, "everyone can write to it (chmod o-w mends that)")
    if facts.st_mode & stat.S_IWGRP and not _is_own_group(facts.st_gid):
        raise UntrustedFile(path, "its group can write to it (chmod g-w mends that)")


def _is_own_group(group_id: int) -> bool:
    if group_id != os.getegid():
        return False
    try:
        group, user = grp.getgrgid(group_id), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}

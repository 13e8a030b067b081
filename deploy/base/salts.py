"""Keeps the secret under which blocks are hashed, if blocks outlive their deployment.

Tenants' salts are derived from a secret (`engine.net.trust`). Usually the secret is the
deployment's own, which is new at each start. But blocks on disk and in object stores can be found
again only with the same secret. So for these blocks the secret is kept in a file, by default beside
the blocks on disk. A reader of the file could test guesses of prompts against block hashes, so only
its owner may read it.
"""

import os
import re
import secrets
import stat
from pathlib import Path

from engine.config import StoreConfig
from engine.errors import ConfigError

DEFAULT_NAME = "salts"
_SECRET = re.compile(r"[0-9a-f]{64}")


def kept_salts(config: StoreConfig) -> str | None:
    """Returns the kept secret; makes the secret if necessary. None: the deployment's own secret is
    used.

    Raises ConfigError if the file cannot be made or used, or if other users can read it.
    """
    path = _path_of(config)
    if path is None:
        return None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        return _read(path)
    except OSError as error:
        raise ConfigError(f"store.salts: {path}: {error.strerror}") from error


def _path_of(config: StoreConfig) -> Path | None:
    if not config.is_on:
        return None
    if config.salts is not None:
        return Path(config.salts)
    return None if config.disk is None else Path(config.disk) / DEFAULT_NAME


def _make(path: Path) -> None:
    """Makes the secret's file atomically.

    If two processes make the file at the same time, the first file stays.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd) as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"store.salts: {path} is no file of this user")
        if found.st_mode & 0o077:
            raise ConfigError(f"store.salts: {path} can be read by other users")
        text = file.read(128).strip()
    if _SECRET.fullmatch(text) is None:
        raise ConfigError(f"store.salts: {path} does not hold a secret of 64 hex digits")
    return text

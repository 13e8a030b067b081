"""Two files of the operator that the cluster file's `file_mounts` copies to every node.

    ~/.baton/ray_auth_token    the token that each call to one of Ray's processes must carry
    ~/.baton/constraints.txt   the exact versions that nodes install

Both have the same path on all nodes: the head passes them on to nodes that join later.
"""

import os
import secrets
from pathlib import Path

from engine.errors import ConfigError
from engine.ownership import make_folder, require_trusted

CONSTRAINTS = (
    Path(__file__).parents[1] / "cluster" / "constraints.txt"
)  # the versions that tests use


def write_files(home: Path) -> None:
    """Writes both into `home`/.baton, with a new token if none exists. Raises ConfigError."""
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
    """Writes atomically, readable by this user only."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(partial, flags, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)

"""What clients tell the store about their sessions. A policy may use or ignore it.

A session is one conversation or one agent. Its requests carry its id. All hints are claims of one
API key: a policy bounds what each key can gain by them, and never believes them beyond that.
The server computes the hashes in a hint from the request's own prompt. They never come
from the client, which could otherwise speak of blocks that are not its own.
"""

import msgspec

from engine.worker.blocks import BlockHash


class SessionUsed(msgspec.Struct, frozen=True, tag=True):
    """A request of a session read or stored these blocks: its whole prompt, first block first.

    `keep_s` says that the session's next request is expected within that time.
    """

    key: str
    session: str
    blocks: tuple[BlockHash, ...]
    keep_s: float | None = None


class SessionEnded(msgspec.Struct, frozen=True, tag=True):
    """A session makes no request any more."""

    key: str
    session: str


class BlocksPinned(msgspec.Struct, frozen=True, tag=True):
    """The key asks that these blocks stay until it unpins them; first block first."""

    key: str
    blocks: tuple[BlockHash, ...]


class BlocksUnpinned(msgspec.Struct, frozen=True, tag=True):
    """The key no longer asks that these blocks stay."""

    key: str
    blocks: tuple[BlockHash, ...]


SessionHint = SessionUsed | SessionEnded | BlocksPinned | BlocksUnpinned

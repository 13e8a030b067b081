"""Hints from clients about their sessions. A policy may use or ignore hints.

A session is one conversation or one agent. Its requests carry its id. Each hint is an unverified
claim of one API key, so a policy bounds what each key can gain by hints. The server computes the
hashes in a hint from the request's own prompt. The client never sends hashes: it could name blocks
that are not its own.
"""

import msgspec

from engine.worker.blocks import BlockHash


class SessionUsed(msgspec.Struct, frozen=True, tag=True):
    """A request of a session read or stored these blocks: its whole prompt, first block first.

    `keep_s`: the client expects the session's next request within this time.
    """

    key: str
    session: str
    blocks: tuple[BlockHash, ...]
    keep_s: float | None = None


class SessionEnded(msgspec.Struct, frozen=True, tag=True):
    """A session will make no more requests."""

    key: str
    session: str


class BlocksPinned(msgspec.Struct, frozen=True, tag=True):
    """The key asks to keep these blocks until it unpins them; first block first."""

    key: str
    blocks: tuple[BlockHash, ...]


class BlocksUnpinned(msgspec.Struct, frozen=True, tag=True):
    """The key withdraws its pins of these blocks."""

    key: str
    blocks: tuple[BlockHash, ...]


SessionHint = SessionUsed | SessionEnded | BlocksPinned | BlocksUnpinned

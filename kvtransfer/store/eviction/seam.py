"""The interface between a tier of the store and its eviction policy.

A tier (memory, disk) reports added, read and removed blocks to its policy, and asks the policy for
victims. A policy stores hashes and counts, never bytes of KV. A policy has no clock: `now_s` is an
argument in monotonic seconds, and never decreases.

A block continues a prefix, and is useful only while all earlier blocks of the prefix are cached. So
every policy evicts *leaves* first: a block is evicted before its parent.

Clients give hints about their sessions. A policy may use or ignore hints. A session is one
conversation or one agent, and its requests carry the session's id. Each hint is an unverified claim
of one API key, so a policy bounds what each key can gain by hints. The server computes the hashes
in a hint from the request's own prompt. Clients never send hashes, because they could name blocks
that are not their own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from engine.worker.blocks import BlockHash


class SessionUsed(msgspec.Struct, frozen=True, tag=True):
    """A request of a session read or stored these blocks: its whole prompt, first block first.

    `keep_s`: seconds within which the client expects the session's next request.
    """

    key: str
    session: str
    blocks: tuple[BlockHash, ...]
    keep_s: float | None = None


class SessionEnded(msgspec.Struct, frozen=True, tag=True):
    """A session will send no more requests."""

    key: str
    session: str


class BlocksPinned(msgspec.Struct, frozen=True, tag=True):
    """The key wants these blocks to be kept until it unpins them. The first block comes first."""

    key: str
    blocks: tuple[BlockHash, ...]


class BlocksUnpinned(msgspec.Struct, frozen=True, tag=True):
    """The key gives up its pins of these blocks."""

    key: str
    blocks: tuple[BlockHash, ...]


SessionHint = SessionUsed | SessionEnded | BlocksPinned | BlocksUnpinned
MayGo = Callable[[BlockHash], bool]
Link = tuple[BlockHash, BlockHash | None]  # a block, and the block before it in its prompt


class Eviction(Protocol):
    """Chooses the blocks that one tier evicts. Owned by one thread."""

    def __len__(self) -> int:
        """The number of blocks in the tier."""

    def __contains__(self, block: object) -> bool:
        """True if the tier has the block."""

    def add(self, block: BlockHash, parent: BlockHash | None, now_s: float) -> None:
        """Adds a block that was just stored. Does nothing if the tier already has the block."""

    def add_all(self, links: Iterable[Link], now_s: float) -> None:
        """Adds the blocks found when the store starts, the least recently used first."""

    def use(self, blocks: Sequence[BlockHash], now_s: float) -> None:
        """Records that a prompt read these blocks, first block first.

        Blocks that the tier does not have are ignored.
        """

    def remove(self, block: BlockHash) -> None:
        """Removes a block that left the tier without `choose`. Unknown blocks are ignored."""

    def choose(self, num_blocks: int, may_go: MayGo) -> list[BlockHash]:
        """Chooses blocks to evict, and removes them from the policy.

        Returns the blocks in the order in which they should be evicted. Returns fewer blocks if too
        few may go. `may_go` returns False for a block that a lease or a running write needs. A
        block with a cached child is chosen only after every leaf that may go.
        """

    def hint(self, hint: SessionHint, now_s: float) -> None:
        """Applies a client's hint about a session. Most policies ignore hints."""

    def validate(self) -> None:
        """Asserts every invariant of the policy."""

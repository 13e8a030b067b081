"""The events that go into a store's machine, and the effects that come out of it.

The machine also handles messages of gateways and reports of the transfer endpoint. It answers
gateways and gives orders to the endpoint: see `engine.worker.events`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.messages import BlocksOffered, Cancel, OfferBlocks, WorkerId
from engine.worker.block_events import BlockEvent, Medium
from engine.worker.blocks import BlockHash, BlockId
from engine.worker.events import (
    Emit,
    FromGateway,
    GatewayLost,
    LeaseEnded,
    PullDone,
    PullFailed,
    TransferOrder,
)
from kvtransfer.store.eviction.seam import Link

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A session with a worker or another store is open. A store's blocks are only counted."""

    peer_id: WorkerId
    is_store: bool = False


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The session with a peer is over."""

    peer_id: WorkerId


@dataclass(frozen=True, slots=True)
class PeerNews:
    """Block events of a peer, in the order of their occurrence."""

    peer_id: WorkerId
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A worker's answer to `OfferBlocks`, which names the leased blocks."""

    peer_id: WorkerId
    message: BlocksOffered


@dataclass(frozen=True, slots=True)
class BlockLoaded:
    """A block of a lower tier was read into its slot, or the read failed with `fault`."""

    medium: Medium
    block: BlockHash
    slot: BlockId  # the slot of memory into which the block was read
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class BlockWritten:
    """A write to a lower tier ended, or failed with `fault`. The slot in memory may be reused."""

    medium: Medium
    block: BlockHash
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class TierTurned:
    """A lower tier was turned off because of `fault`, or on again (None)."""

    medium: Medium
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class TierGrown:
    """A lower tier has grown to `num_slots` slots."""

    medium: Medium
    num_slots: int


@dataclass(frozen=True, slots=True)
class TierListed:
    """A list of all blocks in a lower tier to which other stores write as well."""

    medium: Medium
    links: Sequence[Link]


@dataclass(frozen=True, slots=True)
class DropAll:
    """An operator orders the store to drop all blocks."""


@dataclass(frozen=True, slots=True)
class StoreTick:
    """The clock has advanced."""


StoreEvent = (
    FromGateway
    | GatewayLost
    | LeaseEnded
    | PullDone
    | PullFailed
    | PeerJoined
    | PeerLost
    | PeerNews
    | FromPeer
    | BlockLoaded
    | BlockWritten
    | TierTurned
    | TierGrown
    | TierListed
    | DropAll
    | StoreTick
)

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class AskPeer:
    """Send a message to a worker or another store."""

    peer_id: WorkerId
    message: OfferBlocks | Cancel


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Read a block of a lower tier into a slot of memory. `BlockLoaded` reports the end."""

    medium: Medium
    block: BlockHash
    place: BlockId  # slot on disk; 0 for objects, which are found by their hash
    slot: BlockId


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Write a block from its slot of memory to a lower tier. `BlockWritten` reports the end."""

    medium: Medium
    block: BlockHash
    parent: BlockHash | None
    slot: BlockId
    place: BlockId


@dataclass(frozen=True, slots=True)
class EraseBlock:
    """Erase a block of a lower tier, so that the store does not find it when it starts again."""

    medium: Medium
    block: BlockHash
    place: BlockId


@dataclass(frozen=True, slots=True)
class EraseAll:
    """Erase all blocks of a lower tier, so that no store finds them any more."""

    medium: Medium


StoreEffect = Emit | TransferOrder | AskPeer | LoadBlock | WriteBlock | EraseBlock | EraseAll

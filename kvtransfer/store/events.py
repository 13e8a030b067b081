"""The events that go into the machine of a store, and the effects that come out.

Beside these, the machine takes messages of gateways and reports of the transfer endpoint, and gives
both their orders: see `engine.worker.events`.
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
    """A session with a worker is open, or with another store, whose blocks are only counted."""

    peer_id: WorkerId
    is_store: bool = False


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The session with a peer is over."""

    peer_id: WorkerId


@dataclass(frozen=True, slots=True)
class PeerNews:
    """Block events of a peer, in order."""

    peer_id: WorkerId
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A worker's answer to `OfferBlocks`."""

    peer_id: WorkerId
    message: BlocksOffered


@dataclass(frozen=True, slots=True)
class BlockLoaded:
    """A block of a lower tier was read into its slot, or could not be read: `fault` says why."""

    medium: Medium
    block: BlockHash
    slot: BlockId  # in memory
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class BlockWritten:
    """A block was written to a lower tier, or not: `fault` says why. Nothing reads its slot now."""

    medium: Medium
    block: BlockHash
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class TierTurned:
    """A lower tier stepped back (`fault` says why), or works again."""

    medium: Medium
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class TierGrown:
    """A lower tier has grown to this number of slots."""

    medium: Medium
    num_slots: int


@dataclass(frozen=True, slots=True)
class TierListed:
    """All blocks of a lower tier that other stores write to as well."""

    medium: Medium
    links: Sequence[Link]


@dataclass(frozen=True, slots=True)
class DropAll:
    """An operator wants all blocks gone."""


@dataclass(frozen=True, slots=True)
class StoreTick:
    """Time has passed."""


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
    """Send a message to a worker."""

    peer_id: WorkerId
    message: OfferBlocks | Cancel


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Read a block of a lower tier into a slot of memory; `BlockLoaded` answers."""

    medium: Medium
    block: BlockHash
    place: BlockId  # its slot on disk; 0 for objects, which are found by hash
    slot: BlockId


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """Write a block from its slot of memory to a lower tier; `BlockWritten` answers."""

    medium: Medium
    block: BlockHash
    parent: BlockHash | None
    slot: BlockId
    place: BlockId


@dataclass(frozen=True, slots=True)
class EraseBlock:
    """Forget a block of a lower tier, so that a later start does not find it."""

    medium: Medium
    block: BlockHash
    place: BlockId


@dataclass(frozen=True, slots=True)
class EraseAll:
    """All blocks of a lower tier are forgotten: neither a start nor another store may find one."""

    medium: Medium


StoreEffect = Emit | TransferOrder | AskPeer | LoadBlock | WriteBlock | EraseBlock | EraseAll

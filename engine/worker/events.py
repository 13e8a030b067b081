"""The events that go into a worker's core, and the effects that come out.

A worker's core is its schedulers. Events are messages of gateways and reports of the transfer
endpoint. The worker host carries effects out: messages to gateways, and orders to the transfer
endpoint, which never sees a pool. Orders and reports may cross processes: a worker's ranks have an
endpoint each.
"""

from dataclasses import dataclass

import msgspec

from engine.grammar.guide import OpenedGuide
from engine.messages import (
    Cancel,
    Decode,
    FirstToken,
    GatewayId,
    Generate,
    HandOver,
    LeaseId,
    LeaseRef,
    OfferBlocks,
    OfferPrefix,
    Prefetch,
    Prefill,
    RoleChanged,
    SeqId,
    SetRole,
    StoreHint,
    ToGateway,
)
from engine.worker.blocks import BlockId
from engine.worker.sequence import Sequence

# ---------------------------------------------------------------- events


OfGateway = (
    Prefill
    | Generate
    | Decode
    | FirstToken
    | OfferPrefix
    | OfferBlocks
    | Prefetch
    | StoreHint
    | Cancel
    | HandOver
    | SetRole
)


class FromGateway(msgspec.Struct, frozen=True):  # a struct, as `Emit` is
    """A gateway's message. `guide` is its grammar's, if the shell opened it, or the error."""

    gateway_id: GatewayId
    message: OfGateway
    guide: OpenedGuide | None = None


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway's stream broke, so its sequences are cancelled."""

    gateway_id: GatewayId


class LeaseEnded(msgspec.Struct, frozen=True, tag=True):
    """A lease of this worker is over: `reason` is released, revoked or expired."""

    lease_id: LeaseId
    reason: str


class PullDone(msgspec.Struct, frozen=True, tag=True):
    """All blocks of a pull are here, and the source confirmed that the lease held throughout.

    `transfer_s` is how long blocks were on their way, in seconds. Of those, `exposed_s` came after
    the source had computed the last block, the confirmation included: no computation hid them.
    """

    seq_id: SeqId
    transport: str
    transfer_s: float = 0.0
    exposed_s: float = 0.0


class PullFailed(msgspec.Struct, frozen=True, tag=True):
    """A pull ended without success; it writes to no block any more.

    `arrived` are the indices in the lease of blocks that are here and confirmed intact.
    """

    seq_id: SeqId
    reason: str
    arrived: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Adopted:
    """A sequence that this worker prefilled goes on decoding here."""

    seq: Sequence


@dataclass(frozen=True, slots=True)
class Leaving:
    """A sequence decoded here goes on elsewhere, under another id; it owns its blocks."""

    seq: Sequence
    as_seq_id: SeqId


PassedOn = Adopted | Leaving  # from one scheduler of a worker to another
TransferReport = LeaseEnded | PullDone | PullFailed
Event = FromGateway | GatewayLost | TransferReport | PassedOn

# ---------------------------------------------------------------- effects


class Emit(msgspec.Struct, frozen=True):  # one for each token: structs are faster to make
    """Send a message to a gateway, in the frame of this step."""

    gateway_id: GatewayId
    message: ToGateway


@dataclass(frozen=True, slots=True)
class EmitToAll:
    """Send a message to every gateway. A gateway that connects later gets the new role in
    `Welcome`.
    """

    message: RoleChanged


class OpenLease(msgspec.Struct, frozen=True, tag=True):
    """Let the holder of `lease_id` pull `num_blocks` blocks, each once it is ready."""

    lease_id: LeaseId
    num_blocks: int


class GrowLease(msgspec.Struct, frozen=True, tag=True):
    """The next blocks of a lease are computed."""

    lease_id: LeaseId
    block_ids: tuple[BlockId, ...]


class RevokeLease(msgspec.Struct, frozen=True, tag=True):
    """End a lease now; `LeaseEnded` follows."""

    lease_id: LeaseId


class HoldLease(msgspec.Struct, frozen=True, tag=True):
    """Keep another worker's lease alive while its sequence waits for memory."""

    seq_id: SeqId
    lease: LeaseRef


class StartPull(msgspec.Struct, frozen=True, tag=True):
    """Pull blocks of a held lease: pairs of (index in the lease, block here). May be empty."""

    seq_id: SeqId
    blocks: tuple[tuple[int, BlockId], ...]


class AbortPull(msgspec.Struct, frozen=True, tag=True):
    """Give up a held lease or a running pull. A pull that started ends with `PullFailed`."""

    seq_id: SeqId


TransferOrder = OpenLease | GrowLease | RevokeLease | HoldLease | StartPull | AbortPull
Effect = Emit | EmitToAll | TransferOrder

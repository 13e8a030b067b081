"""What goes into and comes out of a worker's core: events in, effects out.

A worker's core is its schedulers. Messages of gateways are events; so is every report of the
transfer endpoint. Effects are carried out by the worker host: messages to gateways, and orders to
the transfer endpoint, which never sees a pool.
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
    OfferPrefix,
    Prefill,
    RoleChanged,
    SeqId,
    SetRole,
    ToGateway,
)
from engine.worker.blocks import BlockId
from engine.worker.sequence import Sequence

# ---------------------------------------------------------------- events


class FromGateway(msgspec.Struct, frozen=True):  # as `Emit`
    """A gateway's message. `guide` is that of its grammar if the shell opened it, or why not."""

    gateway_id: GatewayId
    message: Prefill | Generate | Decode | FirstToken | OfferPrefix | Cancel | HandOver | SetRole
    guide: OpenedGuide | None = None


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway's stream broke: its sequences are nobody's."""

    gateway_id: GatewayId


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease of this worker is over: `reason` is released, revoked or expired."""

    lease_id: LeaseId
    reason: str


@dataclass(frozen=True, slots=True)
class PullDone:
    """All blocks of a pull are here, and the source confirmed that the lease held throughout.

    `transfer_s` counts the seconds in which blocks were on their way; of those, `exposed_s` came
    after the source had computed the last block, the confirmation included: nothing hid them.
    """

    seq_id: SeqId
    transport: str
    transfer_s: float = 0.0
    exposed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PullFailed:
    """A pull is over without success; it writes to no block any more.

    `arrived` are the indices in the lease of blocks that are here and confirmed intact.
    """

    seq_id: SeqId
    reason: str
    arrived: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Adopted:
    """A sequence prefilled in this worker goes on being decoded here."""

    seq: Sequence


@dataclass(frozen=True, slots=True)
class Leaving:
    """A sequence decoded in this worker goes on elsewhere, under another id; it owns its blocks."""

    seq: Sequence
    as_seq_id: SeqId


PassedOn = Adopted | Leaving  # from one scheduler of a worker to another
Event = FromGateway | GatewayLost | LeaseEnded | PullDone | PullFailed | PassedOn

# ---------------------------------------------------------------- effects


class Emit(msgspec.Struct, frozen=True):  # one a token
    """Send a message to a gateway, in the frame of this step."""

    gateway_id: GatewayId
    message: ToGateway


@dataclass(frozen=True, slots=True)
class EmitToAll:
    """Send a message to every gateway. New ones are welcomed by who this has made the worker."""

    message: RoleChanged


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Let the holder of `lease_id` pull, when they are ready, `num_blocks` blocks."""

    lease_id: LeaseId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class GrowLease:
    """The next blocks of a lease are computed."""

    lease_id: LeaseId
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class RevokeLease:
    """End a lease now; `LeaseEnded` follows."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class HoldLease:
    """Keep a foreign lease alive while its sequence waits for memory."""

    seq_id: SeqId
    lease: LeaseRef


@dataclass(frozen=True, slots=True)
class StartPull:
    """Pull blocks of a held lease: (index in the lease, block here). May be empty."""

    seq_id: SeqId
    blocks: tuple[tuple[int, BlockId], ...]


@dataclass(frozen=True, slots=True)
class AbortPull:
    """Give up a held lease or a running pull. After a start, `PullFailed` follows."""

    seq_id: SeqId


Effect = Emit | EmitToAll | OpenLease | GrowLease | RevokeLease | HoldLease | StartPull | AbortPull

"""The events that enter a worker's core, and the effects that the core returns.

Events are messages of gateways and reports of the transfer endpoint. The worker host carries out
effects. Effects are messages to gateways, and orders to the transfer endpoint, which has no access
to a pool. Orders and reports may cross processes, because each rank of a worker has an endpoint of
its own.
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
from engine.worker.batch import Row
from engine.worker.blocks import BlockId

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


class FromGateway(msgspec.Struct, frozen=True):  # a struct, for the same reason as `Emit`
    """A gateway's message. `guide` is the guide of its grammar, or the error of opening it; None if
    the shell opened no guide.
    """

    gateway_id: GatewayId
    message: OfGateway
    guide: OpenedGuide | None = None


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The connection to a gateway is lost, so the gateway's sequences are cancelled."""

    gateway_id: GatewayId


class LeaseEnded(msgspec.Struct, frozen=True, tag=True):
    """A lease of this worker has ended. `reason` is "released", "revoked" or "expired"."""

    lease_id: LeaseId
    reason: str


class PullDone(msgspec.Struct, frozen=True, tag=True):
    """All blocks of a pull have arrived, and the source has confirmed that the lease was never
    broken.

    `transfer_s` is the time, in seconds, during which blocks were in transfer. `exposed_s` is the
    part of this time after the source had computed the last block, including the confirmation.
    Computation did not hide this part.
    """

    seq_id: SeqId
    transport: str
    transfer_s: float = 0.0
    exposed_s: float = 0.0


class PullFailed(msgspec.Struct, frozen=True, tag=True):
    """A pull has failed. It writes to no block any more.

    `arrived` are the indices, in the lease, of blocks that have arrived and were confirmed intact.
    """

    seq_id: SeqId
    reason: str
    arrived: tuple[int, ...] = ()


TransferReport = LeaseEnded | PullDone | PullFailed
Event = FromGateway | GatewayLost | TransferReport

# ---------------------------------------------------------------- effects


class Emit(msgspec.Struct, frozen=True):  # a struct, because one is created for each token
    """Send a message to a gateway, in the frame of this step."""

    gateway_id: GatewayId
    message: ToGateway


@dataclass(frozen=True, slots=True)
class EmitToAll:
    """Send a message to every gateway. A gateway that connects later finds the new role in
    `Welcome`.
    """

    message: RoleChanged


class OpenLease(msgspec.Struct, frozen=True, tag=True):
    """Allow the holder of `lease_id` to pull `num_blocks` blocks, each block once it is ready."""

    lease_id: LeaseId
    num_blocks: int


class GrowLease(msgspec.Struct, frozen=True, tag=True):
    """Announce that the next blocks of a lease are computed."""

    lease_id: LeaseId
    block_ids: tuple[BlockId, ...]


class RevokeLease(msgspec.Struct, frozen=True, tag=True):
    """End a lease of this worker now; `LeaseEnded` follows."""

    lease_id: LeaseId


class HoldLease(msgspec.Struct, frozen=True, tag=True):
    """Prevent a lease of another worker from expiring, while the sequence waits for memory."""

    seq_id: SeqId
    lease: LeaseRef


class StartPull(msgspec.Struct, frozen=True, tag=True):
    """Pull blocks of another worker's lease: pairs of (index in the lease, block here). May be
    empty.
    """

    seq_id: SeqId
    blocks: tuple[tuple[int, BlockId], ...]


class AbortPull(msgspec.Struct, frozen=True, tag=True):
    """Give up another worker's lease, or a running pull. A started pull then reports
    `PullFailed`.
    """

    seq_id: SeqId


TransferOrder = OpenLease | GrowLease | RevokeLease | HoldLease | StartPull | AbortPull
Effect = Emit | EmitToAll | TransferOrder


class Scheduled(msgspec.Struct):  # a struct, since one is created in each step
    """The rows and effects that a scheduler wants in the next step."""

    rows: list[Row] = []
    num_tokens: int = 0  # tokens of these rows, with drafted tokens
    effects: list[Effect] = []
    held_until_s: float | None = None  # delay the step until this time or the next event
    waits: bool = False  # plan no step until the step in flight has ended


NOTHING = Scheduled()  # the result of a scheduler without work; its lists stay empty

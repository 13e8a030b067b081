"""Effects of the source and sink machines that the endpoint performs on the wire, and the deadlines
and reasons for an end that both machines share.

Other effects (`LeaseEnded`, `PullDone`, `PullFailed`) go up to the worker's core: see
`engine.worker.events`. The effects are msgspec structs, which are faster to make than dataclasses.
"""

from dataclasses import dataclass

import msgspec

from engine.messages import LeaseId, SeqId
from engine.worker.blocks import BlockId
from engine.worker.events import LeaseEnded, PullDone, PullFailed
from kvtransfer.messages import Attached, LeaseWord, ToSink, ToSource
from kvtransfer.wire import Wire

Peer = bytes  # routing id of a sink's connection at the source's socket


class SendToSink(msgspec.Struct, frozen=True):
    """Source: send a message."""

    peer: Peer
    message: ToSink


class SetWord(msgspec.Struct, frozen=True):
    """Source: set a lease's word, which sinks read. It is set to zero before the blocks change."""

    place: int
    generation: int


class SendBlocks(msgspec.Struct, frozen=True):
    """Source: send these blocks in the agreed form, in one or more `Data` messages."""

    peer: Peer
    wire: Wire
    lease_id: LeaseId
    indices: tuple[int, ...]
    block_ids: tuple[BlockId, ...]


class SendToSource(msgspec.Struct, frozen=True):
    """Sink: send a message; open the connection if there is none."""

    address: str
    message: ToSource


class UseSource(msgspec.Struct, frozen=True):
    """Sink: the source accepted us; choose a transport for its blocks."""

    address: str
    wire: Wire
    source: Attached


class Fetch(msgspec.Struct, frozen=True):
    """Sink: fetch these blocks, then call `fetched`, `damaged` or `fetch_failed`."""

    seq_id: SeqId
    address: str
    lease_id: LeaseId
    indices: tuple[int, ...]  # positions of the blocks in the lease
    source_blocks: tuple[int, ...]  # block ids at the source
    block_ids: tuple[BlockId, ...]  # block ids here
    word: LeaseWord | None = None  # the lease's; unchanged after the copy, it proves the blocks


class CloseSource(msgspec.Struct, frozen=True):
    """Sink: close the connection to a source and unmap its memory."""

    address: str


SourceEffect = SendToSink | SendBlocks | SetWord | LeaseEnded
SinkEffect = SendToSource | UseSource | Fetch | CloseSource | PullDone | PullFailed


RELEASED = "released"
LOST_WHILE_WAITING = "lease was lost while waiting"  # the pull had not started yet
END_REASONS = {  # reasons that a source may give; each is a counter at the sink
    RELEASED,
    "revoked",
    "expired",
    "unknown",
    "held by another",
    "bad read",
    "bad message",
    "unread answers",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of the protocol, seconds."""

    ttl_s: float = 30.0  # a lease ends after this time without a message from its sink
    early_s: float = 1.0  # a rank answers about an unknown lease after this time
    hold_every_s: float = 1.0  # a sink renews its leases at this interval
    reread_s: float = 2.0  # the sink asks again after this time without a block
    silence_s: float = 6.0  # the source counts as dead after this time without an answer

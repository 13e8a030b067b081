"""Effects of the source and sink machines that the endpoint carries out, and shared constants.

The constants are the protocol's deadlines, and the reasons for the end of a lease or pull. Other
effects (`LeaseEnded`, `PullDone`, `PullFailed`) go to the worker's core: see
`engine.worker.events`. The effects are msgspec structs, which are faster to create than
dataclasses.
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
    """Source: send a message to a sink."""

    peer: Peer
    message: ToSink


class SetWord(msgspec.Struct, frozen=True):
    """Source: set a lease's word, which sinks read. Zero means that the lease has ended."""

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
    """Sink: the source has accepted this sink; choose a transport for the source's blocks."""

    address: str
    wire: Wire
    source: Attached


class Fetch(msgspec.Struct, frozen=True):
    """Sink: fetch these blocks, then call `fetched`, `damaged` or `fetch_failed`."""

    seq_id: SeqId
    address: str
    lease_id: LeaseId
    indices: tuple[int, ...]  # indices of the blocks in the lease
    source_blocks: tuple[int, ...]  # ids of the blocks at the source
    block_ids: tuple[BlockId, ...]  # block ids in the sink's own pool
    # lease word; if it has not changed after the copy, the blocks are good
    word: LeaseWord | None = None


class CloseSource(msgspec.Struct, frozen=True):
    """Sink: close the connection to a source and unmap its memory."""

    address: str


SourceEffect = SendToSink | SendBlocks | SetWord | LeaseEnded
SinkEffect = SendToSource | UseSource | Fetch | CloseSource | PullDone | PullFailed


RELEASED = "released"
# reason if the lease was lost before the pull started
LOST_WHILE_WAITING = "lease was lost while waiting"
# reasons for the end of a lease that a source may give; the sink counts each reason
END_REASONS = {
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
    """Deadlines of the protocol, in seconds."""

    ttl_s: float = 30.0  # a lease ends after this time without a message from its sink
    # a source rank keeps messages about an unknown lease for this time, then answers
    early_s: float = 1.0
    hold_every_s: float = 1.0  # a sink renews its leases at this interval
    reread_s: float = 2.0  # a sink asks again for its blocks if none arrives within this time
    silence_s: float = 6.0  # the source counts as dead after this time without an answer

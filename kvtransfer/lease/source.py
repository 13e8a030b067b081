"""The source's end of the lease protocol.

The life of a lease:

    open ──grow──> open ──grow──> … complete
      │                               │
      └── Release, revoke, no message from the sink for `ttl_s` ──> ended (reported once)

What each event does (— cannot happen, or changes nothing):

    event           no such lease     open                               complete
    open            open              —                                  —
    grow            —                 Ready to the holder                —
    Hold            Ended(unknown)    Ready, renewed, holder set         the same
    Read            Ended(unknown)    Data, renewed; ended if bad        the same
    Release         Ended(unknown)    ended, Ended(released)             the same
    revoke          —                 ended, Ended(revoked)              the same
    ttl_s over      —                 ended, Ended(expired)              the same
    bad message     —                 ended, Ended(bad message)          the same
    unread answers  —                 ended, Ended(unread answers)       the same

The machine knows no socket, memory or block pool. `next_wake_s` says when to call `sweep`.

Source: leases with renewal, vLLM's NIXL connector.
"""

from dataclasses import dataclass, field

from engine.errors import ProtocolError
from engine.messages import Incarnation, LeaseId
from engine.worker.blocks import BlockId
from engine.worker.events import LeaseEnded
from kvtransfer.lease.effects import Peer, SendBlocks, SendToSink, SourceEffect
from kvtransfer.lease.terms import RELEASED, Timing
from kvtransfer.messages import (
    MAX_BLOCKS_PER_READ,
    TRANSFER_VERSION,
    Attach,
    Attached,
    AttachRefused,
    Ended,
    Hold,
    Identity,
    Offers,
    Read,
    Ready,
    Release,
    ToSource,
    decode_attach_body,
)
from kvtransfer.wire import Disagreement, Wire, agree

MAX_ATTACHED_PEERS = 4096


@dataclass(slots=True)
class _Lease:
    num_blocks: int
    expires_s: float
    block_ids: list[BlockId] = field(default_factory=list)
    holder: Peer | None = None


class SourceMachine:
    """All leases of one worker. Only its methods change it."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        identity: Identity,
        num_blocks: int,
        timing: Timing,
        offers: Offers,
    ) -> None:
        self._incarnation = incarnation
        self._identity = identity
        self._num_blocks = num_blocks
        self._offers = offers
        self._timing = timing
        self._leases: dict[LeaseId, _Lease] = {}
        self._peers: dict[Peer, Wire] = {}  # attached, oldest first

    @property
    def num_leases(self) -> int:
        """Leases that are open."""
        return len(self._leases)

    def open(self, lease_id: LeaseId, num_blocks: int, now_s: float) -> list[SourceEffect]:
        """Opens a lease on `num_blocks` blocks, none of them ready."""
        assert lease_id not in self._leases
        self._leases[lease_id] = _Lease(num_blocks, now_s + self._timing.ttl_s)
        return []

    def grow(
        self, lease_id: LeaseId, block_ids: tuple[BlockId, ...], now_s: float
    ) -> list[SourceEffect]:
        """Adds the next ready blocks to a lease. Does nothing if it has ended meanwhile."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return []
        first = len(lease.block_ids)
        lease.block_ids.extend(block_ids)
        assert len(lease.block_ids) <= lease.num_blocks
        lease.expires_s = now_s + self._timing.ttl_s
        if lease.holder is None:
            return []
        return [SendToSink(lease.holder, Ready(lease_id, first, list(block_ids)))]

    def revoke(self, lease_id: LeaseId, now_s: float) -> list[SourceEffect]:
        """Ends a lease from this side."""
        return self._end(lease_id, "revoked")

    def receive(self, peer: Peer, message: ToSource, now_s: float) -> list[SourceEffect]:
        """Handles a message of a sink."""
        if isinstance(message, Attach):
            return [SendToSink(peer, self._attach(peer, message))]
        wire = self._peers.get(peer)
        if wire is None:
            return [SendToSink(peer, AttachRefused("attach"))]
        lease = self._leases.get(message.lease_id)
        if lease is None:
            return [SendToSink(peer, Ended(message.lease_id, "unknown"))]
        if lease.holder not in (None, peer):
            return [SendToSink(peer, Ended(message.lease_id, "held by another"))]
        lease.holder = peer
        lease.expires_s = now_s + self._timing.ttl_s
        match message:
            case Hold():
                known = max(0, min(message.num_known, len(lease.block_ids)))
                news: list[int] = [*lease.block_ids[known:]]
                return [SendToSink(peer, Ready(message.lease_id, known, news, message.stamp))]
            case Read():
                return self._read(peer, wire, lease, message)
            case Release():
                return self._end(message.lease_id, RELEASED, message.pull_id)

    def send_away(self, peer: Peer, reason: str = "bad message") -> list[SourceEffect]:
        """Ends all leases of a peer that breaks the protocol or reads no answers."""
        self._peers.pop(peer, None)
        held = [i for i, lease in self._leases.items() if lease.holder == peer]
        return [effect for lease_id in held for effect in self._end(lease_id, reason)]

    def may_send(self, read: SendBlocks) -> bool:
        """True if that peer still holds the lease, so that its blocks are unchanged."""
        lease = self._leases.get(read.lease_id)
        return lease is not None and lease.holder == read.peer

    def sweep(self, now_s: float) -> list[SourceEffect]:
        """Ends the leases without a message from their sink in time."""
        late = [i for i, lease in self._leases.items() if lease.expires_s <= now_s]
        return [effect for lease_id in late for effect in self._end(lease_id, "expired")]

    def next_wake_s(self) -> float | None:
        """Returns when the next lease expires."""
        return min((lease.expires_s for lease in self._leases.values()), default=None)

    def validate(self) -> None:
        """Asserts the machine's invariants."""
        for lease in self._leases.values():
            assert len(lease.block_ids) <= lease.num_blocks
            assert len(set(lease.block_ids)) == len(lease.block_ids)
            assert all(0 <= b < self._num_blocks for b in lease.block_ids)

    def _attach(self, peer: Peer, message: Attach) -> Attached | AttachRefused:
        if message.version != TRANSFER_VERSION:
            return AttachRefused("version")
        try:
            body = decode_attach_body(message.body)
        except ProtocolError:
            return AttachRefused("body")
        if body.source != self._incarnation:
            return AttachRefused("incarnation")
        try:
            wire = agree(self._identity, body.identity)
        except Disagreement as error:
            return AttachRefused(error.field)
        self._peers[peer] = wire
        if len(self._peers) > MAX_ATTACHED_PEERS:
            del self._peers[next(iter(self._peers))]
        return Attached(self._incarnation, self._identity, self._num_blocks, self._offers)

    def _read(self, peer: Peer, wire: Wire, lease: _Lease, message: Read) -> list[SourceEffect]:
        ready = len(lease.block_ids)
        has_bytes = self._offers.sends and wire.record_bytes > 0
        valid = has_bytes and len(message.indices) <= MAX_BLOCKS_PER_READ
        if not valid or not all(0 <= i < ready for i in message.indices):
            return self._end(message.lease_id, "bad read")
        blocks = tuple(lease.block_ids[i] for i in message.indices)
        return [SendBlocks(peer, wire, message.lease_id, tuple(message.indices), blocks)]

    def _end(
        self, lease_id: LeaseId, reason: str, pull_id: int | None = None
    ) -> list[SourceEffect]:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        effects: list[SourceEffect] = [LeaseEnded(lease_id, reason)]
        if lease.holder is not None:
            effects.append(SendToSink(lease.holder, Ended(lease_id, reason, pull_id)))
        return effects

"""The source's end of the lease protocol.

The life of a lease:

    open ──grow──> open ──grow──> … complete
      │                               │
      └── all Releases, revoke, no message from a holder for `ttl_s` ──> ended (reported once)

Several ranks of a sink may pull from this source. All ranks of a sink have the same incarnation.
The first rank that attaches names the shards of its sink, which determine the number of ranks that
will hold each lease. Each of these ranks is a holder, with its own deadline and its own Release. If
one of these ranks does not hold the lease in time, the lease expires.

What each event does (— cannot happen, or changes nothing):

    event           no such lease     open                               complete
    open            open              —                                  —
    grow            —                 Ready to the holders               —
    Hold            Ended(unknown)    Ready, renewed, one of the holders the same
    Read            Ended(unknown)    Data, renewed; ended if bad        the same
    Release         Ended(unknown)    Ended(released); ended if no other the same
                                      rank of the sink holds or will
                                      hold the lease
    revoke          —                 ended, Ended(revoked) to holders   the same
    ttl_s over      —                 ended, Ended(expired) to holders   the same
    bad message     —                 ended, Ended(bad message)          the same
    unread answers  —                 ended, Ended(unread answers)       the same

The id of a lease is never reused: it contains the 128 random bits of its request. A sink repeats a
Release until the source confirms it. So a Release may arrive after the end of its lease.

A holder that has released a lease gets Ended(unknown) for it. Any other sink gets Ended(held by
another).

A worker of several ranks orders all its ranks to open a lease. A sink may learn of the lease before
the order has reached every rank. So the ranks of such a worker keep messages about an unknown lease
for `early_s`.

A lease has a *word* in memory that sinks can read. While the lease is open, the word is a
generation that no other lease ever has. The word is set to zero before the end of the lease is
reported. So a sink that finds the generation after a copy knows that the lease was open then. If
too many leases are open, further leases have no word and are confirmed by messages only.

The machine uses no socket, memory or block pool. `next_wake_s` returns the time of the next
`sweep`.

Source: leases with renewal, vLLM's NIXL connector.
"""

from dataclasses import dataclass, field

from engine.errors import ProtocolError
from engine.layout import Shard
from engine.messages import Incarnation, LeaseId
from engine.worker.blocks import BlockId
from engine.worker.events import LeaseEnded
from kvtransfer.lease.effects import (
    RELEASED,
    Peer,
    SendBlocks,
    SendToSink,
    SetWord,
    SourceEffect,
    Timing,
)
from kvtransfer.messages import (
    MAX_BLOCKS_PER_READ,
    NUM_WORDS,
    TRANSFER_VERSION,
    Attach,
    Attached,
    AttachRefused,
    Ended,
    Hold,
    Identity,
    LeaseMessage,
    LeaseWord,
    Offers,
    Read,
    Ready,
    Release,
    decode_attach_body,
)
from kvtransfer.wire import Disagreement, Wire, agree

MAX_ATTACHED_PEERS = 4096
MAX_EARLY = 4096  # kept messages about unknown leases, which may be opened soon


@dataclass(frozen=True, slots=True)
class _Peer:
    """A rank of a sink that has attached."""

    sink: Incarnation
    shard: Shard
    wire: Wire


@dataclass(frozen=True, slots=True)
class _Early:
    """A message about a lease that is not open yet, or has ended."""

    peer: Peer
    message: Hold | Read | Release
    due_s: float


@dataclass(slots=True)
class _Lease:
    num_blocks: int
    expires_s: float  # the lease expires at this time unless all ranks of the sink hold it
    word: LeaseWord | None
    block_ids: list[BlockId] = field(default_factory=list)
    sink: Incarnation | None = None
    num_holders: int = 1  # number of the sink's ranks that will hold the lease
    # ranks that hold the lease or have held it
    holders: dict[Peer, Shard] = field(default_factory=dict)
    # present holders of the lease, with the time at which each hold expires
    pulling: dict[Peer, float] = field(default_factory=dict)

    def admit(self, peer: Peer, rank: _Peer, due_s: float) -> bool:
        """Makes the peer a holder, if the lease is free or held by other ranks of its sink.

        Returns False if another sink, or another peer of the same rank, holds the lease.
        """
        if not self.holders:
            self.sink, self.num_holders, self.expires_s = rank.sink, rank.wire.num_holders, due_s
        is_full = len(self.holders) >= self.num_holders
        if rank.sink != self.sink or rank.shard in self.holders.values() or is_full:
            return False
        self.holders[peer] = rank.shard
        return True

    def deadline_s(self) -> float:
        """Returns when the lease expires."""
        due = self.pulling.values()
        if len(self.holders) < self.num_holders:  # a rank of the sink has not held the lease yet
            return min(*due, self.expires_s) if due else self.expires_s
        return min(due)


class SourceMachine:
    """All leases of one worker. Only the methods of this class change them."""

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
        self._peers: dict[Peer, _Peer] = {}  # attached ranks of sinks, oldest first
        self._early: list[_Early] = []  # oldest first; only at a worker of several ranks
        self._free_words = [*range(NUM_WORDS)] if offers.words is not None else []
        self._next_generation = 1

    @property
    def num_leases(self) -> int:
        """The number of open leases."""
        return len(self._leases)

    def open(self, lease_id: LeaseId, num_blocks: int, now_s: float) -> list[SourceEffect]:
        """Opens a lease on `num_blocks` blocks, none of which is ready."""
        assert lease_id not in self._leases
        word, effects = None, list[SourceEffect]()
        if self._free_words:
            word = LeaseWord(self._free_words.pop(), self._next_generation)
            self._next_generation += 1
            effects.append(SetWord(word.place, word.generation))
        self._leases[lease_id] = _Lease(num_blocks, now_s + self._timing.ttl_s, word)
        if not self._early:
            return effects
        early = [one for one in self._early if one.message.lease_id == lease_id]
        self._early = [one for one in self._early if one not in early]
        for one in early:
            effects += self.receive(one.peer, one.message, now_s)
        return effects

    def grow(
        self, lease_id: LeaseId, block_ids: tuple[BlockId, ...], now_s: float
    ) -> list[SourceEffect]:
        """Adds the next ready blocks to a lease. Does nothing if the lease has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return []
        first = len(lease.block_ids)
        lease.block_ids.extend(block_ids)
        assert len(lease.block_ids) <= lease.num_blocks
        lease.expires_s = now_s + self._timing.ttl_s
        ready = Ready(lease_id, first, list(block_ids), word=lease.word)
        effects: list[SourceEffect] = []
        for peer in lease.pulling:
            lease.pulling[peer] = lease.expires_s
            effects.append(SendToSink(peer, ready))
        return effects

    def revoke(self, lease_id: LeaseId, now_s: float) -> list[SourceEffect]:
        """Ends a lease by order of this source's worker."""
        return self._end(lease_id, "revoked")

    def receive(self, peer: Peer, message: LeaseMessage, now_s: float) -> list[SourceEffect]:
        """Handles a message of a sink."""
        if isinstance(message, Attach):
            return [SendToSink(peer, self._attach(peer, message))]
        rank = self._peers.get(peer)
        if rank is None:
            return [SendToSink(peer, AttachRefused("attach"))]
        lease = self._leases.get(message.lease_id)
        if lease is None:
            return self._on_unknown(_Early(peer, message, now_s + self._timing.early_s))
        due_s = now_s + self._timing.ttl_s
        if peer not in lease.pulling:
            if peer in lease.holders:  # the peer has released the lease already
                return [SendToSink(peer, Ended(message.lease_id, "unknown"))]
            if not lease.admit(peer, rank, due_s):
                return [SendToSink(peer, Ended(message.lease_id, "held by another"))]
        lease.pulling[peer] = due_s
        match message:
            case Hold():
                known = max(0, min(message.num_known, len(lease.block_ids)))
                more: list[int] = [*lease.block_ids[known:]]
                ready = Ready(message.lease_id, known, more, message.stamp, lease.word)
                return [SendToSink(peer, ready)]
            case Read():
                return self._read(peer, rank.wire, lease, message)
            case Release():
                # The last holder's Release ends the lease.
                del lease.pulling[peer]
                is_over = not lease.pulling and len(lease.holders) == lease.num_holders
                ended = self._end(message.lease_id, RELEASED) if is_over else []
                confirmed = Ended(message.lease_id, RELEASED, message.pull_id)
                return [*ended, SendToSink(peer, confirmed)]

    def send_away(self, peer: Peer, reason: str = "bad message") -> list[SourceEffect]:
        """Ends all leases of a peer that violates the protocol or does not read its answers."""
        self._peers.pop(peer, None)
        held = [i for i, lease in self._leases.items() if peer in lease.pulling]
        return [effect for lease_id in held for effect in self._end(lease_id, reason)]

    def is_attached(self, peer: Peer) -> bool:
        """Returns True if the peer may ask for blocks."""
        return peer in self._peers

    def may_send(self, read: SendBlocks) -> bool:
        """Returns True if the peer still holds the lease, so the lease's blocks are unchanged."""
        lease = self._leases.get(read.lease_id)
        return lease is not None and read.peer in lease.pulling

    def sweep(self, now_s: float) -> list[SourceEffect]:
        """Ends leases whose holder has sent no message in time."""
        late = [i for i, lease in self._leases.items() if lease.deadline_s() <= now_s]
        ended = [effect for lease_id in late for effect in self._end(lease_id, "expired")]
        unknown = [one for one in self._early if one.due_s <= now_s]
        self._early = self._early[len(unknown) :]
        return ended + [_unknown(one) for one in unknown]

    def next_wake_s(self) -> float | None:
        """Returns when the next lease expires or the next early message must be answered."""
        wakes = [lease.deadline_s() for lease in self._leases.values()]
        return min([*wakes, *(one.due_s for one in self._early[:1])], default=None)

    def validate(self) -> None:
        """Asserts the machine's invariants."""
        for lease in self._leases.values():
            assert len(lease.block_ids) <= lease.num_blocks
            assert len(set(lease.block_ids)) == len(lease.block_ids)
            assert all(0 <= b < self._num_blocks for b in lease.block_ids)
            assert len(set(lease.holders.values())) == len(lease.holders) <= lease.num_holders
            assert lease.pulling.keys() <= lease.holders.keys()
            is_awaited = len(lease.holders) < lease.num_holders
            assert is_awaited or lease.pulling, "all have released it"
        words = [lease.word.place for lease in self._leases.values() if lease.word is not None]
        assert len({*words, *self._free_words}) == len(words) + len(self._free_words)
        assert not any(one.message.lease_id in self._leases for one in self._early)

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
        self._peers[peer] = _Peer(body.sink, body.identity.shard, wire)
        if len(self._peers) > MAX_ATTACHED_PEERS:
            del self._peers[next(iter(self._peers))]
        return Attached(self._incarnation, self._identity, self._num_blocks, self._offers)

    def _on_unknown(self, early: _Early) -> list[SourceEffect]:
        """Answers a message about an unknown lease, or keeps the message if the lease may open
        soon.
        """
        if len(self._identity.ranks) == 1 or len(self._early) >= MAX_EARLY:
            return [_unknown(early)]
        self._early.append(early)
        return []

    def _read(self, peer: Peer, wire: Wire, lease: _Lease, message: Read) -> list[SourceEffect]:
        ready = len(lease.block_ids)
        has_bytes = self._offers.sends and wire.record_bytes > 0
        valid = has_bytes and len(message.indices) <= MAX_BLOCKS_PER_READ
        if not valid or not all(0 <= i < ready for i in message.indices):
            return self._end(message.lease_id, "bad read")
        blocks = tuple(lease.block_ids[i] for i in message.indices)
        return [SendBlocks(peer, wire, message.lease_id, tuple(message.indices), blocks)]

    def _end(self, lease_id: LeaseId, reason: str) -> list[SourceEffect]:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        effects: list[SourceEffect] = []
        if lease.word is not None:
            # A new lease may use the word's slot at once, because the new lease has a new
            # generation.
            self._free_words.append(lease.word.place)
            effects.append(SetWord(lease.word.place, 0))
        effects.append(LeaseEnded(lease_id, reason))
        for peer in lease.pulling:
            effects.append(SendToSink(peer, Ended(lease_id, reason)))
        return effects


def _unknown(early: _Early) -> SourceEffect:
    return SendToSink(early.peer, Ended(early.message.lease_id, "unknown"))

"""The lease protocol, both ends, without I/O.

A lease at its source:

    open ──grow──> open ──grow──> … complete
      │                               │
      └───────────── Release, revoke, no sign of the sink for `ttl_s` ────> ended (reported once)

A pull at its sink:

    hold ──start──> pulling ──all wanted blocks here──> releasing ──Ended(released)──> PullDone
      │                │                                    │
      └──── abort, Ended(anything else), refusal, source silent for `silence_s` ────> PullFailed

    with every block sent by the source: pulling ──> PullDone, and releasing until that is confirmed

What each makes of what reaches it (— cannot be, or changes nothing):

    source        no such lease      open                               complete
    open          open               —                                  —
    grow          —                  Ready to the holder                —
    Hold          Ended(unknown)     Ready, renewed, holder set         the same
    Read          Ended(unknown)     Data, renewed; ended if bad        the same
    Release       Ended(unknown)     ended, Ended(released)             the same
    revoke        —                  ended, Ended(revoked)              the same
    ttl_s over    —                  ended, Ended(expired)              the same
    nonsense      —                  ended, Ended(bad message)          the same
    reads nothing —                  ended, Ended(unread answers)       the same

    sink          no such pull       held           pulling             releasing
    start         PullFailed         pulling        —                   —
    Ready         —                  noted          fetches             noted
    blocks came   —                  —              fetches; all here:  —
                                                    Release, and if all
                                                    are good PullDone
    our Release   —                  PullFailed     PullFailed          PullDone
    confirmed
    Ended else    —                  PullFailed     PullFailed          PullFailed
    abort         —                  Release, PullFailed: in each of the three
    renewal due   —                  Hold           Hold                Release
    reread_s over —                  —              asks again          —
    silence_s over —                 PullFailed: in each of the three
                                     (nothing is reported of a pull that was reported done)

The sink holds a lease before it has memory for it, so the lease outlives a queue at the sink.

A block is *good* when it is known to be what the lease promised. What the source sent is good, for
it sends only blocks of an open lease. What the sink copied from the source's memory is good when
the source confirms that the lease was open after the copy: by its answer to a later Hold, or to
this very pull's Release, which is sent when every copy is made. Had the source given the blocks
away meanwhile, what was read is thrown away. That needs nothing of the network: a message that is
late, lost, repeated or out of order can make a pull fail, not lie.

A pull that fails reports its good blocks. What is lost on the way is asked for again while the
lease lasts.

A source's deadline runs from the first message that it has not answered, so a sink that was itself
stopped for a while blames nobody. `next_wake_s` says when to call `sweep`, also while nothing else
happens.

Neither end knows sockets, memory or the block pool. The endpoint performs the effects: those of
`engine.worker.events` go up to the worker's core, the others to the wire.

Sources: leases with renewal, vLLM's NIXL connector; confirmation by the source is ours.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import ProtocolError
from engine.messages import Incarnation, LeaseId, LeaseRef, SeqId, TransferAddress
from engine.worker.blocks import BlockId
from engine.worker.events import LeaseEnded, PullDone, PullFailed
from kvtransfer.messages import (
    MAX_BLOCKS_PER_READ,
    TRANSFER_VERSION,
    Attach,
    AttachBody,
    Attached,
    AttachRefused,
    Data,
    Ended,
    Hold,
    Identity,
    Offers,
    Read,
    Ready,
    Release,
    ToSink,
    ToSource,
    attach,
    decode_attach_body,
)
from kvtransfer.wire import Disagreement, Wire, agree

Peer = bytes  # routing id of a sink's connection at the source's socket

RELEASED = "released"
END_REASONS = {  # of a source that is believed: they name a counter at the sink
    RELEASED,
    "revoked",
    "expired",
    "unknown",
    "held by another",
    "bad read",
    "bad message",
    "unread answers",
}
MAX_ATTACHED_PEERS = 4096
MAX_DAMAGED = 3  # of one pull: more is no accident


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of the protocol, seconds."""

    ttl_s: float = 30.0  # a lease without a sign of its sink ends
    hold_every_s: float = 1.0  # a sink renews that often
    reread_s: float = 2.0  # blocks that a source sends none of for so long are asked for again
    silence_s: float = 6.0  # a source that leaves a question open for so long is taken for dead


# ---------------------------------------------------------------- effects to the wire


@dataclass(frozen=True, slots=True)
class SendToSink:
    """Source: send a message."""

    peer: Peer
    message: ToSink


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Source: send these blocks, in as many Data as it takes, as agreed with that peer."""

    peer: Peer
    wire: Wire
    lease_id: LeaseId
    indices: tuple[int, ...]
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class SendToSource:
    """Sink: send a message, over a connection that is opened when needed."""

    address: str
    message: ToSource


@dataclass(frozen=True, slots=True)
class UseSource:
    """Sink: the source accepted us; choose how to read its blocks."""

    address: str
    wire: Wire
    source: Attached


@dataclass(frozen=True, slots=True)
class Fetch:
    """Sink: bring these blocks here; `fetched`, `damaged` or `fetch_failed` is to be called."""

    seq_id: SeqId
    address: str
    lease_id: LeaseId
    indices: tuple[int, ...]  # in the lease
    source_blocks: tuple[int, ...]  # their ids at the source
    block_ids: tuple[BlockId, ...]  # and here


@dataclass(frozen=True, slots=True)
class CloseSource:
    """Sink: close the connection to a source and forget its memory."""

    address: str


SourceEffect = SendToSink | SendBlocks | LeaseEnded
SinkEffect = SendToSource | UseSource | Fetch | CloseSource | PullDone | PullFailed


# ---------------------------------------------------------------- source


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
        """A new lease on `num_blocks` blocks, none of them ready."""
        assert lease_id not in self._leases
        self._leases[lease_id] = _Lease(num_blocks, now_s + self._timing.ttl_s)
        return []

    def grow(
        self, lease_id: LeaseId, block_ids: tuple[BlockId, ...], now_s: float
    ) -> list[SourceEffect]:
        """The next blocks of a lease are ready. A lease that ended meanwhile is left alone."""
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
        """Ends a lease on this side's wish."""
        return self._end(lease_id, "revoked")

    def receive(self, peer: Peer, message: ToSource, now_s: float) -> list[SourceEffect]:
        """A message of a sink."""
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
        """All leases of a peer end that keeps to no protocol, or reads no answer."""
        self._peers.pop(peer, None)
        held = [i for i, lease in self._leases.items() if lease.holder == peer]
        return [effect for lease_id in held for effect in self._end(lease_id, reason)]

    def may_send(self, read: SendBlocks) -> bool:
        """Whether that peer still holds the lease, so that its blocks are what they were."""
        lease = self._leases.get(read.lease_id)
        return lease is not None and lease.holder == read.peer

    def sweep(self, now_s: float) -> list[SourceEffect]:
        """Ends the leases whose sink gave no sign in time."""
        late = [i for i, lease in self._leases.items() if lease.expires_s <= now_s]
        return [effect for lease_id in late for effect in self._end(lease_id, "expired")]

    def next_wake_s(self) -> float | None:
        """When the next lease expires."""
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
        valid = self._offers.sends and len(message.indices) <= MAX_BLOCKS_PER_READ
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


# ---------------------------------------------------------------- sink


@dataclass(slots=True)
class _Pull:
    """What a sink knows of one lease. `todo`, `asked` and `here` are indices of the lease."""

    seq_id: SeqId
    lease: LeaseRef
    pull_id: int
    next_hold_s: float
    source_blocks: list[int] = field(default_factory=list)
    wanted: dict[int, BlockId] | None = None  # None while the sequence waits for memory
    todo: deque[int] = field(default_factory=deque)  # to be asked for, in this order
    asked: set[int] = field(default_factory=set)  # on their way
    asked_s: float = 0.0  # when the last of them were
    waiting_s: float = 0.0  # since when the pull has waited for a block, whatever was asked again
    here: dict[int, None] = field(default_factory=dict)  # in order of arrival
    good: set[int] = field(default_factory=set)  # of these, known to be what the lease promised
    num_damaged: int = 0
    stamp: int = -1  # of its latest Hold
    num_here_at_stamp: int = 0
    releasing: bool = False
    done: bool = False  # reported: only its Release is left
    busy_s: float | None = None  # since when blocks, or the confirmation, are on their way
    transfer_s: float = 0.0  # how long they were, up to then
    hidden_s: float = 0.0  # of that, before the source had computed its last block

    def busy(self, now_s: float) -> None:
        """Something is on its way from now on."""
        if self.busy_s is None:
            self.busy_s = now_s

    def idle(self, now_s: float) -> None:
        """Nothing is on its way any more."""
        if self.busy_s is not None:
            self.transfer_s += now_s - self.busy_s
            self.busy_s = None

    def transferred_s(self, now_s: float) -> float:
        """Seconds in which something was on its way."""
        return self.transfer_s + (0.0 if self.busy_s is None else now_s - self.busy_s)


@dataclass(frozen=True, slots=True)
class Means:
    """How blocks of a source are fetched, and how many at once."""

    transport: str  # named in PullDone
    batch_blocks: int = MAX_BLOCKS_PER_READ  # of one Fetch
    window_blocks: int = MAX_BLOCKS_PER_READ  # on their way, over all pulls from that source
    resends: bool = False  # whether to ask again for blocks that do not come


@dataclass(slots=True)
class _Source:
    address: TransferAddress
    heard_s: float
    asked_s: float | None = None  # first message to it since it was heard
    data_s: float = 0.0  # when it last sent blocks
    attached: bool = False
    given_up: list[Release] = field(default_factory=list)  # to be sent when it is attached
    num_blocks: int = 0
    means: Means = Means("")
    num_asked: int = 0  # that are
    pulls: dict[SeqId, _Pull] = field(default_factory=dict)  # oldest first


class SinkMachine:
    """All pulls of one worker. Only its methods change it."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        identity: Identity,
        timing: Timing,
    ) -> None:
        self._incarnation = incarnation
        self._identity = identity
        self._timing = timing
        self._pulls: dict[SeqId, _Pull] = {}
        self._by_lease: dict[LeaseId, _Pull] = {}
        self._sources: dict[str, _Source] = {}
        self._next_pull_id = 0
        self._next_stamp = 0
        self.num_rereads = 0  # blocks asked for again

    @property
    def num_pulls(self) -> int:
        """Leases held or being pulled."""
        return len(self._pulls)

    def hold(self, seq_id: SeqId, lease: LeaseRef, now_s: float) -> list[SinkEffect]:
        """Keeps a lease alive until `start` or `abort`."""
        assert seq_id not in self._pulls
        assert lease.lease_id not in self._by_lease
        effects: list[SinkEffect] = []
        address = lease.source.address
        source = self._sources.get(address)
        if source is not None and source.address.incarnation != lease.source.incarnation:
            effects += self._lose_source(address, "source restarted")
            source = None
        pull = _Pull(seq_id, lease, self._next_pull_id, now_s + self._timing.hold_every_s)
        self._next_pull_id += 1
        self._pulls[seq_id] = self._by_lease[lease.lease_id] = pull
        if source is None:
            source = self._sources[address] = _Source(lease.source, heard_s=now_s)
            body = AttachBody(self._incarnation, lease.source.incarnation, self._identity)
            effects.append(_ask(source, attach(body), now_s))
        elif source.attached:
            effects.append(_ask(source, self._hold(pull), now_s))
        source.pulls[seq_id] = pull
        return effects

    def start(
        self, seq_id: SeqId, blocks: tuple[tuple[int, BlockId], ...], now_s: float
    ) -> list[SinkEffect]:
        """Memory is there: bring the blocks with these indices of the lease, in this order."""
        pull = self._pulls.get(seq_id)
        if pull is None:
            return [PullFailed(seq_id, "lease was lost while waiting")]
        assert pull.wanted is None
        if not all(0 <= index < pull.lease.num_blocks for index, _ in blocks):
            return self._give_up(pull, "lease is too short", now_s)
        pull.wanted = dict(blocks)
        pull.todo.extend(pull.wanted)
        return self._advance(pull, now_s)

    def abort(self, seq_id: SeqId, now_s: float) -> list[SinkEffect]:
        """Gives a lease up. Whoever started the pull is told when nothing writes any more: now."""
        pull = self._pulls.get(seq_id)
        return [] if pull is None or pull.done else self._give_up(pull, "aborted", now_s)

    def receive(self, address: str, message: ToSink, now_s: float) -> list[SinkEffect]:
        """A message of a source; for Data, after its blocks were written (see `places`)."""
        source = self._sources.get(address)
        if source is None:
            return []
        source.heard_s, source.asked_s = now_s, None
        match message:
            case Attached():
                return self._on_attached(source, message, now_s)
            case AttachRefused():
                return self._lose_source(address, f"source refused: {message.field} differs")
            case Ready():
                return self._on_ready(source, message, now_s)
            case Ended():
                return self._on_ended(source, message, now_s)
            case Data():
                source.data_s = now_s
                return []

    def places(self, address: str, message: Data) -> list[BlockId | None]:
        """Where the blocks of a Data go; None for those that nobody waits for (any more)."""
        pull = self._by_lease.get(message.lease_id)
        if pull is None or pull.wanted is None or pull.lease.source.address != address:
            return [None] * len(message.indices)
        return [pull.wanted[i] if i in pull.asked else None for i in message.indices]

    def fetched(
        self, lease_id: LeaseId, indices: Sequence[int], now_s: float, *, sent_by_source: bool
    ) -> list[SinkEffect]:
        """These blocks of a lease are in place; what the source itself sent is good already."""
        pull = self._by_lease.get(lease_id)
        if pull is None:
            return []
        source = self._sources[pull.lease.source.address]
        arrived = pull.asked.intersection(indices)
        source.num_asked -= len(arrived)
        pull.asked -= arrived
        pull.here.update(dict.fromkeys([i for i in indices if i in arrived]))
        if sent_by_source:
            pull.good |= arrived
        pull.waiting_s = now_s
        if not pull.asked:
            pull.idle(now_s)
        return self._advance_all(source, now_s)

    def damaged(self, lease_id: LeaseId, indices: Sequence[int], now_s: float) -> list[SinkEffect]:
        """Blocks of a lease came, but not as they were sent: they are asked for again."""
        pull = self._by_lease.get(lease_id)
        if pull is None:
            return []
        pull.num_damaged += 1
        if pull.num_damaged > MAX_DAMAGED:
            return self._give_up(pull, "blocks arrive damaged", now_s)
        return self._ask_again(pull, pull.asked.intersection(indices), now_s)

    def fetch_failed(self, lease_id: LeaseId, reason: str, now_s: float) -> list[SinkEffect]:
        """Blocks of a lease cannot be brought here."""
        pull = self._by_lease.get(lease_id)
        return [] if pull is None else self._give_up(pull, reason, now_s)

    def refuse_source(self, address: str, reason: str) -> list[SinkEffect]:
        """Blocks of that source cannot be read from here."""
        return self._lose_source(address, reason)

    def use_transport(self, address: str, means: Means) -> None:
        """How blocks of that source are fetched."""
        self._sources[address].means = means

    def sweep(self, now_s: float) -> list[SinkEffect]:
        """Renews what is due, asks again for what was lost, gives up who is silent."""
        effects: list[SinkEffect] = []
        for source in list(self._sources.values()):
            if self._source_deadline_s(source) <= now_s:
                effects += self._lose_source(source.address.address, "source silent")
        for pull in list(self._pulls.values()):
            if self._blocks_deadline_s(pull) <= now_s:
                effects += self._give_up(pull, "source sends no blocks", now_s)
                continue
            if self._reread_s(pull) <= now_s:
                effects += self._ask_again(pull, set(pull.asked), now_s)
            if pull.next_hold_s <= now_s:
                pull.next_hold_s = now_s + self._timing.hold_every_s
                effects += self._renew(pull, now_s)
        return effects

    def next_wake_s(self) -> float | None:
        """When the next renewal or deadline is due."""
        wakes = [self._source_deadline_s(source) for source in self._sources.values()]
        for pull in self._pulls.values():
            wakes += [pull.next_hold_s, self._reread_s(pull), self._blocks_deadline_s(pull)]
        wake_s = min(wakes, default=math.inf)
        return None if wake_s == math.inf else wake_s

    def validate(self) -> None:
        """Asserts the machine's invariants."""
        assert set(self._by_lease) == {p.lease.lease_id for p in self._pulls.values()}
        assert sum(len(source.pulls) for source in self._sources.values()) == len(self._pulls)
        for source in self._sources.values():
            assert source.num_asked == sum(len(pull.asked) for pull in source.pulls.values())
            assert source.num_asked <= source.means.window_blocks
        for pull in self._pulls.values():
            assert pull.seq_id in self._sources[pull.lease.source.address].pulls
            parts = (set(pull.todo), pull.asked, set(pull.here))
            assert set().union(*parts) == set(pull.wanted or ())
            assert sum(map(len, parts)) == len(pull.wanted or ())
            assert pull.good <= set(pull.here)
            assert len(pull.source_blocks) <= pull.lease.num_blocks
            assert not pull.done or (pull.releasing and len(pull.good) == len(pull.here))
            assert (pull.busy_s is not None) == bool(pull.asked or pull.releasing != pull.done)

    # ------------------------------------------------------------ deadlines

    def _source_deadline_s(self, source: _Source) -> float:
        """When to let go of a source that stays silent: because it owes an answer, or is idle."""
        if source.asked_s is not None:
            return source.asked_s + self._timing.silence_s
        return math.inf if source.pulls else source.heard_s + self._timing.ttl_s

    def _blocks_deadline_s(self, pull: _Pull) -> float:
        """When to give up on blocks, while the source sends none of any pull."""
        if not pull.asked:
            return math.inf
        data_s = self._sources[pull.lease.source.address].data_s
        return max(pull.waiting_s, data_s) + self._timing.silence_s

    def _reread_s(self, pull: _Pull) -> float:
        """When to ask again for blocks that the source is to send."""
        source = self._sources[pull.lease.source.address]
        if not pull.asked or not source.means.resends:
            return math.inf
        return max(pull.asked_s, source.data_s) + self._timing.reread_s

    # ------------------------------------------------------------ what a source says

    def _on_attached(self, source: _Source, message: Attached, now_s: float) -> list[SinkEffect]:
        address = source.address.address
        if message.incarnation != source.address.incarnation:
            return self._lose_source(address, "source restarted")
        if source.attached:
            return []  # it was asked once; its blocks are read as it said then
        try:
            wire = agree(message.identity, self._identity)
        except Disagreement as error:
            return self._lose_source(address, f"source refused: {error.field} differs")
        source.attached, source.num_blocks = True, message.num_blocks
        effects: list[SinkEffect] = [UseSource(address, wire, message)]
        effects += [_ask(source, release, now_s) for release in source.given_up]
        source.given_up = []
        effects += [_ask(source, self._hold(pull), now_s) for pull in source.pulls.values()]
        return effects

    def _pull_from(self, source: _Source, lease_id: LeaseId) -> _Pull | None:
        """The pull that a message of that source is about."""
        pull = self._by_lease.get(lease_id)
        mine = pull is not None and pull.lease.source.address == source.address.address
        return pull if mine else None

    def _on_ready(self, source: _Source, message: Ready, now_s: float) -> list[SinkEffect]:
        pull = self._pull_from(source, message.lease_id)
        if pull is None:
            return []
        if message.stamp == pull.stamp:
            pull.good.update(list(pull.here)[: pull.num_here_at_stamp])
        if message.first > len(pull.source_blocks):
            return []  # a gap that the next Hold will fill
        blocks = message.block_ids
        if not all(0 <= b < source.num_blocks for b in blocks):
            return self._give_up(pull, "source named a block it has not", now_s)
        if message.first < 0 or message.first + len(blocks) > pull.lease.num_blocks:
            return self._give_up(pull, "source named too many blocks", now_s)
        was_complete = len(pull.source_blocks) == pull.lease.num_blocks
        pull.source_blocks[message.first : message.first + len(blocks)] = blocks
        if not was_complete and len(pull.source_blocks) == pull.lease.num_blocks:
            pull.hidden_s = pull.transferred_s(now_s)
        return self._advance(pull, now_s)

    def _on_ended(self, source: _Source, message: Ended, now_s: float) -> list[SinkEffect]:
        pull = self._pull_from(source, message.lease_id)
        if pull is None:
            return []
        confirmed = message.reason == RELEASED and message.pull_id == pull.pull_id
        if pull.releasing and confirmed and not pull.done:
            self._forget(pull)
            return [self._done(pull, now_s)]
        reason = message.reason if message.reason in END_REASONS else "ended"
        return [*self._drop(pull, f"lease {reason}"), *self._advance_all(source, now_s)]

    # ------------------------------------------------------------ pulling

    def _advance_all(self, source: _Source, now_s: float) -> list[SinkEffect]:
        """There may be room in the window: for the oldest pull first."""
        pulls = list(source.pulls.values())
        return [effect for pull in pulls for effect in self._advance(pull, now_s)]

    def _advance(self, pull: _Pull, now_s: float) -> list[SinkEffect]:
        """Fetches what is ready and wanted, as far as the window allows; releases at the end."""
        if pull.wanted is None or pull.releasing:
            return []
        source = self._sources[pull.lease.source.address]
        if not source.attached:
            return []
        if len(pull.here) == len(pull.wanted):
            pull.releasing = True
            release = _ask(source, _release(pull), now_s)
            if len(pull.good) == len(pull.wanted):
                return [release, self._done(pull, now_s)]
            pull.busy(now_s)
            return [release]
        effects: list[SinkEffect] = []
        while batch := self._next_batch(source, pull):
            if not pull.asked:
                pull.waiting_s = now_s
            pull.asked.update(batch)
            pull.asked_s = now_s
            pull.busy(now_s)
            source.num_asked += len(batch)
            effects.append(
                Fetch(
                    pull.seq_id,
                    source.address.address,
                    pull.lease.lease_id,
                    indices=tuple(batch),
                    source_blocks=tuple([pull.source_blocks[i] for i in batch]),
                    block_ids=tuple([pull.wanted[i] for i in batch]),
                )
            )
        return effects

    def _next_batch(self, source: _Source, pull: _Pull) -> list[int]:
        """What to ask for next: a batch, or what there is of it, when the window has room for it.

        Not for what happens to fit: that would be one block at a time when the window is full.
        """
        means = source.means
        room = means.window_blocks - source.num_asked
        most = min(means.batch_blocks, means.window_blocks, len(pull.todo))
        num_ready = len(pull.source_blocks)
        if room < most and (room == 0 or pull.todo[room] < num_ready):
            return []
        batch: list[int] = []
        while len(batch) < most and pull.todo[0] < num_ready:
            batch.append(pull.todo.popleft())
        return batch

    def _ask_again(self, pull: _Pull, indices: set[int], now_s: float) -> list[SinkEffect]:
        """Takes blocks for lost on their way."""
        source = self._sources[pull.lease.source.address]
        waiting_s = pull.waiting_s
        source.num_asked -= len(indices)
        pull.asked -= indices
        pull.todo.extendleft(sorted(indices, reverse=True))
        self.num_rereads += len(indices)
        effects = self._advance(pull, now_s)
        pull.waiting_s = waiting_s
        if not pull.asked:
            pull.idle(now_s)  # until others have left room in the window
        return effects

    def _done(self, pull: _Pull, now_s: float) -> PullDone:
        pull.done = True
        transport = self._sources[pull.lease.source.address].means.transport
        total_s = pull.transferred_s(now_s)
        return PullDone(pull.seq_id, transport, total_s, total_s - pull.hidden_s)

    def _hold(self, pull: _Pull) -> Hold:
        pull.stamp, pull.num_here_at_stamp = self._next_stamp, len(pull.here)
        self._next_stamp += 1
        return Hold(pull.lease.lease_id, len(pull.source_blocks), pull.stamp)

    def _renew(self, pull: _Pull, now_s: float) -> list[SinkEffect]:
        source = self._sources[pull.lease.source.address]
        if not source.attached:
            return []
        return [_ask(source, _release(pull) if pull.releasing else self._hold(pull), now_s)]

    # ------------------------------------------------------------ ends

    def _give_up(self, pull: _Pull, reason: str, now_s: float) -> list[SinkEffect]:
        """Ends a pull from this side and tells the source."""
        source = self._sources[pull.lease.source.address]
        effects = self._drop(pull, reason)
        if source.attached:
            effects.append(_ask(source, _release(pull), now_s))
        else:
            source.given_up.append(_release(pull))
        return [*effects, *self._advance_all(source, now_s)]

    def _drop(self, pull: _Pull, reason: str) -> list[SinkEffect]:
        self._forget(pull)
        return [] if pull.done else [PullFailed(pull.seq_id, reason, tuple(sorted(pull.good)))]

    def _forget(self, pull: _Pull) -> None:
        source = self._sources[pull.lease.source.address]
        source.num_asked -= len(pull.asked)
        del source.pulls[pull.seq_id]
        del self._pulls[pull.seq_id]
        del self._by_lease[pull.lease.lease_id]

    def _lose_source(self, address: str, reason: str) -> list[SinkEffect]:
        lost = list(self._sources[address].pulls.values())
        effects: list[SinkEffect] = [e for pull in lost for e in self._drop(pull, reason)]
        del self._sources[address]
        return [*effects, CloseSource(address)]


def _ask(source: _Source, message: ToSource, now_s: float) -> SendToSource:
    """Sends a message; every one is answered, so from now on the source owes a sign of life."""
    if source.asked_s is None:
        source.asked_s = now_s
    return SendToSource(source.address.address, message)


def _release(pull: _Pull) -> Release:
    return Release(pull.lease.lease_id, pull.pull_id)

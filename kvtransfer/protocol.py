"""The lease protocol, both ends, without I/O.

A lease at its source:

    open ──grow──> open ──grow──> … complete
      │                               │
      └───────────── Release, revoke, no sign of the sink for `ttl_s` ────> ended (reported once)

A pull at its sink:

    hold ──start──> pulling ──all wanted blocks here──> releasing ──Ended(released)──> PullDone
      │                │                                    │
      └──── abort, Ended(anything else), refusal, source silent for `silence_s` ────> PullFailed

The sink holds a lease before it has memory for it, so the lease outlives a queue at the sink. It
takes a pull for complete only when the source confirms that the lease held until this very pull's
Release, which is sent when every copy is made: had the source given the blocks away meanwhile, what
was read is thrown away. That needs nothing of the network: a message that is late, lost, repeated
or out of order can make a pull fail, not lie.

A source's deadline runs from the first message that it has not answered, so a sink that was itself
stopped for a while blames nobody. `next_wake_s` says when to call `sweep`, also while nothing else
happens.

Neither end knows sockets, memory or the block pool. The endpoint performs the effects: those of
`engine.events` go up to the worker's core, the others to the wire.

Sources: leases with renewal, vLLM's NIXL connector; confirmation by the source is ours.
"""

import math
from dataclasses import dataclass, field
from hmac import compare_digest

from engine.blocks import BlockId
from engine.errors import ProtocolError
from engine.events import LeaseEnded, PullDone, PullFailed
from engine.messages import Incarnation, LeaseId, LeaseRef, SeqId, TransferAddress
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
    Read,
    Ready,
    Release,
    ShmOffer,
    ToSink,
    ToSource,
    attach,
    decode_attach_body,
)

Peer = bytes  # routing id of a sink's connection at the source's socket

RELEASED = "released"
MAX_ATTACHED_PEERS = 4096


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines of the protocol, seconds."""

    ttl_s: float = 30.0  # a lease without a sign of its sink ends
    hold_every_s: float = 1.0  # a sink renews that often
    silence_s: float = 6.0  # a source that leaves a question open for so long is taken for dead


# ---------------------------------------------------------------- effects to the wire


@dataclass(frozen=True, slots=True)
class SendToSink:
    """Source: send a message."""

    peer: Peer
    message: ToSink


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Source: send the bytes of these blocks, in one Data."""

    peer: Peer
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
    num_blocks: int
    shm: ShmOffer | None


@dataclass(frozen=True, slots=True)
class Copy:
    """One block of a lease to fetch: its index there, its id at the source, its place here."""

    index: int
    source_block: int
    block_id: BlockId


@dataclass(frozen=True, slots=True)
class Fetch:
    """Sink: bring these blocks here; `fetched` or `fetch_failed` is to be called."""

    seq_id: SeqId
    address: str
    lease_id: LeaseId
    copies: tuple[Copy, ...]


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
        token: str,
        shm: ShmOffer | None,
        timing: Timing,
    ) -> None:
        self._incarnation = incarnation
        self._identity = identity
        self._num_blocks = num_blocks
        self._token = token
        self._shm = shm
        self._timing = timing
        self._leases: dict[LeaseId, _Lease] = {}
        self._peers: dict[Peer, None] = {}  # attached, oldest first

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
        if peer not in self._peers:
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
                ready = Ready(message.lease_id, known, list(lease.block_ids[known:]))
                return [SendToSink(peer, ready)]
            case Read():
                return self._read(peer, lease, message)
            case Release():
                return self._end(message.lease_id, RELEASED, message.pull_id)

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
        if not compare_digest(body.token.encode(), self._token.encode()):
            return AttachRefused("token")
        if body.source != self._incarnation:
            return AttachRefused("incarnation")
        difference = self._identity.difference(body.identity)
        if difference is not None:
            return AttachRefused(difference)
        self._peers[peer] = None
        if len(self._peers) > MAX_ATTACHED_PEERS:
            del self._peers[next(iter(self._peers))]
        return Attached(self._incarnation, self._num_blocks, self._shm)

    def _read(self, peer: Peer, lease: _Lease, message: Read) -> list[SourceEffect]:
        ready = len(lease.block_ids)
        valid = len(message.indices) <= MAX_BLOCKS_PER_READ
        if not valid or not all(0 <= i < ready for i in message.indices):
            return self._end(message.lease_id, "bad read")
        blocks = tuple(lease.block_ids[i] for i in message.indices)
        return [SendBlocks(peer, message.lease_id, tuple(message.indices), blocks)]

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
    seq_id: SeqId
    lease: LeaseRef
    pull_id: int
    next_hold_s: float
    source_blocks: list[int] = field(default_factory=list)
    wanted: dict[int, BlockId] | None = None  # None while the sequence waits for memory
    requested: set[int] = field(default_factory=set)
    requested_s: float = 0.0  # when the last of them were
    fetched: set[int] = field(default_factory=set)
    releasing: bool = False


@dataclass(slots=True)
class _Source:
    address: TransferAddress
    heard_s: float
    asked_s: float | None = None  # first message to it since it was heard
    data_s: float = 0.0  # when it last sent blocks
    attached: bool = False
    given_up: list[Release] = field(default_factory=list)  # to be sent when it is attached
    num_blocks: int = 0
    transport: str = ""


class SinkMachine:
    """All pulls of one worker. Only its methods change it."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        identity: Identity,
        token: str,
        timing: Timing,
        window_blocks: int = MAX_BLOCKS_PER_READ,
    ) -> None:
        self._incarnation = incarnation
        self._identity = identity
        self._token = token
        self._timing = timing
        self._window_blocks = window_blocks
        self._pulls: dict[SeqId, _Pull] = {}
        self._by_lease: dict[LeaseId, _Pull] = {}
        self._sources: dict[str, _Source] = {}
        self._next_pull_id = 0

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
            body = AttachBody(
                self._token, self._incarnation, lease.source.incarnation, self._identity
            )
            effects.append(_ask(source, attach(body), now_s))
        elif source.attached:
            effects.append(_ask(source, Hold(lease.lease_id, 0), now_s))
        return effects

    def start(
        self, seq_id: SeqId, blocks: tuple[tuple[int, BlockId], ...], now_s: float
    ) -> list[SinkEffect]:
        """Memory is there: bring the blocks with these indices of the lease."""
        pull = self._pulls.get(seq_id)
        if pull is None:
            return [PullFailed(seq_id, "lease was lost while waiting")]
        assert pull.wanted is None
        if not all(0 <= index < pull.lease.num_blocks for index, _ in blocks):
            return self._give_up(pull, "lease is too short", now_s)
        pull.wanted = dict(blocks)
        return self._advance(pull, now_s)

    def abort(self, seq_id: SeqId, now_s: float) -> list[SinkEffect]:
        """Gives a lease up. Whoever started the pull is told when nothing writes any more: now."""
        pull = self._pulls.get(seq_id)
        return [] if pull is None else self._give_up(pull, "aborted", now_s)

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
                return self._on_ended(source, message)
            case Data():
                source.data_s = now_s
                return []

    def places(self, address: str, message: Data) -> list[BlockId | None]:
        """Where the blocks of a Data go; None for those that nobody waits for (any more)."""
        pull = self._by_lease.get(message.lease_id)
        if pull is None or pull.wanted is None or pull.lease.source.address != address:
            return [None] * len(message.indices)
        pending = pull.requested - pull.fetched
        return [pull.wanted[i] if i in pending else None for i in message.indices]

    def fetched(
        self, lease_id: LeaseId, indices: tuple[int, ...], now_s: float
    ) -> list[SinkEffect]:
        """These blocks of a lease are in place."""
        pull = self._by_lease.get(lease_id)
        if pull is None:
            return []
        pull.fetched.update(indices)
        return self._advance(pull, now_s)

    def fetch_failed(self, lease_id: LeaseId, reason: str, now_s: float) -> list[SinkEffect]:
        """Blocks of a lease could not be brought here."""
        pull = self._by_lease.get(lease_id)
        return [] if pull is None else self._give_up(pull, reason, now_s)

    def refuse_source(self, address: str, reason: str) -> list[SinkEffect]:
        """Blocks of that source cannot be read from here."""
        return self._lose_source(address, reason)

    def use_transport(self, address: str, transport: str) -> None:
        """How blocks of that source are read; named in PullDone."""
        self._sources[address].transport = transport

    def sweep(self, now_s: float) -> list[SinkEffect]:
        """Renews what is due, gives up silent sources, and lets go of idle ones."""
        effects: list[SinkEffect] = []
        for source in list(self._sources.values()):
            if self._source_deadline_s(source) <= now_s:
                effects += self._lose_source(source.address.address, "source silent")
        for pull in list(self._pulls.values()):
            if self._blocks_deadline_s(pull) <= now_s:
                effects += self._give_up(pull, "source sends no blocks", now_s)
            elif pull.next_hold_s <= now_s:
                pull.next_hold_s = now_s + self._timing.hold_every_s
                effects += self._renew(pull, now_s)
        return effects

    def next_wake_s(self) -> float | None:
        """When the next renewal or deadline is due."""
        wakes = [self._source_deadline_s(source) for source in self._sources.values()]
        wakes += [min(p.next_hold_s, self._blocks_deadline_s(p)) for p in self._pulls.values()]
        wake_s = min(wakes, default=math.inf)
        return None if wake_s == math.inf else wake_s

    def validate(self) -> None:
        """Asserts the machine's invariants."""
        assert set(self._by_lease) == {p.lease.lease_id for p in self._pulls.values()}
        for pull in self._pulls.values():
            assert pull.lease.source.address in self._sources
            assert pull.fetched <= pull.requested <= set(pull.wanted or ())

    def _source_deadline_s(self, source: _Source) -> float:
        """When to let go of a source that stays silent: because it owes an answer, or is idle."""
        if source.asked_s is not None:
            return source.asked_s + self._timing.silence_s
        address = source.address.address
        in_use = any(pull.lease.source.address == address for pull in self._pulls.values())
        return math.inf if in_use else source.heard_s + self._timing.ttl_s

    def _blocks_deadline_s(self, pull: _Pull) -> float:
        """When to give up on requested blocks, while the source sends none of any pull."""
        if len(pull.fetched) == len(pull.requested):
            return math.inf
        data_s = self._sources[pull.lease.source.address].data_s
        return max(pull.requested_s, data_s) + self._timing.silence_s

    def _renew(self, pull: _Pull, now_s: float) -> list[SinkEffect]:
        source = self._sources[pull.lease.source.address]
        if not source.attached:
            return []
        hold = Hold(pull.lease.lease_id, len(pull.source_blocks))
        return [_ask(source, _release(pull) if pull.releasing else hold, now_s)]

    def _on_attached(self, source: _Source, message: Attached, now_s: float) -> list[SinkEffect]:
        address = source.address.address
        if message.incarnation != source.address.incarnation:
            return self._lose_source(address, "source restarted")
        source.attached, source.num_blocks = True, message.num_blocks
        effects: list[SinkEffect] = [UseSource(address, message.num_blocks, message.shm)]
        effects += [_ask(source, release, now_s) for release in source.given_up]
        source.given_up = []
        for pull in self._pulls.values():
            if pull.lease.source.address == address:
                effects.append(_ask(source, Hold(pull.lease.lease_id, 0), now_s))
        return effects

    def _pull_from(self, source: _Source, lease_id: LeaseId) -> _Pull | None:
        """The pull that a message of that source is about."""
        pull = self._by_lease.get(lease_id)
        mine = pull is not None and pull.lease.source.address == source.address.address
        return pull if mine else None

    def _on_ready(self, source: _Source, message: Ready, now_s: float) -> list[SinkEffect]:
        pull = self._pull_from(source, message.lease_id)
        if pull is None or message.first > len(pull.source_blocks):
            return []  # over, or a gap that the next Hold will fill
        blocks = message.block_ids
        if not all(0 <= b < source.num_blocks for b in blocks):
            return self._give_up(pull, "source named a block it has not", now_s)
        if message.first < 0 or message.first + len(blocks) > pull.lease.num_blocks:
            return self._give_up(pull, "source named too many blocks", now_s)
        pull.source_blocks[message.first : message.first + len(blocks)] = blocks
        return self._advance(pull, now_s)

    def _on_ended(self, source: _Source, message: Ended) -> list[SinkEffect]:
        pull = self._pull_from(source, message.lease_id)
        if pull is None:
            return []
        confirmed = message.reason == RELEASED and message.pull_id == pull.pull_id
        if pull.releasing and confirmed:
            transport = self._sources[pull.lease.source.address].transport
            self._forget(pull)
            return [PullDone(pull.seq_id, transport)]
        return self._drop(pull, f"lease {message.reason}")

    def _advance(self, pull: _Pull, now_s: float) -> list[SinkEffect]:
        """Fetches what is ready and wanted, as far as the window allows; releases at the end."""
        if pull.wanted is None or pull.releasing:
            return []
        source = self._sources[pull.lease.source.address]
        if not source.attached:
            return []
        if len(pull.fetched) == len(pull.wanted):
            pull.releasing = True
            return [_ask(source, _release(pull), now_s)]
        room = self._window_blocks - (len(pull.requested) - len(pull.fetched))
        ready = len(pull.source_blocks)
        todo = [i for i in pull.wanted if i < ready and i not in pull.requested][:room]
        if not todo:
            return []
        pull.requested.update(todo)
        pull.requested_s = now_s
        copies = tuple(Copy(i, pull.source_blocks[i], pull.wanted[i]) for i in todo)
        return [Fetch(pull.seq_id, source.address.address, pull.lease.lease_id, copies)]

    def _give_up(self, pull: _Pull, reason: str, now_s: float) -> list[SinkEffect]:
        """Ends a pull from this side and tells the source."""
        source = self._sources[pull.lease.source.address]
        effects = self._drop(pull, reason)
        if source.attached:
            effects.append(_ask(source, _release(pull), now_s))
        else:
            source.given_up.append(_release(pull))
        return effects

    def _drop(self, pull: _Pull, reason: str) -> list[SinkEffect]:
        self._forget(pull)
        return [PullFailed(pull.seq_id, reason)]

    def _forget(self, pull: _Pull) -> None:
        del self._pulls[pull.seq_id]
        del self._by_lease[pull.lease.lease_id]

    def _lose_source(self, address: str, reason: str) -> list[SinkEffect]:
        del self._sources[address]
        lost = [p for p in self._pulls.values() if p.lease.source.address == address]
        effects: list[SinkEffect] = [e for pull in lost for e in self._drop(pull, reason)]
        return [*effects, CloseSource(address)]


def _ask(source: _Source, message: ToSource, now_s: float) -> SendToSource:
    """Sends a message; every one is answered, so from now on the source owes a sign of life."""
    if source.asked_s is None:
        source.asked_s = now_s
    return SendToSource(source.address.address, message)


def _release(pull: _Pull) -> Release:
    return Release(pull.lease.lease_id, pull.pull_id)

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
takes a pull for complete only when the source confirms that the lease held until the Release: had
the source given the blocks away meanwhile, what was read is thrown away. Deadlines run from the
last sign of life, and `next_wake_s` says when to call `sweep`, also while nothing else happens.

Neither end knows sockets, memory or the block pool. The endpoint performs the effects: those of
`engine.events` go up to the worker's core, the others to the wire.

Sources: leases with renewal, vLLM's NIXL connector; confirmation by the source is ours.
"""

from dataclasses import dataclass, field

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
    silence_s: float = 6.0  # a source that has not answered for so long is taken for dead


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
                return self._end(message.lease_id, RELEASED)

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
        if body.token != self._token:
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

    def _end(self, lease_id: LeaseId, reason: str) -> list[SourceEffect]:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        effects: list[SourceEffect] = [LeaseEnded(lease_id, reason)]
        if lease.holder is not None:
            effects.append(SendToSink(lease.holder, Ended(lease_id, reason)))
        return effects


# ---------------------------------------------------------------- sink


@dataclass(slots=True)
class _Pull:
    seq_id: SeqId
    lease: LeaseRef
    since_s: float
    next_hold_s: float
    source_blocks: list[int] = field(default_factory=list)
    wanted: dict[int, BlockId] | None = None  # None while the sequence waits for memory
    requested: set[int] = field(default_factory=set)
    fetched: set[int] = field(default_factory=set)
    releasing: bool = False


@dataclass(slots=True)
class _Source:
    address: TransferAddress
    heard_s: float
    attached: bool = False
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

    @property
    def num_pulls(self) -> int:
        """Leases held or being pulled."""
        return len(self._pulls)

    def hold(self, seq_id: SeqId, lease: LeaseRef, now_s: float) -> list[SinkEffect]:
        """Keeps a lease alive until `start` or `abort`."""
        assert seq_id not in self._pulls
        effects: list[SinkEffect] = []
        address = lease.source.address
        source = self._sources.get(address)
        if source is not None and source.address.incarnation != lease.source.incarnation:
            effects += self._lose_source(address, "source restarted")
            source = None
        pull = _Pull(seq_id, lease, now_s, now_s + self._timing.hold_every_s)
        self._pulls[seq_id] = self._by_lease[lease.lease_id] = pull
        if source is None:
            source = self._sources[address] = _Source(lease.source, now_s)
            body = AttachBody(
                self._token, self._incarnation, lease.source.incarnation, self._identity
            )
            effects.append(SendToSource(address, attach(body)))
        elif source.attached:
            effects.append(SendToSource(address, Hold(lease.lease_id, 0)))
        return effects

    def start(
        self, seq_id: SeqId, blocks: tuple[tuple[int, BlockId], ...], now_s: float
    ) -> list[SinkEffect]:
        """Memory is there: bring the blocks with these indices of the lease."""
        pull = self._pulls.get(seq_id)
        if pull is None:
            return [PullFailed(seq_id, "lease was lost while waiting")]
        assert pull.wanted is None
        pull.wanted = dict(blocks)
        return self._advance(pull)

    def abort(self, seq_id: SeqId, now_s: float) -> list[SinkEffect]:
        """Gives a lease up. Whoever started the pull is told when nothing writes any more: now."""
        pull = self._pulls.get(seq_id)
        if pull is None:
            return []
        effects = self._drop(pull, "aborted")
        address = pull.lease.source.address
        if self._sources[address].attached:
            effects.append(SendToSource(address, Release(pull.lease.lease_id)))
        return effects

    def receive(self, address: str, message: ToSink, now_s: float) -> list[SinkEffect]:
        """A message of a source; for Data, after its blocks were written (see `places`)."""
        source = self._sources.get(address)
        if source is None:
            return []
        source.heard_s = now_s
        match message:
            case Attached():
                return self._on_attached(source, message)
            case AttachRefused():
                return self._lose_source(address, f"source refused: {message.field} differs")
            case Ready():
                return self._on_ready(source, message, now_s)
            case Ended():
                return self._on_ended(message)
            case Data():
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
        return self._advance(pull)

    def fetch_failed(self, lease_id: LeaseId, reason: str, now_s: float) -> list[SinkEffect]:
        """Blocks of a lease could not be brought here."""
        pull = self._by_lease.get(lease_id)
        if pull is None:
            return []
        effects = self._drop(pull, reason)
        effects.append(SendToSource(pull.lease.source.address, Release(lease_id)))
        return effects

    def use_transport(self, address: str, transport: str) -> None:
        """How blocks of that source are read; named in PullDone."""
        self._sources[address].transport = transport

    def sweep(self, now_s: float) -> list[SinkEffect]:
        """Renews what is due and gives up silent sources."""
        effects: list[SinkEffect] = []
        for address in self._silent_sources(now_s):
            effects += self._lose_source(address, "source silent")
        for pull in self._pulls.values():
            if pull.next_hold_s <= now_s:
                pull.next_hold_s = now_s + self._timing.hold_every_s
                effects += self._renew(pull)
        return effects

    def next_wake_s(self) -> float | None:
        """When the next renewal is due."""
        return min((pull.next_hold_s for pull in self._pulls.values()), default=None)

    def validate(self) -> None:
        """Asserts the machine's invariants."""
        assert set(self._by_lease) == {p.lease.lease_id for p in self._pulls.values()}
        for pull in self._pulls.values():
            assert pull.lease.source.address in self._sources
            assert pull.fetched <= pull.requested <= set(pull.wanted or ())

    def _silent_sources(self, now_s: float) -> list[str]:
        waiting_since: dict[str, float] = {}
        for pull in self._pulls.values():
            address = pull.lease.source.address
            waiting_since[address] = min(pull.since_s, waiting_since.get(address, pull.since_s))
        return [
            address
            for address, since_s in waiting_since.items()
            if now_s - max(since_s, self._sources[address].heard_s) > self._timing.silence_s
        ]

    def _renew(self, pull: _Pull) -> list[SinkEffect]:
        source = self._sources[pull.lease.source.address]
        if not source.attached:
            return []
        lease_id = pull.lease.lease_id
        message = Release(lease_id) if pull.releasing else Hold(lease_id, len(pull.source_blocks))
        return [SendToSource(source.address.address, message)]

    def _on_attached(self, source: _Source, message: Attached) -> list[SinkEffect]:
        address = source.address.address
        if message.incarnation != source.address.incarnation:
            return self._lose_source(address, "source restarted")
        source.attached, source.num_blocks = True, message.num_blocks
        effects: list[SinkEffect] = [UseSource(address, message.num_blocks, message.shm)]
        for pull in self._pulls.values():
            if pull.lease.source.address == address:
                effects.append(SendToSource(address, Hold(pull.lease.lease_id, 0)))
        return effects

    def _on_ready(self, source: _Source, message: Ready, now_s: float) -> list[SinkEffect]:
        pull = self._by_lease.get(message.lease_id)
        if pull is None or message.first > len(pull.source_blocks):
            return []  # over, or a gap that the next Hold will fill
        blocks = message.block_ids
        if not all(0 <= b < source.num_blocks for b in blocks):
            return self.fetch_failed(message.lease_id, "source named a block it has not", now_s)
        if message.first + len(blocks) > pull.lease.num_blocks:
            return self.fetch_failed(message.lease_id, "source named too many blocks", now_s)
        pull.source_blocks[message.first : message.first + len(blocks)] = blocks
        return self._advance(pull)

    def _on_ended(self, message: Ended) -> list[SinkEffect]:
        pull = self._by_lease.get(message.lease_id)
        if pull is None:
            return []
        if pull.releasing and message.reason == RELEASED:
            transport = self._sources[pull.lease.source.address].transport
            self._forget(pull)
            return [PullDone(pull.seq_id, transport)]
        return self._drop(pull, f"lease {message.reason}")

    def _advance(self, pull: _Pull) -> list[SinkEffect]:
        """Fetches what is ready and wanted, as far as the window allows; releases at the end."""
        if pull.wanted is None or pull.releasing:
            return []
        address = pull.lease.source.address
        if not self._sources[address].attached:
            return []
        if len(pull.fetched) == len(pull.wanted):
            pull.releasing = True
            return [SendToSource(address, Release(pull.lease.lease_id))]
        room = self._window_blocks - (len(pull.requested) - len(pull.fetched))
        ready = len(pull.source_blocks)
        todo = [i for i in pull.wanted if i < ready and i not in pull.requested][:room]
        if not todo:
            return []
        pull.requested.update(todo)
        copies = tuple(Copy(i, pull.source_blocks[i], pull.wanted[i]) for i in todo)
        return [Fetch(pull.seq_id, address, pull.lease.lease_id, copies)]

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

"""Both sides of the lease protocol in memory: the real machines, connected by queues."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import Incarnation, TransferAddress
from engine.worker.blocks import BlockId
from engine.worker.events import (
    AbortPull,
    Effect,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    RevokeLease,
    StartPull,
)
from kvtransfer.lease.effects import (
    CloseSource,
    Fetch,
    SendBlocks,
    SendToSink,
    SendToSource,
    SinkEffect,
    SourceEffect,
    Timing,
    UseSource,
)
from kvtransfer.lease.pull import Means
from kvtransfer.lease.sink import SinkMachine
from kvtransfer.lease.source import SourceMachine
from kvtransfer.messages import (
    Data,
    Identity,
    Offers,
    Read,
    ToSink,
    ToSource,
    decode_to_sink,
    decode_to_source,
)
from tests.kits.fakes.model import LAYOUT, Kv

if TYPE_CHECKING:
    from tests.kits.fakes.cluster import FakeCluster
    from tests.kits.fakes.worker import FakeWorker

TIMING = Timing(ttl_s=6.0, hold_every_s=1.0, reread_s=1.5, silence_s=3.0)


@dataclass(slots=True)
class Connection:
    """A sink's connection to a source. Messages of one direction keep their order."""

    peer: bytes
    sink: "FakeEndpoint"
    source: "FakeEndpoint"
    to_source: deque[bytes] = field(default_factory=deque)
    to_sink: deque[tuple[bytes, list[list[Kv]]]] = field(default_factory=deque)


class FakeEndpoint:
    """The source and the sink of one worker, over connections that the cluster delivers."""

    def __init__(self, worker: "FakeWorker", cluster: "FakeCluster") -> None:
        self.worker = worker
        self._cluster = cluster
        name = worker.worker_id
        self.address = TransferAddress(name, Incarnation(f"life of {name}"), f"fake://{name}")
        identity = Identity("fake model", LAYOUT)
        incarnation = self.address.incarnation
        self.source = SourceMachine(
            incarnation=incarnation,
            identity=identity,
            num_blocks=worker.shape.num_blocks,
            timing=TIMING,
            offers=Offers(),
        )
        self.sink = SinkMachine(incarnation=incarnation, identity=identity, timing=TIMING)
        self.orders: deque[Effect] = deque()

    def take_order(self) -> None:
        now_s = self._cluster.now_s
        match self.orders.popleft():
            case OpenLease(lease_id, num_blocks):
                self._do_source(self.source.open(lease_id, num_blocks, now_s))
            case GrowLease(lease_id, block_ids):
                self._do_source(self.source.grow(lease_id, block_ids, now_s))
            case RevokeLease(lease_id):
                self._do_source(self.source.revoke(lease_id, now_s))
            case HoldLease(seq_id, lease):
                self._do_sink(self.sink.hold(seq_id, lease, now_s))
            case StartPull(seq_id, blocks):
                self._do_sink(self.sink.start(seq_id, blocks, now_s))
            case AbortPull(seq_id):
                self._do_sink(self.sink.abort(seq_id, now_s))
            case other:
                raise AssertionError(f"not an order: {other}")

    def sweep(self) -> None:
        self._do_source(self.source.sweep(self._cluster.now_s))
        self._do_sink(self.sink.sweep(self._cluster.now_s))

    def take_from_sink(self, connection: Connection) -> None:
        message: ToSource = decode_to_source(connection.to_source.popleft())
        self._do_source(self.source.receive(connection.peer, message, self._cluster.now_s))

    def take_from_source(self, connection: Connection) -> None:
        header, payload = connection.to_sink.popleft()
        message: ToSink = decode_to_sink(header)
        address, now_s = connection.source.address.address, self._cluster.now_s
        good: list[int] = []
        if isinstance(message, Data):
            places = self.sink.places(address, message)
            for index, place, kvs in zip(message.indices, places, payload, strict=True):
                if place is not None:
                    self._write(place, kvs)
                    good.append(index)
        self._do_sink(self.sink.receive(address, message, now_s))
        if isinstance(message, Data):
            fetched = self.sink.fetched(address, message.lease_id, good, now_s, are_good=True)
            self._do_sink(fetched)

    def _write(self, block: BlockId, kvs: list[Kv]) -> None:
        assert self.worker.pool.is_in_flight(block), (
            "a pull writes into a block that it does not own"
        )
        self.worker.runner.memory[block] = list(kvs)

    def _do_source(self, effects: list[SourceEffect]) -> None:
        for effect in effects:
            match effect:
                case SendToSink(peer, message):
                    self._cluster.send_to_sink(peer, message, [])
                case SendBlocks():
                    assert all(self.worker.pool.is_leased(b) for b in effect.block_ids)
                    payload = [list(self.worker.runner.memory[b]) for b in effect.block_ids]
                    data = Data(effect.lease_id, list(effect.indices), 0)
                    self._cluster.send_to_sink(effect.peer, data, payload)
                case LeaseEnded():
                    self.worker.inbox.append(effect)

    def _do_sink(self, effects: list[SinkEffect]) -> None:
        todo = deque(effects)
        while todo:
            effect = todo.popleft()
            match effect:
                case SendToSource(address, message):
                    self._cluster.send_to_source(self, address, message)
                case UseSource(address):
                    self.sink.use_transport(address, self._means())
                case Fetch():
                    todo += self._fetch(effect)
                case CloseSource(address):
                    self._cluster.disconnect(self, address)
                case PullDone() | PullFailed():
                    self.worker.inbox.append(effect)

    def _fetch(self, effect: Fetch) -> list[SinkEffect]:
        if not self.worker.shape.copies_at_once:
            read = Read(effect.lease_id, list(effect.indices))
            self._cluster.send_to_source(self, effect.address, read)
            return []
        source = self._cluster.endpoint_at(effect.address)
        for block_id, source_block in zip(effect.block_ids, effect.source_blocks, strict=True):
            self._write(block_id, source.worker.runner.memory[source_block])
        now_s = self._cluster.now_s
        return self.sink.fetched(
            effect.address, effect.lease_id, effect.indices, now_s, are_good=False
        )

    def _means(self) -> Means:
        shape = self.worker.shape
        return Means("fake", window_blocks=shape.window_blocks, resends=not shape.copies_at_once)

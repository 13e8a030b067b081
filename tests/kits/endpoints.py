"""Two real endpoints on loopback, with short timeouts, for the contract tests of the backends."""

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq

from engine.clock import MonotonicClock
from engine.config import Transport
from engine.layout import KVFormat, KVLayout, KVSection, Shard
from engine.messages import (
    Incarnation,
    LeaseId,
    LeaseRef,
    RankAddress,
    SeqId,
    TransferAddress,
    WorkerId,
)
from engine.net.curve import Channel, Doorkeeper, secure_client, secure_server
from engine.net.trust import Secret
from engine.worker.blocks import BlockId
from engine.worker.events import (
    Event,
    GrowLease,
    HoldLease,
    LeaseEnded,
    OpenLease,
    PullDone,
    PullFailed,
    StartPull,
)
from kvtransfer.endpoint import EndpointConfig, TransferEndpoint
from kvtransfer.lease.effects import Timing
from kvtransfer.memory import Blocks, Pool, PrivatePool, SharedPool, host_pool
from kvtransfer.messages import Identity

LAYOUT = KVLayout(
    block_size=16, kv_format=KVFormat.FP32, sections=(KVSection(2, 2, 16),)
)  # bytes of a block: 8 KiB
TIMING = Timing(ttl_s=8.0, hold_every_s=0.1, silence_s=4.0)  # a busy machine may stall for a second
NUM_BLOCKS = 200
SECRET = Secret("secret")
DEADLINE_S = 120.0


@dataclass
class Worker:
    """One endpoint with its block pool and every event that it has reported."""

    endpoint: TransferEndpoint
    pool: PrivatePool | SharedPool
    address: TransferAddress
    events: "queue.Queue[Event]" = field(default_factory=queue.Queue)
    crashes: list[BaseException] = field(default_factory=list)

    def next_event(self, kind: type) -> Event:
        """Waits for the next event of that kind."""
        clock = MonotonicClock()
        end_s = clock.now_s() + DEADLINE_S
        while True:
            event = self.events.get(timeout=max(0.01, end_s - clock.now_s()))
            if isinstance(event, kind):
                return event

    def lease(self, name: str, blocks: list[int], ready: int | None = None) -> LeaseRef:
        """Opens a lease on `blocks`; the first `ready` blocks are computed."""
        self.endpoint.perform(OpenLease(LeaseId(name), len(blocks)))
        self.grow(name, blocks if ready is None else blocks[:ready])
        return LeaseRef(LeaseId(name), self.address, len(blocks))

    def grow(self, name: str, blocks: list[int]) -> None:
        if blocks:
            ids = tuple(BlockId(b) for b in blocks)
            self.endpoint.perform(GrowLease(LeaseId(name), ids))

    def hold(self, seq: str, lease: LeaseRef) -> None:
        self.endpoint.perform(HoldLease(SeqId(seq), lease))

    def start(self, seq: str, pairs: list[tuple[int, int]]) -> None:
        blocks = tuple((index, BlockId(block)) for index, block in pairs)
        self.endpoint.perform(StartPull(SeqId(seq), blocks))

    def pull(self, seq: str, lease: LeaseRef, pairs: list[tuple[int, int]]) -> Event:
        """Pulls a lease and waits until the pull is done or has failed."""
        self.hold(seq, lease)
        self.start(seq, pairs)
        return self.end_of_pull()

    def is_held(self, name: str) -> bool:
        """Returns True if a sink holds this lease open."""
        lease = self.endpoint.source._leases.get(LeaseId(name))
        return lease is not None and bool(lease.holders)

    def connections(self) -> list[str]:
        """Returns the addresses of the connected sources."""
        return list(self.endpoint._connections._links)

    def end_of_pull(self) -> Event:
        return self.next_event((PullDone, PullFailed))  # type: ignore[arg-type]

    def end_of_lease(self) -> LeaseEnded:
        event = self.next_event(LeaseEnded)
        assert isinstance(event, LeaseEnded)
        return event


def is_done(event: Event, transport: str) -> bool:
    """Returns True if a pull is done over that transport."""
    assert isinstance(event, PullDone), event
    return event.transport == transport and 0 <= event.exposed_s <= event.transfer_s


def fill(pool: PrivatePool | SharedPool, seed: int) -> None:
    """Fills every block with random bytes."""
    rng = np.random.default_rng(seed)
    pool.blocks[:] = rng.integers(0, 256, pool.blocks.shape, dtype=np.uint8)


def config_of(
    name: str, transport: Transport, identity: Identity, timing: Timing, secret: Secret = SECRET
) -> EndpointConfig:
    """Returns the endpoint configuration of a worker, or of one rank of a worker."""
    return EndpointConfig(
        worker_id=WorkerId(name),
        incarnation=Incarnation(f"{name}-1"),
        identity=identity,
        secret=secret,
        transport=transport,
        timing=timing,
    )


@contextmanager
def worker(
    name: str,
    transport: Transport,
    *,
    layout: KVLayout = LAYOUT,
    fingerprint: str = "model",
    shard: Shard = Shard(),  # noqa: B008 - frozen
    group: tuple[Shard, ...] = (),
    kv_wire_dtype: KVFormat | None = None,
    as_pool: Callable[[PrivatePool | SharedPool], Pool] = lambda pool: pool,
    timing: Timing = TIMING,
    secret: Secret = SECRET,
) -> Iterator[Worker]:
    """Opens an endpoint, and closes it with its thread afterwards."""
    identity = Identity(fingerprint, layout, shard, kv_wire_dtype, group)
    pool = host_pool(NUM_BLOCKS, identity.record.block_bytes, transport)
    pool.open()
    events: queue.Queue[Event] = queue.Queue()
    crashes: list[BaseException] = []
    endpoint = TransferEndpoint(
        config_of(name, transport, identity, timing, secret),
        pool=as_pool(pool),
        clock=MonotonicClock(),
        on_event=events.put,
        on_crash=crashes.append,
    )
    address = endpoint.open()
    try:
        yield Worker(endpoint, pool, address, events, crashes)
    finally:
        endpoint.close()
        pool.close()
    assert not crashes


@contextmanager
def ranks(
    name: str, transport: Transport, shards: tuple[Shard, ...], **options: Any
) -> Iterator[list[Worker]]:
    """Opens an endpoint for each rank of a worker.

    Each endpoint gets the addresses of all ranks.
    """
    with ExitStack() as stack:
        group = [
            stack.enter_context(worker(name, transport, shard=shard, group=shards, **options))
            for shard in shards
        ]
        address = address_of([rank.address for rank in group])
        for rank in group:
            rank.address = address
        yield group


def address_of(ranks: list[TransferAddress]) -> TransferAddress:
    """Returns the address of a worker with these ranks."""
    others = tuple(RankAddress(rank.address, rank.shard) for rank in ranks[1:])
    return msgspec.structs.replace(ranks[0], others=others)


def share_of(blocks: Blocks, layout: KVLayout, shard: Shard) -> Blocks:
    """Returns the part of the whole model's blocks that one rank stores."""
    parts = []
    for index, section in enumerate(layout.sections):
        begin, end = (layout.section_offset_bytes(i) for i in (index, index + 1))
        shape = (len(blocks), section.num_layers, 2, section.num_kv_heads, layout.head_bytes(index))
        layers, heads = shard.layers_of(layout, index), shard.heads_of(section)
        held = blocks[:, begin:end].reshape(shape)[:, layers, :, heads.start : heads.stop]
        parts.append(held.reshape(len(blocks), -1))
    return np.concatenate(parts, axis=1)


@contextmanager
def dialled(source: Worker) -> Iterator["zmq.Socket[bytes]"]:
    """Connects a test's own socket to a source, as a sink does."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        secure_client(dealer, SECRET, Channel.KV, max_message_bytes=2**24)
        dealer.linger = 0
        dealer.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
        dealer.connect(source.address.address)
        yield dealer


@contextmanager
def bound() -> Iterator[tuple["zmq.Socket[bytes]", TransferAddress]]:
    """Binds a test's own socket, as a source does."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        Doorkeeper(SECRET, Channel.KV, MonotonicClock()).open(context)
        secure_server(router, SECRET, Channel.KV, max_message_bytes=2**24)
        router.linger = 0
        router.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
        port = router.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        yield router, TransferAddress(WorkerId("raw"), Incarnation("raw-1"), address)


def until(holds: Callable[[], bool], what: str) -> None:
    """Polls until `holds` returns True; fails after the deadline."""
    import select

    clock = MonotonicClock()
    end_s = clock.now_s() + DEADLINE_S
    while not holds():
        assert clock.now_s() < end_s, what
        select.select([], [], [], 0.01)

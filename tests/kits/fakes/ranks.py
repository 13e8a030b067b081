"""Workers of several ranks in one process: a GroupEndpoint whose other endpoints only seem
remote."""

import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.clock import MonotonicClock
from engine.config import Transport
from engine.layout import KVLayout, Shard
from engine.messages import TransferAddress
from engine.worker.events import Event, TransferOrder, TransferReport
from kvtransfer.endpoint import EndpointConfig, TransferEndpoint
from kvtransfer.group_endpoint import GroupEndpoint
from kvtransfer.lease.effects import Timing
from kvtransfer.memory import PrivatePool, SharedPool, host_pool
from kvtransfer.messages import Identity
from tests.kits.endpoints import NUM_BLOCKS, TIMING, Worker, config_of


class NearbyEndpoint:
    """A RemoteEndpoint in this process. Orders and reports are still encoded as bytes."""

    def __init__(
        self,
        config: EndpointConfig,
        pool: PrivatePool | SharedPool,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._on_crash = on_crash
        self.is_dead = False

    def open(
        self, on_report: Callable[[TransferReport], None], on_lost: Callable[[], None]
    ) -> TransferAddress:
        self._on_lost = on_lost
        self.endpoint = TransferEndpoint(
            self._config,
            pool=self._pool,
            clock=MonotonicClock(),
            on_event=lambda event: on_report(passed(event, TransferReport)),
            on_crash=self._on_crash,
        )
        return self.endpoint.open()

    def perform(self, order: TransferOrder) -> None:
        if not self.is_dead:
            self.endpoint.perform(passed(order, TransferOrder))

    def counters(self) -> Mapping[str, float]:
        return self.endpoint.counters()

    def close(self) -> None:
        if not self.is_dead:
            self.endpoint.close()

    def die(self) -> None:
        """Stops like a killed process, without a message to peers."""
        self.is_dead = True
        self.endpoint.close()
        self._on_lost()


def passed(message: Any, kind: Any) -> Any:
    """Returns a message as another process would decode it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


@dataclass
class WorkerOfRanks(Worker):
    """A GroupEndpoint with the block pools of all ranks and the endpoints of ranks 1 and up."""

    endpoint: GroupEndpoint  # type: ignore[assignment]
    pools: list[PrivatePool | SharedPool] = field(default_factory=list)
    others: list[NearbyEndpoint] = field(default_factory=list)


@contextmanager
def worker_of_ranks(
    name: str,
    transport: Transport,
    shards: tuple[Shard, ...],
    *,
    layout: KVLayout,
    timing: Timing = TIMING,
) -> Iterator[WorkerOfRanks]:
    """Opens the endpoints of all ranks, and closes them at the end."""
    identities = [Identity("model", layout, shard, group=shards) for shard in shards]
    pools = [host_pool(NUM_BLOCKS, i.record.block_bytes, transport) for i in identities]
    events: queue.Queue[Event] = queue.Queue()
    crashes: list[BaseException] = []
    configs = [config_of(name, transport, identity, timing) for identity in identities]
    for pool in pools:
        pool.open()
    others = [
        NearbyEndpoint(config, pool, crashes.append)
        for config, pool in zip(configs[1:], pools[1:], strict=True)
    ]
    endpoint = GroupEndpoint(
        configs[0],
        pool=pools[0],
        clock=MonotonicClock(),
        on_event=events.put,
        on_crash=crashes.append,
        others=others,
    )
    address = endpoint.open()
    try:
        yield WorkerOfRanks(endpoint, pools[0], address, events, crashes, pools, others)
    finally:
        endpoint.close()
        for pool in pools:
            pool.close()
    assert not crashes

"""A worker of several ranks behaves like one rank.

Each order reaches all ranks, and each end is reported once.
"""

import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from engine.clock import MonotonicClock
from engine.config import Transport
from engine.layout import KVFormat, KVLayout, KVSection, Shard
from engine.messages import LeaseId, SeqId, TransferAddress
from engine.worker.events import (
    AbortPull,
    LeaseEnded,
    OpenLease,
    PullFailed,
    RevokeLease,
    TransferOrder,
    TransferReport,
)
from kvtransfer.group_endpoint import RANK_DIED, GroupEndpoint
from kvtransfer.lease.effects import Timing
from kvtransfer.memory import host_pool
from kvtransfer.messages import Identity
from tests.kits.endpoints import DEADLINE_S, NUM_BLOCKS, config_of, is_done, share_of, until, worker
from tests.kits.fakes.ranks import WorkerOfRanks, worker_of_ranks

BACKENDS = [Transport.SHM, Transport.NIXL, Transport.ZMQ]
LAYOUT = KVLayout(16, KVFormat.FP32, (KVSection(3, 2, 16), KVSection(1, 1, 8)))
HERE, THERE = [5, 0, 9, 3], [7, 8, 1, 100]
PAIRS = list(enumerate(HERE))
QUICK = Timing(ttl_s=1.0, hold_every_s=0.1, silence_s=0.5)


def tp(size: int) -> tuple[Shard, ...]:
    return tuple(Shard(rank, size) for rank in range(size))


def fill(source: WorkerOfRanks) -> np.ndarray:
    """Fills the pools of all ranks with their shares. Returns the blocks of the whole model."""
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 256, (NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    for rank, pool in enumerate(source.pools):
        pool.blocks[:] = share_of(whole, LAYOUT, Shard(rank, len(source.pools)))
    return whole


def holds_all(sink: WorkerOfRanks, whole: np.ndarray, here: list[int], there: list[int]) -> bool:
    return all(
        np.array_equal(
            pool.blocks[here], share_of(whole[there], LAYOUT, Shard(rank, len(sink.pools)))
        )
        for rank, pool in enumerate(sink.pools)
    )


def is_quiet(*workers: WorkerOfRanks) -> bool:
    """Returns True if no worker has a pull or lease left. Asserts that no event was reported
    twice.
    """
    for one in workers:
        endpoint = one.endpoint
        sinks = [e.sink for e in (endpoint._local, *(o.endpoint for o in one.others))]
        assert one.events.empty()
        if endpoint._pulls.num_pulls or endpoint.source.num_leases:
            return False
        if any(sink.num_pulls for sink in sinks):
            return False
    return True


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (2, 4)])
def test_blocks_come_to_all_ranks_and_each_end_comes_once(sizes, backend):
    of_source, of_sink = map(tp, sizes)
    with (
        worker_of_ranks("p", backend, of_source, layout=LAYOUT) as source,
        worker_of_ranks("d", backend, of_sink, layout=LAYOUT) as sink,
    ):
        whole = fill(source)
        lease = source.lease("l", THERE, ready=2)
        assert len(lease.source.ranks) == len(of_source)
        sink.hold("s", lease)
        sink.start("s", PAIRS)
        until(lambda: holds_all(sink, whole, HERE[:2], THERE[:2]), "two blocks arrive")
        source.grow("l", THERE[2:])
        assert is_done(sink.end_of_pull(), backend)
        assert holds_all(sink, whole, HERE, THERE)
        assert source.end_of_lease() == LeaseEnded(LeaseId("l"), "released")
        until(lambda: is_quiet(source, sink), "nothing is left")
        counters = sink.endpoint.counters()
        assert (counters["pulls_done"], round(counters["pulled_blocks"], 6)) == (1, len(HERE))
        moved = sum(pool.block_bytes for pool in sink.pools) * len(HERE)
        assert counters["pulled_bytes"] == moved
        assert source.endpoint.counters()["leases_ended:released"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_aborted_pull_ends_once_at_all_ranks(backend):
    with (
        worker_of_ranks("p", backend, tp(2), layout=LAYOUT) as source,
        worker_of_ranks("d", backend, tp(4), layout=LAYOUT) as sink,
    ):
        fill(source)
        sink.hold("s", source.lease("l", THERE, ready=2))
        sink.start("s", PAIRS)
        sink.endpoint.perform(AbortPull(SeqId("s")))
        end = sink.end_of_pull()
        assert isinstance(end, PullFailed)
        assert end.reason == "aborted"
        written = [pool.blocks.copy() for pool in sink.pools]
        source.grow("l", THERE[2:])
        assert source.end_of_lease().lease_id == "l"
        until(lambda: is_quiet(source, sink), "nothing is left")
        for pool, before in zip(sink.pools, written, strict=True):
            assert np.array_equal(pool.blocks, before)


def test_a_revoked_lease_ends_at_all_ranks_and_fails_the_pull():
    with (
        worker_of_ranks("p", Transport.ZMQ, tp(2), layout=LAYOUT) as source,
        worker_of_ranks("d", Transport.ZMQ, tp(2), layout=LAYOUT) as sink,
    ):
        sink.hold("s", source.lease("l", THERE))
        source.endpoint.perform(RevokeLease(LeaseId("l")))
        assert source.end_of_lease() == LeaseEnded(LeaseId("l"), "revoked")
        end = sink.end_of_pull()
        assert isinstance(end, PullFailed)
        until(lambda: is_quiet(source, sink), "nothing is left")
        assert sink.pull("t", source.lease("m", THERE), PAIRS).seq_id == "t"


def test_many_pulls_in_both_directions_at_once():
    with (
        worker_of_ranks("a", Transport.SHM, tp(2), layout=LAYOUT) as a,
        worker_of_ranks("b", Transport.SHM, tp(4), layout=LAYOUT) as b,
    ):
        half = NUM_BLOCKS // 2
        content = fill(a)
        fill(b)
        for here, there in ((a, b), (b, a)):
            for first in range(0, half, 10):
                name = f"{first} of {there.address.worker_id}"
                lease = there.lease(name, list(range(first, first + 10)), ready=3)
                here.hold(name, lease)
                here.start(name, [(i, half + first + i) for i in range(10)])
        for first in range(0, half, 10):
            for there in (a, b):
                name = f"{first} of {there.address.worker_id}"
                there.grow(name, list(range(first + 3, first + 10)))
        for one in (a, b):
            reports = [one.events.get(timeout=DEADLINE_S) for _ in range(2 * half // 10)]
            kinds = Counter(type(report).__name__ for report in reports)
            assert kinds == {"PullDone": half // 10, "LeaseEnded": half // 10}
            assert holds_all(one, content, [*range(half, 2 * half)], [*range(half)])
        until(lambda: is_quiet(a, b), "nothing is left")


def test_a_dead_rank_of_a_sink_fails_its_pulls_and_the_source_gets_its_lease_back():
    with (
        worker_of_ranks("p", Transport.ZMQ, tp(1), layout=LAYOUT, timing=QUICK) as source,
        worker_of_ranks("d", Transport.ZMQ, tp(2), layout=LAYOUT, timing=QUICK) as sink,
    ):
        sink.hold("s", source.lease("l", THERE, ready=2))
        sink.start("s", PAIRS)
        dying = sink.others[0]
        until(lambda: dying.counters().get("pulled_blocks") == 2, "two blocks come")
        dying.die()
        end = sink.end_of_pull()
        assert end == PullFailed(SeqId("s"), RANK_DIED)
        assert source.end_of_lease() == LeaseEnded(LeaseId("l"), "expired")
        assert sink.pull("t", source.lease("m", THERE), PAIRS) == PullFailed(SeqId("t"), RANK_DIED)


def test_a_dead_rank_of_a_source_ends_its_leases_and_the_sink_gives_up():
    with (
        worker_of_ranks("p", Transport.ZMQ, tp(2), layout=LAYOUT, timing=QUICK) as source,
        worker_of_ranks("d", Transport.ZMQ, tp(1), layout=LAYOUT, timing=QUICK) as sink,
    ):
        sink.hold("s", source.lease("l", THERE, ready=2))
        sink.start("s", PAIRS)
        until(lambda: sink.endpoint.counters().get("pulled_blocks", 0) > 1.9, "two blocks come")
        source.others[0].die()
        assert source.end_of_lease() == LeaseEnded(LeaseId("l"), RANK_DIED)
        end = sink.end_of_pull()
        assert isinstance(end, PullFailed)
        assert end.reason in ("lease revoked", "source silent")
        assert sink.events.empty()
        source.endpoint.perform(OpenLease(LeaseId("m"), 1))
        assert source.end_of_lease() == LeaseEnded(LeaseId("m"), RANK_DIED)


def test_a_worker_of_one_rank_pulls_from_a_group_and_is_pulled_from():
    with (
        worker_of_ranks("p", Transport.SHM, tp(4), layout=LAYOUT) as group,
        worker("store", Transport.SHM, layout=LAYOUT) as store,
    ):
        whole = fill(group)
        assert is_done(store.pull("s", group.lease("l", THERE), PAIRS), "shm")
        assert np.array_equal(store.pool.blocks[HERE], whole[THERE])
        assert group.end_of_lease().reason == "released"
        back = [(i, 150 + i) for i in range(4)]
        assert is_done(group.pull("t", store.lease("m", HERE), back), "shm")
        assert holds_all(group, whole, [block for _, block in back], THERE)
        assert store.end_of_lease().reason == "released"


class FullPipe:
    """A RemoteEndpoint that accepts an order only after one of its reports has been handled."""

    def open(
        self, on_report: Callable[[TransferReport], None], on_lost: Callable[[], None]
    ) -> TransferAddress:
        self._on_report = on_report
        return TransferAddress("p", "p-1", "tcp://nowhere", Shard(1, 2))

    def perform(self, order: TransferOrder) -> None:
        report = LeaseEnded(LeaseId("unknown"), "released")
        reader = threading.Thread(target=self._on_report, args=(report,))
        reader.start()
        reader.join(DEADLINE_S)
        assert not reader.is_alive(), "a report waits for an order"

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Does nothing: the pipe has no resources."""


def test_a_report_never_waits_for_an_order_that_is_being_sent():
    crashes: list[BaseException] = []
    identity = Identity("model", LAYOUT, Shard(0, 2), group=tp(2))
    pool = host_pool(NUM_BLOCKS, identity.record.block_bytes, Transport.ZMQ)
    pool.open()
    endpoint = GroupEndpoint(
        config_of("p", Transport.ZMQ, identity, QUICK),
        pool=pool,
        clock=MonotonicClock(),
        on_event=lambda _: None,
        on_crash=crashes.append,
        others=[FullPipe()],
    )
    endpoint.open()
    endpoint.perform(OpenLease(LeaseId("l"), 1))
    endpoint.perform(RevokeLease(LeaseId("l")))
    endpoint.close()
    pool.close()
    assert not crashes

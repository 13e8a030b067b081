"""Workers of several ranks: a sink rank pulls its share from the source ranks that have it."""

from typing import Any

import msgspec
import numpy as np
import pytest

from engine.config import Transport
from engine.layout import KVFormat, KVLayout, KVSection, LayerRange, Shard
from engine.messages import LeaseId, LeaseRef, SeqId, TransferAddress
from engine.worker.events import AbortPull, LeaseEnded, PullFailed, RevokeLease
from kvtransfer.formats import convert
from kvtransfer.lease.effects import Timing
from kvtransfer.lease.sink import MAX_DAMAGED
from kvtransfer.memory import Blocks
from kvtransfer.transports import zmq as by_message
from kvtransfer.transports.sealed_source import SealedSource
from kvtransfer.wire import Wire
from tests.kits.endpoints import (
    NUM_BLOCKS,
    Worker,
    address_of,
    bound,
    is_done,
    ranks,
    share_of,
    until,
)

BACKENDS = [Transport.SHM, Transport.NIXL, Transport.ZMQ]
FP32 = KVLayout(16, KVFormat.FP32, (KVSection(4, 2, 16), KVSection(1, 1, 8)))
HERE, THERE = [5, 0, 9, 3], [7, 8, 1, 100]
PAIRS = list(enumerate(HERE))
QUICK = Timing(ttl_s=1.0, hold_every_s=0.1, silence_s=0.5)


def tp(size: int) -> tuple[Shard, ...]:
    return tuple(Shard(rank, size) for rank in range(size))


def pp(cut: int, size: int = 1) -> tuple[Shard, ...]:
    """Returns the shards of two pipeline stages of `size` ranks; the second stage has the draft
    model.
    """
    stages = (LayerRange(0, cut), LayerRange(0, 0)), (LayerRange(cut, 4 - cut), LayerRange(0, 1))
    return tuple(Shard(rank, size, layers) for layers in stages for rank in range(size))


SHAPES = {
    "tp1 to tp2": (tp(1), tp(2)),
    "tp2 to tp1": (tp(2), tp(1)),
    "tp2 to tp2": (tp(2), tp(2)),
    "tp2 to tp4": (tp(2), tp(4)),  # each head is needed by two sink ranks
    "tp4 to tp1": (tp(4), tp(1)),  # two source ranks give the sink rank no bytes
    "tp4 to tp2": (tp(4), tp(2)),
    "pp2 to tp2": (pp(3), tp(2)),
    "tp2 to pp2": (tp(2), pp(1)),
    "pp2 x tp2 to pp2": (pp(1, 2), pp(3)),
}


def numbers(layout: KVLayout, seed: int) -> np.ndarray:
    """Returns random finite numbers as blocks of the whole model."""
    rng = np.random.default_rng(seed)
    floats = rng.standard_normal((NUM_BLOCKS, FP32.block_bytes // 4), dtype=np.float32)
    return convert(floats.view(np.uint8), FP32, layout.kv_format)


def fill(source: list[Worker], shards: tuple[Shard, ...], whole: np.ndarray, layout=FP32) -> None:
    for rank, shard in zip(source, shards, strict=True):
        rank.pool.blocks[:] = share_of(whole, layout, shard)


def lease(source: list[Worker], name: str, blocks: list[int], ready: int | None = None) -> LeaseRef:
    """Opens a lease at all ranks of a source. Returns its reference."""
    leases = [rank.lease(name, blocks, ready) for rank in source]
    return leases[0]


def begin(sink: list[Worker], lease: LeaseRef) -> None:
    """Starts a pull at all ranks of a sink."""
    for rank in sink:
        rank.hold("s", lease)
        rank.start("s", PAIRS)


def has_share(rank: Worker, whole: np.ndarray, shard: Shard, num: int = len(HERE)) -> bool:
    return np.array_equal(rank.pool.blocks[HERE[:num]], share_of(whole[THERE[:num]], FP32, shard))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_rank_gets_its_share_of_each_block(shape, backend):
    of_source, of_sink = SHAPES[shape]
    whole = numbers(FP32, seed=1)
    with (
        ranks("p", backend, of_source, layout=FP32) as source,
        ranks("d", backend, of_sink, layout=FP32) as sink,
    ):
        fill(source, of_source, whole)
        before = [rank.pool.blocks.copy() for rank in sink]
        begin(sink, lease(source, "l", THERE))
        for rank, shard, old in zip(sink, of_sink, before, strict=True):
            assert is_done(rank.end_of_pull(), backend)
            assert has_share(rank, whole, shard)
            others = sorted(set(range(NUM_BLOCKS)) - set(HERE))
            assert np.array_equal(rank.pool.blocks[others], old[others])
            counters = rank.endpoint.counters()
            assert counters["pulled_bytes"] == rank.pool.block_bytes * len(HERE)
            assert (counters["pulls_done"], round(counters["pulled_blocks"], 6)) == (1, len(HERE))
        for rank in source:
            assert rank.end_of_lease() == LeaseEnded(LeaseId("l"), "released")


@pytest.mark.parametrize("backend", [Transport.SHM, Transport.ZMQ])
@pytest.mark.parametrize("shape", ["tp1 to tp2", "tp2 to tp4", "tp4 to tp1", "pp2 to tp2"])
def test_shares_are_converted_on_their_way(shape, backend):
    of_source, of_sink = SHAPES[shape]
    int8 = msgspec.structs.replace(FP32, kv_format=KVFormat.INT8)
    whole = numbers(FP32, seed=1)
    wire = {"kv_wire_dtype": KVFormat.INT8}
    with (
        ranks("p", backend, of_source, layout=FP32, **wire) as source,
        ranks("d", backend, of_sink, layout=int8, **wire) as sink,
    ):
        fill(source, of_source, whole)
        begin(sink, lease(source, "l", THERE))
        for rank, shard in zip(sink, of_sink, strict=True):
            assert is_done(rank.end_of_pull(), backend)
            expected = share_of(convert(whole[THERE], FP32, KVFormat.INT8), int8, shard)
            assert np.array_equal(rank.pool.blocks[HERE], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lease_revoked_at_one_rank_fails_the_pull_and_ends_the_other(backend):
    with (
        ranks("p", backend, tp(2), layout=FP32) as source,
        ranks("d", backend, tp(1), layout=FP32) as [sink],
    ):
        begin([sink], lease(source, "l", THERE, ready=2))
        until(lambda: all(rank.is_held("l") for rank in source), "held")
        source[1].endpoint.perform(RevokeLease(LeaseId("l")))
        end = sink.end_of_pull()
        assert isinstance(end, PullFailed)
        assert end.reason == "lease revoked"
        assert source[0].end_of_lease().reason == "released"
        assert source[1].end_of_lease().reason == "revoked"


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_of_a_sink_that_gives_up_leaves_the_others_their_lease(backend):
    whole = numbers(FP32, seed=1)
    with (
        ranks("p", backend, tp(1), layout=FP32) as [source],
        ranks("d", backend, tp(2), layout=FP32) as sink,
    ):
        fill([source], tp(1), whole)
        begin(sink, source.lease("l", THERE, ready=2))
        sink[0].endpoint.perform(AbortPull(SeqId("s")))
        assert isinstance(sink[0].end_of_pull(), PullFailed)
        source.grow("l", THERE[2:])
        assert is_done(sink[1].end_of_pull(), backend)
        assert has_share(sink[1], whole, tp(2)[1])
        assert source.end_of_lease().reason == "released"


def test_a_silent_rank_of_a_source_fails_the_pull_in_time():
    with (
        ranks("raw", Transport.ZMQ, tp(2), layout=FP32, timing=QUICK) as source,
        ranks("d", Transport.ZMQ, tp(1), layout=FP32, timing=QUICK) as [sink],
        bound() as (_, silent),
    ):
        alive = source[0]
        dead = msgspec.structs.replace(silent, shard=Shard(1, 2))
        one = TransferAddress("raw", "raw-1", alive.address.address, Shard(0, 2))
        alive.address = address_of([one, dead])
        begin([sink], alive.lease("l", THERE))
        assert sink.end_of_pull() == PullFailed(SeqId("s"), "source silent")
        assert alive.end_of_lease().reason == "released"
        assert sink.events.empty()


def test_a_sink_whose_other_rank_does_not_come_lets_the_lease_expire():
    with (
        ranks("p", Transport.ZMQ, tp(1), layout=FP32, timing=QUICK) as [source],
        ranks("d", Transport.ZMQ, tp(2), layout=FP32, timing=QUICK) as sink,
    ):
        begin(sink[:1], source.lease("l", THERE, ready=2))
        end = sink[0].end_of_pull()
        assert isinstance(end, PullFailed)
        assert (end.reason, end.arrived) == ("lease expired", (0, 1))
        assert source.end_of_lease().reason == "expired"


def test_shares_that_arrive_damaged_are_sent_again(monkeypatch):
    whole = numbers(FP32, seed=1)
    with (
        ranks("p", Transport.ZMQ, tp(2), layout=FP32) as source,
        ranks("d", Transport.ZMQ, tp(1), layout=FP32) as [sink],
    ):
        fill(source, tp(2), whole)
        monkeypatch.setattr(SealedSource, "is_connected", lambda *what: False)
        real = by_message.pack
        once = iter([1])
        monkeypatch.setattr(by_message, "pack", lambda *what: real(*what) ^ next(once, 0))
        begin([sink], lease(source, "l", THERE))
        assert is_done(sink.end_of_pull(), "zmq")
        assert has_share(sink, whole, Shard())
        assert sink.endpoint.counters()["failed_fetches:blocks_arrive_damaged"] == 1


def test_a_rank_whose_shares_stay_damaged_fails_the_pull_with_no_block(monkeypatch):
    with (
        ranks("p", Transport.ZMQ, tp(2), layout=FP32) as source,
        ranks("d", Transport.ZMQ, tp(1), layout=FP32) as [sink],
    ):
        monkeypatch.setattr(SealedSource, "is_connected", lambda *what: False)
        real, broken = by_message.pack, source[1].pool.blocks

        def pack(wire: Wire, pool: Blocks, *what: Any) -> int:
            return real(wire, pool, *what) ^ np.shares_memory(pool, broken)

        monkeypatch.setattr(by_message, "pack", pack)
        begin([sink], lease(source, "l", THERE))
        assert sink.end_of_pull() == PullFailed(SeqId("s"), "blocks arrive damaged")
        found = sink.endpoint.counters()["failed_fetches:blocks_arrive_damaged"]
        assert found == MAX_DAMAGED + 1
        assert [rank.end_of_lease().reason for rank in source] == ["released"] * 2


@pytest.mark.parametrize("named", [(0,), (1, 0, 1), (0, 0)])
def test_an_address_that_lacks_a_rank_is_refused(named):
    with (
        ranks("p", Transport.ZMQ, tp(2), layout=FP32) as source,
        ranks("d", Transport.ZMQ, tp(1), layout=FP32) as [sink],
    ):
        rank_address = source[0].address.ranks[0]
        places = [f"tcp://127.0.0.1:{1 + place}" for place in range(len(named))]
        wrong = address_of(
            [
                msgspec.structs.replace(rank_address, address=place, shard=Shard(rank, 2))
                for rank, place in zip(named, places, strict=True)
            ]
        )
        end = sink.pull("s", LeaseRef(LeaseId("l"), wrong, 4), PAIRS)
        assert end == PullFailed(SeqId("s"), "source refused: group differs")

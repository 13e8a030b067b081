"""The contract of every transport, tested with shared memory, NIXL and ZeroMQ.

The same tests run with pools in the memory of a fake device, whose copies are late on purpose.
"""

import os
import random
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from engine.config import Transport
from engine.layout import KVFormat
from engine.messages import LeaseId, LeaseRef, SeqId, TransferAddress
from engine.worker.events import AbortPull, PullDone, PullFailed, RevokeLease
from kvtransfer import endpoint
from kvtransfer.transports import zmq as by_message
from tests.kits.endpoints import (
    LAYOUT,
    NUM_BLOCKS,
    Timing,
    bound,
    dialled,
    fill,
    is_done,
    until,
    worker,
)
from tests.kits.fakes.device import on_device

BACKENDS = [Transport.SHM, Transport.NIXL, Transport.ZMQ]


def scattered(num: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(NUM_BLOCKS), num)


@pytest.fixture(params=[*BACKENDS, "ipc on a device", "zmq on a device"])
def pair(request):
    """Yields a source and a sink whose pools have different random bytes."""
    name, _, place = request.param.partition(" ")
    how = {"as_pool": on_device} if place else {}
    backend = Transport(name)
    with worker("source", backend, **how) as source, worker("sink", backend, **how) as sink:
        fill(source.pool, seed=1)
        fill(sink.pool, seed=2)
        yield source, sink


def test_all_blocks_arrive_and_no_other_block_is_touched(pair):
    source, sink = pair
    there, here = scattered(150, seed=3), scattered(150, seed=4)
    before = sink.pool.blocks.copy()
    done = sink.pull("s", source.lease("l", there), list(enumerate(here)))
    assert isinstance(done, PullDone)
    assert np.array_equal(sink.pool.blocks[here], source.pool.blocks[there])
    others = sorted(set(range(NUM_BLOCKS)) - set(here))
    assert np.array_equal(sink.pool.blocks[others], before[others])
    assert source.end_of_lease().reason == "released"
    assert source.endpoint.counters()["leases_ended:released"] == 1


def test_blocks_arrive_while_the_source_still_computes(pair):
    source, sink = pair
    there, here = scattered(30, seed=5), scattered(30, seed=6)
    lease = source.lease("l", there, ready=10)
    sink.hold("s", lease)
    sink.start("s", list(enumerate(here)))
    first = here[:10]
    until(
        lambda: np.array_equal(sink.pool.blocks[first], source.pool.blocks[there[:10]]),
        "the first blocks arrive before the lease is complete",
    )
    assert source.endpoint.source.num_leases == 1
    source.grow("l", there[10:20])
    source.grow("l", there[20:])
    assert isinstance(sink.end_of_pull(), PullDone)
    assert np.array_equal(sink.pool.blocks[here], source.pool.blocks[there])


def test_only_the_wanted_blocks_are_moved(pair):
    source, sink = pair
    there = scattered(20, seed=7)
    before = sink.pool.blocks.copy()
    done = sink.pull("s", source.lease("l", there), [(17, 3), (19, 4)])
    assert isinstance(done, PullDone)
    assert np.array_equal(sink.pool.blocks[3], source.pool.blocks[there[17]])
    assert np.array_equal(sink.pool.blocks[4], source.pool.blocks[there[19]])
    assert np.array_equal(sink.pool.blocks[5:], before[5:])
    assert sink.endpoint.counters()["pulled_blocks"] == 2


def test_a_pull_of_nothing_still_releases_the_lease(pair):
    source, sink = pair
    assert isinstance(sink.pull("s", source.lease("l", [1, 2, 3]), []), PullDone)
    assert source.end_of_lease().reason == "released"


def test_a_lease_outlives_its_time_while_the_sink_holds_it(pair):
    source, sink = pair
    lease = source.lease("l", [1, 2, 3])
    sink.hold("s", lease)
    until(lambda: source.is_held("l"), "held")
    first_deadline_s = source.endpoint.source.next_wake_s()
    until(lambda: source.endpoint.source.next_wake_s() > first_deadline_s + 0.2, "renewed")
    sink.start("s", [(0, 7), (1, 8), (2, 9)])
    assert isinstance(sink.end_of_pull(), PullDone)


def test_a_revoked_lease_fails_the_pull(pair):
    source, sink = pair
    sink.hold("s", source.lease("l", [1, 2, 3], ready=1))
    sink.start("s", [(0, 7), (1, 8), (2, 9)])
    source.endpoint.perform(RevokeLease(LeaseId("l")))
    end = sink.end_of_pull()
    assert isinstance(end, PullFailed)
    assert source.end_of_lease().reason == "revoked"


def test_an_unknown_lease_fails_the_pull(pair):
    source, sink = pair
    end = sink.pull("s", LeaseRef(LeaseId("unknown"), source.address, 2), [(0, 1)])
    assert end == PullFailed(SeqId("s"), "lease unknown")


def test_an_aborted_pull_ends_the_lease_and_writes_no_more(pair):
    source, sink = pair
    there, here = scattered(30, seed=8), scattered(30, seed=9)
    sink.hold("s", source.lease("l", there, ready=5))
    sink.start("s", list(enumerate(here)))
    sink.endpoint.perform(AbortPull(SeqId("s")))
    end = sink.end_of_pull()
    assert isinstance(end, PullFailed)
    assert end.reason == "aborted"
    assert sink.endpoint.counters()["pulls_failed:aborted"] == 1
    # A fast transport has fetched some of the ready blocks before the sink reads the abort.
    assert set(end.arrived) <= set(range(5))
    for index in end.arrived:
        assert np.array_equal(sink.pool.blocks[here[index]], source.pool.blocks[there[index]])
    written = sink.pool.blocks.copy()
    source.grow("l", there[5:])
    assert source.end_of_lease().lease_id == "l"
    assert np.array_equal(sink.pool.blocks, written)


def test_the_sink_of_a_silent_source_gives_up_in_time(pair):
    _, sink = pair
    with bound() as (_, address):
        end = sink.pull("s", LeaseRef(LeaseId("l"), address, 1), [(0, 1)])
    assert end == PullFailed(SeqId("s"), "source silent")


def test_garbage_on_the_source_socket_is_counted_and_survived(pair):
    source, sink = pair
    with dialled(source) as stranger:
        for garbage in ([b""], [b"\xc1" * 9], [b"\x80", b"two frames"], [os.urandom(200)]):
            stranger.send_multipart(garbage)
        until(lambda: source.endpoint.counters().get("bad_messages") == 4, "all are counted")
    assert isinstance(sink.pull("s", source.lease("l", [5]), [(0, 6)]), PullDone)


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("layout.block_size", {"layout": msgspec.structs.replace(LAYOUT, block_size=32)}),
        ("layout.kv_format", {"layout": msgspec.structs.replace(LAYOUT, kv_format=KVFormat.BF16)}),
        ("kv_wire_dtype", {"kv_wire_dtype": KVFormat.INT8}),
        ("fingerprint", {"fingerprint": "another model"}),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_that_do_not_agree_are_refused_by_the_name_of_the_field(backend, field, changed):
    with worker("source", backend) as source, worker("sink", backend, **changed) as sink:
        end = sink.pull("s", source.lease("l", [1]), [(0, 1)])
        assert end == PullFailed(SeqId("s"), f"source refused: {field} differs")


def test_damaged_blocks_are_sent_again(monkeypatch):
    monkeypatch.setattr(endpoint, "can_seal", lambda: False)
    with worker("source", Transport.ZMQ) as source, worker("sink", Transport.ZMQ) as sink:
        fill(source.pool, seed=1)
        real = by_message.pack
        once = iter([1])
        monkeypatch.setattr(by_message, "pack", lambda *what: real(*what) ^ next(once, 0))
        end = sink.pull("s", source.lease("l", [1, 2]), [(0, 1), (1, 2)])
        assert is_done(end, "zmq")
        assert np.array_equal(sink.pool.blocks[[1, 2]], source.pool.blocks[[1, 2]])
        assert sink.endpoint.counters()["failed_fetches:blocks_arrive_damaged"] == 1


def test_auto_falls_back_to_zmq_and_counts_it():
    with worker("source", Transport.ZMQ) as source, worker("sink", Transport.AUTO) as sink:
        fill(source.pool, seed=1)
        assert is_done(sink.pull("s", source.lease("l", [3]), [(0, 4)]), "zmq")
        assert np.array_equal(sink.pool.blocks[4], source.pool.blocks[3])
        assert sink.endpoint.counters()["fallbacks:shm_not_offered"] == 1


def test_shm_alone_refuses_a_source_that_it_cannot_map():
    with worker("source", Transport.ZMQ) as source, worker("sink", Transport.SHM) as sink:
        end = sink.pull("s", source.lease("l", [3]), [(0, 4)])
        reason = "no transport: shm: source offers no shared memory"
        assert end == PullFailed(SeqId("s"), reason)


def test_closing_frees_every_descriptor():
    def num_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    def run() -> None:
        with worker("source", Transport.SHM) as source, worker("sink", Transport.SHM) as sink:
            assert isinstance(sink.pull("s", source.lease("l", [1]), [(0, 2)]), PullDone)

    run()
    before, num_runs = num_fds(), 5
    for _ in range(num_runs):
        run()
    # A leak would leave a descriptor in each run. Threads of earlier tests may open or close a few.
    assert num_fds() - before < num_runs


SOURCE_PROCESS = """
import sys
from engine.messages import LeaseId
from engine.config import Transport
from tests.kits.endpoints import fill, worker
with worker("source", Transport(sys.argv[1])) as source:
    fill(source.pool, seed=1)
    source.lease("l", list(range(50)), ready=20)
    print(source.address.address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_source_killed_in_mid_pull_fails_the_pull_within_its_deadline(backend):
    process = subprocess.Popen(
        [sys.executable, "-c", SOURCE_PROCESS, backend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = process.stdout.readline().strip()
        timing = Timing(ttl_s=4.0, hold_every_s=0.1, silence_s=0.5)
        with worker("sink", backend, timing=timing) as sink:
            source = TransferAddress("source", "source-1", address)
            sink.hold("s", LeaseRef(LeaseId("l"), source, 50))
            sink.start("s", [(i, i) for i in range(50)])
            until(lambda: sink.endpoint.counters().get("pulled_blocks") == 20, "20 blocks came")
            process.send_signal(signal.SIGKILL)
            end = sink.end_of_pull()
            assert isinstance(end, PullFailed)
            assert end.reason == "source silent"
            expected = np.random.default_rng(1).integers(
                0, 256, sink.pool.blocks.shape, dtype=np.uint8
            )
            assert np.array_equal(sink.pool.blocks[:20], expected[:20])
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()

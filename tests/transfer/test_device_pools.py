"""Pools that the host cannot reach, like pools in a GPU's memory.

No GPU is needed: a fake device with host memory uses the same code. A pool that gives no access to
its bytes shows which pools only one-sided reads can move.
"""

import importlib.util

import msgspec
import numpy as np
import pytest

from engine.config import Transport
from engine.errors import ConfigError
from engine.layout import KVFormat
from engine.messages import SeqId
from engine.worker.events import AbortPull, PullFailed
from kvtransfer.device.cuda_driver import CudaDriver, DriverError
from kvtransfer.formats import convert
from kvtransfer.memory import Region, SharedPool
from kvtransfer.records import Shard
from kvtransfer.transports.nixl_agent import PACKAGES
from tests.kits.endpoints import LAYOUT, fill, is_done, until, worker
from tests.kits.fakes.device import LateDriver, on_device

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(package) for package in PACKAGES),
    reason=f"none of {', '.join(PACKAGES)} is installed",
)
WAYS = [Transport.IPC, Transport.ZMQ]


class Hidden:
    """A pool that gives its region, but no access to its bytes."""

    blocks = None

    def __init__(self, pool: SharedPool) -> None:
        self.num_blocks = pool.num_blocks
        self.block_bytes = pool.block_bytes
        self._region = pool.region()

    def region(self) -> Region:
        return self._region

    def offer(self) -> None:
        return None


def test_a_device_pool_has_its_owners_address():
    with worker("p", Transport.AUTO, as_pool=on_device) as source:
        pool = on_device(source.pool)
        address, num_bytes = source.pool.blocks.ctypes.data, source.pool.blocks.nbytes
        assert pool.region() == Region(address, num_bytes, "VRAM", 0)
        assert (pool.blocks, pool.offer()) == (None, None)


def test_auto_takes_ipc_between_devices_of_one_host():
    with (
        worker("p", Transport.AUTO, as_pool=on_device) as source,
        worker("d", Transport.AUTO, as_pool=on_device) as sink,
    ):
        fill(source.pool, seed=1)
        end = sink.pull("s", source.lease("l", [3, 9]), [(0, 4), (1, 2)])
        assert is_done(end, "ipc")
        assert np.array_equal(sink.pool.blocks[[4, 2]], source.pool.blocks[[3, 9]])
        assert not [name for name in sink.endpoint.counters() if name.startswith("fallbacks")]


@pytest.mark.parametrize("broken", ["shares", "maps"])
def test_a_device_whose_memory_cannot_be_mapped_sends_instead(broken):
    def place(pool):
        return on_device(pool, LateDriver(**{broken: False}))

    with (
        worker("p", Transport.AUTO, as_pool=place) as source,
        worker("d", Transport.AUTO, as_pool=place) as sink,
    ):
        fill(source.pool, seed=1)
        end = sink.pull("s", source.lease("l", [3, 9]), [(0, 4), (1, 2)])
        assert is_done(end, "zmq")
        assert np.array_equal(sink.pool.blocks[[4, 2]], source.pool.blocks[[3, 9]])
        counters = sink.endpoint.counters() | source.endpoint.counters()
        assert counters["fallbacks:ipc_unavailable"] == 1


def test_a_device_pulls_from_memory_that_a_store_shares():
    with (
        worker("store", Transport.AUTO) as source,
        worker("d", Transport.AUTO, as_pool=on_device) as sink,
    ):
        fill(source.pool, seed=1)
        end = sink.pull("s", source.lease("l", [3, 9]), [(0, 4), (1, 2)])
        assert is_done(end, "shm")
        assert np.array_equal(sink.pool.blocks[[4, 2]], source.pool.blocks[[3, 9]])


def test_a_store_pulls_from_a_device_through_staging():
    with (
        worker("p", Transport.AUTO, as_pool=on_device) as source,
        worker("store", Transport.AUTO) as sink,
    ):
        fill(source.pool, seed=1)
        end = sink.pull("s", source.lease("l", [3, 9]), [(0, 4), (1, 2)])
        assert is_done(end, "zmq")
        assert np.array_equal(sink.pool.blocks[[4, 2]], source.pool.blocks[[3, 9]])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("stored", "wire", "wanted"),
    [
        (KVFormat.FP32, KVFormat.INT8, KVFormat.INT8),
        (KVFormat.FP32, KVFormat.INT8, KVFormat.FP32),
        (KVFormat.INT8, KVFormat.INT8, KVFormat.FP32),
    ],
)
def test_a_device_converts_between_formats(way, stored, wire, wanted):
    source_layout = msgspec.structs.replace(LAYOUT, kv_format=stored)
    sink_layout = msgspec.structs.replace(LAYOUT, kv_format=wanted)
    wire_layout = msgspec.structs.replace(LAYOUT, kv_format=wire)
    how = {"as_pool": on_device, "kv_wire_dtype": wire}
    with (
        worker("p", way, layout=source_layout, **how) as source,
        worker("d", way, layout=sink_layout, **how) as sink,
    ):
        floats = np.random.default_rng(3).normal(size=(200, LAYOUT.block_bytes // 4))
        full = floats.astype(np.float32).view(np.uint8)
        source.pool.blocks[:] = full if stored is KVFormat.FP32 else convert(full, LAYOUT, stored)
        end = sink.pull("s", source.lease("l", [3, 9]), [(0, 4), (1, 2)])
        assert is_done(end, way)
        there = source.pool.blocks[[3, 9]]
        travels = there if stored is wire else convert(there, source_layout, wire)
        expected = travels if wire is wanted else convert(travels, wire_layout, wanted)
        assert np.array_equal(sink.pool.blocks[[4, 2]], expected)


@pytest.mark.parametrize("way", WAYS)
def test_heads_are_gathered_from_a_device_of_other_shards(way):
    halves = {"shard": Shard(1, 2), "group": (Shard(0, 2), Shard(1, 2))}
    with (
        worker("p", way, as_pool=on_device) as source,
        worker("d", way, as_pool=on_device, **halves) as sink,
        worker("h", Transport.ZMQ, **halves) as host,
    ):
        fill(source.pool, seed=1)
        assert is_done(sink.pull("s", source.lease("l", [3, 9]), [(0, 4), (1, 2)]), way)
        if way is Transport.ZMQ:
            assert is_done(host.pull("h", source.lease("m", [3, 9]), [(0, 4), (1, 2)]), way)
            assert np.array_equal(sink.pool.blocks[[4, 2]], host.pool.blocks[[4, 2]])
        # axes of the array: block, layer, K or V, head
        heads = source.pool.blocks.reshape(200, 2, 2, 2, -1)[[3, 9], :, :, 1]
        assert np.array_equal(sink.pool.blocks[[4, 2]], heads.reshape(2, -1))


def test_an_aborted_pull_ends_only_after_the_device_has_written():
    driver = LateDriver()
    driver.is_stalled = True
    with (
        worker("p", Transport.IPC, as_pool=on_device) as source,
        worker("d", Transport.IPC, as_pool=lambda pool: on_device(pool, driver)) as sink,
    ):
        fill(source.pool, seed=1)
        sink.hold("s", source.lease("l", list(range(50))))
        sink.start("s", [(i, i) for i in range(50)])
        until(lambda: driver.num_queued > 0, "copies are queued")
        sink.endpoint.perform(AbortPull(SeqId("s")))
        until(lambda: sink.endpoint.sink.num_pulls == 0, "it is aborted")
        assert sink.events.empty()
        driver.is_stalled = False
        assert sink.end_of_pull().reason == "aborted"
        assert driver.num_queued == 0


def test_memory_of_a_lost_source_stays_mapped_until_the_copies_end():
    driver = LateDriver()
    driver.is_stalled = True
    with worker("d", Transport.IPC, as_pool=lambda pool: on_device(pool, driver)) as sink:
        with worker("p", Transport.IPC, as_pool=on_device) as source:
            sink.hold("s", source.lease("l", list(range(50))))
            sink.start("s", [(i, i) for i in range(50)])
            until(lambda: driver.num_queued > 0, "copies are queued")
            # a device keeps memory allocated while other processes map it
            kept = source.pool.blocks
        until(lambda: not sink.connections(), "it is lost")
        assert sink.events.empty()
        assert driver.mapped
        driver.is_stalled = False
        assert isinstance(sink.end_of_pull(), PullFailed)
        until(lambda: not driver.mapped, "the memory is let go")
        del kept


def test_workers_on_cpus_cannot_use_ipc():
    with pytest.raises(ConfigError, match="ipc is for workers that compute on GPUs"):
        worker("w", Transport.IPC).__enter__()


def test_a_machine_without_cuda_says_so():
    with pytest.raises(DriverError, match=r"libcuda\.so\.1 cannot be used"):
        CudaDriver(0).enter()


@needs_nixl
def test_nixl_reads_pools_that_the_host_cannot_reach():
    with (
        worker("p", Transport.AUTO, as_pool=Hidden) as source,
        worker("d", Transport.AUTO, as_pool=Hidden) as sink,
    ):
        fill(source.pool, seed=1)
        end = sink.pull("s", source.lease("l", [3, 9]), [(0, 4), (1, 2)])
        assert is_done(end, "nixl")
        assert np.array_equal(sink.pool.blocks[[4, 2]], source.pool.blocks[[3, 9]])


@needs_nixl
def test_a_source_that_cannot_send_is_not_asked_to():
    with (
        worker("p", Transport.AUTO, as_pool=Hidden) as source,
        worker("d", Transport.ZMQ) as sink,
    ):
        end = sink.pull("s", source.lease("l", [3]), [(0, 4)])
        reason = "no transport: zmq: source cannot send what is in a GPU's memory"
        assert end == PullFailed(SeqId("s"), reason)


@needs_nixl
@pytest.mark.parametrize("transport", [Transport.ZMQ, Transport.SHM])
def test_a_sink_takes_no_message_for_memory_that_it_cannot_reach(transport):
    with (
        worker("p", transport) as source,
        worker("d", transport, as_pool=Hidden) as sink,
    ):
        end = sink.pull("s", source.lease("l", [3]), [(0, 4)])
        assert isinstance(end, PullFailed)
        assert "KV here is in a GPU's memory" in end.reason

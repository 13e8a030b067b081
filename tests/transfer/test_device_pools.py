"""Pools that the host cannot reach, as those in a GPU's memory: only one-sided reads move them.

No GPU is needed: a pool of host memory that hides itself goes the same way, but for its kind.
"""

import importlib.util

import numpy as np
import pytest

from engine.config import Transport
from engine.messages import SeqId
from engine.worker.events import PullFailed
from kvtransfer.memory import DevicePool, Region, SharedPool
from kvtransfer.nixl_backend import PACKAGES
from tests.kits.endpoints import fill, is_done, worker

if not any(importlib.util.find_spec(package) for package in PACKAGES):
    pytest.skip(f"none of {', '.join(PACKAGES)} is installed", allow_module_level=True)


class Hidden:
    """A pool that gives its region and no access to its bytes."""

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
    pool = DevicePool(2**40, num_blocks=10, block_bytes=4096, device_id=1)
    assert pool.region() == Region(2**40, 40_960, "VRAM", 1)
    assert (pool.blocks, pool.offer()) == (None, None)


def test_auto_takes_nixl_between_device_pools():
    with (
        worker("p", Transport.AUTO, as_pool=Hidden) as source,
        worker("d", Transport.AUTO, as_pool=Hidden) as sink,
    ):
        fill(source.pool, seed=1)
        end = sink.pull("s", source.lease("l", [3, 9]), [(0, 4), (1, 2)])
        assert is_done(end, "nixl")
        assert np.array_equal(sink.pool.blocks[[4, 2]], source.pool.blocks[[3, 9]])


def test_a_source_that_cannot_send_is_not_asked_to():
    with (
        worker("p", Transport.AUTO, as_pool=Hidden) as source,
        worker("d", Transport.ZMQ) as sink,
    ):
        end = sink.pull("s", source.lease("l", [3]), [(0, 4)])
        reason = "no transport: zmq: source cannot send what is in a GPU's memory"
        assert end == PullFailed(SeqId("s"), reason)


@pytest.mark.parametrize("transport", [Transport.ZMQ, Transport.SHM])
def test_a_sink_takes_no_message_for_memory_that_it_cannot_reach(transport):
    with (
        worker("p", transport) as source,
        worker("d", transport, as_pool=Hidden) as sink,
    ):
        end = sink.pull("s", source.lease("l", [3]), [(0, 4)])
        assert isinstance(end, PullFailed)
        assert "KV here is in a GPU's memory" in end.reason

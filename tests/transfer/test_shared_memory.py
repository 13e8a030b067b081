"""A pool's memory, and checks of other pools' offers."""

import os
import threading

import msgspec
import numpy as np
import pytest

from engine.config import Transport
from kvtransfer.memory import (
    PrivatePool,
    SharedPool,
    ShmUnavailable,
    host_pool,
    map_offer,
    touch,
)

NUM_BLOCKS, BLOCK_BYTES = 5, 4096


@pytest.fixture
def pool():
    pool = SharedPool(NUM_BLOCKS, BLOCK_BYTES)
    pool.open()
    yield pool
    pool.close()


def test_writes_are_visible_in_a_mapped_pool(pool):
    mapped = map_offer(pool.offer(), NUM_BLOCKS, BLOCK_BYTES)
    pool.blocks[3] = 7
    assert mapped.shape == (NUM_BLOCKS, BLOCK_BYTES)
    assert np.all(mapped[3] == 7)
    assert not mapped[2].any()


def test_a_mapped_pool_cannot_be_written_to(pool):
    mapped = map_offer(pool.offer(), NUM_BLOCKS, BLOCK_BYTES)
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1


def test_a_mapped_pool_outlives_its_owners_descriptor(pool):
    mapped = map_offer(pool.offer(), NUM_BLOCKS, BLOCK_BYTES)
    pool.blocks[0] = 9
    pool.close()
    assert np.all(mapped[0] == 9)


def test_mapping_leaves_no_descriptor_behind(pool):
    def num_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_fds()
    mapped = map_offer(pool.offer(), NUM_BLOCKS, BLOCK_BYTES)
    del mapped
    with pytest.raises(ShmUnavailable):
        map_offer(msgspec.structs.replace(pool.offer(), inode=1), NUM_BLOCKS, BLOCK_BYTES)
    assert num_fds() == before


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"boot_id": "another"}, "another host"),
        ({"num_bytes": 7}, "does not match the layout"),
        ({"inode": 1}, "is gone"),
        ({"fd": 10**6}, "cannot open"),
        ({"pid": 2**30}, "cannot open"),
        ({"fd": -1}, "cannot open"),
    ],
)
def test_an_offer_with_a_wrong_field_is_refused(pool, changed, reason):
    offer = msgspec.structs.replace(pool.offer(), **changed)
    with pytest.raises(ShmUnavailable, match=reason):
        map_offer(offer, NUM_BLOCKS, BLOCK_BYTES)


def test_memory_that_changed_its_size_is_refused(pool):
    offer = pool.offer()
    os.ftruncate(offer.fd, offer.num_bytes * 2)
    with pytest.raises(ShmUnavailable, match="is gone"):
        map_offer(offer, NUM_BLOCKS, BLOCK_BYTES)


def test_another_processs_pipe_in_its_place_does_not_block(pool):
    """In a container the source's process id may belong to another process."""
    reads, writes = os.pipe()
    os.close(writes)
    outcomes: list[str] = []

    def try_to_map() -> None:
        try:
            map_offer(msgspec.structs.replace(pool.offer(), fd=reads), NUM_BLOCKS, BLOCK_BYTES)
        except ShmUnavailable as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=try_to_map, daemon=True)
    thread.start()
    thread.join(5)
    os.close(reads)
    assert outcomes == ["the source's memory is gone"]


def test_a_private_pool_is_zeroed_writable_and_not_offered():
    pool = PrivatePool(NUM_BLOCKS, BLOCK_BYTES)
    pool.open()
    assert pool.blocks.shape == (NUM_BLOCKS, BLOCK_BYTES)
    assert not pool.blocks.any()
    pool.blocks[-1, -1] = 7
    assert pool.blocks[-1, -1] == 7
    assert pool.region().num_bytes == NUM_BLOCKS * BLOCK_BYTES
    assert pool.offer() is None
    pool.close()


@pytest.mark.parametrize(
    ("transport", "kind"),
    [("auto", SharedPool), ("shm", SharedPool), ("zmq", PrivatePool), ("nixl", PrivatePool)],
)
def test_a_pool_is_shared_only_where_another_worker_may_map_it(transport, kind):
    assert isinstance(host_pool(NUM_BLOCKS, BLOCK_BYTES, Transport(transport)), kind)


@pytest.mark.parametrize("kind", [PrivatePool, SharedPool])
def test_touching_a_block_changes_no_byte(kind):
    pool = kind(3, 3 * 4096 + 64)
    pool.open()
    pool.blocks[:] = 7
    for block in range(3):
        touch(pool.blocks, block)
    assert (pool.blocks == 7).all()
    pool.close()

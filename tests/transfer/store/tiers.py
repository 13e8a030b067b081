"""Tiers of blocks on disk, for tests.

The content of a block is computed from its hash. The time of a tier is 0 unless the test sets it.
"""

import hashlib
import os
import select
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from engine.clock import MonotonicClock
from kvtransfer.store.disk.tier import DiskRead, DiskTier, DiskTuning, DiskWrite

IDENTITY = b"model and layout"
DEADLINE_S = 20.0  # longest wait of a test, seconds
ENGINES = ("uring", "threads")
CLOCK = MonotonicClock()


def new_tier(directory, engine="threads", *, block_bytes=4096, num_slots=8, **tuning):
    """Makes a tier without opening it, by default with two slots per slab."""
    stride_bytes = -(-block_bytes // 4096) * 4096
    tuning = {"slab_bytes": 2 * stride_bytes, **tuning}
    return DiskTier(
        Path(directory),
        identity=IDENTITY,
        block_bytes=block_bytes,
        max_bytes=num_slots * (stride_bytes + 128),
        tuning=DiskTuning(with_uring=engine == "uring", **tuning),
    )


@contextmanager
def opened(directory, engine="threads", **options):
    """Yields an open tier with all its slots, and the blocks that it recovered."""
    tier = new_tier(directory, engine, **options)
    blocks = tier.open(0.0)
    if engine == "uring" and "fallbacks:no_uring" in tier.counters:
        tier.close(DEADLINE_S)
        pytest.skip("io_uring is not allowed here")
    try:
        yield tier, blocks
    finally:
        tier.close(DEADLINE_S)


def hash_of(number):
    return number.to_bytes(16, "little")


def content_of(block_hash, block_bytes=4096):
    """Returns the only correct content of a block with this hash."""
    seed = int.from_bytes(hashlib.sha256(block_hash).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, block_bytes, np.uint8)


def shifted(row, shift):
    """Returns a copy of the row at an address that is `shift` bytes above a multiple of 4096."""
    memory = np.zeros(len(row) + 8192, np.uint8)
    start = -memory.ctypes.data % 4096 + shift
    memory[start : start + len(row)] = row
    return memory[start : start + len(row)]


def polled(tier, num, now_s=0.0):
    """Waits until `num` requests have ended. Returns them with their reasons."""
    deadline_s, done = CLOCK.now_s() + DEADLINE_S, []
    while len(done) < num:
        assert CLOCK.now_s() < deadline_s, f"{len(done)} of {num} requests have ended"
        select.select([tier.fd], [], [], 0.1)
        done += tier.poll(now_s)
    assert len(done) == num
    return done


def settle(tier, is_so, now_s=0.0):
    """Polls until `is_so()` returns True. Asserts that no request ends meanwhile."""
    deadline_s = CLOCK.now_s() + DEADLINE_S
    while not is_so():
        assert CLOCK.now_s() < deadline_s, "it does not come to that"
        select.select([tier.fd], [], [], 0.01)
        assert not tier.poll(now_s)


def write(tier, slot, block_hash, *, block_bytes=4096, parent=None, now_s=0.0):
    """Writes a block. Returns the reason of the failure, or None."""
    request = DiskWrite(slot, block_hash, content_of(block_hash, block_bytes), parent)
    assert tier.write([request], now_s) == 1
    return polled(tier, 1, now_s)[0].reason


def read(tier, slot, block_hash, *, block_bytes=4096, now_s=0.0):
    """Reads a block. Returns its bytes, or the reason of the failure.

    Asserts that a failed read does not change the row.
    """
    row = np.full(block_bytes, 7, np.uint8)
    request = DiskRead(slot, block_hash, row)
    assert tier.read([request], now_s) == 1
    reason = polled(tier, 1, now_s)[0].reason
    if reason is None:
        return row
    assert np.all(row == 7)
    return reason


def check_all(tier, blocks, *, block_bytes=4096):
    """Reads each recovered block. Returns the hashes of whole blocks, by slot.

    Asserts that each block has the bytes that were written under its hash.
    """
    whole = {}
    for block_hash, slot in blocks.slot_by_hash().items():
        found = read(tier, slot, block_hash, block_bytes=block_bytes)
        if isinstance(found, str):
            assert found == "damaged"
        else:
            assert np.array_equal(found, content_of(block_hash, block_bytes))
            whole[slot] = block_hash
    return whole


def descriptor_of(path):
    """Returns the descriptor of a file that this process has open."""
    for name in os.listdir("/proc/self/fd"):
        link = Path("/proc/self/fd", name)
        if link.is_symlink() and os.readlink(link).removesuffix(" (deleted)") == str(path):
            return int(name)
    raise AssertionError(f"{path} is not open")


def replace_file(path, other):
    """Makes the descriptor of the open file at `path` refer to the file of the descriptor
    `other`.
    """
    os.dup2(other, descriptor_of(path))

"""Measures the start-up time of a store with many blocks on disk, for `bench store`."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.clock import MonotonicClock
from engine.messages import HASH_BYTES
from kvtransfer.store.disk.format import (
    ALIGNMENT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    DiskGeometry,
    Headers,
)
from kvtransfer.store.disk.slabs import SLAB_BYTES, SlabFiles, remove_directory
from kvtransfer.store.disk.tier import DiskTier
from kvtransfer.store.disk.uring import header_checksums


@dataclass(frozen=True, slots=True)
class RecoveryTime:
    """Duration of a recovery of `num_blocks` in seconds, from opening files to a dict of all
    hashes.
    """

    num_blocks: int
    open_s: float
    dict_s: float


def measure_recovery(directory: Path, num_blocks: int, *, seed: int = 0) -> RecoveryTime:
    """Measures a recovery of blocks with synthetic headers. Creates and removes `directory`.

    The table is in the page cache. 4 KiB are allocated for each slot, but not written. Raises
    DirectoryInUse, DiskUnusable, and OSError if the disk is full.
    """
    clock = MonotonicClock()
    geometry = DiskGeometry(bytes(HASH_BYTES), ALIGNMENT, SLAB_BYTES // ALIGNMENT, num_blocks)
    _write_files(directory, geometry, np.random.default_rng(seed))
    tier = DiskTier(
        directory,
        identity=geometry.identity,
        block_bytes=geometry.block_bytes,
        max_bytes=num_blocks * (ALIGNMENT + HEADER_BYTES),
    )
    began_s = clock.now_s()
    blocks = tier.open(began_s)
    opened_s = clock.now_s()
    slots = blocks.slot_by_hash()
    ended_s = clock.now_s()
    tier.close(timeout_s=10.0)
    remove_directory(directory)
    return RecoveryTime(len(slots), opened_s - began_s, ended_s - opened_s)


def _write_files(directory: Path, geometry: DiskGeometry, rng: np.random.Generator) -> None:
    files = SlabFiles(directory, geometry)
    files.open()
    try:
        while not files.is_whole:
            files.add(files.allocate())
        os.pwrite(files.table_fd, _headers(geometry, rng).tobytes(), 0)
    finally:
        files.close()


def _headers(geometry: DiskGeometry, rng: np.random.Generator) -> Headers:
    """Returns headers of random blocks in random order. Each block's parent is the one before."""
    num_blocks = geometry.max_slots
    headers = np.zeros(num_blocks, HEADER)
    headers["magic"], headers["version"] = np.void(MAGIC), VERSION
    headers["identity"] = np.void(geometry.identity)
    headers["hash"] = np.frombuffer(rng.bytes(num_blocks * HASH_BYTES), f"V{HASH_BYTES}")
    headers["parent"][1:], headers["has_parent"][1:] = headers["hash"][:-1], 1
    headers["payload_bytes"] = geometry.block_bytes
    headers["sequence"] = 1 + rng.permutation(num_blocks)
    headers["slot"] = np.arange(num_blocks)
    headers["slab_slots"] = geometry.slab_slots
    headers["checksum"] = header_checksums(headers)
    return headers

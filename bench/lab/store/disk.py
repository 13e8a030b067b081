"""Measures loads from disk through `DiskTier` and through `fio`, alternately, on the same file.

Both read each slot of one slab once, in random order, with the same number of requests in flight,
and without the page cache. So both read the same bytes at the same places of the disk. `DiskTier`
also verifies each block's checksum and copies the block to a row of memory; fio discards the data.
All files are removed at the end.
"""

import json
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np

from bench.common.command import Say, say_nothing
from bench.lab.store.plan import DISK_DEPTH, DISK_TOTAL_BYTES, StorePlan
from engine.clock import MonotonicClock
from engine.errors import BatonError
from kvtransfer.store.disk.format import ALIGNMENT, HEADER_BYTES
from kvtransfer.store.disk.measuring import RecoveryTime, measure_recovery
from kvtransfer.store.disk.tier import DiskRead, DiskTier, DiskTuning, DiskWrite

IDENTITY = bytes(16)
NUM_ROWS = 2 * DISK_DEPTH  # number of memory rows into which blocks are read
WAIT_S = 10.0
CLOSE_TIMEOUT_S = 10.0
MOST_RECOVERIES = 3  # most timed recoveries; before each, a table of 250 bytes per block is written
FIO_TIMEOUT_S = 120.0
SLAB = "slab-00000"
# fio engines in order of preference; the first one that works is used
FIO_ENGINES = ("io_uring", "libaio", "psync")


class DiskNotMeasured(BatonError):
    """The disk or fio did not read as requested."""


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes per second of each repetition. `fio` is None if fio could not run; `reason`
    says why.
    """

    tier: tuple[float, ...]
    fio: tuple[float, ...] | None
    reason: str = ""
    facts: str = ""  # the engines that read


def measure(plan: StorePlan, say: Say = say_nothing) -> DiskRates:
    """Measures both rates. Raises BatonError."""
    block_bytes = plan.block_bytes
    fio = shutil.which("fio")
    with (
        TemporaryDirectory(prefix="baton-store-", dir=plan.folder) as folder,
        _filled(Path(folder) / "tier", block_bytes) as tier,
    ):
        slab = Path(folder) / "tier" / SLAB
        engine = None if fio is None else _engine_of(fio, slab, block_bytes)
        rates: list[float] = []
        theirs: list[float] = []
        for repeat in range(plan.repeat):
            say(f"loads from disk, repetition {repeat + 1} of {plan.repeat}")
            turns = [0, 1] if repeat % 2 else [1, 0]
            for turn in turns:
                if turn == 0:
                    rates.append(_loaded(tier, block_bytes, Random(f"{plan.seed}/{repeat}")))
                elif fio is not None and engine is not None:
                    theirs.append(_fio_rate(fio, engine, slab, block_bytes))
        fallbacks = ", ".join(n for n in tier.counters if n.startswith("fallbacks"))
    if fio is None:
        return DiskRates(tuple(rates), None, "fio is not installed")
    if engine is None:
        return DiskRates(tuple(rates), None, "fio runs none of its engines here")
    return DiskRates(tuple(rates), tuple(theirs), facts=f"fio {engine}; {fallbacks or 'io_uring'}")


def recovery(plan: StorePlan, folder: Path, say: Say = say_nothing) -> tuple[RecoveryTime, ...]:
    """Measures the seconds until a store with many blocks on disk has started. Uses `folder`.
    Raises BatonError, OSError.
    """
    found = []
    for repeat in range(min(plan.repeat, MOST_RECOVERIES)):
        say(f"a start with {plan.recovered:,} blocks on disk, {repeat + 1}")
        found.append(measure_recovery(folder / "tier", plan.recovered, seed=plan.seed + repeat))
    return tuple(found)


@contextmanager
def _filled(directory: Path, block_bytes: int) -> Iterator[DiskTier]:
    """Returns a disk tier whose slots are all full."""
    num_blocks = DISK_TOTAL_BYTES // block_bytes
    tier = DiskTier(
        directory,
        identity=IDENTITY,
        block_bytes=block_bytes,
        # one slab with all slots full
        max_bytes=num_blocks * (_stride(block_bytes) + HEADER_BYTES),
        tuning=DiskTuning(depth=DISK_DEPTH),
    )
    clock = MonotonicClock()
    tier.open(clock.now_s())
    try:
        row = np.frombuffer(Random(0).randbytes(block_bytes), np.uint8)
        writes = [DiskWrite(slot, _hash_of(slot), row) for slot in range(num_blocks)]
        _carry_out(tier, writes)
        yield tier
    finally:
        tier.close(CLOSE_TIMEOUT_S)


def _loaded(tier: DiskTier, block_bytes: int, rng: Random) -> float:
    """Reads every block once, in random order. Returns the bytes per second."""
    num_blocks = DISK_TOTAL_BYTES // block_bytes
    rows = np.zeros((NUM_ROWS, block_bytes), np.uint8)
    slots = rng.sample(range(num_blocks), num_blocks)
    reads = [DiskRead(s, _hash_of(s), rows[i % NUM_ROWS]) for i, s in enumerate(slots)]
    clock = MonotonicClock()
    begun_s = clock.now_s()
    _carry_out(tier, reads)
    return num_blocks * block_bytes / (clock.now_s() - begun_s)


def _carry_out(tier: DiskTier, requests: list[DiskRead] | list[DiskWrite]) -> None:
    """Performs the requests, with as many in flight as rows and depth allow. Raises
    DiskNotMeasured.
    """
    clock = MonotonicClock()
    num_begun = num_ended = 0
    while num_ended < len(requests):
        some = requests[num_begun : num_begun + tier.room]
        if some:
            begin = tier.read if isinstance(some[0], DiskRead) else tier.write
            num_begun += begin(some, clock.now_s())  # type: ignore[arg-type]  # all of one kind
        ready, _, _ = select.select([tier.fd], [], [], WAIT_S)
        if not ready:
            raise DiskNotMeasured(f"the disk tier did nothing for {WAIT_S:g} s")
        for done in tier.poll(clock.now_s()):
            if done.reason is not None:
                raise DiskNotMeasured(f"a request of the disk tier failed: {done.reason}")
            num_ended += 1


def _stride(block_bytes: int) -> int:
    """Returns the bytes from one slot to the next."""
    return -(-block_bytes // ALIGNMENT) * ALIGNMENT


def _hash_of(slot: int) -> bytes:
    return slot.to_bytes(16, "little")


def _engine_of(fio: str, slab: Path, block_bytes: int) -> str | None:
    """Returns the first engine with which fio can read on this machine, or None."""
    for engine in FIO_ENGINES:
        try:
            _fio_rate(fio, engine, slab, block_bytes)
        except DiskNotMeasured:
            continue
        return engine
    return None


def _fio_rate(fio: str, engine: str, slab: Path, block_bytes: int) -> float:
    """Reads each slot once with fio. Returns the bytes per second. Raises DiskNotMeasured."""
    command = [
        *(fio, "--name=read", f"--filename={slab}", "--rw=randread", "--direct=1"),
        *(f"--bs={_stride(block_bytes)}", f"--iodepth={DISK_DEPTH}", f"--ioengine={engine}"),
        *("--output-format=json", "--readonly"),
    ]
    try:
        ran = subprocess.run(
            command, capture_output=True, timeout=FIO_TIMEOUT_S, check=True, cwd=slab.parent.parent
        )
        job = json.loads(ran.stdout)["jobs"][0]
        if job["error"]:
            raise DiskNotMeasured(f"fio: error {job['error']}")
        return 1e3 * float(job["read"]["io_bytes"]) / float(job["read"]["runtime"])
    except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
        raise DiskNotMeasured(f"fio: {error}") from error

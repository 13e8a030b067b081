"""After a crash at any moment, a slot is empty or has a whole block, never wrong bytes."""

import os
import random
import select
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.store.disk import threads
from kvtransfer.store.disk.tier import DiskWrite
from tests.kits.seeds import seeds
from tests.transfer.store.crashing import BLOCK_BYTES, NOTHING, OPTIONS, RECORD
from tests.transfer.store.tiers import (
    DEADLINE_S,
    ENGINES,
    check_all,
    content_of,
    hash_of,
    opened,
    polled,
    write,
)

ROOT = Path(__file__).parents[3]
LONGEST_LIFE_S = 0.15


@pytest.mark.parametrize("engine", ENGINES)
def test_after_kill_9_at_any_moment_every_block_has_its_own_bytes(tmp_path, engine):
    num_recovered, before = 0, {}
    for seed in seeds(8):
        told = run_until_killed(tmp_path, engine, seed)
        with opened(tmp_path, engine, **OPTIONS) as (tier, blocks):
            whole = check_all(tier, blocks, block_bytes=BLOCK_BYTES)
            assert len(whole) == len(blocks), "no payload is damaged when only the process dies"
            assert set(tier.counters) <= {"recovered", "reads", "read_bytes"}
        check(before, told, whole)
        before = whole
        num_recovered += len(whole)
    assert num_recovered > 0


def run_until_killed(directory, engine, seed):
    """Runs a process that is killed at a random moment while it writes. Returns its records."""
    command = [sys.executable, "-m", "tests.transfer.store.crashing", directory, engine, str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert select.select([process.stdout], [], [], DEADLINE_S)[0], "it does not begin"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(random.Random(seed).uniform(0, LONGEST_LIFE_S))
        finally:
            process.kill()
        told = process.stdout.read()
    return [RECORD.unpack_from(told, at) for at in range(0, len(told), RECORD.size)]


def check(before, told, whole):
    """Asserts that the blocks on disk agree with the records of the killed process."""
    possible = {slot: {before.get(slot, NOTHING)} for slot in range(OPTIONS["num_slots"])}
    for what, slot, block_hash in told:
        if what == b"begin":
            possible[slot] |= {block_hash, NOTHING}
        else:
            possible[slot] = {block_hash}
    for slot, hashes in possible.items():
        assert whole.get(slot, NOTHING) in hashes


class Recorder:
    """Records all writes of the engine in Python: the file, the offset and the bytes."""

    def __init__(self, monkeypatch):
        self.writes = []
        self._pwrite, self._pwritev = os.pwrite, os.pwritev
        monkeypatch.setattr(threads.os, "pwrite", self.pwrite)
        monkeypatch.setattr(threads.os, "pwritev", self.pwritev)

    def pwrite(self, fd, content, offset):
        self.writes.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, offset, bytes(content)))
        return self._pwrite(fd, content, offset)

    def pwritev(self, fd, buffers, offset):
        content = b"".join(map(bytes, buffers))
        self.writes.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, offset, content))
        return self._pwritev(fd, buffers, offset)


def recorded_history(directory, slots):
    """Writes a new block to each of the slots in turn; returns all writes to files."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorder = Recorder(monkeypatch)
        with opened(directory, num_slots=2) as (tier, _):
            for number, slot in enumerate(slots, 1):
                assert write(tier, slot, hash_of(number)) is None
    return recorder.writes


def replay(directory, writes):
    """Applies these writes, each (name, offset, bytes), to files of a new tier."""
    with opened(directory, num_slots=2):
        pass  # opening the tier allocates its files
    for name, offset, content in writes:
        with (directory / name).open("r+b") as file:
            file.seek(offset)
            file.write(content)


def torn(writes, data):
    """Yields a part of each write: nothing, the whole write, or its beginning."""
    for name, offset, content in writes:
        kept = data.draw(st.sampled_from([0, len(content)]) | st.integers(0, len(content)))
        yield name, offset, content[:kept]


some_examples = settings(
    max_examples=settings().max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
some_slots = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@some_examples
@given(slots=some_slots, data=st.data())
def test_a_process_that_ends_within_any_write_leaves_whole_blocks(tmp_path_factory, slots, data):
    top = tmp_path_factory.mktemp("torn")
    writes = recorded_history(top / "history", slots)
    # three writes per slot: clear the header, write the payload, write the header
    assert len(writes) == 3 * len(slots)
    index = data.draw(st.integers(0, len(writes) - 1))
    name, offset, content = writes[index]
    kept = data.draw(st.integers(0, len(content)))
    replay(top / "crashed", [*writes[:index], (name, offset, content[:kept])])
    with opened(top / "crashed", num_slots=2) as (tier, blocks):
        whole = check_all(tier, blocks)
        assert len(whole) == len(blocks)
    for slot in (0, 1):
        told = [number for number, at in enumerate(slots, 1) if at == slot and 3 * number <= index]
        begun = slots[index // 3] == slot
        expected = hash_of(told[-1]) if told else None
        possible = {expected, None, hash_of(index // 3 + 1)} if begun else {expected}
        assert whole.get(slot) in possible


@some_examples
@given(slots=some_slots, data=st.data())
def test_a_power_cut_that_loses_or_tears_any_writes_leaves_no_wrong_block(
    tmp_path_factory, slots, data
):
    top = tmp_path_factory.mktemp("cut")
    writes = recorded_history(top / "history", slots)
    replay(top / "crashed", torn(writes, data))
    with opened(top / "crashed", num_slots=2) as (tier, blocks):
        written = {(hash_of(number), slot) for number, slot in enumerate(slots, 1)}
        assert set(blocks.slot_by_hash().items()) <= written
        whole = check_all(tier, blocks)
        assert tier.counters.get("errors:damaged", 0) == len(blocks) - len(whole)
    # the headers of damaged blocks were cleared
    with opened(top / "crashed", num_slots=2) as (_, blocks):
        assert blocks.slot_by_hash() == {block_hash: slot for slot, block_hash in whole.items()}


@some_examples
@given(data=st.data())
def test_flipped_bits_and_cut_files_never_give_wrong_bytes(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("flipped")
    with opened(directory, num_slots=2) as (tier, _):
        rows = [(slot, hash_of(slot + 1)) for slot in (0, 1)]
        tier.write([DiskWrite(slot, one, content_of(one)) for slot, one in rows], 0.0)
        polled(tier, 2)
    for _ in range(data.draw(st.integers(1, 3))):
        path = directory / data.draw(st.sampled_from(["headers", "slab-00000"]))
        size = path.stat().st_size
        if data.draw(st.booleans()):
            os.truncate(path, data.draw(st.integers(0, size)))
        elif size:
            flip(path, data.draw(st.integers(0, 8 * size - 1)))
    with opened(directory, num_slots=2) as (tier, blocks):
        check_all(tier, blocks)


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (before,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([before ^ 1 << bit % 8]))

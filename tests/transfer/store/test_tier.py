"""Each engine reads blocks from disk unchanged, also after a restart."""

import numpy as np
import pytest

from kvtransfer.store.disk.format import HEADER
from kvtransfer.store.disk.measuring import measure_recovery
from kvtransfer.store.disk.slabs import (
    DirectoryInUse,
    directories,
    identity_directory,
    remove_directory,
)
from kvtransfer.store.disk.tier import DiskRead, DiskTier, DiskWrite
from kvtransfer.store.disk.uring import header_checksums
from tests.kits.twins.checksums import slow_header_checksums
from tests.transfer.store.tiers import (
    DEADLINE_S,
    ENGINES,
    IDENTITY,
    check_all,
    content_of,
    hash_of,
    new_tier,
    opened,
    polled,
    read,
    settle,
    shifted,
    write,
)

each_engine = pytest.mark.parametrize("engine", ENGINES)
NEW = b"a new block's ha"


@each_engine
@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("block_bytes", [100, 4096, 5000, 300 * 1024])
def test_blocks_are_read_as_they_were_written(tmp_path, engine, block_bytes, shift):
    numbers = range(1, 9)
    contents = [content_of(hash_of(n), block_bytes) for n in numbers]
    with opened(tmp_path, engine, block_bytes=block_bytes, slab_bytes=1 << 22) as (tier, _):
        rows = [shifted(content, shift) for content in contents]
        writes = [DiskWrite(n - 1, hash_of(n), row) for n, row in zip(numbers, rows, strict=True)]
        assert tier.write(writes, 0.0) == len(writes)
        assert {done.reason for done in polled(tier, len(writes), 0.0)} == {None}
        sinks = [shifted(np.zeros(block_bytes, np.uint8), shift) for _ in numbers]
        reads = [DiskRead(n - 1, hash_of(n), row) for n, row in zip(numbers, sinks, strict=True)]
        assert tier.read(reads, 0.0) == len(reads)
        assert {done.request for done in polled(tier, len(reads), 0.0)} == set(reads)
        assert all(map(np.array_equal, sinks, contents))
    with opened(tmp_path, engine, block_bytes=block_bytes, slab_bytes=1 << 22) as (tier, blocks):
        assert len(check_all(tier, blocks, block_bytes=block_bytes)) == len(writes)


@each_engine
def test_a_restart_finds_blocks_parents_and_order(tmp_path, engine):
    with opened(tmp_path, engine) as (tier, blocks):
        assert len(blocks) == 0
        assert write(tier, 1, hash_of(1)) is None
        assert write(tier, 0, hash_of(2), parent=hash_of(1)) is None
    other = "threads" if engine == "uring" else "uring"  # both engines use the same file format
    with opened(tmp_path, other) as (tier, blocks):
        assert blocks.slot_by_hash() == {hash_of(1): 1, hash_of(2): 0}
        assert blocks.parent_by_hash() == {hash_of(1): None, hash_of(2): hash_of(1)}
        assert blocks.sequences.tolist() == [1, 2]
        assert write(tier, 1, hash_of(3)) is None
    with opened(tmp_path, engine) as (_, blocks):
        assert blocks.slot_by_hash() == {hash_of(2): 0, hash_of(3): 1}
        assert blocks.sequences.tolist() == [2, 3]


@each_engine
def test_forgotten_blocks_are_neither_read_nor_recovered(tmp_path, engine):
    with opened(tmp_path, engine) as (tier, _):
        for slot in (0, 1):
            assert write(tier, slot, hash_of(slot)) is None
        tier.remove(0, 0.0)
        assert read(tier, 0, hash_of(0)) == "not_held"
        settle(tier, lambda: tier.counters.get("clears") == 1)
        tier.remove(0, 0.0)  # the block is removed already, so this call does nothing
        assert read(tier, 1, hash_of(1)) is not None
        assert tier.counters["clears"] == 1
    with opened(tmp_path, engine) as (_, blocks):
        assert blocks.slot_by_hash() == {hash_of(1): 1}


@each_engine
def test_operations_on_one_slot_take_place_in_order(tmp_path, engine):
    with opened(tmp_path, engine) as (tier, _):
        old, new = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
        tier.write([DiskWrite(0, hash_of(1), content_of(hash_of(1)))], 0.0)
        tier.read([DiskRead(0, hash_of(1), old)], 0.0)
        tier.write([DiskWrite(0, NEW, content_of(NEW))], 0.0)
        tier.read([DiskRead(0, hash_of(1), np.zeros(4096, np.uint8))], 0.0)
        tier.read([DiskRead(0, NEW, new)], 0.0)
        tier.remove(0, 0.0)
        reasons = [done.reason for done in polled(tier, 5, 0.0)]
        settle(tier, lambda: "clears" in tier.counters)
        assert np.array_equal(old, content_of(hash_of(1)))
        # `remove` takes effect at once: a read that has not begun is refused.
        assert reasons[:3] == [None, None, None]
        assert set(reasons[3:]) <= {None, "not_held"}
    with opened(tmp_path, engine) as (_, blocks):
        assert len(blocks) == 0


@each_engine
def test_more_requests_than_there_is_room_for_are_left_to_the_caller(tmp_path, engine):
    with opened(tmp_path, engine, depth=3) as (tier, _):
        writes = [DiskWrite(slot, hash_of(slot), content_of(hash_of(slot))) for slot in (0, 1)] * 3
        assert tier.room == 3
        assert tier.write(writes, 0.0) == 3
        assert tier.room == 0
        assert tier.write(writes, 0.0) == 0
        polled(tier, 3)
        assert tier.room == 3


def test_refused_requests_take_room_until_they_are_polled(tmp_path):
    with opened(tmp_path, depth=2) as (tier, _):
        requests = [DiskRead(0, NEW, np.zeros(4096, np.uint8)) for _ in range(5)]
        assert tier.read(requests, 0.0) == 2
        assert tier.room == 0
        assert [done.reason for done in polled(tier, 2)] == ["not_held", "not_held"]
        assert tier.counters["errors:not_held"] == 2


@pytest.mark.parametrize(
    ("slot", "block_hash", "row"),
    [
        (0, b"short", np.zeros(4096, np.uint8)),
        (8, NEW, np.zeros(4096, np.uint8)),
        (-1, NEW, np.zeros(4096, np.uint8)),
        (0, NEW, np.zeros(4095, np.uint8)),
        (0, NEW, np.zeros(4096, np.int8)),
        (0, NEW, np.zeros(8192, np.uint8)[::2]),
        (0, NEW, np.frombuffer(bytes(4096), np.uint8)),
    ],
)
def test_requests_that_make_no_sense_are_refused_at_once(tmp_path, slot, block_hash, row):
    with opened(tmp_path) as (tier, _), pytest.raises(ValueError, match=r"slot|row"):
        tier.read([DiskRead(slot, block_hash, row)], 0.0)


def test_slabs_are_allocated_as_they_come_into_use(tmp_path):
    with opened(tmp_path, num_slots=5) as (tier, _):
        seen = [tier.num_slots]
        for slot in range(5):
            assert write(tier, slot, hash_of(slot)) is None
            settle(tier, lambda done=slot + 1: tier.num_slots >= min(5, 2 * (done // 2 + 1)))
            seen.append(tier.num_slots)
        assert seen[0] == 2
        assert seen[-1] == tier.max_slots == 5
        assert sorted(seen) == seen
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    slabs = {"slab-00000": 8192, "slab-00001": 8192, "slab-00002": 4096}
    assert sizes == {"headers": 5 * 128, **slabs}
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in tmp_path.iterdir())


def test_slots_that_are_not_allocated_hold_nothing(tmp_path):
    with opened(tmp_path) as (tier, _):
        assert write(tier, 7, NEW) == "no_slot"
        assert read(tier, 7, NEW) == "no_slot"


def test_a_smaller_store_drops_slabs_and_blocks_beyond_its_size(tmp_path):
    with opened(tmp_path, num_slots=8) as (tier, _):
        for slot in range(8):
            settle(tier, lambda slot=slot: tier.num_slots > slot)
            assert write(tier, slot, hash_of(slot)) is None
    with opened(tmp_path, num_slots=3) as (tier, blocks):
        assert list(check_all(tier, blocks)) == [0, 1, 2]
    assert {path.name for path in tmp_path.glob("slab-*")} == {"slab-00000", "slab-00001"}
    with opened(tmp_path, num_slots=8) as (tier, blocks):
        assert list(check_all(tier, blocks)) == [0, 1, 2]


@each_engine
def test_clear_forgets_everything_for_ever(tmp_path, engine):
    with opened(tmp_path, engine) as (tier, _):
        assert write(tier, 0, hash_of(1)) is None
        tier.write([DiskWrite(1, NEW, content_of(NEW))], 0.0)
        tier.clear()
        assert tier.room == 0
        assert polled(tier, 1)[0].reason == "cleared"
        assert tier.room > 0
        assert read(tier, 0, hash_of(1)) == "not_held"
        assert read(tier, 1, NEW) == "not_held"
        assert write(tier, 1, hash_of(3)) is None
    with opened(tmp_path, engine) as (_, blocks):
        assert blocks.slot_by_hash() == {hash_of(3): 1}


def test_two_tiers_never_use_one_directory(tmp_path):
    with opened(tmp_path):
        with pytest.raises(DirectoryInUse):
            new_tier(tmp_path).open(0.0)
        with pytest.raises(DirectoryInUse):
            remove_directory(tmp_path)
    with opened(tmp_path):
        pass


def test_directories_are_listed_and_removed(tmp_path):
    root = tmp_path / "store"
    assert directories(root) == {}
    directory = identity_directory(root, IDENTITY)
    with opened(directory) as (tier, _):
        assert write(tier, 0, NEW) is None
    (root / "something else").mkdir()
    (root / ("f" * 32)).symlink_to(directory)
    assert list(directories(root)) == [directory]
    assert directories(root)[directory] >= 2 * 4096
    remove_directory(directory)
    assert directories(root) == {}
    remove_directory(directory)  # the directory does not exist any more
    with opened(directory) as (_, blocks):
        assert len(blocks) == 0


def test_files_of_others_stay_when_a_directory_is_removed(tmp_path):
    directory = identity_directory(tmp_path, IDENTITY)
    with opened(directory):
        pass
    (directory / "notes").write_text("keep")
    remove_directory(directory)
    assert [path.name for path in directory.iterdir()] == ["notes"]


def test_blocks_are_for_this_user_alone(tmp_path):
    with opened(tmp_path / "new"):
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    assert modes == {0o600}
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_another_identity_finds_nothing(tmp_path):
    with opened(tmp_path) as (tier, _):
        assert write(tier, 0, NEW) is None
    other = DiskTier(tmp_path, identity=b"?" * 16, block_bytes=4096, max_bytes=1 << 16)
    assert len(other.open(0.0)) == 0
    assert other.counters["skipped:other_identity"] == 1
    assert other.close(DEADLINE_S)


@each_engine
def test_close_waits_for_writes_that_are_under_way(tmp_path, engine):
    with opened(tmp_path, engine) as (tier, _):
        tier.write(
            [DiskWrite(slot, hash_of(slot), content_of(hash_of(slot))) for slot in (0, 1)],
            0.0,
        )
    with opened(tmp_path, engine) as (tier, blocks):
        check_all(tier, blocks)


def test_checksums_of_headers_in_cpp_are_those_in_python():
    entries = np.random.default_rng(5).integers(0, 256, (100, 128), np.uint8)
    headers = entries.view(HEADER)[:, 0]
    assert np.array_equal(header_checksums(headers), slow_header_checksums(headers))


def test_recovery_is_measured_with_made_up_headers(tmp_path):
    found = measure_recovery(tmp_path / "many", 3000)
    assert found.num_blocks == 3000
    assert not (tmp_path / "many").exists()

"""A fault of the disk makes a request fail with a reason, and serving never depends on a disk."""

import fcntl
import os
import resource
import select
import shutil
import subprocess
import threading
from contextlib import contextmanager

import numpy as np
import pytest

from kvtransfer.store.disk import threads, uring
from kvtransfer.store.disk.slabs import DiskUnusable, SlabFiles, remove_directory
from kvtransfer.store.disk.tier import DiskRead, DiskWrite
from tests.transfer.store.tiers import (
    ENGINES,
    check_all,
    content_of,
    hash_of,
    new_tier,
    opened,
    polled,
    read,
    replace_file,
    settle,
    write,
)

each_engine = pytest.mark.parametrize("engine", ENGINES)
NEW = b"a new block's ha"
MIB = 2**20


@contextmanager
def mounted(directory, options):
    """Mounts a file system in memory, and skips the test if this user may not mount one."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@contextmanager
def files_no_longer_than(num_bytes):
    """Limits the size of this process's files, with the same effect as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@each_engine
def test_a_full_disk_fails_writes_and_keeps_no_header(tmp_path, engine):
    with opened(tmp_path, engine) as (tier, _):
        assert write(tier, 0, hash_of(1)) is None
        fd = os.open("/dev/full", os.O_RDWR)
        replace_file(tmp_path / "slab-00000", fd)
        os.close(fd)
        assert write(tier, 0, NEW) == "ENOSPC"
        assert read(tier, 0, NEW) == "not_held"
        assert tier.counters["errors:ENOSPC"] == 1
        assert not tier.is_off
    with opened(tmp_path, engine) as (_, blocks):
        assert len(blocks) == 0


@each_engine
def test_a_disk_that_cannot_be_read_fails_reads(tmp_path, engine):
    with opened(tmp_path, engine) as (tier, _):
        assert write(tier, 0, NEW) is None
        # no memory is mapped at offset 0, so reads fail with EIO
        fd = os.open("/proc/self/mem", os.O_RDONLY)
        replace_file(tmp_path / "slab-00000", fd)
        os.close(fd)
        assert read(tier, 0, NEW) == "EIO"
        assert tier.counters["errors:EIO"] == 1


@each_engine
def test_a_table_that_cannot_be_written_fails_writes_before_the_payload(tmp_path, engine):
    with opened(tmp_path, engine) as (tier, _):
        assert write(tier, 0, NEW) is None
        fd = os.open(tmp_path / "headers", os.O_RDONLY)
        replace_file(tmp_path / "headers", fd)
        os.close(fd)
        assert write(tier, 0, hash_of(2)) == "EBADF"
    with opened(tmp_path, engine) as (tier, blocks):
        assert check_all(tier, blocks) == {0: NEW}  # the failed write did not change the old block


@each_engine
def test_a_slab_that_ends_early_fails_reads(tmp_path, engine):
    with opened(tmp_path, engine, block_bytes=9000) as (tier, _):
        assert write(tier, 1, NEW, block_bytes=9000) is None
        for size in (12288 + 8192, 12288 + 100, 0):
            os.truncate(tmp_path / "slab-00000", size)
            assert read(tier, 1, NEW, block_bytes=9000) == "short"
    with opened(tmp_path, engine, block_bytes=9000) as (tier, blocks):
        assert read(tier, 1, NEW, block_bytes=9000) == "damaged"
        assert read(tier, 1, NEW, block_bytes=9000) == "not_held"
    with opened(tmp_path, engine, block_bytes=9000) as (_, blocks):
        assert len(blocks) == 0


@each_engine
def test_a_disk_that_vanishes_costs_only_growth(tmp_path, engine):
    directory = tmp_path / "gone"
    with opened(directory, engine) as (tier, _):
        assert write(tier, 0, NEW) is None
        settle(tier, lambda: tier.num_slots == 4)
        shutil.rmtree(directory)
        assert read(tier, 0, NEW) is not None
        assert write(tier, 2, hash_of(2)) is None
        settle(tier, lambda: tier.counters.get("growth_errors:ENOENT") == 1)
        assert tier.num_slots == 4
        assert not tier.is_off


def test_growth_that_fails_is_tried_again_after_a_pause(tmp_path):
    with opened(tmp_path) as (tier, _):
        with files_no_longer_than(4096):
            assert write(tier, 0, NEW, now_s=5.0) is None
            # a file within the limit has room for one slot
            settle(tier, lambda: tier.num_slots == 3, now_s=5.0)
            assert write(tier, 2, hash_of(2), now_s=5.0) is None
            settle(tier, lambda: tier.counters.get("growth_errors:EFBIG") == 1, now_s=5.0)
            tier.poll(5.9)
            tier.poll(6.0)
            settle(tier, lambda: tier.counters["growth_errors:EFBIG"] == 2, now_s=6.0)
        assert tier.num_slots == 3
        settle(tier, lambda: tier.num_slots == 4, now_s=8.0)


def test_a_full_file_system_leaves_fewer_slots_and_is_said(tmp_path):
    with mounted(tmp_path / "small", "size=28k") as root, opened(root / "d") as (tier, _):
        for slot in range(6):  # the file system has seven pages: for six blocks and the table
            settle(tier, lambda slot=slot: tier.num_slots > slot)
            assert write(tier, slot, hash_of(slot)) is None
        settle(tier, lambda: "growth_errors:ENOSPC" in tier.counters)
        assert tier.num_slots == 6
        assert all(
            np.array_equal(read(tier, n, hash_of(n)), content_of(hash_of(n))) for n in range(6)
        )


def test_a_file_system_that_is_full_from_the_start_leaves_no_slots(tmp_path):
    with mounted(tmp_path / "small", "size=8k") as root, opened(root / "d") as (tier, blocks):
        assert len(blocks) == 0
        assert tier.num_slots == 0
        assert tier.counters["growth_errors:ENOSPC"] == 1
        assert write(tier, 0, NEW) == "no_slot"


def test_a_slab_that_does_not_fit_is_allocated_in_part_and_grows_with_the_room(tmp_path):
    large = {"block_bytes": MIB, "num_slots": 64, "slab_bytes": 32 * MIB}
    with mounted(tmp_path / "small", "size=28m") as root:
        with opened(root / "d", **large) as (tier, _):
            num_slots = tier.num_slots
            assert 10 <= num_slots <= 12, "what is free, but 16 MiB"
            for slot in range(num_slots):
                assert write(tier, slot, hash_of(slot), block_bytes=MIB) is None
            settle(tier, lambda: tier.shortage == "ENOSPC")
            assert not tier.is_off
        with opened(root / "d", **large) as (tier, blocks):  # the disk is full now
            assert (tier.num_slots, len(blocks)) == (num_slots, num_slots)
            settle(tier, lambda: tier.shortage == "ENOSPC")
            subprocess.run(["mount", "-o", "remount,size=100m", root], check=True)
            settle(tier, lambda: tier.num_slots == 64, now_s=60.0)
            assert tier.shortage is None
            assert len(check_all(tier, blocks, block_bytes=MIB)) == num_slots
            assert write(tier, 40, NEW, block_bytes=MIB) is None


def test_a_limit_that_the_file_system_does_not_tell_leaves_a_part_of_a_slab(tmp_path):
    large = {"block_bytes": MIB, "num_slots": 64, "slab_bytes": 64 * MIB}
    with files_no_longer_than(9 * MIB), opened(tmp_path, **large) as (tier, _):
        settle(tier, lambda: tier.num_slots == 9, now_s=0.0)
        settle(tier, lambda: tier.shortage == "EFBIG")
        assert write(tier, 8, NEW, block_bytes=MIB) is None
        assert write(tier, 9, NEW, block_bytes=MIB) == "no_slot"


def test_a_read_only_file_system_is_a_typed_error(tmp_path):
    with mounted(tmp_path / "fixed", "ro") as root:
        with pytest.raises(DiskUnusable) as caught:
            new_tier(root / "d").open(0.0)
        assert caught.value.reason == "EROFS"


def test_a_file_in_place_of_the_directory_is_a_typed_error(tmp_path):
    (tmp_path / "d").write_text("no directory")
    with pytest.raises(DiskUnusable) as caught:
        new_tier(tmp_path / "d").open(0.0)
    assert caught.value.reason == "EEXIST"
    with pytest.raises(DiskUnusable):
        remove_directory(tmp_path / "d")


def test_links_in_place_of_files_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("content")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "headers").symlink_to(victim)
    with pytest.raises(DiskUnusable) as caught:
        new_tier(tmp_path / "d").open(0.0)
    assert caught.value.reason == "ELOOP"
    assert victim.read_text() == "content"


@each_engine
def test_after_failures_in_a_row_the_disk_is_off_and_comes_back(tmp_path, engine):
    with opened(tmp_path, engine, most_failures=3, pause_s=2.0) as (tier, _):
        assert write(tier, 1, NEW, now_s=0.0) is None
        os.truncate(tmp_path / "slab-00000", 4096)
        for _ in range(3):
            assert not tier.is_off
            assert read(tier, 1, NEW) == "short"
        assert tier.off_reason == "short"
        assert read(tier, 1, NEW, now_s=1.9) == "off"
        # this read is the trial of the disk; after its failure the pause is 4 s
        assert read(tier, 1, NEW, now_s=2.0) == "short"
        assert write(tier, 0, hash_of(2), now_s=5.9) == "off"
        assert write(tier, 0, hash_of(2), now_s=6.0) is None
        assert not tier.is_off
        assert tier.counters["errors:off"] == 2
        assert tier.counters["offs"] == 1


def test_without_io_uring_threads_do_the_same_and_it_is_counted(tmp_path, monkeypatch, caplog):
    def refuse(*arguments):
        return 1  # errno 1 is EPERM

    monkeypatch.setattr(uring.library(), "baton_disk_open", refuse)
    tier = new_tier(tmp_path, "uring")
    tier.open(0.0)
    assert write(tier, 0, NEW) is None
    assert read(tier, 0, NEW) is not None
    assert tier.counters["fallbacks:no_uring"] == 1
    assert "Operation not permitted" in caplog.text
    assert tier.close(5.0)


@each_engine
def test_without_direct_io_the_page_cache_is_used_and_it_is_counted(tmp_path, engine, monkeypatch):
    def refuse_direct(path, flags, mode=0o777, *, dir_fd=None):
        if flags & os.O_DIRECT:
            raise OSError(22, "no direct I/O")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    real_open = os.open
    monkeypatch.setattr("kvtransfer.store.disk.slabs.os.open", refuse_direct)
    with opened(tmp_path, engine) as (tier, _):
        assert tier.counters["fallbacks:no_direct"] == 1
        assert write(tier, 0, NEW) is None
        assert np.array_equal(read(tier, 0, NEW), content_of(NEW))


@contextmanager
def hanging(engine, path):
    """Makes reads of a slab hang. Yields a function that ends them with the bytes of `NEW`."""
    if engine == "uring":
        reader, writer = os.pipe()
        replace_file(path, reader)
        try:
            yield lambda: os.write(writer, content_of(NEW).tobytes())
        finally:
            os.close(reader)
            os.close(writer)
        return
    go_on, preadv = threading.Event(), os.preadv

    def hang(*arguments):
        assert go_on.wait(20)
        return preadv(*arguments)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(threads.os, "preadv", hang)
        yield go_on.set
        go_on.set()


@each_engine
def test_a_slow_disk_fails_requests_in_time_and_never_touches_their_rows_later(tmp_path, engine):
    with opened(tmp_path, engine, depth=2, timeout_s=3.0, most_failures=1) as (tier, _):
        assert write(tier, 0, NEW) is None
        with hanging(engine, tmp_path / "slab-00000") as go_on:
            row = np.full(4096, 7, np.uint8)
            tier.read([DiskRead(0, NEW, row)], 1.0)
            assert not tier.poll(3.9)
            assert [done.reason for done in tier.poll(4.0)] == ["timeout"]
            assert tier.off_reason == "timeout"
            assert tier.room == 1  # the engine still has the timed-out request
            go_on()
            settle(tier, lambda: tier.room == 2, now_s=4.0)
            assert np.all(row == 7)
            assert tier.counters["errors:timeout"] == 1


@each_engine
def test_close_gives_up_on_a_disk_that_hangs_and_its_rows_stay(tmp_path, engine):
    tier = new_tier(tmp_path, engine)
    tier.open(0.0)
    if "fallbacks:no_uring" in tier.counters:
        pytest.skip("io_uring is not allowed here")
    assert write(tier, 0, NEW) is None
    settle(tier, lambda: tier.num_slots == 4)
    with hanging(engine, tmp_path / "slab-00000") as go_on:
        row = np.full(4096, 7, np.uint8)
        tier.read([DiskRead(0, NEW, row)], 0.0)
        # this write began after the read, so the engine has begun the read too
        assert write(tier, 2, hash_of(2)) is None
        assert not tier.close(timeout_s=0.05)
        assert tier.counters["abandoned"] == 1
        go_on()
        assert select.select([tier.fd], [], [], 20)[0], "the read has not ended"
        assert np.all(row == 7)


@contextmanager
def hanging_writes(engine, path):
    """Makes writes of payloads hang. Yields a function that lets the writes continue."""
    if engine == "uring":
        reader, writer = os.pipe()
        capacity = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
        os.write(writer, bytes(capacity))
        replace_file(path, writer)
        os.close(writer)
        yield lambda: os.read(reader, capacity)
        os.close(reader)
        return
    go_on, pwritev = threading.Event(), os.pwritev

    def hang(*arguments):
        assert go_on.wait(20)
        return pwritev(*arguments)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(threads.os, "pwritev", hang)
        yield go_on.set


@each_engine
def test_a_write_that_ends_after_its_timeout_leaves_no_header(tmp_path, engine):
    with opened(tmp_path, engine, timeout_s=3.0) as (tier, _):
        with hanging_writes(engine, tmp_path / "slab-00000") as go_on:
            row = content_of(NEW)
            tier.write([DiskWrite(0, NEW, row)], 0.0)
            assert [done.reason for done in tier.poll(3.0)] == ["timeout"]
            row[:] = 0  # the owner reuses the row after the timeout
            tier.read([DiskRead(0, NEW, np.zeros(4096, np.uint8))], 3.0)
            go_on()
            assert polled(tier, 1, 3.0)[0].reason == "not_held"
        assert set(tier.counters) == {"recovered", "errors:timeout", "errors:not_held"}
    assert (tmp_path / "headers").read_bytes().strip(b"\0") == b""


@each_engine
def test_while_a_payload_is_written_its_slot_has_no_header(tmp_path, engine):
    table = tmp_path / "headers"
    with opened(tmp_path, engine) as (tier, _):
        assert write(tier, 0, hash_of(1)) is None
        settle(tier, lambda: tier.num_slots == 4)
        with hanging_writes(engine, tmp_path / "slab-00000") as go_on:
            tier.write([DiskWrite(0, NEW, content_of(NEW))], 0.0)
            settle(tier, lambda: table.read_bytes()[:128] == bytes(128))
            # this write began later, so the engine has done everything that precedes the hanging
            # write
            if engine == "uring":
                assert write(tier, 2, hash_of(3)) is None
            assert table.read_bytes()[:128] == bytes(128)
            go_on()
            assert polled(tier, 1)[0].reason is None
        assert table.read_bytes()[:128] != bytes(128)


def test_a_table_that_cannot_be_read_recovers_nothing(tmp_path, monkeypatch):
    with opened(tmp_path) as (tier, _):
        assert write(tier, 0, NEW) is None

    def fail(files):
        raise OSError(5, "bad disk")

    with monkeypatch.context() as patched:
        patched.setattr(SlabFiles, "headers", fail)
        with opened(tmp_path) as (tier, blocks):
            assert len(blocks) == 0
            assert tier.counters["errors:EIO"] == 1
            assert write(tier, 1, hash_of(2)) is None

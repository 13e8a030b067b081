"""The object tier on real fsspec file systems, and on hostile ones that fail, hang or return wrong
data.
"""

import os
import random
import threading
import time
import uuid

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from engine.clock import MonotonicClock
from engine.errors import ConfigError
from kvtransfer.store.objects.calls import MAX_FAILURES, CallThreads
from kvtransfer.store.objects.manifest import SEGMENT_BLOCKS
from kvtransfer.store.objects.segments import ObjectBlock, ObjectEntry
from kvtransfer.store.objects.tier import ObjectLimits, ObjectTier

BLOCK_BYTES = 1000
IDENTITY, OTHER_IDENTITY = b"i" * 16, b"j" * 16
PATIENT = ObjectLimits()
HASTY_READS = ObjectLimits(get_timeout_s=0.2, num_readers=2, max_waiting=4, max_stuck=2)
HASTY_WRITES = ObjectLimits(put_timeout_s=0.2)
WAIT_S = 20.0  # longest wait for a future, far above the usual time
LARGE = 10**9


class HostileFiles(MemoryFileSystem):
    """A file system in memory that calls `trap(operation, path)` before each operation on an
    object.
    """

    protocol = "hostile"
    trap = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("hostile://"))

    def ls(self, path, detail=True, **kwargs):
        self.trap("ls", path)
        if path not in self.dircache:  # listings are cached, as the libraries of object stores do
            self.dircache[path] = super().ls(path, detail=detail, **kwargs)
        return self.dircache[path]

    def invalidate_cache(self, path=None):
        self.dircache.clear()

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.trap("read", path)
        return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self.trap("write", path)
        super().pipe_file(path, value, mode, **kwargs)

    def rm(self, path, recursive=False, maxdepth=None):
        for one in path:
            self.trap("delete", one)
        super().rm(path, recursive, maxdepth)


fsspec.register_implementation("hostile", HostileFiles, clobber=True)


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/bucket"
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def hostile_url():
    return f"hostile://{uuid.uuid4().hex}"


@pytest.fixture
def make():
    """Returns a function that makes tiers, opens them and lists their folder."""
    tiers = []

    def open_tier(url, identity=IDENTITY, max_bytes=LARGE, limits=PATIENT):
        tier = ObjectTier(
            url,
            identity,
            block_bytes=BLOCK_BYTES,
            max_bytes=max_bytes,
            limits=limits,
            clock=MonotonicClock(),
        )
        tiers.append(tier)
        tier.open().result(WAIT_S)
        return tier

    yield open_tier
    for tier in tiers:
        tier.close()


@pytest.fixture
def gate(monkeypatch):
    """Makes operations for which `gate.holds` returns True wait until `gate.opened` is set."""

    class Gate:
        opened = threading.Event()
        holds = staticmethod(lambda operation, path: False)

        @property
        def is_entered(self):
            return self.entered.is_set()

        entered = threading.Event()

    gate = Gate()

    def trap(operation, path):
        if gate.holds(operation, path):
            gate.entered.set()
            gate.opened.wait(WAIT_S)

    monkeypatch.setattr(HostileFiles, "trap", staticmethod(trap))
    yield gate
    gate.opened.set()


def payload_of(number):
    return random.Random(number).randbytes(BLOCK_BYTES)


def digest(number):
    return number.to_bytes(16, "little")


def block(number):
    return ObjectBlock(digest(number), digest(number - 1) if number else None, payload_of(number))


def put(tier, *numbers):
    return tier.put([block(number) for number in numbers]).result(WAIT_S)


def get(tier, *numbers):
    """Returns the numbers of the blocks that were found, and asserts that their bytes are right."""
    found = tier.get([digest(number) for number in numbers]).result(WAIT_S)
    assert found == {digest(n): payload_of(n) for n in numbers if digest(n) in found}
    return {int.from_bytes(key, "little") for key in found}


def objects_of(url):
    """Returns the paths of the objects, listed without the tier; manifests first."""
    files, path = fsspec.core.url_to_fs(url)
    return sorted(files.find(path)) if files.exists(path) else []


def content(url, path):
    return fsspec.core.url_to_fs(url)[0].cat_file(path)


def replace(url, path, data):
    fsspec.core.url_to_fs(url)[0].pipe_file(path, data)


def remove(url, path):
    fsspec.core.url_to_fs(url)[0].rm_file(path)


def errors(tier):
    return {
        key.removeprefix("errors:"): count
        for key, count in tier.counters().items()
        if key.startswith("errors:")
    }


def wait_until(holds):
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def failing(operations, error=PermissionError):
    """Returns a trap that makes these operations fail, with a secret in the error message."""

    def trap(operation, path):
        if operation in operations:
            raise error("a secret key")

    return staticmethod(trap)


# ------------------------------------------------------------ stored blocks are found


def test_blocks_come_back_with_their_bytes(url, make):
    tier = make(url)
    assert put(tier, *range(10)) == {digest(number) for number in range(10)}
    assert get(tier, 3, 4, 9, 77) == {3, 4, 9}
    assert errors(tier) == {}


def test_blocks_outlive_the_store(url, make):
    first = make(url)
    put(first, *range(SEGMENT_BLOCKS))
    put(first, 100)
    first.close()
    second = make(url)
    assert len(second.hashes()) == SEGMENT_BLOCKS + 1
    assert ObjectEntry(digest(5), digest(4)) in second.hashes()
    assert ObjectEntry(digest(0), None) in second.hashes()
    assert get(second, 0, 63, 100) == {0, 63, 100}
    assert second.num_bytes == sum(len(content(url, path)) for path in objects_of(url))


def test_a_known_block_is_not_written_again(url, make):
    tier = make(url)
    put(tier, 1, 2)
    assert put(tier, 2, 3) == {digest(2), digest(3)}
    assert put(tier, 1, 2) == {digest(1), digest(2)}
    assert tier.counters()["blocks_put"] == 3
    assert len(objects_of(url)) == 4


def test_only_the_needed_bytes_are_read_and_neighbours_together(hostile_url, make, monkeypatch):
    tier, ranges = make(hostile_url), []
    put(tier, *range(10))
    plain = HostileFiles.cat_file

    def spy(self, path, start=None, end=None, **kwargs):
        ranges.append((start, end))
        return plain(self, path, start, end, **kwargs)

    monkeypatch.setattr(HostileFiles, "cat_file", spy)
    assert get(tier, 7, 2, 3) == {2, 3, 7}
    assert sorted(ranges) == [(2000, 4000), (7000, 8000)]


def test_two_stores_write_into_one_folder_at_once(url, make):
    tiers = [make(url), make(url)]
    pending = [
        tier.put([block(number) for number in range(start, start + 8)])
        for start in range(0, 40, 4)
        for tier in tiers
    ]
    for future in pending:
        assert len(future.result(WAIT_S)) == 8
    for tier in tiers:
        assert tier.refresh().result(WAIT_S) == 44
        assert get(tier, *range(44)) == set(range(44))
        assert errors(tier) == {}


def test_a_refresh_finds_what_another_store_finished_since(hostile_url, make):
    ours, theirs = make(hostile_url), make(hostile_url)
    put(theirs, 1)
    manifest, _ = objects_of(hostile_url)
    data = content(hostile_url, manifest)
    remove(hostile_url, manifest)  # the state before the manifest is written
    assert ours.refresh().result(WAIT_S) == 0
    assert ours.num_bytes == BLOCK_BYTES
    replace(hostile_url, manifest, data)
    assert ours.refresh().result(WAIT_S) == 1
    assert ours.num_bytes == BLOCK_BYTES + len(data)


def test_models_do_not_see_each_others_blocks(url, make):
    ours, theirs = make(url), make(url, identity=OTHER_IDENTITY)
    put(ours, 1)
    put(theirs, 2)
    assert ours.refresh().result(WAIT_S) == 1
    assert not ours.has(digest(2))


def test_a_manifest_moved_from_another_model_is_foreign(url, make):
    ours, theirs = make(url), make(url, identity=OTHER_IDENTITY)
    put(theirs, 1)
    put(ours, 2)
    for path in objects_of(url)[2:]:
        replace(url, path.replace(OTHER_IDENTITY.hex(), IDENTITY.hex()), content(url, path))
    assert ours.refresh().result(WAIT_S) == 1
    assert not ours.has(digest(1))
    assert errors(ours) == {"manifest_foreign": 1}


# ------------------------------------------------------------ damage


def test_no_wrong_block_is_returned_under_random_damage(url, make):
    rng = random.Random(5)
    writer = make(url)
    for start in range(0, 60, 6):
        put(writer, *range(start, start + 6))
    damaged = served = 0
    whole = {path: content(url, path) for path in objects_of(url)}
    for _ in range(40):
        paths = rng.sample(sorted(whole), 6)
        for path in paths:
            replace(url, path, _damage(rng, whole[path]))
        tier = make(url)
        served += len(get(tier, *range(60)))  # `get` checks the bytes
        damaged += sum(errors(tier).values())
        tier.close()
        for path in paths:
            replace(url, path, whole[path])
    assert damaged > 100
    assert served > 1000


def _damage(rng, data):
    kind = rng.randrange(4)
    if kind == 0:  # returns only the beginning of the object
        return data[: rng.randrange(len(data))]
    if kind == 1:  # flips one bit
        place = rng.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if kind == 2:  # returns unrelated bytes
        return rng.randbytes(len(data))
    return data + bytes(rng.randrange(1, 100))


def test_a_block_that_decays_after_it_was_listed_is_a_miss_and_never_read_again(url, make):
    tier = make(url)
    put(tier, 1, 2, 3)
    segment = objects_of(url)[1]
    data = content(url, segment)
    replace(url, segment, data[:1500] + b"?" + data[1501:])
    assert get(tier, 1, 2, 3) == {1, 3}
    assert errors(tier) == {"block_checksum": 1}
    assert not tier.has(digest(2))
    tier.refresh().result(WAIT_S)
    assert not tier.has(digest(2))
    replace(url, segment, data[:1500])
    assert get(tier, 1, 3) == {1}
    assert errors(tier) == {"block_checksum": 1, "block_length": 1}


def test_a_segment_that_another_store_deleted_is_a_miss(url, make):
    tier = make(url)
    put(tier, 1, 2)
    put(tier, 3)
    for path in objects_of(url)[:2]:
        remove(url, path)
    remaining = get(tier, 1, 2, 3)
    assert remaining in ({1, 2}, {3})
    assert errors(tier) == {"segment_gone": 1}
    assert [tier.has(digest(number)) for number in (1, 2, 3)] == [
        number in remaining for number in (1, 2, 3)
    ]
    assert tier.refresh().result(WAIT_S) == len(remaining)


def test_a_huge_object_is_never_read(hostile_url, make, monkeypatch):
    put(make(hostile_url), 1)
    manifest, segment = objects_of(hostile_url)
    replace(hostile_url, segment, bytes(SEGMENT_BLOCKS * BLOCK_BYTES + 1))
    tier = make(hostile_url)
    assert errors(tier) == {"manifest_size": 1}
    replace(hostile_url, manifest, bytes(10_000_000))
    longest = []
    plain = HostileFiles.cat_file

    def spy(self, path, start=None, end=None, **kwargs):
        longest.append(end - start)
        return plain(self, path, start, end, **kwargs)

    monkeypatch.setattr(HostileFiles, "cat_file", spy)
    assert errors(make(hostile_url)) == {"manifest_size": 1}
    assert max(longest) <= 8192


# ------------------------------------------------------------ crashes and garbage


def test_after_a_crash_between_segment_and_manifest_nothing_wrong_is_found(url, make):
    put(make(url), 1, 2)
    manifest, segment = objects_of(url)
    remove(url, manifest)
    tier = make(url)
    assert not tier.has(digest(1))
    # the segment is young: its writer may still write the manifest
    assert objects_of(url) == [segment]
    assert tier.num_bytes == 2 * BLOCK_BYTES
    assert put(tier, 1) == {digest(1)}


@pytest.mark.parametrize("remains", [0, 1], ids=["manifest", "segment"])
def test_remains_are_swept_after_a_day(tmp_path, make, remains):
    url = f"file://{tmp_path}/bucket"
    put(make(url), 1, 2)
    paths = objects_of(url)
    remove(url, paths[1 - remains])
    day_ago_s = time.time() - 86_400
    os.utime(paths[remains], (day_ago_s + 60, day_ago_s + 60))
    make(url)
    assert objects_of(url) == [paths[remains]]
    os.utime(paths[remains], (day_ago_s - 60, day_ago_s - 60))
    assert make(url).num_bytes == 0
    assert objects_of(url) == []


def test_a_segment_whose_manifest_is_torn_is_swept_after_a_day(tmp_path, make):
    url = f"file://{tmp_path}/bucket"
    put(make(url), 1)
    put(make(url), 2)
    manifest, _, *others = objects_of(url)
    replace(url, manifest, content(url, manifest)[:-1])
    for path in objects_of(url):
        os.utime(path, (1e9, 1e9))
    make(url)
    assert sorted(objects_of(url)) == others


def test_a_manifest_that_cannot_be_written_leaves_no_segment(hostile_url, make, monkeypatch):
    tier = make(hostile_url)

    def trap(operation, path):
        if operation == "write" and path.endswith(".manifest"):
            raise OSError("a secret key")

    monkeypatch.setattr(HostileFiles, "trap", staticmethod(trap))
    assert put(tier, 1) == frozenset()
    assert objects_of(hostile_url) == []
    assert tier.num_bytes == 0
    assert errors(tier) == {"store": 1}


# ------------------------------------------------------------ bounds


def test_the_oldest_segments_are_deleted_and_the_bound_holds(tmp_path, make):
    url = f"file://{tmp_path}/bucket"
    tier = make(url, max_bytes=10 * BLOCK_BYTES)
    for number in range(0, 40, 2):
        put(tier, number, number + 1)
        size = sum(len(content(url, path)) for path in objects_of(url))
        assert size == tier.num_bytes <= 10 * BLOCK_BYTES
    kept = {int.from_bytes(entry.block_hash, "little") for entry in tier.hashes()}
    assert kept == set(range(32, 40))
    assert get(tier, *range(40)) == kept
    assert errors(tier) == {}


def test_a_reduced_bound_deletes_excess_objects(url, make):
    first = make(url)
    for number in range(5):
        put(first, number)
    second = make(url, max_bytes=3 * BLOCK_BYTES)
    assert len(second.hashes()) == 2
    assert len(objects_of(url)) == 4


def test_what_never_fits_is_refused_and_deletes_nothing(url, make):
    tier = make(url, max_bytes=2 * BLOCK_BYTES)
    put(tier, 1)
    assert put(tier, 2, 3, 4) == frozenset()
    assert errors(tier) == {"no_room": 1}
    assert get(tier, 1) == {1}


def test_a_manifest_is_deleted_before_its_segment(hostile_url, make, monkeypatch):
    tier = make(hostile_url, max_bytes=2 * BLOCK_BYTES)
    put(tier, 1)
    deleted = []

    def trap(operation, path):
        if operation == "delete":
            deleted.append(path.rpartition(".")[2])

    monkeypatch.setattr(HostileFiles, "trap", staticmethod(trap))
    put(tier, 2)
    assert deleted == ["manifest", "segment"]


def test_without_permission_to_delete_nothing_is_written_beyond_the_bound(
    hostile_url, make, monkeypatch
):
    tier = make(hostile_url, max_bytes=2 * BLOCK_BYTES)
    put(tier, 1)
    monkeypatch.setattr(HostileFiles, "trap", failing({"delete"}))
    assert put(tier, 2) == frozenset()
    assert len(objects_of(hostile_url)) == 2


def test_failing_writes_do_not_drain_the_tier(hostile_url, make, monkeypatch):
    tier = make(hostile_url, max_bytes=4 * BLOCK_BYTES)
    for number in range(3):
        put(tier, number)
    monkeypatch.setattr(HostileFiles, "trap", failing({"write"}))
    for number in range(10, 20):
        assert put(tier, number) == frozenset()
    assert len(tier.hashes()) == 2  # the first failed write had deleted one block to make room


def test_drop_deletes_everything_of_this_identity_alone(url, make):
    ours, theirs = make(url), make(url, identity=OTHER_IDENTITY)
    put(theirs, 1)
    put(ours, 1)
    put(make(url), 2)  # another store of the same identity wrote this block
    put(ours, 3)
    before = objects_of(url)
    remove(url, before[0])  # the manifest is removed, and its segment remains
    stranger = before[0].rpartition("/")[0] + "/notes.txt"
    replace(url, stranger, b"mine")
    assert ours.drop().result(WAIT_S) is True
    assert ours.num_bytes == 0
    assert ours.hashes() == []
    left = objects_of(url)
    assert len(left) == 3
    assert get(theirs, 1) == {1}
    assert get(ours, 1) == set()


# ------------------------------------------------------------ a store that fails or hangs


def test_failures_are_counted_misses_and_turn_the_tier_off(hostile_url, make, monkeypatch):
    tier = make(hostile_url)
    put(tier, 1)
    monkeypatch.setattr(HostileFiles, "trap", failing({"read"}))
    for _ in range(MAX_FAILURES + 2):
        assert get(tier, 1) == set()
    assert errors(tier) == {"store": MAX_FAILURES, "off": 2}
    assert "PermissionError" in tier.why_off()
    assert "secret" not in tier.why_off()
    monkeypatch.undo()
    wait_until(lambda: tier.why_off() is None)
    assert get(tier, 1) == {1}


def test_a_tier_whose_first_listing_fails_is_empty_and_recovers(hostile_url, make, monkeypatch):
    put(make(hostile_url), 1)
    monkeypatch.setattr(HostileFiles, "trap", failing({"ls"}, ConnectionError))
    tier = make(hostile_url)
    assert tier.hashes() == []
    assert errors(tier) == {"store": 1}
    monkeypatch.undo()
    assert tier.refresh().result(WAIT_S) == 1


def test_a_manifest_that_cannot_be_read_hides_only_its_own_segment(hostile_url, make, monkeypatch):
    writer = make(hostile_url)
    put(writer, 1)
    put(writer, 2)
    broken = objects_of(hostile_url)[0]

    def trap(operation, path):
        if operation == "read" and path.endswith(broken.rpartition("/")[2]):
            raise OSError("a secret key")

    monkeypatch.setattr(HostileFiles, "trap", staticmethod(trap))
    tier = make(hostile_url)
    assert len(tier.hashes()) == 1
    assert errors(tier) == {"store": 1}
    monkeypatch.undo()
    assert tier.refresh().result(WAIT_S) == 2


def test_one_manifest_that_cannot_be_read_does_not_stop_the_rest_of_a_listing(
    hostile_url, make, monkeypatch
):
    put(make(hostile_url), 1)
    monkeypatch.setattr(HostileFiles, "trap", failing({"read"}))
    tier = make(hostile_url, max_bytes=BLOCK_BYTES)
    assert errors(tier) == {"store": 1}
    assert objects_of(hostile_url) == []  # the segment was deleted, because it exceeded `max_bytes`


def test_a_hanging_read_is_a_miss_at_its_deadline(hostile_url, make, gate):
    tier = make(hostile_url, limits=HASTY_READS)
    put(tier, 1)
    gate.holds = lambda operation, path: operation == "read"
    start_s = time.monotonic()
    assert get(tier, 1) == set()
    assert time.monotonic() - start_s < 5
    assert errors(tier) == {"timeout": 1}


def test_hanging_calls_use_a_bounded_number_of_threads_and_the_tier_recovers(
    hostile_url, make, gate
):
    before = threading.active_count()
    tier = make(hostile_url, limits=HASTY_READS)
    put(tier, 1)
    gate.holds = lambda operation, path: operation == "read"
    for _ in range(4):
        for future in [tier.get([digest(1)]) for _ in range(6)]:
            assert future.result(WAIT_S) == {}
        # two readers, the writer, the watcher, and the stuck threads
        assert threading.active_count() - before <= 2 + 1 + 1 + HASTY_READS.max_stuck
    assert tier.why_off() is not None
    assert errors(tier)["off"] > 0
    assert errors(tier)["busy"] > 0
    gate.holds = lambda operation, path: False
    gate.opened.set()
    wait_until(lambda: get(tier, 1) == {1})
    wait_until(lambda: threading.active_count() - before <= 2 + 1 + 1)


def test_hanging_writes_do_not_delay_reads(hostile_url, make, gate):
    put(make(hostile_url), 1)
    tier = make(hostile_url, limits=HASTY_WRITES)
    gate.holds = lambda operation, path: operation == "write"
    hanging = tier.put([block(2)])
    wait_until(lambda: gate.is_entered)
    assert get(tier, 1) == {1}
    assert hanging.result(WAIT_S) == frozenset()


def test_a_write_that_comes_back_late_leaves_no_segment(hostile_url, make, gate):
    tier = make(hostile_url, limits=HASTY_WRITES)
    gate.holds = lambda operation, path: operation == "write"
    assert put(tier, 1) == frozenset()
    gate.opened.set()
    wait_until(lambda: tier.num_bytes == 0)
    assert objects_of(hostile_url) == []


def test_a_write_that_made_room_too_late_is_not_begun(hostile_url, make, gate):
    put(make(hostile_url), 1)
    tier = make(hostile_url, max_bytes=2 * BLOCK_BYTES, limits=HASTY_WRITES)
    operations = []

    def hold(operation, path):
        operations.append(operation)
        return operation == "delete"

    gate.holds = hold
    assert put(tier, 2) == frozenset()
    gate.opened.set()
    wait_until(lambda: tier.num_bytes == 0)
    assert tier.refresh().result(WAIT_S) == 0
    assert "write" not in operations


def test_a_listing_that_hangs_does_not_hold_up_the_owner(hostile_url, make, gate):
    gate.holds = lambda operation, path: operation == "ls"
    tier = make(hostile_url, limits=ObjectLimits(refresh_timeout_s=0.1))
    assert errors(tier) == {"timeout": 1}
    assert put(tier, 1) == {digest(1)}
    assert get(tier, 1) == {1}


def test_closing_ends_calls_that_hang(hostile_url, make, gate):
    tier = make(hostile_url)
    put(tier, 1)
    gate.holds = lambda operation, path: operation == "read"
    hanging = tier.get([digest(1)])
    wait_until(lambda: gate.is_entered)
    tier.close()
    assert hanging.result(WAIT_S) == {}
    assert get(tier, 1) == set()
    assert errors(tier) == {"closed": 2}


def test_a_future_may_be_awaited_with_a_callback_that_makes_the_next_call(url, make):
    tier, found = make(url), []
    done = threading.Event()

    def then(future):
        found.append(future.result())
        done.set()

    tier.put([block(1)]).add_done_callback(lambda _: tier.get([digest(1)]).add_done_callback(then))
    assert done.wait(WAIT_S)
    assert found == [{digest(1): payload_of(1)}]


def test_a_bug_reaches_the_owner_and_the_thread_goes_on():
    threads = CallThreads(
        {"only": 1},
        max_waiting=4,
        max_stuck=1,
        clock=MonotonicClock(),
        count=lambda fault: None,
    )
    threads.open()
    bug = threads.submit("only", lambda call: 1 // 0, otherwise=0, timeout_s=WAIT_S)
    with pytest.raises(ZeroDivisionError):
        bug.result(WAIT_S)
    assert threads.submit("only", lambda call: 7, otherwise=0, timeout_s=WAIT_S).result(WAIT_S) == 7
    threads.close()
    assert threads.num_threads == 0


class HangingCalls:
    """Call threads, and calls on them that hang until an event is set."""

    def __init__(self, lanes, max_stuck):
        self.threads = CallThreads(
            lanes,
            max_waiting=8,
            max_stuck=max_stuck,
            clock=MonotonicClock(),
            count=lambda fault: None,
        )
        self.threads.open()

    def hang(self, lane, event):
        return self.threads.submit(
            lane, lambda call: event.wait(3 * WAIT_S), otherwise="late", timeout_s=0.1
        )

    def works(self, lane):
        future = self.threads.submit(lane, lambda call: "done", otherwise="late", timeout_s=1.0)
        return future.result(WAIT_S) == "done"


def test_at_the_bound_on_stuck_threads_no_call_is_made_until_one_comes_back():
    calls, event = HangingCalls({"only": 2}, max_stuck=1), threading.Event()
    assert calls.hang("only", event).result(WAIT_S) == "late"
    assert not calls.works("only")  # no call is made, although a thread is idle
    assert calls.threads.why_off() == "1 calls hang"
    event.set()
    wait_until(lambda: calls.works("only"))
    calls.threads.close()


def test_a_lane_whose_thread_stays_stuck_gets_another_when_other_lanes_recover():
    calls = HangingCalls({"a": 2, "b": 1}, max_stuck=2)
    first, second = threading.Event(), threading.Event()
    pending = [calls.hang("a", first), calls.hang("a", first), calls.hang("b", second)]
    assert [one.result(WAIT_S) for one in pending] == ["late"] * 3
    first.set()
    wait_until(lambda: calls.works("b"))
    assert not second.is_set()
    second.set()
    calls.threads.close()


@pytest.mark.parametrize("bad", ["", "bucket", "s3://", "nosuch://bucket/x", "memory://a*b"])
def test_a_url_that_is_no_use_is_refused_at_once(bad):
    tier = ObjectTier(
        bad,
        IDENTITY,
        block_bytes=BLOCK_BYTES,
        max_bytes=LARGE,
        limits=PATIENT,
        clock=MonotonicClock(),
    )
    with pytest.raises(ConfigError):
        tier.open()

"""The API keys file: its owner and mode, atomic changes, and reloads in a gateway."""

import fcntl
import os
import threading
from datetime import timedelta

import pytest

from router.access import file as key_files
from router.access.file import KeyFile, change_keys, read_keys
from router.access.keys import KeysError, with_key, without_key
from tests.kits.router.access import (
    CREATED,
    SetClock,
    key_file,
    open_keys,
    record,
    write_keys,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


def test_only_the_owner_may_read_the_file(path):
    write_keys(path, record("a", "ann"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in read_keys(path)] == ["ann"]
    assert {each.name for each in path.parent.iterdir()} == {"keys.json", "keys.json.lock"}


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o666, 0o644, 0o601])
def test_a_file_that_others_may_read_or_change_is_refused(path, mode):
    write_keys(path, record("a", "ann"))
    path.chmod(mode)
    with pytest.raises(KeysError, match="others may read or change it"):
        read_keys(path)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_a_secret_that_a_pod_mounts_is_read(path, mode):
    write_keys(path, record("a", "ann"))
    path.chmod(mode)
    assert len(read_keys(path)) == 1


def test_the_file_of_another_user_is_refused(path, monkeypatch):
    write_keys(path, record("a", "ann"))
    owner = path.stat().st_uid
    monkeypatch.setattr(
        key_files.os, "fstat", lambda _: os.stat_result((0o100600, 0, 0, 1, 12345, 0, 0, 0, 0, 0))
    )
    assert owner != 12345
    with pytest.raises(KeysError, match="another user"):
        read_keys(path)


def test_a_folder_a_pipe_and_a_huge_file_are_refused_at_once(path, monkeypatch):
    with pytest.raises(KeysError):
        read_keys(path.parent)
    os.mkfifo(path, 0o600)
    with pytest.raises(KeysError, match="not a regular file"):
        read_keys(path)
    path.unlink()
    write_keys(path, record("a", "ann"))
    monkeypatch.setattr(key_files, "MAX_FILE_BYTES", 10)
    with pytest.raises(KeysError, match="longer than 10 bytes"):
        read_keys(path)


def test_a_change_that_fails_leaves_the_file_as_it_was(path):
    write_keys(path, record("a", "ann"))
    before = path.read_bytes()
    with pytest.raises(KeysError):
        change_keys(path, lambda records: without_key(records, "bob"))
    assert path.read_bytes() == before
    assert len([*path.parent.iterdir()]) == 2


def test_changes_at_the_same_time_are_all_made(path):
    names = [f"key-{number}" for number in range(16)]
    threads = [
        threading.Thread(
            target=change_keys, args=(path, lambda rs, n=name: with_key(rs, record(n, n)))
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(each.name for each in read_keys(path)) == sorted(names)


def test_a_writer_waits_for_another_only_so_long(path, monkeypatch):
    write_keys(path)
    monkeypatch.setattr(key_files, "LOCK_TIMEOUT_S", 0.0)
    with path.with_name("keys.json.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(KeysError, match="has been locked"):
            write_keys(path, record("a", "ann"))


# ---------------------------------------------------------------- reloads in a gateway


@pytest.fixture
def clock():
    return SetClock()


def later(clock: SetClock) -> None:
    clock.seconds += 1.0


def test_a_new_key_opens_and_a_revoked_one_does_not_without_a_restart(path, clock):
    keys = key_file(path, "a", clock=clock)
    assert keys.find(b"b") is None
    change_keys(path, lambda records: with_key(records, record("b", "bob")))
    later(clock)
    assert keys.find(b"b").name == "bob"
    change_keys(path, lambda records: without_key(records, "one"))
    later(clock)
    assert keys.find(b"a") is None
    assert keys.find(b"b").name == "bob"
    assert keys.counters["reloaded"] == 2


def test_the_file_is_looked_at_once_a_second_at_most(path, clock, monkeypatch):
    keys = key_file(path, "a", clock=clock)
    looks = []
    monkeypatch.setattr(KeyFile, "_check", lambda _: looks.append(clock.seconds))
    for tenth in range(35):
        clock.seconds = tenth / 10
        keys.find(b"a")
    assert looks == [1.0, 2.0, 3.0]


def test_a_key_that_expires_is_refused_from_then_on(path, clock):
    keys = key_file(path, "a", clock=clock, expires=CREATED + timedelta(hours=1))
    assert keys.find(b"a").name == "one"
    clock.unix_s += 3600
    assert keys.find(b"a") is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text('{"version": 1, "keys": [{"name": "open"}]}'),
        lambda path: path.chmod(0o666),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_unusable_contents_keep_the_old_keys_and_are_counted(path, clock, caplog, spoil):
    keys = key_file(path, "a", clock=clock)
    spoil(path)
    for _ in range(3):
        later(clock)
        assert keys.find(b"a").name == "one"
        assert keys.find(b"") is None
    assert keys.counters["reload failed"] == 3
    assert [each.message for each in caplog.records if "stay as they were" in each.message] == [
        each.message for each in caplog.records
    ]
    assert len(caplog.records) == 1


def test_a_mended_file_counts_again(path, clock):
    keys = key_file(path, "a", clock=clock)
    path.write_text("{")
    later(clock)
    assert keys.find(b"a")
    path.unlink()
    later(clock)
    assert keys.find(b"a") is None
    write_keys(path, record("b", "bob"))
    later(clock)
    assert keys.find(b"b").name == "bob"
    assert keys.find(b"a") is None


def test_without_its_file_no_key_is_valid(path, clock):
    keys = key_file(path, "a", clock=clock)
    path.unlink()
    later(clock)
    assert keys.find(b"a") is None
    assert keys.counters["file gone"] == 1


def test_a_gateway_may_start_before_the_first_key_is_made(path, clock):
    keys = open_keys(path, clock)
    assert keys.find(b"a") is None
    write_keys(path, record("a", "ann"))
    later(clock)
    assert keys.find(b"a").name == "ann"


def test_a_gateway_does_not_start_with_a_file_that_it_cannot_use(path, clock):
    path.write_text("{")
    path.chmod(0o600)
    with pytest.raises(KeysError, match=str(path)):
        open_keys(path, clock)

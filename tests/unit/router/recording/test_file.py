"""A recording on disk: complete, private, and never the cause of a gateway's failure."""

import asyncio
import logging
import stat
import threading

import pytest
from msgspec.structs import replace

from engine.clock import MonotonicClock
from engine.config import RouterConfig
from engine.errors import ConfigError
from engine.net.trust import Secret
from router.machine.events import ClientGone
from router.machine.machine import RouterMachine
from router.machine.requests import Rejected
from router.recording.file import NOT_WRITTEN_IN_TIME, RecordingFile
from router.recording.records import read, records_of, replay
from router.service import Router
from tests.kits.router.recordings import CONFIG, SCRIPT, arrival
from tests.kits.router.scripted_workers import updates_of

DEADLINE_S = 5.0
NO_TEXT = "secret\ud800"  # a lone surrogate, which UTF-8 cannot encode


def play(file: RecordingFile) -> None:
    machine = RouterMachine(CONFIG)
    for now_s, event in SCRIPT:
        file.record(event, now_s, machine.handle(event, now_s))


class BadDisk:
    """A disk that accepts `num_writes` writes and then fails."""

    def __init__(
        self,
        num_writes: int,
        *,
        closes: bool = True,
        error: Exception | None = None,
    ) -> None:
        self.written = b""
        self.refused = threading.Event()
        self._num_left = num_writes
        self._closes = closes
        self._error = error or OSError(28, "No space left on device")

    def write(self, data: bytes) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            self.refused.set()
            raise self._error
        self.written += data

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self._closes:
            raise OSError(28, "No space left on device")


def on_disk(tmp_path, monkeypatch, disk: BadDisk) -> RecordingFile:
    monkeypatch.setattr("router.recording.file.WRITE_EVERY_S", 0.0)
    monkeypatch.setattr("router.recording.file._create", lambda path: disk)
    file = RecordingFile(tmp_path / "r.msgpack", CONFIG)
    file.open()
    return file


def test_closed_recording_is_complete_and_replays(tmp_path):
    file = RecordingFile(tmp_path / "there" / "r.msgpack", CONFIG)
    file.open()
    play(file)
    file.close()
    assert file.failure is None
    assert len(list(read(records_of(file.path)))) == len(SCRIPT)
    assert list(replay(records_of(file.path))) == []
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_the_end_of_a_recording_that_was_cut_off_is_left_out(tmp_path):
    file = RecordingFile(tmp_path / "r.msgpack", CONFIG)
    file.open()
    play(file)
    file.close()
    file.path.write_bytes(file.path.read_bytes()[:-5])
    assert len(list(read(records_of(file.path)))) == len(SCRIPT) - 1


@pytest.mark.parametrize("name", ["r.msgpack", "file/r.msgpack"])
def test_unwritable_folder_is_reported_at_the_start(tmp_path, name):
    (tmp_path / "r.msgpack").touch()  # the writer never overwrites a recording
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot record"):
        RecordingFile(tmp_path / name, CONFIG).open()


def test_a_full_disk_ends_only_the_recording(tmp_path, monkeypatch, caplog):
    disk = BadDisk(0)
    file = on_disk(tmp_path, monkeypatch, disk)
    assert disk.refused.wait(DEADLINE_S)
    play(file)
    file.close()
    assert file.failure == "No space left on device"
    assert caplog.record_tuples == [
        (
            "router.recording.file",
            logging.ERROR,
            f"the recording {file.path} ends here: No space left on device",
        )
    ]
    assert disk.written == b""


def test_a_disk_that_says_at_the_end_that_it_is_full_is_heard(tmp_path, monkeypatch):
    file = on_disk(tmp_path, monkeypatch, BadDisk(10**6, closes=False))
    play(file)
    file.close()
    assert file.failure == "No space left on device"


def test_more_than_a_slow_disk_takes_is_not_kept_and_there_is_no_hole(tmp_path, monkeypatch):
    # so that it writes only at the end
    monkeypatch.setattr("router.recording.file.WRITE_EVERY_S", 60.0)
    file = RecordingFile(tmp_path / "r.msgpack", CONFIG, max_unwritten_bytes=4000)
    file.open()
    play(file)
    file.close()
    assert file.failure == "the disk does not keep up"
    kept = len(list(read(records_of(file.path))))
    assert 0 < kept < len(SCRIPT)
    assert list(replay(records_of(file.path))) == []


def test_one_that_was_never_opened_can_be_closed(tmp_path):
    RecordingFile(tmp_path / "r.msgpack", CONFIG).close()


def test_short_memory_ends_the_recording_and_frees_its_lines(tmp_path, monkeypatch):
    file = on_disk(tmp_path, monkeypatch, BadDisk(0, error=MemoryError()))
    play(file)
    file.close()
    assert file.failure == "MemoryError"
    assert file._unwritten == []


class StuckDisk(BadDisk):
    """A disk whose writes block until the test releases them."""

    def __init__(self) -> None:
        super().__init__(10**6)
        self.let_go = threading.Event()

    def write(self, data: bytes) -> None:
        self.let_go.wait(DEADLINE_S)
        super().write(data)


def test_a_disk_that_does_not_finish_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("router.recording.file.CLOSE_TIMEOUT_S", 0.0)
    disk = StuckDisk()
    file = on_disk(tmp_path, monkeypatch, disk)
    file.close()
    assert file.failure == NOT_WRITTEN_IN_TIME
    disk.let_go.set()
    file._thread.join(DEADLINE_S)
    assert not file._thread.is_alive()


def test_encoding_error_ends_the_recording(tmp_path, caplog):
    file = RecordingFile(tmp_path / "r.msgpack", CONFIG)
    file.open()
    play(file)
    file.record(ClientGone(NO_TEXT), 200.0, [])
    file.record(ClientGone("r0"), 201.0, [])  # after a lost record, no further record is written
    file.close()
    assert file.failure == "ClientGone cannot be encoded: UnicodeEncodeError"
    assert file.failure in caplog.text
    assert "secret" not in caplog.text
    assert len(list(read(records_of(file.path)))) == len(SCRIPT)


def test_router_answers_requests_that_it_cannot_record(tmp_path):
    async def outcomes() -> list[object]:
        config = RouterConfig(queue_timeout_s=0.01)
        clock = MonotonicClock()
        router = Router([], config=config, secret=Secret("token"), clock=clock, record_dir=tmp_path)
        await router.open()
        try:
            asked = replace(arrival("r").request, tenant=NO_TEXT)
            updates = [update async for update in updates_of(router, asked)]
            failure = "Arrived cannot be encoded: UnicodeEncodeError"
            assert router.counters()["recording ended", failure] == 1
        finally:
            await router.close()
        return [update.outcome for update in updates]

    [outcome] = asyncio.run(outcomes())
    assert isinstance(outcome, Rejected)  # no worker has joined

"""A fresh machine repeats the effects of a recorded machine; differences are found."""

import msgpack
import pytest

from engine.config import RouterConfig
from engine.errors import ProtocolError
from router.machine.machine import RouterMachine
from router.recording.records import read, records_of, replay
from tests.kits.router.recordings import SCRIPT, recorded


def packed(kind: str) -> bytes:
    return msgpack.packb({"now_s": 1.0, "kind": kind, "event": {}, "effects": []})


def test_a_fresh_machine_repeats_a_recording():
    records = recorded()
    assert sum(len(msgpack.unpackb(record)["effects"]) for record in records[1:]) > 20
    assert list(replay(records)) == []


def test_events_are_read_as_they_were():
    assert [(one.now_s, one.event) for one in read(recorded())] == SCRIPT


def test_other_decisions_are_reported_from_the_first():
    records = recorded()
    first, *_ = replay(records, lambda config: RouterMachine(RouterConfig(seed=config.seed)))
    assert first.recorded != first.replayed
    assert msgpack.unpackb(records[first.number - 1])["kind"] == first.kind


def test_changed_effect_is_found():
    records = recorded()
    number = next(i for i, record in enumerate(records) if b"SendTo" in record)
    record = msgpack.unpackb(records[number])
    record["effects"][0][1]["worker_id"] = "elsewhere"
    records[number] = msgpack.packb(record)
    assert next(m.number for m in replay(records)) == number + 1


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "empty"),
        ([b"nothing"], "record 1"),
        ([msgpack.packb({"version": 1, "config": {}})], "version differs"),
        ([recorded()[0], b"\x81"], "record 2"),
        ([recorded()[0], packed("Rain")], "Rain"),
        ([recorded()[0], packed("WorkerLost")], "record 2"),
    ],
)
def test_bad_recording_is_reported_with_its_record(records, reason):
    with pytest.raises(ProtocolError, match=reason):
        list(replay(records))


def test_records_are_framed_by_a_stream(tmp_path, monkeypatch):
    path = tmp_path / "r.msgpack"
    path.write_bytes(b"".join(recorded()))
    assert list(records_of(path)) == recorded()
    monkeypatch.setattr("router.recording.records.MAX_RECORD_BYTES", 256)
    with pytest.raises(ProtocolError, match="a record of"):
        list(records_of(path))


def test_bytes_that_are_no_records_are_refused(tmp_path):
    path = tmp_path / "r.msgpack"
    path.write_bytes(recorded()[0] + b"\xc1")
    with pytest.raises(ProtocolError, match="not a recording"):
        list(records_of(path))

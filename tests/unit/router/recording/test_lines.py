"""What was recorded of a machine, a fresh one does again; what differs is told."""

import json

import pytest

from engine.config import RouterConfig, RouterPolicy
from engine.errors import ProtocolError
from router.native.machine import native_machine
from router.recording.lines import Recorder, read_events, replay
from tests.kits.router.recordings import CONFIG, SCRIPT, recorded


def test_a_fresh_machine_does_all_that_was_recorded():
    lines = recorded()
    assert sum(len(json.loads(line)["effects"]) for line in lines[1:]) > 20
    assert list(replay(lines)) == []


def test_events_are_read_as_they_were():
    assert list(read_events(recorded())) == SCRIPT


def test_a_machine_that_decides_otherwise_is_told_from_the_first():
    lines = recorded()
    first, *_ = replay(lines, lambda config: native_machine(RouterConfig(seed=config.seed)))
    assert first.recorded != first.replayed
    line = json.loads(lines[first.line - 1])
    assert line["kind"] == first.kind
    assert line["effects"] == json.loads(first.recorded)


def test_an_effect_that_was_changed_by_hand_is_found():
    lines = recorded()
    number = next(i for i, line in enumerate(lines) if b'"SendTo"' in line)
    lines[number] = lines[number].replace(b'"token_ids":[1,2,3', b'"token_ids":[1,2,4', 1)
    # the arrival's own prompt comes first in a line, then that of its effect
    mismatches = [m.line for m in replay(lines)]
    assert mismatches[0] == number + 1


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "empty"),
        ([b"nothing"], "line 1"),
        ([b'{"version": 1, "config": {}}'], "version differs"),
        ([recorded()[0], b"{"], "line 2"),
        ([recorded()[0], b'{"now_s": 1, "kind": "Rain", "event": {}, "effects": []}'], "Rain"),
        (
            [recorded()[0], b'{"now_s": 1, "kind": "WorkerLost", "event": {}, "effects": []}'],
            "line 2",
        ),
    ],
)
def test_bad_recording_is_reported_with_its_line(lines, reason):
    with pytest.raises(ProtocolError, match=reason):
        list(replay(lines))


@pytest.mark.parametrize("was_native", [True, False])
def test_a_recording_is_not_replayed_by_a_router_that_places_otherwise(monkeypatch, was_native):
    lines: list[bytes] = []
    monkeypatch.setattr("router.recording.lines.is_native", lambda: was_native)
    Recorder(RouterConfig(policy=RouterPolicy.SLO), lines.append)
    assert not list(replay(lines))
    monkeypatch.setattr("router.recording.lines.is_native", lambda: not was_native)
    with pytest.raises(ProtocolError, match="C\\+\\+"):
        list(replay(lines))


def test_policies_without_cpp_are_replayed_with_it_or_without(monkeypatch):
    lines: list[bytes] = []
    monkeypatch.setattr("router.recording.lines.is_native", lambda: False)
    Recorder(CONFIG, lines.append)
    monkeypatch.setattr("router.recording.lines.is_native", lambda: True)
    assert not list(replay(lines))

"""What was recorded of a machine, a fresh one does again; what differs is told."""

import json

import pytest

from engine.config import RouterConfig, RouterPolicy
from engine.errors import ProtocolError
from engine.messages import (
    PROTOCOL_VERSION,
    FinishReason,
    GivenBack,
    KvReady,
    Limits,
    LoadReport,
    Logprobs,
    PrefillDone,
    PrefillStarted,
    Role,
    Sampling,
    Tokens,
    Welcome,
)
from engine.worker.block_events import AllBlocksCleared, BlockStored
from router.machine.events import (
    Arrived,
    BlocksChanged,
    BlocksUnheard,
    ClientGone,
    FromWorker,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from router.machine.requests import Request
from router.native.machine import native_machine
from router.recording.lines import Recorder, read_events, replay
from tests.kits.router_machine import LAYOUT, LEASE

CONFIG = RouterConfig(policy=RouterPolicy.RANDOM, seed=3, queue_timeout_s=7.0)
ROLES = {"p": Role.PREFILL, "d": Role.DECODE}


def welcome(name: str) -> WorkerJoined:
    role = ROLES[name[0]]
    info = Welcome(PROTOCOL_VERSION, name, "inc", role, "fp", LAYOUT, 100, 4)
    return WorkerJoined(info)


def arrival(name: str, prompt=(1, 2, 3, 4, 5), now_s=1.0) -> Arrived:
    sampling = Sampling(logit_bias=((3, 0.5),), logprobs=1)
    return Arrived(Request(name, tuple(prompt), sampling, Limits(len(prompt) + 9), now_s))


SCRIPT = [
    *((1.0, welcome(name)) for name in ("p0", "p1", "d0", "d1")),
    (
        1.1,
        BlocksChanged(
            "d0", [AllBlocksCleared(), BlockStored([b"x" * 16], None, [], 4, *3 * [None])]
        ),
    ),
    *((1.1 + i / 7, arrival(f"r{i}")) for i in range(6)),
    (2.5, FromWorker("d1", LoadReport(9, 0, 0, 0, 0, 0, 0, 0, {"steps": 2.0}, decode_seqs=1))),
    *((3.0, FromWorker(p, PrefillStarted(f"r{i}.0", 0, LEASE))) for p in ("p0",) for i in range(6)),
    *(
        (3.0 + i / 3, FromWorker("p0", PrefillDone(f"r{i}.0", 9, None, Logprobs(-1 / 3, 1))))
        for i in range(6)
    ),
    (5.5, FromWorker("d0", KvReady("r1.0", 2, 0, "shm", 0.1, 0.05))),
    (5.6, BlocksUnheard("d0", "why")),
    (5.7, FromWorker("d0", Tokens("r0.0", [7, 8]))),
    (6.0, FromWorker("d0", GivenBack("r2.0", "pull failed"))),
    (6.1, ClientGone("r3")),
    (6.2, WorkerLost("p1", "gone")),
    (6.3, FromWorker("d0", Tokens("r1.0", [7], FinishReason.STOP))),
    (100.0, Tick()),
]


def recorded(config: RouterConfig = CONFIG, script=SCRIPT) -> list[bytes]:
    lines: list[bytes] = []
    machine, recorder = native_machine(config), Recorder(config, lines.append)
    for now_s, event in script:
        recorder.note(event, now_s, machine.handle(event, now_s))
    return lines


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

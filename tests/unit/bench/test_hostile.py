"""`baton bench hostile`: its requests and its results."""

from collections import Counter
from dataclasses import replace

import pytest

from bench.hostile.assaults import AssaultRun, private_bytes
from bench.hostile.corpus import CHAT, Shot, shots
from bench.hostile.results import (
    HonestReports,
    HostileRun,
    MemorySample,
    Phase,
    complaints,
    growth,
    results,
)
from bench.hostile.waves import Outcomes, Slow, is_wrong

CALM = HostileRun(
    phases=(Phase("calm", 0.0, 5.0), Phase("bodies", 5.0, 9.0)),
    reports=HonestReports(gaps=[(1.0, 1.03), (4.9, 5.2)]),
    bodies=Outcomes(Counter({200: 3, 400: 5, 503: 1, "left": 1})),
    slow=Slow(num_opened=3, num_closed=3, probes_s=[0.1, 0.3]),
    disconnects={"nothing": 2},
    memory=MemorySample({"gateway": 100, "worker": 200}, {"gateway": 104, "worker": 190}),
    blocks_left=0,
    leases_left=0,
    num_ended=0,
)


def test_no_body_is_beyond_what_a_gateway_takes_by_default():
    assert max(len(shot.body) for shot in shots(500, seed=0)) < 8 * 2**20


def test_a_calm_run_has_nothing_to_complain_of():
    assert complaints(CALM) == []
    values = {result.name: result.value for result in results(CALM)}
    assert values["bodies/wrong"] == 0
    assert values["pause/calm"] == pytest.approx(100)  # the gap inside the calm phase
    assert values["pause/bodies"] == pytest.approx(200)
    assert values["memory/gateway_growth"] == pytest.approx(4)
    assert growth(CALM, "worker") == pytest.approx(-0.05)


def test_an_assault_may_neither_stall_honest_streams_nor_fill_the_gateway():
    run = replace(
        CALM,
        phases=(*CALM.phases, Phase("chunks", 9.0, 12.0)),
        reports=HonestReports(gaps=[(1.0, 1.2), (9.0, 9.4)], firsts=[(2.0, 2.9), (10.0, 11.0)]),
        assaults=(AssaultRun("chunks", {"400": 2}, before_bytes=100, after_bytes=109),),
    )
    assert complaints(run) == []
    values = {result.name: result.value for result in results(run)}
    assert values["assault/chunks/400"] == 2
    assert values["assault/chunks/pause"] == pytest.approx(200)
    assert values["assault/chunks/kept"] == pytest.approx(9)
    assert values["first_token/chunks"] == pytest.approx(1000)
    assert values["assault/chunks/first_token"] == pytest.approx(100)
    stalled = replace(run, reports=HonestReports(gaps=[(1.0, 1.2), (9.0, 9.6)]))
    waited = replace(run, reports=HonestReports(firsts=[(2.0, 2.1), (9.0, 9.6)]))
    filled = replace(run, assaults=(replace(run.assaults[0], after_bytes=112),))
    assert [len(complaints(each)) for each in (stalled, waited, filled)] == [1, 1, 1]


def test_workers_that_an_assault_loads_are_slower_for_all():
    run = replace(
        CALM,
        phases=(*CALM.phases, Phase("answers", 9.0, 12.0)),
        reports=HonestReports(firsts=[(9.0, 11.0)]),
        assaults=(AssaultRun("answers", {"200": 2}, before_bytes=100, after_bytes=100),),
    )
    assert complaints(run) == []


def test_every_kind_of_damage_is_a_complaint():
    bodies = Outcomes()
    bodies.note(500, Shot(CHAT, b"x"), "internal error")
    damaged = [
        replace(CALM, bodies=bodies),
        replace(CALM, reports=HonestReports(broken=["broken: it ended"])),
        replace(CALM, memory=MemorySample({"gateway": 100}, {"gateway": 106})),
        replace(CALM, blocks_left=1),
        replace(CALM, num_ended=1),
        replace(CALM, slow=Slow(num_probes_failed=1)),
    ]
    assert [len(complaints(run)) for run in damaged] == [1] * len(damaged)


def test_only_a_busy_server_and_a_client_that_left_are_excused():
    assert [is_wrong(status) for status in (200, 400, 429, 503, "left")] == [False] * 5
    assert all(is_wrong(status) for status in (500, 502, "broken"))


def test_only_the_private_memory_of_the_sessions_counts(tmp_path):
    for pid, session, kib in ((5, 5, 100), (6, 5, 20), (7, 7, 3)):
        process = tmp_path / str(pid)
        process.mkdir()
        (process / "stat").write_text(f"{pid} (a b) S 1 {session} {session} 0")
        (process / "status").write_text(f"Name: x\nRssAnon:\t{kib} kB\nRssShmem:\t900 kB\n")
    assert private_bytes([5], tmp_path) == 120 * 1024

"""Faults and requests of `bench chaos` are functions of its seed."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.chaos.asks import KINDS, asks
from bench.chaos.checker import Books
from bench.chaos.cli import _kinds
from bench.chaos.deployment import WorkerSeen, num_listening, workers_of
from bench.chaos.faults import candidates
from bench.chaos.plan import (
    LASTING,
    LONG_STOP_S,
    ChaosPlan,
    Fault,
    FaultKind,
    check,
    chosen,
    faults_of,
    quick,
)
from engine.errors import ConfigError
from engine.messages import Role

ALL = tuple(FaultKind)
PLAN = ChaosPlan(num_requests=1000, rate_per_s=4, every_s=5, kinds=ALL, seed=3)
BOOKS = Books(free=8, cached=0, owned=0, leased=0, in_flight=0, open_leases=0)


def test_the_same_seed_gives_the_same_faults_and_another_one_others():
    assert faults_of(PLAN) == faults_of(PLAN)
    assert faults_of(PLAN) != faults_of(replace(PLAN, seed=4))


def test_kills_come_every_so_many_seconds_with_another_fault_between_each_two():
    faults = faults_of(PLAN)
    kills_s = [fault.at_s for fault in faults if fault.kind is FaultKind.KILL]
    assert len(kills_s) == 250 / 5
    assert {round(later - earlier, 9) for earlier, later in pairwise(kills_s)} == {5.0}
    between = [fault.kind is FaultKind.KILL for fault in faults]
    assert all(one is not other for one, other in pairwise(between))
    assert {fault.kind for fault in faults} == set(ALL)
    assert all(0 < fault.at_s < PLAN.duration_s for fault in faults)


def test_without_kills_other_faults_keep_the_pace():
    faults = faults_of(replace(PLAN, kinds=(FaultKind.STOP, FaultKind.SLOW)))
    assert {fault.kind for fault in faults} == {FaultKind.STOP, FaultKind.SLOW}
    assert {round(b.at_s - a.at_s, 9) for a, b in pairwise(faults)} == {5.0}


def test_only_faults_that_end_by_themselves_last_and_some_stops_last_long():
    faults = faults_of(PLAN)
    assert all((fault.lasts_s > 0) == (fault.kind in LASTING) for fault in faults)
    stops = [f.lasts_s for f in faults_of(replace(PLAN, kinds=(FaultKind.STOP,)))]
    assert LONG_STOP_S in stops
    assert min(stops) < LONG_STOP_S / 2


def test_a_victim_is_drawn_from_all_who_may_be_hit():
    def hit(draw: float) -> str | None:
        return chosen(Fault(0.0, FaultKind.KILL, draw), ["a", "b", "c"])

    assert [hit(0.0), hit(0.34), hit(0.999)] == ["a", "b", "c"]
    assert chosen(Fault(0.0, FaultKind.KILL, 0.5), []) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ()}, "at least one kind"),
        ({"gateways": 1}, "another one"),
        ({"rate_per_s": 0.0}, "above 0"),
        ({"prefill": 1, "decode": 1}, "the only one of its pool"),
    ],
)
def test_a_plan_that_can_show_nothing_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(replace(PLAN, **changes))


def test_unknown_faults_are_refused_with_those_that_there_are():
    assert _kinds("kill, stop,kill") == (FaultKind.KILL, FaultKind.STOP)
    with pytest.raises(ConfigError, match="there are: kill, stop"):
        _kinds("kill,flood")


def test_quick_is_a_plan_of_few_requests():
    assert quick(PLAN).num_requests == 60
    assert quick(replace(PLAN, num_requests=5)).num_requests == 5


def seen(**roles: Role) -> dict[str, WorkerSeen]:
    return {name: WorkerSeen(role, BOOKS, 0) for name, role in roles.items()}


FOUR = seen(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)


def hit_by(kind: FaultKind, workers=FOUR, *, running="p0 p1 d0 d1", held="", gateways="g0 g1"):
    return candidates(
        kind,
        workers,
        running=running.split(),
        held=held.split(),
        gateways=gateways.split(),
    )


def test_everybody_may_be_hit_while_all_are_there():
    assert hit_by(FaultKind.KILL) == ["d0", "d1", "p0", "p1"]


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.GATEWAY])
def test_nobody_takes_the_last_that_works_of_a_pool(kind):
    for workers, running, held in (
        ({name: w for name, w in FOUR.items() if name != "d1"}, "p0 p1 d0 d1", ""),
        (FOUR, "p0 p1 d0", ""),
        (FOUR, "p0 p1 d0 d1", "d1"),
        (FOUR | seen(d1=Role.DRAINED), "p0 p1 d0 d1", "d1"),
    ):
        assert hit_by(kind, workers, running=running, held=held) == ["p0", "p1"]
    assert hit_by(kind, held="d1 p0") == []


def test_a_mixed_worker_counts_for_both_pools():
    workers = seen(m0=Role.MIXED, p0=Role.PREFILL, d0=Role.DECODE)
    assert hit_by(FaultKind.KILL, workers, running="m0 p0 d0") == ["d0", "m0", "p0"]


def test_a_gateway_is_hit_only_while_there_is_another_one():
    assert hit_by(FaultKind.GATEWAY) == ["g0", "g1"]
    assert hit_by(FaultKind.GATEWAY, gateways="g1") == []


def test_metrics_are_read_by_worker():
    page = """# HELP baton_worker_blocks KV blocks by state
baton_worker_blocks{role="decode",state="free",worker="decode-0"} 90.0
baton_worker_blocks{role="decode",state="cached",worker="decode-0"} 5.0
baton_worker_blocks{role="decode",state="owned",worker="decode-0"} 3.0
baton_worker_blocks{role="decode",state="leased",worker="decode-0"} 2.0
baton_worker_blocks{role="decode",state="in_flight",worker="decode-0"} 1.0
baton_worker_waiting_seqs{role="decode",worker="decode-0"} 4.0
baton_worker_running_seqs{role="decode",worker="decode-0"} 6.0
baton_worker_open_leases{role="decode",worker="decode-0"} 7.0
baton_worker_leases_ended_total{reason="released",role="decode",worker="decode-0"} 8.0
"""
    assert workers_of(page) == {"decode-0": WorkerSeen(Role.DECODE, Books(90, 5, 3, 2, 1, 7), 10)}


def test_a_port_may_have_several_who_listen():
    table = """  sl  local_address rem_address   st tx_queue rx_queue
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1
   2: 0100007F:1F90 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 3 1
   3: 0100007F:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4 1
"""
    assert num_listening(table, 8080) == 2


def test_requests_are_of_all_kinds_and_each_names_its_seed():
    made = asks(500, vocab=range(5, 4096), model="m", seed=1)
    assert made == asks(500, vocab=range(5, 4096), model="m", seed=1)
    counts = Counter(ask.kind for ask in made)
    assert counts.keys() == KINDS.keys()
    assert min(counts.values()) > 20
    bodies = [json.loads(ask.body) for ask in made]
    assert all(body["stream"] and "seed" in body for body in bodies)
    assert all(body.get("n", 1) == ask.num_choices for ask, body in zip(made, bodies, strict=True))
    assert {ask.num_choices for ask in made} == {1, 2, 3}


def test_many_prompts_begin_alike():
    bodies = [json.loads(ask.body) for ask in asks(100, vocab=range(5, 4096), model="m", seed=1)]
    begins = Counter(tuple(body["prompt"][:16]) for body in bodies if "prompt" in body)
    assert len(begins) <= 8
    prompts = [tuple(body["prompt"]) for body in bodies if "prompt" in body]
    assert len(set(prompts)) == len(prompts)

"""A run of `bench chaos` fails for the damage of its faults, and for planned faults that did not
occur.
"""

from dataclasses import replace

import pytest

from bench.chaos.checker import Injected, Reply, RequestEnd, RequestVerdict
from bench.chaos.plan import ChaosPlan, FaultKind, quick
from bench.chaos.results import ChaosRun, LeftBehind, complaints, has_passed, results, row_of, story
from bench.chaos.services import StoreLeft
from bench.chaos.streams import ReceivedPiece, ReceivedStream, ReceivedUsage, chaos_requests
from bench.common.report import results_of
from engine.messages import Role

KINDS = (FaultKind.KILL, FaultKind.FLIP, FaultKind.DRAIN)
USAGE = ReceivedUsage(prompt_tokens=7, completion_tokens=2)
PIECES = (ReceivedPiece(1.0, 0, "a"), ReceivedPiece(3.5, 0, "b", finish="length"))
ANSWER = ReceivedStream(0.0, 4.0, pieces=PIECES, usages=(USAGE,), num_done=1)
RUN = ChaosRun(
    plan=ChaosPlan(num_requests=100, rate_per_s=4.0, every_s=5.0, kinds=KINDS),
    asked=tuple(chaos_requests(1, vocab=range(5, 4096), model="m", seed=0)),
    expected=(Reply((), USAGE),),
    streams=((ANSWER,),),
    verdicts=(RequestVerdict(RequestEnd.SAME),),
    injected=tuple(Injected(kind, "worker-0", 2.0, 2.0, role=Role.PREFILL) for kind in KINDS),
    skipped=(),
    outages=(),
    left=LeftBehind(0, 0),
    calm_stall_s=0.0,
    duration_s=25.0,
)


def test_run_passes_if_its_faults_did_no_harm():
    assert has_passed(results(RUN))
    assert complaints(RUN) == []


@pytest.mark.parametrize(
    "harmed",
    [
        replace(RUN, verdicts=(RequestVerdict(RequestEnd.LOST),)),
        replace(RUN, verdicts=(RequestVerdict(RequestEnd.CHANGED),)),
        replace(RUN, left=LeftBehind(1, 0)),
        replace(RUN, left=LeftBehind(0, 1)),
        replace(RUN, left=LeftBehind(0, 0, is_whole=False)),
        replace(RUN, left=LeftBehind(0, 0, store=StoreLeft(leaked_blocks=1))),
        replace(RUN, left=LeftBehind(0, 0, store=StoreLeft(leaked_leases=1))),
        replace(RUN, left=LeftBehind(0, 0, processes=("7 baton",))),
    ],
)
def test_run_with_harm_fails(harmed):
    assert not has_passed(results(harmed))


def test_a_failed_fault_is_reported_and_fails_the_run():
    failed = replace(RUN.injected[1], failure="not serving as decode in 20 s")
    run = replace(RUN, injected=(*RUN.injected, failed))
    assert not has_passed(results(run))
    assert complaints(run) == ["flip of worker-0 (prefill): not serving as decode in 20 s"]


def test_kind_without_any_victim_fails_the_run():
    run = replace(RUN, injected=RUN.injected[:2])
    assert not has_passed(results(run))
    assert complaints(run) == ["drain: requested, but hit no service"]


def test_short_run_needs_one_fault_and_names_missing_kinds():
    plan = quick(replace(RUN.plan, num_requests=20))
    run = replace(RUN, plan=plan, injected=RUN.injected[:1])
    assert has_passed(results(run))
    assert story(run)[1] == "too short for all kinds of faults; missing: flip, drain"
    idle = replace(run, injected=())
    assert not has_passed(results(idle))
    assert len(complaints(idle)) == len(KINDS)


@pytest.mark.parametrize(("until_s", "verdict"), [(10.9, "met"), (11.1, "MISSED")])
def test_the_longest_stall_is_held_against_its_goal(until_s, verdict):
    slow = replace(ANSWER, pieces=(PIECES[0], replace(PIECES[1], at_s=until_s)))
    (line,) = story(replace(RUN, streams=((slow,),)))
    assert line.endswith(f"with kill of worker-0 (prefill); goal of 10 s {verdict}")


def test_run_with_one_kind_of_fault_is_a_row_under_its_name():
    one = replace(RUN, plan=replace(RUN.plan, kinds=(FaultKind.KILL,)))
    row = row_of(one)
    assert row["kill/longest_stall_s"].unit == "s"
    assert row["kill/lost"].value == row["kill/leaked"].value == 0
    assert has_passed(results_of([row])) == (row["kill/wrong"].value == 0)
    harmed = replace(one, left=LeftBehind(1, 0))
    assert row_of(harmed)["kill/leaked"].value == 1
    assert not has_passed(results_of([row_of(harmed)]))

"""A run of `bench chaos` fails if faults did damage, or if planned faults did not occur."""

from dataclasses import replace

import pytest

from bench.chaos.checker import Injected, Reply, RequestEnd, RequestVerdict
from bench.chaos.plan import ChaosPlan, FaultKind
from bench.chaos.results import ChaosRun, LeftBehind, complaints, has_passed, results
from bench.chaos.services import StoreLeft
from bench.chaos.streams import ReceivedPiece, ReceivedStream, ReceivedUsage, chaos_requests
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

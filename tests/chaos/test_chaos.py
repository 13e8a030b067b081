"""Deployments of the bundled model under load and faults: no request is lost, changed or leaked.

`tests/unit/bench/chaos/test_checker.py` tests which errors the checker finds.
"""

import pytest

from bench.chaos.netns import Unavailable
from bench.chaos.plan import OF_RAY, ChaosPlan, FaultKind, check
from bench.chaos.results import ChaosRun, complaints, figures_of, has_passed, results
from bench.chaos.run import measure

pytestmark = pytest.mark.torch
# The faults that can be combined in one deployment of processes that runs for the whole test.
TOGETHER = tuple(k for k in FaultKind if k not in {*OF_RAY, FaultKind.EVERYTHING})


def num_affected(run: ChaosRun) -> float:
    """Returns the number of requests that a fault disturbed."""
    figures = figures_of(run)
    return sum(f.value for name, f in figures.items() if name.startswith("affected/"))


def unharmed(plan: ChaosPlan, *, must_affect: bool = True) -> ChaosRun:
    """Runs a plan. Asserts that no request was harmed, and if `must_affect`, that some were
    disturbed.
    """
    try:
        run = measure(check(plan))
    except Unavailable as error:
        pytest.skip(str(error))
    assert has_passed(results(run)), complaints(run)
    figures = figures_of(run)
    assert figures["injected"].value > 0
    if set(plan.kinds) == {FaultKind.STORE}:
        return run  # prompts that cannot be pulled are computed, so no request is affected
    assert num_affected(run) > 0 or not must_affect
    return run


def test_a_short_storm_of_faults_harms_no_request():
    kinds = (FaultKind.KILL, FaultKind.FLIP, FaultKind.GATEWAY)
    for seed in (1, 2, 3):  # in such a short run, the faults may disturb no request
        plan = ChaosPlan(
            num_requests=84, rate_per_s=12.0, every_s=4.0, kinds=kinds, seed=seed, store_mib=64
        )
        run = unharmed(plan, must_affect=seed == 3)
        if num_affected(run):
            break
    assert FaultKind.KILL in {fault.kind for fault in run.injected}
    assert len(run.injected) >= 2


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", list(FaultKind))
def test_one_kind_of_fault_again_and_again_harms_no_request(kind):
    unharmed(
        ChaosPlan(
            num_requests=150, rate_per_s=5.0, every_s=4.0, kinds=(kind,), seed=2, store_mib=64
        )
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(tuple(k for k in TOGETHER if k is not FaultKind.PARTITION), id="without-root"),
        pytest.param(TOGETHER, id="partitioned"),
    ],
)
def test_a_long_storm_of_faults_harms_no_request(kinds):
    unharmed(ChaosPlan(num_requests=1000, rate_per_s=6.0, kinds=kinds, seed=3, store_mib=64))

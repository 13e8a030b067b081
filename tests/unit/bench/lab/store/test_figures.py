"""The results of `bench store`, its goals and its warnings."""

from dataclasses import replace

import pytest

from bench.client.load import LoadRun, RequestOutcome
from bench.lab.kv.contest import GIB, TimeKey
from bench.lab.store.disk import DiskRates
from bench.lab.store.figures import StoreMeasured, results
from bench.lab.store.parts import RestartTimes, StreamsMeasured, TurnsMeasured
from bench.lab.store.peer import PeerRestart
from bench.lab.store.study import StoreStudy
from bench.lab.streams import BesideRun
from kvtransfer.store.disk.measuring import RecoveryTime
from tests.kits.answers import answer_at

CASE = StoreStudy().pulls.cases[0]
GOALS = StoreStudy.GOALS


def answers(*ttft_s, queue=0.0):
    return tuple(
        answer_at([t], timeline_s={"prefill_queue": queue * t, "prefill_compute": t / 4})
        for t in ttft_s
    )


def gaps(arm, p99_s):
    stream = answer_at([i * p99_s for i in range(100)])
    return BesideRun(arm, (stream, stream))


def turns(cached, ttft_s):
    outcomes = [
        RequestOutcome(0.0, None, answer_at([ttft_s * (i + 1)], num_prompt=100, num_cached=cached))
        for i in range(3)
    ]
    return LoadRun(6.0, tuple(outcomes))


MEASURED = StoreMeasured(
    restarts=RestartTimes(
        cold=answers(4.0, 5.0, 6.0),
        memory=answers(0.2, 0.25, 0.3, queue=0.5),
        worker=answers(0.1, 0.1, 0.1),
        disk=answers(1.0, 1.0, 1.0, queue=0.75),
    ),
    pulls={
        TimeKey("slab", "", CASE): (CASE.num_bytes / GIB / 4, CASE.num_bytes / GIB / 2),
        TimeKey("shm", "", CASE): (CASE.num_bytes / GIB / 5, CASE.num_bytes / GIB / 2),
        TimeKey("memcpy", "c", CASE): (CASE.num_bytes / GIB / 8, CASE.num_bytes / GIB / 8),
        TimeKey("memcpy", "ctypes", CASE): (CASE.num_bytes / GIB / 6, CASE.num_bytes / GIB / 9),
    },
    disk=DiskRates((0.9 * GIB, 0.6 * GIB), (1.0 * GIB, 1.0 * GIB)),
    streams=StreamsMeasured(
        (
            *(gaps("off", 0.02), gaps("on", 0.03)),
            gaps("again", 0.0205),
        ),
        taken_blocks=64,
        written_blocks=64,
    ),
    recovery=(RecoveryTime(1_000_000, 0.5, 0.25),),
    turns=TurnsMeasured(turns(10, 2.0), turns(70, 1.0)),
)


def found(measured=MEASURED):
    return {result.name: result for result in results(measured)}


def test_gains_are_those_of_each_prompt_and_pulls_are_held_against_cached_prompts():
    by_name = found()
    assert by_name["ttft/cold"].value == pytest.approx(5000)
    assert by_name["ttft_gain/memory"].runs == pytest.approx((20, 20, 20))
    assert by_name["ttft_gain/disk"].runs == pytest.approx((4, 5, 6))
    assert by_name["ttft/memory"].of_limit == pytest.approx(2.5)
    assert by_name["pull_share/memory"].value == pytest.approx(0.5)
    assert by_name["pull_share/disk"].value == pytest.approx(0.75)
    assert by_name["rest_share/disk"].value == pytest.approx(0.25)


def test_pulls_of_the_slab_are_held_against_memcpy_and_against_those_between_workers():
    by_name = found()
    assert by_name["pull/slab/64KiB"].runs == pytest.approx((4, 2))
    assert by_name["pull/slab/64KiB"].limit == pytest.approx(8)  # the faster of the two copies
    assert by_name["pull_of_shm/64KiB"].runs == pytest.approx((0.8, 1.0))


def test_ratios_are_within_a_repetition():
    by_name = found()
    assert by_name["disk_load_of_fio"].runs == pytest.approx((0.9, 0.6))
    assert by_name["disk_load"].limit == pytest.approx(1.0)
    assert by_name["itl_p99_ratio/on"].value == pytest.approx(1.5)
    assert by_name["itl_p99_ratio/again"].value == pytest.approx(1.025)


def test_each_goal_has_a_result_and_knows_which_way_is_better():
    by_name = found()
    met = {name: GOALS.is_met(result) for name, result in by_name.items()}
    assert {name: is_met for name, is_met in met.items() if is_met is not None} == {
        "ttft_gain/memory": True,
        "ttft_gain/disk": True,
        "pull_of_shm/64KiB": True,
        "disk_load_of_fio": False,
        "itl_p99_ratio/on": False,
        "recovery": True,
    }


def test_the_peer_stands_beside_computed_prompts_and_those_from_disk():
    peer = PeerRestart(cold_s=(10.0, 10.0), files_s=(2.0, 2.0), version="1")
    by_name = found(replace(MEASURED, peer=peer))
    assert by_name["ttft/cold"].peers["vllm"].ratio == pytest.approx(0.5)
    assert by_name["ttft/disk"].peers["vllm"].ratio == pytest.approx(0.5)
    assert not by_name["ttft/memory"].peers

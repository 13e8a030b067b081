"""Conditions under which batches run, and the number of batch requests that may run."""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from engine.messages import Role
from router.gateway.batches.idleness import STRETCH, Idleness, PoolsLoad, has_time, num_places
from router.machine.requests import Forecast
from router.port import WorkerStatus

DECODE = WorkerStatus(Role.DECODE, None, 0, 0, max_running=8)
PREFILL = WorkerStatus(Role.PREFILL, None, 0, 0, max_running=8)
IDLE = PoolsLoad((DECODE, PREFILL), num_other=0, num_running=0)
BUSY = replace(IDLE, num_other=1)


def test_idle_decode_workers_are_filled() -> None:
    assert Idleness(share=0.0, idle_s=0.5).num_allowed(IDLE, 1.0) == 8
    mixed = replace(DECODE, role=Role.MIXED, max_running=5)
    two = replace(IDLE, workers=(DECODE, mixed, PREFILL))
    assert Idleness(share=0.0, idle_s=0.5).num_allowed(two, 1.0) == 13


def test_nothing_runs_beside_other_requests_nor_shortly_after_them() -> None:
    idleness = Idleness(share=0.0, idle_s=0.5)
    allowed = [
        idleness.num_allowed(load, now_s)
        for now_s, load in [(1.0, IDLE), (2.0, BUSY), (2.4, IDLE), (2.6, IDLE)]
    ]
    assert allowed == [8, 0, 0, 8]


def test_without_a_wait_nothing_runs_beside_other_requests_either() -> None:
    idleness = Idleness(share=0.0, idle_s=0.0)
    assert [idleness.num_allowed(load, 1.0) for load in (BUSY, IDLE)] == [0, 8]


def test_a_request_that_arrives_counts_before_it_is_seen() -> None:
    idleness = Idleness(share=0.0, idle_s=0.5)
    idleness.record_other(3.0)
    assert [idleness.num_allowed(IDLE, now_s) for now_s in (3.4, 3.5)] == [0, 8]


def test_work_of_other_gateways_is_other_work() -> None:
    foreign = replace(IDLE, workers=(replace(DECODE, num_foreign=1), PREFILL))
    assert Idleness(share=0.0, idle_s=0.5).num_allowed(foreign, 1.0) == 0


def test_a_share_runs_beside_other_requests() -> None:
    idleness = Idleness(share=0.25, idle_s=0.5)
    assert idleness.num_allowed(BUSY, 1.0) == 2
    assert idleness.num_beside(BUSY) == 2
    assert Idleness(share=0.0, idle_s=0.5).num_beside(BUSY) == 0


def test_nothing_runs_while_no_worker_is_ready() -> None:
    for load in (IDLE, BUSY):
        unready = replace(load, is_ready=False)
        assert Idleness(share=1.0, idle_s=0.5).num_allowed(unready, 1.0) == 0
        assert Idleness(share=1.0, idle_s=0.5).num_beside(unready) == 0
    assert num_places((PREFILL,), 3) == 0


def test_a_worker_with_one_sequence_gets_a_second_one_and_not_all() -> None:
    busy = replace(DECODE, forecast=Forecast(tpot_s=0.1, alone_s=0.1))
    assert [num_places((busy,), number) for number in (0, 1, 2)] == [2, 2, 8]
    assert num_places((replace(busy, max_running=1),), 1) == 1


@given(st.floats(1e-4, 1.0), st.floats(0.0, 0.1), st.integers(1, 256), st.integers(0, 256))
@example(0.125, 0.0625, 2, 0)  # even two sequences slow a step beyond the bound
def test_places_approach_the_number_that_stretches_a_step_so_far(
    alone_s: float, each_s: float, max_running: int, num_running: int
) -> None:
    def places(number: int) -> int:
        step_s = alone_s + each_s * max(number - 1, 0)
        forecast = Forecast(tpot_s=step_s, alone_s=alone_s)
        return num_places((replace(DECODE, max_running=max_running, forecast=forecast),), number)

    number = num_running
    for _ in range(4):
        number = places(number)
    assert 1 <= number <= max_running
    assert number <= 2 or alone_s + each_s * (number - 1) <= STRETCH * alone_s * (1 + 1e-6)


def test_a_worker_gets_another_prompt_when_its_prompts_take_less_than_a_step() -> None:
    decoder = replace(DECODE, forecast=Forecast(alone_s=0.01))
    assert has_time((decoder, PREFILL))
    for wait_s, holds in ((0.009, True), (0.011, False), (None, False)):
        busy = replace(PREFILL, reserved_tokens=5, forecast=Forecast(wait_s=wait_s))
        assert has_time((decoder, busy)) is holds
        assert has_time((decoder, busy, PREFILL))
    unknown = replace(PREFILL, forecast=Forecast(wait_s=None))
    assert has_time((decoder, unknown))


def test_without_prefill_workers_the_router_decides_about_prompts() -> None:
    assert has_time((DECODE,))
    assert has_time(())

"""TTFT and TPOT of running answers, sampled once a second."""

from types import SimpleNamespace

import pytest

from engine.messages import Limits, RequestId, Sampling
from router.gateway.dashboard.recent import MAX_STALLS, AnswerRates, spread_of
from router.machine.requests import Request, Timeline

NAME = RequestId("r")


def answer(num_tokens=0, last_s=0.0, *, name=NAME, is_background=False):
    request = Request(
        name, (1, 2), Sampling(), Limits(9), received_s=10.0, is_background=is_background
    )
    timeline = Timeline(0.1, 0.2, 0.3, 0.4) if num_tokens else None
    return SimpleNamespace(request=request, num_tokens=num_tokens, last_s=last_s, timeline=timeline)


def check(rates, now_s, *answers):
    running = {each.request.request_id: each for each in answers}
    return rates.check(running, now_s)


def test_a_request_without_a_token_waits():
    seen = check(AnswerRates(), 17.7, answer(), answer(name=RequestId("late")))
    assert (seen.waiting_s, seen.ttft, seen.tpot) == (pytest.approx(7.7), None, None)


def test_the_time_to_the_first_token_is_told_once_when_it_has_come():
    rates = AnswerRates()
    assert check(rates, 11.0, answer(3, 11.0)).ttft.p50_s == pytest.approx(1.0)
    assert check(rates, 12.0, answer(5, 12.0)).ttft is None


def test_an_answer_that_began_and_ended_between_two_looks_counts():
    rates = AnswerRates()
    assert rates.remove(answer().request, 0.4) == []
    assert check(rates, 11.0).ttft.p50_s == 0.4
    assert check(rates, 12.0).ttft is None


def test_the_time_for_each_token_is_measured_since_the_last_look():
    rates = AnswerRates()
    check(rates, 11.0, answer(1, 11.0))
    assert check(rates, 12.0, answer(11, 12.0)).tpot.p50_s == pytest.approx(0.1)


def test_a_stalled_answer_is_detected_by_its_silence():
    rates = AnswerRates()
    check(rates, 11.0, answer(5, 11.0))
    assert check(rates, 12.0, answer(5, 11.0)).num_stalled == 0
    for now_s in (13.0, 14.0, 18.7):
        seen = check(rates, now_s, answer(5, 11.0))
        assert seen.num_stalled == 1
        assert seen.tpot.p95_s == pytest.approx(now_s - 11.0)
    assert rates.stalls_of(NAME) == [(1.0, pytest.approx(8.7))]
    assert check(rates, 19.7, answer(6, 19.0)).num_stalled == 0
    assert rates.remove(answer().request, None) == [(1.0, pytest.approx(8.7))]
    assert rates.stalls_of(NAME) == []


def test_stalls_of_an_answer_are_bounded():
    rates = AnswerRates()
    for number in range(1, MAX_STALLS + 9):
        check(rates, 10.0 * number, answer(number, 10.0 * number))
        check(rates, 10.0 * number + 5, answer(number, 10.0 * number))
    assert len(rates.stalls_of(NAME)) == MAX_STALLS


def test_batches_do_not_count():
    rates = AnswerRates()
    batch = {"is_background": True}
    seen = [check(rates, now_s, answer(5, 11.0, **batch)) for now_s in (11.0, 12.0, 15.0)]
    assert {(each.ttft, each.tpot) for each in seen} == {(None, None)}
    assert check(rates, 99.0, answer(name=RequestId("b"), **batch)).waiting_s == 0.0


def test_a_spread_is_the_middle_and_the_slow_end():
    spread = spread_of([float(number) for number in range(100, -1, -1)])
    assert (spread.p50_s, spread.p95_s) == (50.0, 95.0)
    assert spread_of([]) is None

"""Calls stop after several failures in a row, and are retried after longer and longer pauses."""

from kvtransfer.store.objects.calls import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_FAILURES,
    CallBreaker,
)


def tripped(now_s):
    breaker = CallBreaker()
    for _ in range(MAX_FAILURES):
        breaker.failed("broken", now_s)
    return breaker


def test_it_is_off_after_failures_in_a_row_only():
    breaker = CallBreaker()
    for _ in range(3 * MAX_FAILURES):
        breaker.failed("broken", 1.0)
        assert breaker.why_off(1.0) is None
        breaker.succeeded(1.0)
    assert tripped(1.0).why_off(1.0) == "broken"


def test_pauses_double_up_to_the_longest_while_each_try_fails():
    breaker, now_s, pauses = tripped(0.0), 0.0, []
    for _ in range(12):
        start_s = now_s
        while breaker.why_off(now_s) is not None:
            now_s += 0.5
        pauses.append(now_s - start_s)
        breaker.failed("still broken", now_s)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_failures_of_calls_made_before_a_pause_do_not_lengthen_it():
    breaker = tripped(0.0)
    for _ in range(10):
        breaker.failed("late", 0.5)
    assert breaker.why_off(FIRST_PAUSE_S) is None


def test_a_late_success_does_not_end_a_pause():
    breaker = tripped(0.0)
    breaker.succeeded(0.5)
    assert breaker.why_off(0.5) == "broken"


def test_after_a_success_the_first_pause_is_short_again():
    breaker = tripped(0.0)
    breaker.failed("broken", 1.0)
    breaker.succeeded(10.0)
    breaker.failed("broken", 11.0)
    assert breaker.why_off(11.0) is None
    breaker.trip("hangs", 11.0)
    assert breaker.why_off(11.0 + FIRST_PAUSE_S - 0.1) == "hangs"
    assert breaker.why_off(11.0 + FIRST_PAUSE_S) is None

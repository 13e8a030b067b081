"""The limits of the edge, and when a connection is overdue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.limits import Book, ConnectionTimes, Overdue

LIMITS = {"max_connections": 3, "max_connections_per_address": 2}


def overdue(times, now_s, *, num_unsent=0, is_answered=False):
    return times.overdue(now_s, 10.0, num_unsent=num_unsent, is_answered=is_answered)


def test_an_address_and_all_of_them_have_so_many_connections():
    book = Book(**LIMITS)
    assert [book.admit(each) for each in "aaab"] == [
        None,
        None,
        "too many connections of one address",
        None,
    ]
    assert book.admit("c") == "too many connections"
    book.leave("a")
    assert book.admit("c") is None
    assert book.refusals.total() == 2
    book.validate()


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"))))
def test_the_book_counts_open_connections(steps):
    book, here = Book(**LIMITS), []
    for comes, address in steps:
        if comes:
            if book.admit(address) is None:
                here.append(address)
        elif address in here:
            here.remove(address)
            book.leave(address)
        book.validate()
        assert book.num_connections == len(here) <= 3
        assert all(here.count(each) <= 2 for each in here)


@pytest.mark.parametrize(("has_begun", "why"), [(False, Overdue.SILENT), (True, Overdue.HEAD)])
def test_a_head_has_to_be_complete_in_time(has_begun, why):
    times = ConnectionTimes(100.0, has_begun=has_begun)
    assert overdue(times, 109.9) is None
    assert overdue(times, 110.0) is why


def test_a_body_has_a_clock_of_its_own():
    times = ConnectionTimes(None, 109.0)
    assert overdue(times, 138.9) is None
    assert overdue(times, 139.0) is Overdue.BODY


def test_a_pipelined_request_is_not_overdue_while_it_waits():
    times = ConnectionTimes(101.0)
    assert overdue(times, 200.0, is_answered=True) is None


def test_a_client_that_takes_something_has_not_stalled():
    times = ConnectionTimes(None)
    for now_s, num_unsent in ((0, 900), (59, 900), (59.5, 899), (119, 899)):
        assert overdue(times, now_s, num_unsent=num_unsent, is_answered=True) is None
    assert overdue(times, 119.5, num_unsent=899, is_answered=True) is Overdue.STALLED


def test_nothing_unsent_is_no_stall():
    times = ConnectionTimes(None)
    assert overdue(times, 0, num_unsent=1) is None
    assert overdue(times, 59, num_unsent=0) is None
    assert overdue(times, 60, num_unsent=1) is None
    assert overdue(times, 119, num_unsent=1) is None


def test_after_the_last_answer_a_connection_lingers_a_moment():
    times = ConnectionTimes(0.0, last_s=100.0)
    assert overdue(times, 101.9) is None
    assert overdue(times, 102.0) is Overdue.LINGER


def test_an_idle_connection_is_closed_after_its_last_answer():
    times = ConnectionTimes(None, idle_s=100.0)
    assert overdue(times, 104.9) is None
    assert overdue(times, 105.0) is Overdue.IDLE

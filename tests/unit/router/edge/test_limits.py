"""The limits of the edge, and when a connection is overdue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.limits import Book, ConnectionPace, EdgeLimits, Overdue

LIMITS = EdgeLimits(
    max_connections=3,
    max_connections_per_address=2,
    head_timeout_s=10,
    body_timeout_s=30,
    stall_timeout_s=60,
    linger_s=2,
)


def overdue(pace, now_s, *, num_unsent=0, is_answered=False):
    return pace.overdue(now_s, LIMITS, num_unsent=num_unsent, is_answered=is_answered)


def test_an_address_and_all_of_them_have_so_many_connections():
    book = Book(LIMITS)
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
    book, here = Book(LIMITS), []
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
    pace = ConnectionPace(100.0, has_begun=has_begun)
    assert overdue(pace, 109.9) is None
    assert overdue(pace, 110.0) is why


def test_a_body_has_a_clock_of_its_own():
    pace = ConnectionPace(100.0)
    pace.begin_body(109.0)
    assert overdue(pace, 138.9) is None
    assert overdue(pace, 139.0) is Overdue.BODY
    pace.end_message()
    assert overdue(pace, 1000.0) is None


def test_a_pipelined_request_is_not_overdue_while_it_waits():
    pace = ConnectionPace(100.0)
    pace.end_message()
    pace.await_head(101.0)
    assert overdue(pace, 200.0, is_answered=True) is None
    pace.resume(200.0)
    assert overdue(pace, 209.9) is None
    assert overdue(pace, 210.0) is Overdue.SILENT


def test_a_client_that_takes_something_has_not_stalled():
    pace = ConnectionPace(None)
    for now_s, num_unsent in ((0, 900), (59, 900), (59.5, 899), (119, 899)):
        assert overdue(pace, now_s, num_unsent=num_unsent, is_answered=True) is None
    assert overdue(pace, 119.5, num_unsent=899, is_answered=True) is Overdue.STALLED


def test_nothing_unsent_is_no_stall():
    pace = ConnectionPace(None)
    assert overdue(pace, 0, num_unsent=1) is None
    assert overdue(pace, 59, num_unsent=0) is None
    assert overdue(pace, 60, num_unsent=1) is None
    assert overdue(pace, 119, num_unsent=1) is None


def test_after_the_last_answer_a_connection_lingers_a_moment():
    pace = ConnectionPace(0.0, last_s=100.0)
    assert overdue(pace, 101.9) is None
    assert overdue(pace, 102.0) is Overdue.LINGER


def test_an_idle_connection_is_closed_after_its_last_answer():
    pace = ConnectionPace(None, idle_s=100.0)
    assert overdue(pace, 104.9) is None
    assert overdue(pace, 105.0) is Overdue.IDLE

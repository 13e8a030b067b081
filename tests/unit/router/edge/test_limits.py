"""The edge's limits: the number of connections, overdue connections, and shared parse time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.limits import (
    PART_WORK,
    SLICE_BYTES,
    WORK_PER_ITERATION,
    Book,
    ConnectionTimes,
    Feeder,
    Overdue,
)

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


class Fed:
    """A connection whose parser needs time for each byte."""

    def __init__(self, feeder, work_per_byte, log=None):
        self.feeder, self.work_per_byte = feeder, work_per_byte
        self.parsed, self.is_held, self.ends_at = b"", False, None
        self.log = [] if log is None else log

    def parse(self, data):
        self.parsed += bytes(data)
        self.log.append(self)
        self.feeder.work_left -= int(len(data) * self.work_per_byte)
        return self.ends_at is None or len(self.parsed) < self.ends_at

    def hold(self):
        self.is_held = True

    def let_go(self):
        self.is_held = False


async def turns(number=1):
    for _ in range(number):
        await asyncio.sleep(0)


inputs = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 5 * SLICE_BYTES), st.integers(0, 2)), max_size=12
)


@given(inputs, st.sampled_from([0.0, 0.1, 1.0, 10.0]))
def test_each_connection_gets_its_input_once_and_in_order(given_inputs, work_per_byte):
    async def run():
        feeder = Feeder()
        connections = [Fed(feeder, work_per_byte) for _ in range(3)]
        sent = [b"", b"", b""]
        for number, (index, num_bytes, num_turns) in enumerate(given_inputs):
            data = bytes([number]) * num_bytes
            sent[index] += data
            feeder.feed(connections[index], data)
            await turns(num_turns)
        await turns(100 * len(given_inputs))
        assert [each.parsed for each in connections] == sent
        assert not any(each.is_held for each in connections)

    asyncio.run(run())


async def test_costly_input_is_shared_over_turns_and_connections():
    feeder, log = Feeder(), []
    connections = [Fed(feeder, 1.0, log) for _ in range(4)]
    for each in connections:
        feeder.feed(each, bytes(50 * SLICE_BYTES))
    most = WORK_PER_ITERATION // SLICE_BYTES + 1
    assert len(log) <= most
    for _ in range(20):
        before = len(log)
        await turns()
        assert len(log) - before <= most
    counts = [log.count(each) for each in connections]
    assert max(counts) - min(counts) <= most
    assert all(each.is_held for each in connections)


async def test_cheap_input_is_taken_at_once():
    feeder = Feeder()
    connection = Fed(feeder, PART_WORK / SLICE_BYTES)
    feeder.feed(connection, bytes(256 * 1024))
    assert len(connection.parsed) == 256 * 1024
    assert not connection.is_held


async def test_a_connection_that_ends_gets_no_more():
    feeder = Feeder()
    connection, other = Fed(feeder, 10.0), Fed(feeder, 10.0)
    connection.ends_at = 4 * SLICE_BYTES
    feeder.feed(connection, bytes(20 * SLICE_BYTES))
    feeder.feed(other, bytes(20 * SLICE_BYTES))
    await turns(5)
    feeder.remove(other)
    seen = len(other.parsed)
    await turns(50)
    assert len(connection.parsed) == connection.ends_at
    assert len(other.parsed) == seen
    assert not any(each.is_held for each in (connection, other))


async def test_a_connection_whose_parser_fails_is_cut_and_others_go_on(caplog):
    feeder, cut = Feeder(), []
    broken, other = Fed(feeder, 10.0), Fed(feeder, 10.0)
    broken.cut = lambda: cut.append(broken)
    for each in (broken, other):
        feeder.feed(each, bytes(5 * SLICE_BYTES))
    broken.parse = lambda data: 1 / 0
    await turns(50)
    assert cut == [broken]
    assert len(other.parsed) == 5 * SLICE_BYTES
    assert "parsing the input of a connection failed" in caplog.text

"""Input is parsed in turns: in order, fairly, and with bounded work in each turn of the loop."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from router.edge.limits import PART_WORK, SLICE_BYTES, WORK_PER_ITERATION, Feeder


class Fed:
    """A connection whose parser does some work for each byte."""

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

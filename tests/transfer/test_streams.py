"""Sealed streams: only the sink that asked gets the records, whole and in order."""

import itertools
import select
import socket
from contextlib import closing, contextmanager

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.clock import MonotonicClock
from engine.config import Transport
from engine.errors import ProtocolError
from engine.layout import KVFormat
from engine.messages import LeaseId, SeqId
from engine.worker.blocks import BlockId
from engine.worker.events import AbortPull, PullDone, PullFailed
from kvtransfer import endpoint as endpoints
from kvtransfer.lease.effects import SendBlocks, Timing
from kvtransfer.memory import PrivatePool
from kvtransfer.messages import AskSealed, Data, Hold, Identity, MaySeal, Read, encode
from kvtransfer.native.stream import (
    KEY_BYTES,
    RecordFrame,
    SealedStream,
    StreamStop,
    agreed_lanes,
    can_seal,
)
from kvtransfer.transports import sealed
from kvtransfer.transports.sealed import SealedLink, StreamLost, Target
from kvtransfer.transports.sealed_source import MAX_GUESTS, SealedSource
from kvtransfer.transports.seam import TransferContext
from kvtransfer.wire import agree
from tests.kits.endpoints import LAYOUT, NUM_BLOCKS, SECRET, fill, is_done, until, worker

pytestmark = pytest.mark.skipif(not can_seal(), reason="there is no libsodium with AEGIS here")
KEY = bytes(range(KEY_BYTES))
WIRE = agree(Identity("model", LAYOUT), Identity("model", LAYOUT))
SINK = b"sink"
BUDGET = 2**20
DAMAGED = "damaged"
LANES = sorted({1, agreed_lanes()})  # the numbers of AEGIS lanes to test


# ---------------------------------------------------------------- messages


@contextmanager
def both_ends(key_of_sink=KEY, lanes=1):
    """Yields the two connected ends of a stream, the source's end first."""
    connections = socket.socketpair()
    for connection in connections:
        connection.settimeout(0)
    with select.epoll() as nothing:
        there, here = (
            SealedStream(connection, key, is_source=is_source, others=nothing.fileno(), lanes=lanes)
            for connection, key, is_source in zip(
                connections, (KEY, key_of_sink), (True, False), strict=True
            )
        )
        with closing(there), closing(here):
            yield there, here


def move(there, here, frame, into):
    """Sends a note and a frame. Returns the number of received records."""
    assert there.note(b"records")
    assert there.send(None, BUDGET) is StreamStop.DONE
    assert here.receive(None, BUDGET)[0] is StreamStop.NOTE
    assert here.received_note == b"records"
    while True:
        sent = there.send(frame, BUDGET)
        stop, num = here.receive(into, BUDGET)
        if stop not in (StreamStop.BLOCKED, StreamStop.MORE):
            return stop
        if sent is StreamStop.DONE and num == len(into.ids):
            return StreamStop.DONE


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 100_000),
    st.lists(st.integers(0, 3), max_size=6),
    st.sampled_from(LANES),
    st.randoms(),
)
def test_records_come_from_any_rows_to_any_rows(record_bytes, ids, lanes, random):
    source = np.random.default_rng(1).integers(0, 256, (4, record_bytes), np.uint8)
    sink = np.zeros((7, record_bytes), np.uint8)
    places = random.sample(range(7), len(ids))
    passed_over = {place for place in places if random.random() < 0.3}
    rows = [-1 if place in passed_over else place for place in places]
    with both_ends(lanes=lanes) as (there, here):
        assert (
            move(there, here, RecordFrame.of(source, ids), RecordFrame.of(sink, rows))
            is StreamStop.DONE
        )
    expected = np.zeros_like(sink)
    for row, block in zip(rows, ids, strict=True):
        if row >= 0:
            expected[row] = source[block]
    assert np.array_equal(sink, expected)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=3000), max_size=20))
def test_notes_come_in_order_both_ways(notes):
    with both_ends() as ends:
        for there, here in (ends, ends[::-1]):
            for note in notes:
                assert there.note(note)
            assert there.send(None, BUDGET) is StreamStop.DONE
            for note in notes:
                assert here.receive(None, BUDGET)[0] is StreamStop.NOTE
                assert here.received_note == note
            assert here.receive(None, BUDGET)[0] is StreamStop.BLOCKED


def test_a_frame_may_be_given_up_for_another_one():
    source = np.random.default_rng(1).integers(0, 256, (64, 2**20), np.uint8)
    sink = np.zeros((2, 2**20), np.uint8)
    with both_ends() as (there, here):
        there.note(b"long")
        assert there.send(RecordFrame.of(source, range(64)), 2**40) is StreamStop.BLOCKED
        assert here.receive(None, BUDGET)[0] is StreamStop.NOTE
        into = RecordFrame.of(source.copy(), range(64))
        while there.send(None, BUDGET) is not StreamStop.DONE:
            assert here.receive(into, BUDGET)[0] in (StreamStop.BLOCKED, StreamStop.MORE)
        there.note(b"short")
        there.send(RecordFrame.of(source, [5, 6]), 2**40)
        stop, num = here.receive(into, 2**40)
        assert (stop, here.received_note) == (StreamStop.NOTE, b"short")
        assert num < 64
        last = RecordFrame.of(sink, [0, 1])
        while here.receive(last, BUDGET)[1] < 2:
            there.send(RecordFrame.of(source, [5, 6]), 2**40)
    assert np.array_equal(sink, source[[5, 6]])


@pytest.mark.parametrize("ids", [[6], [-1]], ids=["no such record", "negative"])
def test_nothing_is_sent_out_of_bounds(ids):
    with both_ends() as (there, here):
        there.note(b"")
        with pytest.raises(IndexError):
            there.send(RecordFrame.of(np.zeros((6, 64), np.uint8), ids), BUDGET)
        assert here.receive(None, BUDGET)[0] is StreamStop.BLOCKED


def sealed_bytes(*notes, lanes=1):
    """Returns the bytes that a source's stream sends."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0)
    sends = SealedStream(ours, KEY, is_source=True, others=-1, lanes=lanes)
    with closing(sends) as stream, theirs:
        for note in notes:
            stream.note(note)
        stream.send(None, BUDGET)
        return theirs.recv(2**20)


def heard(raw, key=KEY, lanes=1):
    """Returns what a sink's stream receives if the connection closes after these bytes."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0)
    hears = SealedStream(ours, key, is_source=False, others=-1, lanes=lanes)
    with closing(hears) as stream, theirs:
        theirs.sendall(raw)
        theirs.shutdown(socket.SHUT_WR)
        notes = []
        while (stop := stream.receive(None, BUDGET)[0]) is StreamStop.NOTE:
            notes.append(stream.received_note)
        return notes, stop


def test_messages_open_only_in_order_and_with_their_key():
    first, second = sealed_bytes(b"one"), sealed_bytes(b"one", b"two")
    second = second.removeprefix(first)
    assert heard(first + second) == ([b"one", b"two"], StreamStop.LOST)
    assert heard(second) == ([], StreamStop.BAD)
    assert heard(first + first) == ([b"one"], StreamStop.BAD)
    assert heard(first, key=bytes(KEY_BYTES)) == ([], StreamStop.BAD)
    assert heard(first[:-1]) == ([], StreamStop.LOST)


@given(st.data())
def test_any_changed_bit_ends_a_stream(data):
    lanes = data.draw(st.sampled_from(LANES))
    raw = bytearray(sealed_bytes(b"some", b"notes", lanes=lanes))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    notes, stop = heard(bytes(raw), lanes=lanes)
    assert notes in ([], [b"some"])
    # the changed length may announce a longer message, which the closed connection never completes
    assert stop in (StreamStop.BAD, StreamStop.LOST)


@given(st.binary(max_size=4096))
def test_any_other_bytes_end_a_stream(raw):
    assert heard(raw)[0] == []


def test_a_sink_cannot_be_sent_its_own_messages():
    ours, theirs = socket.socketpair()
    ours.settimeout(0)
    with closing(SealedStream(ours, KEY, is_source=False, others=-1)) as stream, theirs:
        stream.note(b"read")
        stream.send(None, BUDGET)
        theirs.sendall(theirs.recv(2**16))
        assert stream.receive(None, BUDGET)[0] is StreamStop.BAD


# ---------------------------------------------------------------- ends


class Ends:
    """A source's listener, a pool, and a sink's link."""

    def __init__(self):
        self.poller = select.epoll()
        self.counted = []
        shared = TransferContext(
            *(None, self.poller, SECRET, Timing(), MonotonicClock()),
            count=lambda name, _: self.counted.append(name),
        )
        self.source = SealedSource(shared)
        self.source.listen("127.0.0.1")
        self.pool = PrivatePool(NUM_BLOCKS, LAYOUT.block_bytes)
        self.pool.open()
        fill(self.pool, seed=1)
        self.sink = np.zeros((4, LAYOUT.block_bytes), np.uint8)
        self.places = [0, 1]
        self.link = SealedLink()
        self.sink_poller = select.epoll()

    def close(self):
        self.link.close()
        self.source.stop()
        self.poller.close()
        self.sink_poller.close()
        self.pool.close()

    def turn(self):
        """Returns the reads that the source received."""
        return list(self.source.receive({fd for fd, _ in self.poller.poll(0)}))

    def connect(self, link, lanes_of_sink=1):
        address = f"tcp://127.0.0.1:{self.source.port + 1}"
        lanes = agreed_lanes(lanes_of_sink)
        link.connect(address, self.source.port, self.sink_poller, Timing(), lanes=lanes)

    def admit_and_connect(self, lanes_of_sink=None):
        ask = self.link.ask
        lanes = ask.lanes if lanes_of_sink is None else lanes_of_sink
        self.source.admit(SINK, msgspec.structs.replace(ask, lanes=lanes))
        self.connect(self.link, lanes)
        self.take()
        until(lambda: self.turn() == [] and self.source.is_connected(SINK), "connected")

    def take(self):
        places = self.places
        target = Target(WIRE, self.sink, max_blocks=2, places=lambda data: places)
        return self.link.receive(target, may_wait=False)

    def send(self, *blocks):
        ids = tuple(BlockId(block) for block in blocks)
        read = SendBlocks(SINK, WIRE, LeaseId("l"), tuple(range(len(blocks))), ids)
        return self.source.send(read, self.pool.blocks, may_wait=False)


@pytest.fixture
def ends():
    ends = Ends()
    yield ends
    ends.close()


def test_a_data_brings_its_blocks_to_their_places(ends):
    ends.admit_and_connect()
    ends.places = [2, None]
    assert ends.send(3, 5)
    assert ends.take() is None  # the step sends only the note
    assert ends.take() == (Data(LeaseId("l"), [0, 1], 0), (0,))
    assert np.array_equal(ends.sink[2], ends.pool.blocks[3])
    assert not ends.sink[[0, 1, 3]].any()


@pytest.mark.parametrize("lanes", [1, 2, 4, 3, -1])
def test_ends_agree_on_lanes_that_both_compute(ends, lanes):
    assert agreed_lanes(lanes) == (lanes if lanes in LANES else 1)
    ends.admit_and_connect(lanes_of_sink=lanes)
    assert ends.send(3)
    assert ends.take() is None
    assert ends.take() == (Data(LeaseId("l"), [0], 0), (0,))


def test_blocks_whose_places_have_changed_are_not_written(ends):
    ends.admit_and_connect()
    assert ends.send(3, 5)
    assert ends.take() is None
    ends.places = [0, 2]
    ends.link.is_stale = True
    assert ends.take() == (Data(LeaseId("l"), [0, 1], 0), (0,))
    assert np.array_equal(ends.sink[0], ends.pool.blocks[3])
    assert not ends.sink[1:].any()


def test_reads_reach_the_source(ends):
    ends.admit_and_connect()
    read = Read(LeaseId("l"), [1, 2])
    assert ends.link.read(read)
    assert ends.turn() == [(SINK, read)]
    ends.link._stream.note(encode(Hold(LeaseId("l"), 0, 0)))
    ends.link._stream.note(b"nonsense")
    ends.link._stream.send(None, BUDGET)
    (_, first), (_, second) = ends.turn()
    assert isinstance(first, ProtocolError)
    assert isinstance(second, ProtocolError)


@pytest.mark.parametrize(
    "note",
    [b"nonsense", encode(MaySeal()), encode(Data("l", [], 0)), encode(Data("l", [0, 1, 2], 0))],
    ids=["nonsense", "no Data", "no blocks", "too many"],
)
def test_a_source_that_sends_other_notes_is_reported(ends, note):
    ends.admit_and_connect()
    stream = ends.source._lines[SINK].stream
    stream.note(note)
    stream.send(None, BUDGET)
    with pytest.raises(ProtocolError):
        ends.take()


def test_what_is_not_the_sources_ends_the_link(ends):
    ends.admit_and_connect()
    ends.source._lines[SINK].stream._connection.send(bytes(100))
    with pytest.raises(StreamLost, match=DAMAGED):
        ends.take()


def test_only_a_sink_that_was_admitted_connects_and_only_once(ends):
    stranger, twin = SealedLink(), SealedLink()
    twin.ask = ends.link.ask
    for late in (stranger, twin):
        ends.source.admit(SINK, ends.link.ask)
        if late is twin:
            ends.admit_and_connect()
        ends.connect(late)
        late.receive(None, may_wait=False)
        until(
            lambda: ends.turn() == [] and ends.counted == ["refused_connections:wrong pass"],
            "refused",
        )
        with pytest.raises(StreamLost):
            until(lambda late=late: late.receive(None, may_wait=False), "closed")
        ends.counted.clear()
        late.close()
    wrong = AskSealed(ends.link.ask.name, bytes(16), KEY)
    assert ends.source._known(wrong.name + wrong.word) is None


def test_silent_guests_make_room_for_others(ends):
    guests = [socket.create_connection(("127.0.0.1", ends.source.port)) for _ in range(3)]
    until(lambda: ends.turn() == [] and len(ends.source._guests) == 3, "they are there")
    more = [
        socket.create_connection(("127.0.0.1", ends.source.port)) for _ in range(MAX_GUESTS - 1)
    ]
    until(lambda: ends.turn() == [] and guests[1].recv(1) == b"", "the oldest ones went")
    assert len(ends.source._guests) == MAX_GUESTS
    for guest in (*guests, *more):
        guest.close()


def test_silent_guests_do_not_stay(ends, monkeypatch):
    monkeypatch.setattr("kvtransfer.transports.sealed_source.GREETING_S", 0.0)
    with socket.create_connection(("127.0.0.1", ends.source.port)) as guest:
        until(lambda: ends.turn() == [] and not guest.recv(1), "it is sent away")


def test_a_broken_connection_is_counted_once(ends):
    ends.admit_and_connect()
    ends.link.close()
    until(lambda: ends.turn() == [] and not ends.source.is_connected(SINK), "it is noticed")
    assert ends.counted == ["fallbacks:zmq_unsealed"]
    ends.link = SealedLink()
    ends.admit_and_connect()
    assert ends.send(3)


# ---------------------------------------------------------------- endpoints


@contextmanager
def sealing_pair(**options):
    """Yields two workers that exchange blocks over sealed streams."""
    with (
        worker("source", Transport.ZMQ, **options) as source,
        worker("sink", Transport.ZMQ, **options) as sink,
    ):
        numbers = np.random.default_rng(1).uniform(-1, 1, (source.pool.blocks.nbytes // 4,))
        source.pool.blocks[:] = (
            numbers.astype(np.float32).view(np.uint8).reshape(source.pool.blocks.shape)
        )
        seal(source, sink)
        yield source, sink


_warm_ups = itertools.count()


def seal(source, sink):
    """Pulls blocks until both workers have a stream."""

    def is_sealed():
        name = f"warm-up {next(_warm_ups)}"
        assert is_done(sink.pull(name, source.lease(name, [0]), [(0, 0)]), "zmq")
        lines = source.endpoint._by_message.sealed_source._lines.values()
        return link_of(sink)._stream is not None and any(line.stream for line in lines)

    until(is_sealed, "blocks travel sealed")


def link_of(sink):
    (source,) = sink.endpoint._by_message.sealed_sink._sources.values()
    return source.link or SealedLink()


@pytest.mark.parametrize("travels_as", [None, KVFormat.INT8])
def test_pulls_go_over_the_stream_once_it_is_there(travels_as, monkeypatch):
    with sealing_pair(kv_wire_dtype=travels_as) as (source, sink):
        # no staging buffers: a block sent over CURVE would fail
        monkeypatch.setattr(source.endpoint._by_message, "_staging", None)
        fill(sink.pool, seed=2)
        end = sink.pull("s", source.lease("l", [1, 2]), [(0, 7), (1, 8)])
        assert is_done(end, "zmq")
        there, here = source.pool.blocks[[1, 2]], sink.pool.blocks[[7, 8]]
        if travels_as is None:
            assert np.array_equal(here, there)
        else:
            error = np.abs(here.view(np.float32) - there.view(np.float32))
            assert error.max() < 0.02


@pytest.mark.parametrize("budget", [50_000, 300_000, 2**20])
def test_the_end_of_a_read_comes_however_it_is_cut_into_steps(monkeypatch, budget):
    with sealing_pair() as (source, sink):
        monkeypatch.setattr("kvtransfer.transports.sealed.BUDGET_BYTES", budget)
        for number in range(5):
            lease = source.lease(f"l{number}", list(range(NUM_BLOCKS)))
            pairs = [(block, block) for block in range(NUM_BLOCKS)]
            assert is_done(sink.pull(f"s{number}", lease, pairs), "zmq")
        assert np.array_equal(sink.pool.blocks, source.pool.blocks)


@pytest.mark.parametrize("which", ["source", "sink"])
def test_pulls_go_on_over_curve_if_the_stream_breaks(which):
    with sealing_pair(timing=Timing(reread_s=0.1, silence_s=2.0)) as (source, sink):
        streams = link_of(sink)
        if which == "sink":
            streams._connection.shutdown(socket.SHUT_RDWR)
        else:
            (line,) = source.endpoint._by_message.sealed_source._lines.values()
            until(lambda: line.stream is not None, "the source knows whose connection it is")
            line.stream._connection.shutdown(socket.SHUT_RDWR)
        end = sink.pull("s", source.lease("l", [1, 2]), [(0, 7), (1, 8)])
        assert is_done(end, "zmq")
        assert np.array_equal(sink.pool.blocks[[7, 8]], source.pool.blocks[[1, 2]])
        assert sink.endpoint.counters()["fallbacks:zmq_unsealed"] == 1
        assert source.endpoint.counters()["fallbacks:zmq_unsealed"] == 1


def test_another_stream_replaces_a_broken_one():
    with sealing_pair(timing=Timing(reread_s=0.1, silence_s=0.3)) as (source, sink):
        link_of(sink)._connection.shutdown(socket.SHUT_RDWR)
        until(lambda: link_of(sink)._stream is None, "it is noticed")
        seal(source, sink)


def test_blocks_that_arrive_damaged_are_sent_again(monkeypatch):
    with sealing_pair(timing=Timing(reread_s=30.0, silence_s=30.0)) as (source, sink):
        receive = SealedLink.receive

        def damage(self, target, **options):
            if self.landing is not None:
                raise StreamLost(DAMAGED)
            return receive(self, target, **options)

        monkeypatch.setattr(SealedLink, "receive", damage)
        end = sink.pull("s", source.lease("l", [1, 2]), [(0, 7), (1, 8)])
        assert is_done(end, "zmq")
        assert np.array_equal(sink.pool.blocks[[7, 8]], source.pool.blocks[[1, 2]])
        assert sink.endpoint.counters()["reread_blocks"] == 2


def test_a_pull_that_was_given_up_is_written_no_more():
    """The blocks belong to another sequence once the pull's end has been reported."""
    with sealing_pair() as (source, sink):
        sealed = link_of(sink)
        for number in range(20):
            name = f"l{number}"
            everything = list(range(NUM_BLOCKS))
            lease = source.lease(name, everything)
            sink.hold(name, lease)
            sink.start(name, [(i, i) for i in everything])
            sink.endpoint.perform(AbortPull(SeqId(name)))
            end = sink.end_of_pull()
            assert isinstance(end, PullFailed | PullDone)
            sink.pool.blocks[:] = 0
            again = sink.pull(f"{name} again", source.lease(f"{name}+", [3]), [(0, 5)])
            assert is_done(again, "zmq")
            assert np.array_equal(sink.pool.blocks[5], source.pool.blocks[3])
            others = [block for block in everything if block != 5]
            assert not sink.pool.blocks[others].any()
        assert link_of(sink) is sealed


@pytest.mark.parametrize("lacks_it", [endpoints, sealed], ids=["source", "sink"])
def test_without_libsodium_at_an_end_blocks_come_over_curve_and_that_is_counted(
    monkeypatch, lacks_it
):
    monkeypatch.setattr(lacks_it, "can_seal", lambda: False)
    with worker("source", Transport.ZMQ) as source, worker("sink", Transport.ZMQ) as sink:
        fill(source.pool, seed=1)
        for number in range(3):
            lease = source.lease(f"l{number}", [1])
            assert is_done(sink.pull(f"s{number}", lease, [(0, 2)]), "zmq")
        assert np.array_equal(sink.pool.blocks[2], source.pool.blocks[1])
        assert sink.endpoint.counters()["fallbacks:zmq_unsealed"] == 1

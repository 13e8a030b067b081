"""Sealed blocks: they come whole or not at all, to who asked, and otherwise over CURVE."""

import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine.clock import MonotonicClock
from engine.config import Transport
from engine.errors import ProtocolError
from engine.layout import KVFormat
from engine.messages import SeqId
from engine.net.curve import Channel, Doorkeeper
from engine.worker.events import PullDone, PullFailed
from kvtransfer import endpoint as endpoints
from kvtransfer import sink_end
from kvtransfer.lease.effects import SendBlocks
from kvtransfer.memory import PrivatePool
from kvtransfer.messages import Identity
from kvtransfer.native.sealing import KEY_BYTES, TAG_BYTES, CannotSeal, Opener, Sealer, can_seal
from kvtransfer.records import RecordPiece
from kvtransfer.sealed import SealedLink, SealedSource, encode_header, num_sealed
from kvtransfer.wire import agree
from tests.kits.endpoints import LAYOUT, SECRET, fill, is_done, until, worker
from tests.kits.records import random_records, whole

pytestmark = pytest.mark.skipif(not can_seal(), reason="there is no libcrypto here")
KEY = bytes(range(KEY_BYTES))
WIRE = agree(Identity("model", LAYOUT), Identity("model", LAYOUT))
SINK = b"sink"


# ---------------------------------------------------------------- boxes


@given(st.binary(max_size=300), st.integers(0, 2**40), st.data())
def test_a_box_opens_only_unchanged_and_under_its_number(text, number, data):
    box = np.empty(len(text) + TAG_BYTES, np.uint8)
    Sealer(KEY).seal(number, text, box)
    opener = Opener(KEY)
    assert opener.open(number, box) == text
    assert opener.open(number + 1, box) is None
    box[data.draw(st.integers(0, len(box) - 1))] ^= 1
    assert opener.open(number, box) is None


def test_records_are_sealed_from_and_opened_to_any_places():
    source, sink = random_records(6), random_records(6, seed=1)
    frame, tag = np.empty((3, source.shape[1]), np.uint8), np.empty(TAG_BYTES, np.uint8)
    before = sink.copy()
    Sealer(KEY).seal_records(5, frame, tag, source, [4, 0, 2], whole())
    assert Opener(KEY).open_records(5, frame.copy(), tag, sink, [1, -1, 3], whole())
    assert np.array_equal(sink[[1, 3]], source[[4, 2]])
    assert np.array_equal(sink[[0, 2, 4, 5]], before[[0, 2, 4, 5]])
    frame[2, 7] ^= 1
    assert not Opener(KEY).open_records(5, frame, tag, sink, [1, -1, 3], whole())


@pytest.mark.parametrize(
    ("ids", "pieces"),
    [([6], whole()), ([-1], whole()), ([0], [RecordPiece(0, 0, 64)]), ([0], [])],
    ids=["no such record", "negative", "a gap", "no piece"],
)
def test_nothing_is_sealed_out_of_bounds_or_in_part(ids, pieces):
    frame, tag = np.zeros((1, 4096), np.uint8), np.empty(TAG_BYTES, np.uint8)
    with pytest.raises(CannotSeal):
        Sealer(KEY).seal_records(0, frame, tag, random_records(6), ids, pieces)
    assert not frame.any()


# ---------------------------------------------------------------- frames


class Ends:
    """A source's socket, a pool, and a connected sink."""

    def __init__(self, context):
        self.context = context
        self.doorkeeper = Doorkeeper(SECRET, Channel.KV, MonotonicClock())
        self.doorkeeper.open(context)
        self.counted = []
        self.source = SealedSource(self.doorkeeper, self.counted.append)
        self.source.open(context, "127.0.0.1", prepare=lambda socket: None)
        self.address = f"tcp://127.0.0.1:{self.source.port}"
        self.pool = PrivatePool(8, LAYOUT.block_bytes)
        self.pool.open()
        fill(self.pool, seed=1)
        self.link = SealedLink()

    def connect(self, link):
        port = self.source.port
        return link.connect(self.context, self.address, port, max_frame_bytes=2**20)

    def admit_and_connect(self):
        self.source.admit(SINK, self.link.ask())
        self.connect(self.link).set(zmq.RCVTIMEO, 10_000)

    def send(self, *blocks):
        read = SendBlocks(SINK, WIRE, "l", tuple(range(len(blocks))), blocks)
        until(lambda: self.source.begin(SINK), "the sink is connected")
        header = encode_header(read)
        num_bytes = num_sealed(header, len(blocks) * WIRE.record_bytes)
        self.source.send(read, header, self.pool.blocks, np.empty(num_bytes, np.uint8))


@pytest.fixture
def ends():
    context = zmq.Context()
    ends = Ends(context)
    yield ends
    ends.link.close()
    ends.source.close()
    ends.pool.close()
    context.term()


def test_a_frame_brings_its_blocks_to_their_places(ends):
    ends.admit_and_connect()
    ends.send(3, 5)
    ends.send(1)
    frame = ends.link.receive()
    sink = np.zeros((4, LAYOUT.block_bytes), np.uint8)
    assert frame.data.lease_id == "l"
    assert frame.open(WIRE, sink, [2, None])
    assert np.array_equal(sink[2], ends.pool.blocks[3])
    assert not sink[[0, 1, 3]].any()
    assert ends.link.receive().open(WIRE, sink, [0])
    assert np.array_equal(sink[0], ends.pool.blocks[1])


@pytest.mark.parametrize("change", ["repeated", "a bit", "short", "other key", "number"])
def test_a_frame_that_is_not_the_next_one_of_the_source_is_refused(ends, change):
    ends.admit_and_connect()
    ends.send(3)
    taken = ends.link.socket.recv()
    frame = bytearray(taken)
    if change == "a bit":
        frame[14] ^= 1  # of the header
    elif change == "short":
        del frame[40:]
    elif change == "number":
        frame[0] += 1
    elif change == "other key":
        ends.link._opener = Opener(bytes(KEY_BYTES))
    name = ends.link.ask().name
    for _ in range(2 if change == "repeated" else 1):
        ends.source.socket.send_multipart([name, bytes(frame)])
    if change == "repeated":
        ends.link.receive()
    with pytest.raises(ProtocolError):
        ends.link.receive()


def test_only_a_sink_that_was_admitted_may_connect(ends):
    stranger = SealedLink()
    ends.connect(stranger)
    until(lambda: ends.doorkeeper.counters["refused_connections:wrong key"] == 1, "refused")
    assert not ends.source.begin(SINK)
    ends.admit_and_connect()
    ends.send(3)
    ends.source.dismiss(SINK)
    assert not ends.source.begin(SINK)
    stranger.close()


def test_a_broken_connection_is_counted_once(ends):
    ends.admit_and_connect()
    assert not ends.source.begin(b"another")
    ends.send(3)
    ends.link.socket.close()

    def is_lost():
        ends.source.begin(SINK) and ends.source.socket.send(b"")
        return bool(ends.counted)

    until(is_lost, "the source notices")
    assert not ends.source.begin(SINK)
    assert ends.counted == ["fallbacks:zmq_unsealed"]


# ---------------------------------------------------------------- endpoints


@contextmanager
def sealing_pair(monkeypatch, **options):
    """Two workers between which blocks travel sealed, and the number of sealed frames so far."""
    sent = []
    send = SealedSource.send
    monkeypatch.setattr(SealedSource, "send", lambda *what: sent.append(1) or send(*what))
    with (
        worker("source", Transport.ZMQ, **options) as source,
        worker("sink", Transport.ZMQ, **options) as sink,
    ):
        numbers = np.random.default_rng(1).uniform(-1, 1, (source.pool.blocks.nbytes // 4,))
        source.pool.blocks[:] = (
            numbers.astype(np.float32).view(np.uint8).reshape(source.pool.blocks.shape)
        )

        warm_ups = itertools.count()

        def is_sealed():
            lease = source.lease(f"warm-up {next(warm_ups)}", [0])
            assert is_done(sink.pull(lease.lease_id, lease, [(0, 0)]), "zmq")
            return bool(sent)

        until(is_sealed, "blocks travel sealed")
        yield source, sink, sent


@pytest.mark.parametrize("travels_as", [None, KVFormat.INT8])
def test_pulls_go_over_the_sealed_connection_once_it_is_there(monkeypatch, travels_as):
    with sealing_pair(monkeypatch, kv_wire_dtype=travels_as) as (source, sink, sent):
        num_before = len(sent)
        fill(sink.pool, seed=2)
        end = sink.pull("s", source.lease("l", [1, 2]), [(0, 7), (1, 8)])
        assert is_done(end, "zmq")
        assert len(sent) == num_before + 1
        there, here = source.pool.blocks[[1, 2]], sink.pool.blocks[[7, 8]]
        if travels_as is None:
            assert np.array_equal(here, there)
        else:
            error = np.abs(here.view(np.float32) - there.view(np.float32))
            assert error.max() < 0.02


@pytest.mark.parametrize(("num_damaged", "is_done_at_last"), [(1, True), (100, False)])
def test_damaged_sealed_blocks_are_sent_again_a_few_times(
    monkeypatch, num_damaged, is_done_at_last
):
    with sealing_pair(monkeypatch) as (source, sink, _):
        seal = Sealer.seal_records
        damages = iter([1] * num_damaged)

        def damage(self, number, frame, tag, *rest):
            seal(self, number, frame, tag, *rest)
            tag[0] ^= next(damages, 0)

        monkeypatch.setattr(Sealer, "seal_records", damage)
        end = sink.pull("s", source.lease("l", [1, 2]), [(0, 7), (1, 8)])
        if is_done_at_last:
            assert isinstance(end, PullDone)
            assert np.array_equal(sink.pool.blocks[[7, 8]], source.pool.blocks[[1, 2]])
        else:
            assert end == PullFailed(SeqId("s"), "blocks arrive damaged")


@pytest.mark.parametrize("lacks_it", [endpoints, sink_end], ids=["source", "sink"])
def test_without_libcrypto_at_an_end_blocks_come_over_curve_and_that_is_counted(
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

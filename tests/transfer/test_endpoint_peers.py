"""Endpoints with faulty, lost or replaced peers, and with several pulls at once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import UnionType

import numpy as np
import pytest
import zmq

from engine.clock import MonotonicClock
from engine.config import Transport
from engine.messages import Incarnation, LeaseId, LeaseRef, SeqId, TransferAddress
from engine.net.trust import Secret
from engine.worker.events import AbortPull, LeaseEnded, PullDone, PullFailed
from kvtransfer import source_end
from kvtransfer.lease.effects import Timing
from kvtransfer.lease.sink import MAX_DAMAGED
from kvtransfer.memory import ShmUnavailable
from kvtransfer.messages import (
    Attach,
    AttachBody,
    Attached,
    Data,
    Ended,
    Hold,
    Identity,
    Offers,
    Read,
    Ready,
    Release,
    ToSink,
    ToSource,
    attach,
    decode_attach_body,
    decode_to_source,
    encode,
)
from kvtransfer.native.copying import checksum
from kvtransfer.transports import shm
from tests.kits.endpoints import (
    DEADLINE_S,
    LAYOUT,
    NUM_BLOCKS,
    Worker,
    bound,
    dialled,
    fill,
    is_done,
    until,
    worker,
)

# deadlines so long that none is reached in a test
PATIENT = Timing(ttl_s=8.0, hold_every_s=0.05, silence_s=8.0)
IMPATIENT = Timing(ttl_s=1.0, hold_every_s=0.05, silence_s=0.3)
BLOCK = bytes(range(256)) * (LAYOUT.block_bytes // 256)


# ---------------------------------------------------------------- a source that is a bare socket


class RawSource:
    """A source that sends only the messages that the test chooses."""

    def __init__(self, router: "zmq.Socket[bytes]", address: TransferAddress) -> None:
        self._router = router
        self.lease = LeaseRef(LeaseId("l"), address, 4)

    def expect(self, kind: type | UnionType) -> ToSource:
        """Returns the next message of that type. Skips the renewals before it."""
        while True:
            self._peer, frame = self._router.recv_multipart()
            message = decode_to_source(frame)
            if isinstance(message, kind):
                return message

    def say(self, message: ToSink | bytes, *payload: bytes) -> None:
        frame = message if isinstance(message, bytes) else encode(message)
        self._router.send_multipart([self._peer, frame, *payload])

    def bring_to_read(self, sink: Worker) -> None:
        """Starts a pull of two blocks, into blocks 10 and 11, and returns its first Read."""
        sink.hold("s", self.lease)
        sink.start("s", [(0, 10), (1, 11)])
        attach = self.expect(Attach)
        assert isinstance(attach, Attach)
        assert decode_attach_body(attach.body).source == "raw-1"
        self.say(Attached(Incarnation("raw-1"), Identity("model", LAYOUT), 4, Offers()))
        self.expect(Hold)
        self.say(Ready(LeaseId("l"), 0, [0, 1, 2, 3]))
        read = self.expect(Read)
        assert read == Read(LeaseId("l"), [0, 1])

    def held(self) -> Hold:
        """Returns the next renewal of the sink."""
        hold = self.expect(Hold)
        assert isinstance(hold, Hold)
        return hold


@contextmanager
def raw_pair(timing: Timing = PATIENT) -> Iterator[tuple[RawSource, Worker]]:
    with worker("sink", Transport.ZMQ, timing=timing) as sink, bound() as (router, address):
        yield RawSource(router, address), sink


def data(*indices: int) -> Data:
    return Data(LeaseId("l"), list(indices), checksum(BLOCK * len(indices)))


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (data(0, 1), []),
        (data(0), [BLOCK, BLOCK]),
        (Ready(LeaseId("l"), 0, [0]), [BLOCK]),
        (b"\xc1 no message", [BLOCK] * 3),
        (encode(Ended(LeaseId("lease"), "x")).replace(b"lease", b"\xff" * 5), []),
    ],
    ids=["none", "too many", "not data", "garbage", "not unicode"],
)
def test_a_source_with_invalid_messages_is_cut_off_and_writes_nothing(message, payload):
    with raw_pair() as (source, sink):
        fill(sink.pool, seed=2)
        before = sink.pool.blocks.copy()
        source.bring_to_read(sink)
        source.say(message, *payload)
        end = sink.end_of_pull()
        assert end == PullFailed(SeqId("s"), "source sends nonsense")
        assert sink.endpoint.counters()["bad_messages"] == 1
        assert np.array_equal(sink.pool.blocks, before)
        until(lambda: not sink.connections(), "the connection is closed")


@pytest.mark.parametrize(
    "payload",
    [BLOCK * 2 + b"x", BLOCK, b"", BLOCK + BLOCK[::-1]],
    ids=["long", "short", "empty", "wrong"],
)
def test_wrong_blocks_are_asked_for_again_a_limited_number_of_times(payload):
    with raw_pair() as (source, sink):
        fill(sink.pool, seed=2)
        before = sink.pool.blocks.copy()
        source.bring_to_read(sink)
        for _ in range(MAX_DAMAGED):
            source.say(data(0, 1), payload)
            assert source.expect(Read) == Read(LeaseId("l"), [0, 1])
        source.say(data(0, 1), payload)
        assert sink.end_of_pull() == PullFailed(SeqId("s"), "blocks arrive damaged")
        assert source.expect(Release).lease_id == "l"
        others = [b for b in range(NUM_BLOCKS) if b not in (10, 11)]
        assert np.array_equal(sink.pool.blocks[others], before[others])


def test_damage_reaches_only_blocks_in_flight():
    with raw_pair() as (source, sink):
        fill(sink.pool, seed=2)
        before = sink.pool.blocks.copy()
        source.bring_to_read(sink)
        source.say(data(1), BLOCK)
        source.say(data(1, 2, 99, 0), BLOCK[::-1] * 4)
        assert source.expect(Read) == Read(LeaseId("l"), [0])
        others = [b for b in range(NUM_BLOCKS) if b not in (10, 11)]
        assert np.array_equal(sink.pool.blocks[others], before[others])
        assert sink.pool.blocks[11].tobytes() == BLOCK


def test_lost_frames_are_asked_for_again():
    timing = Timing(ttl_s=8.0, hold_every_s=0.05, reread_s=0.2, silence_s=8.0)
    with raw_pair(timing) as (source, sink):
        source.bring_to_read(sink)
        source.say(data(1), BLOCK)
        assert source.expect(Read) == Read(LeaseId("l"), [0])
        source.say(data(0), BLOCK)
        assert is_done(sink.end_of_pull(), "zmq")
        assert sink.endpoint.counters()["reread_blocks"] == 1


def test_unrequested_data_is_written_nowhere():
    with raw_pair() as (source, sink):
        fill(sink.pool, seed=2)
        before = sink.pool.blocks.copy()
        source.bring_to_read(sink)
        source.say(data(2, 3, 99, 0), BLOCK * 4)
        until(lambda: sink.endpoint.counters().get("pulled_blocks") == 1, "block 0 came")
        others = [b for b in range(NUM_BLOCKS) if b != 10]
        assert np.array_equal(sink.pool.blocks[others], before[others])


def test_data_that_comes_after_the_pull_failed_is_written_nowhere():
    with raw_pair() as (source, sink):
        fill(sink.pool, seed=2)
        before = sink.pool.blocks.copy()
        source.bring_to_read(sink)
        sink.endpoint.perform(AbortPull(SeqId("s")))
        assert sink.end_of_pull() == PullFailed(SeqId("s"), "aborted")
        source.say(data(0, 1), BLOCK * 2)
        # A second pull proves that the sink has read the late Data: a connection keeps the order of
        # messages.
        sink.hold("t", LeaseRef(LeaseId("m"), source.lease.source, 1))
        while source.held().lease_id != "m":
            pass
        source.say(Ended(LeaseId("m"), "revoked"))
        assert sink.end_of_pull() == PullFailed(SeqId("t"), "lease revoked")
        assert np.array_equal(sink.pool.blocks, before)


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://", "tcp://127.0.0.1:notaport"])
def test_an_invalid_address_fails_only_the_pull(address):
    with worker("sink", Transport.ZMQ, timing=IMPATIENT) as sink:
        lease = LeaseRef(LeaseId("l"), TransferAddress("x", "x-1", address), 1)
        assert sink.pull("s", lease, [(0, 1)]) == PullFailed(SeqId("s"), "source silent")
        assert sink.endpoint.counters()["unsent_messages"] >= 1


# ---------------------------------------------------------------- a sink that is a bare socket


def test_a_sink_with_invalid_messages_loses_its_leases_and_must_attach_again():
    with worker("source", Transport.ZMQ) as source, worker("sink", Transport.ZMQ) as sink:
        sink.hold("s", source.lease("l", [1, 2], ready=1))
        until(lambda: source.is_held("l"), "held")
        (link,) = sink.endpoint._connections._links.values()
        link.socket.send(b"\xc1")
        assert source.end_of_lease() == LeaseEnded(LeaseId("l"), "bad message")
        sink.start("s", [(0, 1)])
        assert isinstance(sink.end_of_pull(), PullFailed)


def test_a_frame_that_is_too_large_ends_only_its_connection():
    with (
        worker("source", Transport.ZMQ) as source,
        worker("sink", Transport.ZMQ) as sink,
        dialled(source) as stranger,
    ):
        stranger.send(bytes(source_end.MAX_MESSAGE_BYTES + 1))
        assert isinstance(sink.pull("s", source.lease("l", [5]), [(0, 6)]), PullDone)


def test_a_flood_of_garbage_does_not_keep_others_waiting():
    with (
        worker("source", Transport.ZMQ) as source,
        worker("sink", Transport.ZMQ, timing=PATIENT) as sink,
        dialled(source) as stranger,
    ):
        for _ in range(900):
            stranger.send(b"\xc1")
        assert isinstance(sink.pull("s", source.lease("l", [5]), [(0, 6)]), PullDone)
        until(lambda: source.endpoint.counters().get("bad_messages") == 900, "all are counted")


@pytest.mark.parametrize("token", ["guess", "sécret"])
def test_a_sink_with_another_secret_is_not_answered(token):
    with (
        worker("source", Transport.ZMQ) as source,
        worker("sink", Transport.ZMQ, secret=Secret(token)) as sink,
    ):
        assert sink.pull("s", source.lease("l", [1]), [(0, 1)]) == PullFailed(
            SeqId("s"), "source silent"
        )
        assert not source.is_held("l")


def test_a_sink_that_reads_no_answers_is_cut_off_and_costs_little(monkeypatch):
    monkeypatch.setattr(source_end, "MAX_UNREAD_MESSAGES", 8)
    with worker("source", Transport.ZMQ) as source, worker("sink", Transport.ZMQ) as sink:
        with dialled(source) as greedy:
            greedy.set(zmq.RCVHWM, 1)
            source.lease("g", list(range(NUM_BLOCKS)))
            identity = Identity("model", LAYOUT)
            greedy.send(encode(attach(AttachBody("greedy", source.address.incarnation, identity))))
            hold = encode(Hold(LeaseId("g"), 0, 0))
            clock = MonotonicClock()
            end_s = clock.now_s() + DEADLINE_S
            while "slow_sinks" not in source.endpoint.counters():
                assert clock.now_s() < end_s
                with suppress(zmq.Again):
                    greedy.send(hold, zmq.NOBLOCK)
            assert source.end_of_lease() == LeaseEnded(LeaseId("g"), "unread answers")
        assert isinstance(sink.pull("s", source.lease("l", [5]), [(0, 6)]), PullDone)


# ---------------------------------------------------------------- shared memory


def test_auto_falls_back_when_the_offered_memory_cannot_be_mapped(monkeypatch):
    def unavailable(*_: object) -> None:
        raise ShmUnavailable("the source's memory is gone")

    monkeypatch.setattr(shm, "map_offer", unavailable)
    with worker("source", Transport.AUTO) as source, worker("sink", Transport.AUTO) as sink:
        fill(source.pool, seed=1)
        done = sink.pull("s", source.lease("l", [3]), [(0, 4)])
        assert is_done(done, "zmq")
        assert np.array_equal(sink.pool.blocks[4], source.pool.blocks[3])
        assert sink.endpoint.counters()["fallbacks:shm_unavailable"] == 1


def test_a_source_on_another_host_is_not_mapped(monkeypatch):
    with worker("source", Transport.AUTO) as source, worker("sink", Transport.SHM) as sink:
        monkeypatch.setattr("kvtransfer.memory.boot_id", lambda: "another host")
        end = sink.pull("s", source.lease("l", [3]), [(0, 4)])
        assert end == PullFailed(SeqId("s"), "no transport: shm: source is on another host")
        until(lambda: not sink.connections(), "the connection is closed")


# ---------------------------------------------------------------- several pulls, and closing


@pytest.mark.parametrize("backend", [Transport.SHM, Transport.NIXL, Transport.ZMQ])
def test_many_pulls_in_both_directions_at_once(backend):
    with worker("a", backend) as a, worker("b", backend) as b:
        fill(a.pool, seed=1)
        fill(b.pool, seed=2)
        sent = {"a": a.pool.blocks.copy(), "b": b.pool.blocks.copy()}
        # Each worker leases its lower half in pieces of ten blocks, and pulls the other worker's
        # lower half into its own upper half.
        half = NUM_BLOCKS // 2
        for here, there in ((a, b), (b, a)):
            for first in range(0, half, 10):
                name = f"{first} of {there.address.worker_id}"
                lease = there.lease(name, list(range(first, first + 10)), ready=3)
                here.hold(name, lease)
                here.start(name, [(i, half + first + i) for i in range(10)])
        for there in (a, b):
            for first in range(0, half, 10):
                name = f"{first} of {there.address.worker_id}"
                there.grow(name, list(range(first + 3, first + 10)))
        for here, other in ((a, "b"), (b, "a")):
            ends = [here.next_event((PullDone, PullFailed)) for _ in range(0, half, 10)]  # type: ignore[arg-type]
            assert all(isinstance(end, PullDone) for end in ends), ends
            assert np.array_equal(here.pool.blocks[half:], sent[other][:half])


def test_a_source_without_pulls_is_let_go():
    with (
        worker("source", Transport.SHM) as source,
        worker("sink", Transport.SHM, timing=Timing(ttl_s=0.5, silence_s=8.0)) as sink,
    ):
        assert isinstance(sink.pull("s", source.lease("l", [1]), [(0, 2)]), PullDone)
        until(lambda: not sink.connections(), "let go")
        assert isinstance(sink.pull("t", source.lease("m", [3]), [(0, 4)]), PullDone)


def test_closing_joins_the_thread():
    def num_threads() -> int:
        return sum(thread.name == "kv-transfer" for thread in threading.enumerate())

    before = num_threads()
    with worker("source", Transport.SHM) as source, worker("sink", Transport.SHM) as sink:
        assert num_threads() == before + 2
        sink.hold("s", source.lease("l", [1]))
    assert num_threads() == before

"""Real endpoints refuse impossible layouts and offers, and meanwhile serve other peers.

`tests.fuzz` sends arbitrary messages to the code behind the sockets.
"""

import logging
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from engine.config import Transport
from engine.layout import KVFormat, KVLayout, KVSection, LayerRange, Shard
from engine.messages import Incarnation, LeaseId, LeaseRef, SeqId, TransferAddress
from engine.worker.events import PullDone, PullFailed
from kvtransfer.lease.effects import Timing
from kvtransfer.lease.sink import MAX_DAMAGED
from kvtransfer.memory import SharedPool, ShmUnavailable, boot_id, map_offer
from kvtransfer.messages import (
    AttachBody,
    Attached,
    AttachRefused,
    Data,
    Ended,
    Hold,
    Identity,
    Offers,
    Ready,
    ShmOffer,
    ToSink,
    ToSource,
    attach,
    decode_to_sink,
    decode_to_source,
    encode,
)
from kvtransfer.wire import Disagreement, agree
from tests.fuzz.mutation import Message, Script
from tests.kits.endpoints import (
    DEADLINE_S,
    LAYOUT,
    Worker,
    bound,
    dialled,
    fill,
    until,
    worker,
)

TIMING = Timing(
    ttl_s=30.0, hold_every_s=0.2, reread_s=30.0, silence_s=30.0
)  # no pull ends because of a deadline
IDENTITY = Identity("model", LAYOUT)
NUM_OFFERED = 8  # number of blocks that the lying source offers
TARGETS = (10, 11)  # local blocks for indices 0 and 1 of the lying source's lease
HONEST_TARGET = 20


@pytest.fixture(autouse=True)
def _few_words(caplog):
    caplog.set_level(logging.ERROR)  # every invalid message would log a warning


def framed(*messages: ToSink | ToSource) -> Script:
    return [(encode(message),) for message in messages]


# ---------------------------------------------------------------- a sink that is a bare socket


class RawSink:
    """A sink that is a bare socket, connected to a source."""

    def __init__(self, dealer: "zmq.Socket[bytes]", source: Worker) -> None:
        self._dealer = dealer
        body = AttachBody(Incarnation("raw"), source.address.incarnation, IDENTITY)
        self.attach = attach(body)

    def say(self, script: Script) -> None:
        for message in script:
            self._dealer.send_multipart(message)

    def answers(self) -> Iterator[Message]:
        """Yields all answers of the source to the messages sent so far."""
        # the source may send blocks only after its answer to the first Hold
        for mark in ("no lease", "another"):
            self.say(framed(self.attach, Hold(LeaseId(mark), 0, 0)))
            while True:
                frames = tuple(self._dealer.recv_multipart())
                if decode_to_sink(frames[0]) == Ended(LeaseId(mark), "unknown"):
                    break
                yield frames


# ---------------------------------------------------------------- a source that is a bare socket


class RawSource:
    """A source that is a bare socket, offers one lease, and has memory that sinks can map."""

    def __init__(
        self, router: "zmq.Socket[bytes]", address: TransferAddress, offered: SharedPool
    ) -> None:
        self._router = router
        self._offered = offered
        self.address = address

    def expect(self, timeout_s: float = DEADLINE_S) -> ToSource | None:
        """Returns the next message, or None if none arrives in time. `say` then sends to its
        sender.
        """
        if not self._router.poll(int(1000 * timeout_s)):
            return None
        self._peer, frame = self._router.recv_multipart()
        return decode_to_source(frame)

    def say(self, script: Script) -> None:
        for message in script:
            self._router.send_multipart([self._peer, *message])

    def attached(self, *, maps: bool) -> Attached:
        shm = self._offered.offer() if maps else None
        return Attached(self.address.incarnation, IDENTITY, NUM_OFFERED, Offers(shm=shm))

    def end(self, sink: Worker) -> list[PullDone | PullFailed]:
        """Waits until the sink has handled all messages, and all pulls from the source have
        ended.
        """
        sink.hold("last", LeaseRef(LeaseId("last"), self.address, 1))
        ends: list[PullDone | PullFailed] = []
        while not any(end.seq_id == "last" for end in ends):
            self.say(framed(AttachRefused("enough")))
            self.expect(0.02)  # the sink may have connected again
            while not sink.events.empty():
                event = sink.events.get()
                assert isinstance(event, PullDone | PullFailed)
                ends.append(event)
        until(lambda: self.address.address not in sink.connections(), "the connection is closed")
        return ends


@contextmanager
def raw_source(offered: SharedPool) -> Iterator[RawSource]:
    with bound() as (router, address):
        yield RawSource(router, address, offered)


@pytest.fixture
def offered():
    pool = SharedPool(NUM_OFFERED, LAYOUT.block_bytes)
    pool.open()
    fill(pool, seed=3)
    yield pool
    pool.close()


def test_a_repeated_attached_message_is_ignored(offered):
    with worker("sink", Transport.SHM, timing=TIMING) as sink, raw_source(offered) as source:
        sink.hold("s", LeaseRef(LeaseId("l"), source.address, 2))
        sink.start("s", list(enumerate(TARGETS)))
        source.expect()
        attached = source.attached(maps=True)
        more = msgspec.structs.replace(attached, num_blocks=2**40)
        source.say(framed(attached, more, Ready(LeaseId("l"), 0, [NUM_OFFERED, 2**39])))
        reason = "source named a block it has not"
        assert sink.end_of_pull() == PullFailed(SeqId("s"), reason)
        assert not sink.crashes


def test_blocks_of_one_source_cannot_be_spoiled_by_another(offered):
    with (
        worker("honest", Transport.ZMQ, timing=TIMING) as honest,
        worker("sink", Transport.ZMQ, timing=TIMING) as sink,
        raw_source(offered) as liar,
    ):
        sink.hold("good", honest.lease("g", [1], ready=0))
        sink.start("good", [(0, HONEST_TARGET)])
        until(lambda: honest.is_held("g"), "held")
        sink.hold("s", LeaseRef(LeaseId("l"), liar.address, 1))
        liar.expect()
        damaged = (encode(Data(LeaseId("g"), [0], 0)), bytes(LAYOUT.block_bytes))
        liar.say([*framed(liar.attached(maps=False)), *[damaged] * (MAX_DAMAGED + 1)])
        assert {end.seq_id for end in liar.end(sink)} == {"s", "last"}
        honest.grow("g", [1])
        end = sink.end_of_pull()
        assert isinstance(end, PullDone)
        assert end.seq_id == "good"


# ---------------------------------------------------------------- impossible layouts and shards


def with_layout(**fields: object) -> Identity:
    return msgspec.structs.replace(IDENTITY, layout=msgspec.structs.replace(LAYOUT, **fields))


def with_section(**fields: int) -> Identity:
    (section,) = LAYOUT.sections
    return with_layout(sections=(msgspec.structs.replace(section, **fields),))


def with_ranks(shard: Shard, *others: Shard, group: tuple[Shard, ...] | None = None) -> Identity:
    group = (shard, *others) if group is None else group
    return msgspec.structs.replace(IDENTITY, shard=shard, group=group)


HUGE = 2**64 - 1
HOSTILE = {
    "no tokens": (with_layout(block_size=0), "layout.block_size"),
    "negative tokens": (with_layout(block_size=-16), "layout.block_size"),
    "huge tokens": (with_layout(block_size=HUGE), "layout.block_size"),
    "no sections": (with_layout(sections=()), "layout.sections"),
    "many sections": (with_layout(sections=LAYOUT.sections * 1500), "layout.sections"),
    "no layers": (with_section(num_layers=0), "layout.sections"),
    "negative layers": (with_section(num_layers=-1), "layout.sections"),
    "huge layers": (with_section(num_layers=HUGE), "layout.sections"),
    "no heads": (with_section(num_kv_heads=0), "layout.sections"),
    "negative heads": (with_section(num_kv_heads=-2), "layout.sections"),
    "huge heads": (with_section(num_kv_heads=HUGE), "layout.sections"),
    "odd head_dim": (with_section(head_dim=17), "layout.sections"),
    "huge head_dim": (with_section(head_dim=HUGE), "layout.sections"),
    "other format": (with_layout(kv_format=KVFormat.INT8), "layout.kv_format"),
    "a shard of huge layers": (with_ranks(Shard(layers=(LayerRange(0, 2**62),))), "group"),
    "other layers": (with_ranks(Shard(layers=(LayerRange(2, 1),))), "group"),
    "many sections in a shard": (with_ranks(Shard(layers=(LayerRange(0, 1),) * 500)), "group"),
    "a rank twice": (with_ranks(Shard(0, 2), Shard(0, 2)), "group"),
    "a rank of others": (with_ranks(Shard(0, 2), group=(Shard(0, 3), Shard(1, 3))), "shard"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_an_impossible_layout_is_refused_by_name_at_no_cost(case):
    identity, field = HOSTILE[case]
    tracemalloc.start()
    for source, sink in ((IDENTITY, identity), (identity, IDENTITY)):
        with pytest.raises(Disagreement) as raised:
            agree(source, sink)
        assert raised.value.field == field
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 16 * 2**20


def test_both_ends_refuse_impossible_layouts_and_go_on(offered):
    with (
        worker("source", Transport.ZMQ, timing=TIMING) as source,
        worker("sink", Transport.ZMQ, timing=TIMING) as sink,
        raw_source(offered) as liar,
    ):
        for number, (identity, field) in enumerate(HOSTILE.values()):
            with dialled(source) as dealer:
                raw = RawSink(dealer, source)
                body = AttachBody(Incarnation("raw"), source.address.incarnation, identity)
                raw.say(framed(attach(body)))
                (answer,) = list(raw.answers())[:1]
                assert decode_to_sink(answer[0]) == AttachRefused(field)
            sink.hold(f"s{number}", LeaseRef(LeaseId("l"), liar.address, 1))
            liar.expect()
            liar.say(framed(Attached(liar.address.incarnation, identity, 2**60, Offers())))
            reason = f"source refused: {field} differs"
            assert sink.end_of_pull() == PullFailed(SeqId(f"s{number}"), reason)
        assert isinstance(sink.pull("good", source.lease("g", [1]), [(0, 2)]), PullDone)


@pytest.mark.parametrize("theirs", [KVFormat.FP32, KVFormat.INT8])
def test_a_head_that_our_format_cannot_have_is_refused_by_name(theirs):
    """int4 needs an even head_dim, and the peer's layout is checked in the format of this side."""

    def identity(kv_format: KVFormat, head_dim: int) -> Identity:
        return Identity("model", KVLayout(16, kv_format, (KVSection(1, 1, head_dim),)))

    with pytest.raises(Disagreement) as raised:
        agree(identity(KVFormat.INT4, 16), identity(theirs, 17))
    assert raised.value.field == "layout.sections"


# ---------------------------------------------------------------- false offers of memory


@pytest.mark.parametrize("num_blocks", [0, -1, -(2**63), 2**40, HUGE])
def test_offers_with_a_wrong_number_of_blocks_are_refused(offered, num_blocks):
    with pytest.raises(ShmUnavailable, match="does not match"):
        map_offer(offered.offer(), num_blocks, LAYOUT.block_bytes)


@pytest.mark.parametrize("field", ["pid", "fd", "inode", "num_bytes"])
@pytest.mark.parametrize("value", [-(2**63), -1, 0, 2**31, 2**63, HUGE])
def test_offers_with_any_wrong_number_are_refused(offered, field, value):
    offer = msgspec.structs.replace(offered.offer(), **{field: value})
    with pytest.raises(ShmUnavailable):
        map_offer(offer, NUM_OFFERED, LAYOUT.block_bytes)


def test_an_empty_file_is_not_mapped(offered):
    fd = os.memfd_create("empty")
    offer = ShmOffer(boot_id(), os.getpid(), fd, os.fstat(fd).st_ino, 0)
    with pytest.raises(ShmUnavailable):
        map_offer(offer, 0, LAYOUT.block_bytes)
    os.close(fd)


def test_memory_that_its_owner_could_take_away_is_not_mapped():
    """Reading a page that no longer exists kills the process, so only sealed memory is mapped."""
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, LAYOUT.block_bytes)
    offer = ShmOffer(boot_id(), os.getpid(), fd, os.fstat(fd).st_ino, LAYOUT.block_bytes)
    with pytest.raises(ShmUnavailable, match="may shrink"):
        map_offer(offer, 1, LAYOUT.block_bytes)
    os.close(fd)


def test_a_file_is_not_mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(LAYOUT.block_bytes))
    with path.open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        offer = ShmOffer(boot_id(), os.getpid(), file.fileno(), inode, LAYOUT.block_bytes)
        with pytest.raises(ShmUnavailable):
            map_offer(offer, 1, LAYOUT.block_bytes)


def test_a_pool_cannot_be_made_smaller(offered):
    with pytest.raises(PermissionError):
        os.ftruncate(offered.offer().fd, 0)

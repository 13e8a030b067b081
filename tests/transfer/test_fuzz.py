"""With any peer's messages the thread lives, others are served, and only a pull's blocks change.

One pair of real endpoints gets many scripts, each a valid one with some changes. `tests.fuzz`
fuzzes the code behind the sockets by itself, and much longer.
"""

import logging
import os
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import count

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import Transport
from engine.layout import KVFormat, KVLayout, KVSection, LayerRange, Shard
from engine.messages import Incarnation, LeaseId, LeaseRef, SeqId, TransferAddress
from engine.worker.events import LeaseEnded, PullDone, PullFailed, RevokeLease
from kvtransfer.lease.sink import MAX_DAMAGED, SinkMachine
from kvtransfer.lease.source import SourceMachine
from kvtransfer.lease.terms import Timing
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
    Read,
    Ready,
    Release,
    ShmOffer,
    ToSink,
    ToSource,
    attach,
    decode_to_sink,
    decode_to_source,
    encode,
)
from kvtransfer.native.copying import checksum
from kvtransfer.wire import Disagreement, agree
from tests.fuzz.mutation import DECODE_ERRORS, Message, Script, changed_once
from tests.kits.endpoints import (
    DEADLINE_S,
    LAYOUT,
    NUM_BLOCKS,
    Worker,
    bound,
    dialled,
    fill,
    until,
    worker,
)

TIMING = Timing(
    ttl_s=30.0, hold_every_s=0.2, reread_s=30.0, silence_s=30.0
)  # no deadline ends a pull
IDENTITY = Identity("model", LAYOUT)
NUM_OFFERED = 8  # blocks of the source that lies
TARGETS = (10, 11)  # blocks of the sink for indices 0 and 1 of its lease
HONEST_TARGET = 20
FUZZ = settings(max_examples=120)
CHANGES = st.lists(st.integers(0, 2**32 - 1), max_size=3)  # seeds: fewer are simpler


@pytest.fixture(autouse=True)
def _few_words(caplog):
    caplog.set_level(logging.ERROR)  # each invalid message is a warning


def changed(script: Script, seeds: Sequence[int]) -> Script:
    """Returns the script with one change for each seed."""
    return reduce(lambda so_far, seed: changed_once(so_far, random.Random(seed)), seeds, script)


def framed(*messages: ToSink | ToSource) -> Script:
    return [(encode(message),) for message in messages]


def validate_always(machine: SourceMachine | SinkMachine) -> None:
    """Validates after every message on the endpoint's thread; a violation ends the thread."""
    receive = machine.receive

    def checked(*arguments):
        effects = receive(*arguments)
        machine.validate()
        return effects

    machine.receive = checked  # type: ignore[method-assign]


# ---------------------------------------------------------------- a sink with arbitrary messages


class RawSink:
    """A socket connected to a source."""

    def __init__(self, dealer: "zmq.Socket[bytes]", source: Worker) -> None:
        self._dealer = dealer
        body = AttachBody(Incarnation("raw"), source.address.incarnation, IDENTITY)
        self.attach = attach(body)

    def honest_script(self, lease_id: LeaseId, *, releases: bool) -> Script:
        hold, read = Hold(lease_id, 0, 0), Read(lease_id, [0, 1])
        last = Release(lease_id, 0) if releases else Hold(lease_id, 2, 1)
        return framed(self.attach, hold, read, last)

    def say(self, script: Script) -> None:
        for message in script:
            self._dealer.send_multipart(message)

    def answers(self) -> Iterator[Message]:
        """Returns all answers of the source."""
        for mark in ("no lease", "another"):  # blocks are sent after the first, if with it
            self.say(framed(self.attach, Hold(LeaseId(mark), 0, 0)))
            while True:
                frames = tuple(self._dealer.recv_multipart())
                if decode_to_sink(frames[0]) == Ended(LeaseId(mark), "unknown"):
                    break
                yield frames


def test_a_source_survives_any_message_and_serves_other_sinks():
    leased = [5, 3]
    numbers = count()  # a Release may be repeated late, so no example has the ids of another
    answered: Counter[str] = Counter()
    with (
        worker("source", Transport.ZMQ, timing=TIMING) as source,
        worker("sink", Transport.ZMQ, timing=TIMING) as sink,
    ):
        fill(source.pool, seed=1)
        content = source.pool.blocks.copy()
        validate_always(source.endpoint.source)

        @FUZZ
        @given(CHANGES, st.booleans())
        def survives(seeds, releases):
            number = next(numbers)
            bad, good = f"l{number}", f"g{number}"
            source.lease(bad, [*leased, 7], ready=2)
            sink.hold(good, source.lease(good, [1]))
            until(lambda: source.is_held(good), "held by the good sink")
            with dialled(source) as dealer:
                raw = RawSink(dealer, source)
                raw.say(changed(raw.honest_script(LeaseId(bad), releases=releases), seeds))
                for header, *payload in raw.answers():
                    message = decode_to_sink(header)
                    answered[type(message).__name__] += 1
                    if isinstance(message, Data):  # leased blocks and nothing else
                        blocks = [leased[index] for index in message.indices]
                        assert payload == [content[blocks].tobytes()]
            sink.start(good, [(0, HONEST_TARGET)])
            end = sink.end_of_pull()
            assert isinstance(end, PullDone), end
            assert np.array_equal(sink.pool.blocks[HONEST_TARGET], content[1])
            source.endpoint.perform(RevokeLease(LeaseId(bad)))
            assert {source.end_of_lease().lease_id for _ in range(2)} == {bad, good}
            until(lambda: sink.endpoint.sink.num_pulls == 0, "the release is confirmed")
            assert np.array_equal(source.pool.blocks, content)
            assert not source.crashes
            assert source.endpoint.source.num_leases == 0

        survives()
        assert source.endpoint.counters()["bad_messages"] > 0
    assert min(answered[kind] for kind in ("Attached", "Ready", "Data", "Ended")) > 0


# ---------------------------------------------------------------- a source with arbitrary messages


class RawSource:
    """A socket to which a sink connects for one lease, and memory that can be mapped."""

    def __init__(
        self, router: "zmq.Socket[bytes]", address: TransferAddress, offered: SharedPool
    ) -> None:
        self._router = router
        self._offered = offered
        self.address = address

    def expect(self, timeout_s: float = DEADLINE_S) -> ToSource | None:
        """Returns the next message, if one comes in time. Later messages go to its sender."""
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

    def honest_script(self, pull_id: int, *, maps: bool) -> Script:
        lease_id = LeaseId("l")
        records = [self._offered.blocks[block].tobytes() for block in (5, 3)]
        return [
            *framed(self.attached(maps=maps), Ready(lease_id, 0, [5]), Ready(lease_id, 1, [3], 0)),
            *([] if maps else [record_message(lease_id, i, r) for i, r in enumerate(records)]),
            *framed(Ended(lease_id, "released", pull_id)),
        ]

    def end(self, sink: Worker) -> list[PullDone | PullFailed]:
        """Waits until all messages are handled and all pulls from here have ended."""
        sink.hold("last", LeaseRef(LeaseId("last"), self.address, 1))
        ends: list[PullDone | PullFailed] = []
        while not any(end.seq_id == "last" for end in ends):
            self.say(framed(AttachRefused("enough")))
            self.expect(0.02)  # it may have connected anew
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


def record_message(lease_id: LeaseId, index: int, record: bytes) -> Message:
    return encode(Data(lease_id, [index], checksum(record))), record


def records_sent(script: Script, index: int) -> set[bytes]:
    """Returns the contents that a sink may accept for the block with that index."""
    found = set()
    for header, *payload in script:
        try:
            data = msgspec.msgpack.decode(header, type=Data)
        except DECODE_ERRORS:
            continue
        if len(payload) == 1 and checksum(payload[0]) == data.checksum:
            size = LAYOUT.block_bytes
            for row, i in enumerate(data.indices[:NUM_BLOCKS]):
                if i == index:
                    found.add(payload[0][row * size : (row + 1) * size])
    return found


@pytest.mark.parametrize("maps", [False, True], ids=["zmq", "shm"])
def test_a_sink_survives_any_message_and_pulls_from_other_sources(offered, maps):
    outcomes: Counter[type] = Counter()
    with (
        worker("honest", Transport.AUTO, timing=TIMING) as honest,
        worker("sink", Transport.AUTO if maps else Transport.ZMQ, timing=TIMING) as sink,
    ):
        fill(honest.pool, seed=1)
        fill(sink.pool, seed=2)
        content = sink.pool.blocks.copy()
        others = [b for b in range(NUM_BLOCKS) if b not in (*TARGETS, HONEST_TARGET)]
        rows = {row.tobytes() for row in offered.blocks} if maps else set()
        numbers = count()  # a Release may be repeated late, so no example has the ids of another
        validate_always(sink.endpoint.sink)

        @FUZZ
        @given(CHANGES)
        def survives(seeds):
            good = f"g{next(numbers)}"
            sink.hold(good, honest.lease(good, [1], ready=0))
            sink.start(good, [(0, HONEST_TARGET)])
            until(lambda: honest.is_held(good), "held")
            with raw_source(offered) as source:
                pull_id = sink.endpoint.sink._next_pull_id
                sink.hold("s", LeaseRef(LeaseId("l"), source.address, 2))
                sink.start("s", list(enumerate(TARGETS)))
                assert source.expect() is not None
                script = changed(source.honest_script(pull_id, maps=maps), seeds)
                source.say(script)
                ends = source.end(sink)
            assert sorted(end.seq_id for end in ends) == ["last", "s"]
            end = next(end for end in ends if end.seq_id == "s")
            outcomes[type(end)] += 1
            arrived = (0, 1) if isinstance(end, PullDone) else end.arrived
            for index, block in enumerate(TARGETS):
                right = rows | records_sent(script, index)
                assert index not in arrived or sink.pool.blocks[block].tobytes() in right
            honest.grow(good, [1])
            assert isinstance(sink.end_of_pull(), PullDone)
            assert np.array_equal(sink.pool.blocks[HONEST_TARGET], honest.pool.blocks[1])
            assert honest.end_of_lease() == LeaseEnded(LeaseId(good), "released")
            until(lambda: sink.endpoint.sink.num_pulls == 0, "nothing is left")
            assert np.array_equal(sink.pool.blocks[others], content[others])
            assert not sink.crashes
            sink.pool.blocks[:] = content

        survives()
        assert sink.endpoint.counters()["bad_messages"] > 0
    assert min(outcomes[PullDone], outcomes[PullFailed]) > 0


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
    """int4 needs an even head_dim, and the peer's layout is checked in our format."""

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
    """Reading a page that is gone kills the reader; pools are sealed against that."""
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

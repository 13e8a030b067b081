"""The source's side of the lease protocol: permission to read, and the end of a lease."""

import msgspec
import pytest

from engine.layout import KVFormat, KVLayout, KVSection, Shard
from engine.worker.events import LeaseEnded
from kvtransfer.lease.effects import SendBlocks, SendToSink, SetWord, Timing
from kvtransfer.lease.source import SourceMachine
from kvtransfer.messages import (
    MAX_BLOCKS_PER_READ,
    NUM_WORDS,
    TRANSFER_VERSION,
    Attach,
    AttachBody,
    Attached,
    AttachRefused,
    Ended,
    Hold,
    Identity,
    LeaseWord,
    Offers,
    Read,
    Ready,
    Release,
    ShmOffer,
    attach,
)
from kvtransfer.wire import agree

LAYOUT = KVLayout(16, KVFormat.BF16, (KVSection(2, 2, 64), KVSection(1, 1, 64)))
IDENTITY = Identity("model 1", LAYOUT)
TIMING = Timing(ttl_s=30.0, hold_every_s=1.0, silence_s=6.0)
OFFERS = Offers(shm=ShmOffer("boot", 1, 2, 3, 4096))
WITH_WORDS = Offers(words=OFFERS.shm)
GOOD = AttachBody("life of sink", "life of source", IDENTITY)
SINK, OTHER, STRANGER = b"sink", b"other", b"stranger"
WIRE = agree(IDENTITY, IDENTITY)


def machine(*attached: bytes, offers: Offers = OFFERS) -> SourceMachine:
    source = SourceMachine(
        incarnation="life of source",
        identity=IDENTITY,
        num_blocks=10,
        offers=offers,
        timing=TIMING,
    )
    for peer in attached:
        source.receive(peer, attach(GOOD), 0.0)
    return source


def held(*ready: int, num_blocks: int = 4, offers: Offers = OFFERS) -> SourceMachine:
    """Returns a source with lease `l`, attached by SINK; `ready` are its ready blocks so far."""
    source = machine(SINK, OTHER, offers=offers)
    source.open("l", num_blocks, 0.0)
    source.grow("l", ready, 0.0)
    source.receive(SINK, Hold("l", 0, 0), 0.0)
    return source


def answer(source: SourceMachine, message: object, peer: bytes = SINK, now_s: float = 1.0):
    """Returns the single effect of a message."""
    (effect,) = source.receive(peer, message, now_s)
    source.validate()
    return effect


# ---------------------------------------------------------------- attaching


def test_a_sink_that_agrees_on_everything_is_attached():
    attached = answer(machine(), attach(GOOD))
    assert attached == SendToSink(SINK, Attached("life of source", IDENTITY, 10, OFFERS))


def changed(**fields: object) -> AttachBody:
    return msgspec.structs.replace(GOOD, **fields)


def relaid(**fields: object) -> AttachBody:
    return changed(identity=Identity("model 1", msgspec.structs.replace(LAYOUT, **fields)))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (changed(source="its former life"), "incarnation"),
        (changed(identity=Identity("model 2", LAYOUT)), "fingerprint"),
        (relaid(block_size=32), "layout.block_size"),
        (relaid(kv_format=KVFormat.INT8), "layout.kv_format"),
        (relaid(sections=LAYOUT.sections[:1]), "layout.sections"),
        (relaid(sections=(KVSection(2, 1, 64), KVSection(1, 2, 64))), "layout.sections"),
    ],
)
def test_a_sink_that_differs_is_refused_by_the_name_of_the_field(body, field):
    source = machine()
    assert answer(source, attach(body)) == SendToSink(SINK, AttachRefused(field))
    assert answer(source, Hold("l", 0, 0)) == SendToSink(SINK, AttachRefused("attach"))


def test_every_field_of_a_layout_is_compared():
    tried = {"block_size", "kv_format", "sections"}
    assert set(KVLayout.__struct_fields__) == tried


def test_the_version_is_compared_before_the_body_is_decoded():
    later = Attach(TRANSFER_VERSION + 1, msgspec.Raw(msgspec.msgpack.encode(["not", "a", "body"])))
    assert answer(machine(), later) == SendToSink(SINK, AttachRefused("version"))


def test_an_undecodable_body_is_refused():
    broken = Attach(TRANSFER_VERSION, msgspec.Raw(msgspec.msgpack.encode({"sink": 7})))
    assert answer(machine(), broken) == SendToSink(SINK, AttachRefused("body"))


@pytest.mark.parametrize("message", [Hold("l", 0, 0), Read("l", [0]), Release("l", 0)])
def test_a_sink_that_is_not_attached_gets_nothing(message):
    source = held(7)
    assert answer(source, message, peer=STRANGER) == SendToSink(STRANGER, AttachRefused("attach"))
    assert source.num_leases == 1


def test_attaching_twice_changes_nothing():
    source = held(7)
    answer(source, attach(GOOD))
    assert answer(source, Hold("l", 0, 0)) == SendToSink(SINK, Ready("l", 0, [7], 0))


def test_the_number_of_attached_sinks_is_bounded(monkeypatch):
    monkeypatch.setattr("kvtransfer.lease.source.MAX_ATTACHED_PEERS", 2)
    source = machine(b"a", b"b", b"c")
    assert answer(source, Hold("l", 0, 0), b"a") == SendToSink(b"a", AttachRefused("attach"))
    assert answer(source, Hold("l", 0, 0), b"c") == SendToSink(b"c", Ended("l", "unknown"))


# ---------------------------------------------------------------- growing and reading


def test_opening_a_lease_sends_nothing():
    source = machine(SINK)
    assert source.open("l", 4, 0.0) == []
    assert source.num_leases == 1


def test_only_the_holder_is_informed_of_new_blocks():
    source = machine(SINK)
    source.open("l", 4, 0.0)
    assert source.grow("l", (7, 8), 0.0) == []
    source.receive(SINK, Hold("l", 0, 0), 0.0)
    assert source.grow("l", (9,), 0.0) == [SendToSink(SINK, Ready("l", 2, [9]))]


@pytest.mark.parametrize(
    ("num_known", "ready"),
    [
        (0, Ready("l", 0, [7, 8, 9], 17)),
        (2, Ready("l", 2, [9], 17)),
        (3, Ready("l", 3, [], 17)),
        (99, Ready("l", 3, [], 17)),
        (-1, Ready("l", 0, [7, 8, 9], 17)),
    ],
)
def test_a_hold_is_answered_with_its_stamp_and_the_new_blocks(num_known, ready):
    assert answer(held(7, 8, 9), Hold("l", num_known, 17)) == SendToSink(SINK, ready)


@pytest.mark.parametrize(
    ("indices", "blocks"), [([0, 1, 2], (7, 8, 9)), ([2, 0], (9, 7)), ([1, 1], (8, 8)), ([], ())]
)
def test_a_read_is_answered_by_the_blocks_it_names(indices, blocks):
    effect = answer(held(7, 8, 9), Read("l", indices))
    assert effect == SendBlocks(SINK, WIRE, "l", tuple(indices), blocks)


@pytest.mark.parametrize(
    "indices", [[3], [4], [-1], [0, 1, 99], [2**63], [0] * (MAX_BLOCKS_PER_READ + 1)]
)
def test_a_read_of_too_many_or_unready_blocks_ends_the_lease(indices):
    source = held(7, 8, 9)
    assert source.receive(SINK, Read("l", indices), 1.0) == [
        LeaseEnded("l", "bad read"),
        SendToSink(SINK, Ended("l", "bad read")),
    ]
    assert source.num_leases == 0


def test_a_read_from_a_source_that_cannot_send_ends_the_lease():
    """A pool in a GPU's memory cannot send, but a faulty sink requests a read."""
    source = held(7, offers=Offers(sends=False))
    assert source.receive(SINK, Read("l", [0]), 1.0)[0] == LeaseEnded("l", "bad read")


@pytest.mark.parametrize("message", [Hold("l", 0, 0), Read("l", [0]), Release("l", 0)])
def test_a_lease_has_one_holder(message):
    source = held(7)
    assert answer(source, message, peer=OTHER) == SendToSink(OTHER, Ended("l", "held by another"))
    assert answer(source, Hold("l", 0, 0)) == SendToSink(SINK, Ready("l", 0, [7], 0))


@pytest.mark.parametrize("message", [Hold("x", 0, 0), Read("x", [0]), Release("x", 0)])
def test_an_unknown_lease_is_reported_as_unknown(message):
    assert answer(held(7), message) == SendToSink(SINK, Ended("x", "unknown"))


def test_blocks_may_be_sent_as_long_as_their_reader_holds_the_lease():
    source = held(7)
    read = answer(source, Read("l", [0]))
    assert source.may_send(read)
    source.revoke("l", 1.0)
    assert not source.may_send(read)
    source.open("l", 1, 1.0)
    source.grow("l", (9,), 1.0)
    source.receive(OTHER, Hold("l", 0, 0), 1.0)
    assert not source.may_send(read)


# ---------------------------------------------------------------- ends of leases


def test_a_release_ends_the_lease_and_is_confirmed_with_the_number_of_the_pull():
    source = held(7)
    assert source.receive(SINK, Release("l", 5), 1.0) == [
        LeaseEnded("l", "released"),
        SendToSink(SINK, Ended("l", "released", 5)),
    ]
    assert source.num_leases == 0


def test_a_release_that_is_repeated_late_ends_no_later_lease():
    """A sink repeats a Release until it is confirmed, so a Release may arrive after its
    confirmation.
    """
    source = held(7)
    source.receive(SINK, Release("l", 5), 1.0)
    source.open("m", 4, 1.0)
    source.receive(SINK, Hold("m", 0, 0), 1.0)
    assert answer(source, Release("l", 5)) == SendToSink(SINK, Ended("l", "unknown"))
    assert source.num_leases == 1


def test_revoking_tells_the_core_and_the_holder():
    assert held(7).revoke("l", 1.0) == [
        LeaseEnded("l", "revoked"),
        SendToSink(SINK, Ended("l", "revoked")),
    ]


def test_revoking_a_lease_without_a_holder_tells_the_core():
    source = machine(SINK)
    source.open("l", 4, 0.0)
    assert source.revoke("l", 0.0) == [LeaseEnded("l", "revoked")]


END = {
    "release": lambda source: source.receive(SINK, Release("l", 0), 1.0),
    "revoke": lambda source: source.revoke("l", 1.0),
    "expire": lambda source: source.sweep(99.0),
    "bad read": lambda source: source.receive(SINK, Read("l", [9]), 1.0),
}


@pytest.mark.parametrize("first", END)
@pytest.mark.parametrize("second", END)
def test_a_lease_ends_once_however_often_it_is_ended(first, second):
    source = held(7)
    effects = END[first](source) + END[second](source)
    assert [e for e in effects if isinstance(e, LeaseEnded)] == effects[:1]
    assert source.num_leases == 0
    assert source.next_wake_s() is None


def test_an_ended_lease_neither_grows_nor_is_read():
    source = held(7)
    source.revoke("l", 1.0)
    assert source.grow("l", (8,), 1.0) == []
    assert answer(source, Read("l", [0])) == SendToSink(SINK, Ended("l", "unknown"))


def test_a_lease_without_messages_of_its_sink_expires():
    source = held(7)
    assert source.next_wake_s() == TIMING.ttl_s
    assert source.sweep(TIMING.ttl_s - 0.1) == []
    assert source.sweep(TIMING.ttl_s) == [
        LeaseEnded("l", "expired"),
        SendToSink(SINK, Ended("l", "expired")),
    ]


@pytest.mark.parametrize(
    "sign",
    [
        lambda source, now_s: source.receive(SINK, Hold("l", 1, 0), now_s),
        lambda source, now_s: source.receive(SINK, Read("l", [0]), now_s),
        lambda source, now_s: source.grow("l", (8,), now_s),
    ],
    ids=["hold", "read", "grow"],
)
def test_a_lease_expires_after_the_last_message_of_its_sink(sign):
    source = held(7)
    sign(source, 20.0)
    assert source.next_wake_s() == 20.0 + TIMING.ttl_s
    assert source.sweep(20.0 + TIMING.ttl_s - 0.1) == []
    assert source.sweep(20.0 + TIMING.ttl_s) != []


@pytest.mark.parametrize("peer", [OTHER, STRANGER])
def test_only_the_holder_keeps_a_lease_alive(peer):
    source = held(7)
    source.receive(peer, Hold("l", 0, 0), 20.0)
    assert source.sweep(TIMING.ttl_s)[0] == LeaseEnded("l", "expired")


def test_the_next_wake_is_the_first_of_all_leases():
    source = machine(SINK)
    source.open("a", 1, 5.0)
    source.open("b", 1, 3.0)
    assert source.next_wake_s() == 3.0 + TIMING.ttl_s
    assert [e.lease_id for e in source.sweep(3.0 + TIMING.ttl_s)] == ["b"]


# ---------------------------------------------------------------- sinks of several ranks

PAIR = (Shard(0, 2), Shard(1, 2))
FIRST, SECOND, TWIN, LONE = b"first", b"second", b"twin of the second", b"lone"


def rank_body(rank: int, sink: str = "life of pair") -> AttachBody:
    identity = msgspec.structs.replace(IDENTITY, shard=PAIR[rank], group=PAIR)
    return changed(sink=sink, identity=identity)


def held_by_first(*ready: int) -> SourceMachine:
    """A source whose sink has two attached ranks. Only the first rank holds lease `l`."""
    source = machine(SINK)
    for peer, body in (
        (FIRST, rank_body(0)),
        (SECOND, rank_body(1)),
        (TWIN, rank_body(1)),
        (LONE, rank_body(1, sink="life of another")),
    ):
        source.receive(peer, attach(body), 0.0)
    source.open("l", 4, 0.0)
    source.grow("l", ready, 0.0)
    answer(source, Hold("l", 0, 0), FIRST, now_s=0.0)
    return source


def held_by_both(*ready: int) -> SourceMachine:
    source = held_by_first(*ready)
    answer(source, Hold("l", 0, 0), SECOND, now_s=0.0)
    return source


def test_each_rank_of_a_sink_reads_its_own_share():
    source = held_by_both(7, 8)
    for rank, peer in enumerate((FIRST, SECOND)):
        read = answer(source, Read("l", [1]), peer)
        assert (read.peer, read.block_ids) == (peer, (8,))
        assert read.wire == agree(IDENTITY, rank_body(rank).identity)
        assert source.may_send(read)


def test_all_holders_are_informed_of_new_blocks():
    source = held_by_both(7)
    ready = Ready("l", 1, [8])
    assert source.grow("l", (8,), 0.0) == [SendToSink(FIRST, ready), SendToSink(SECOND, ready)]
    answer(source, Release("l", 0), FIRST)
    assert source.grow("l", (9,), 0.0) == [SendToSink(SECOND, Ready("l", 2, [9]))]


def test_a_lease_ends_when_all_ranks_of_the_sink_have_released_it():
    source = held_by_both(7)
    released = Ended("l", "released", 5)
    assert source.receive(FIRST, Release("l", 5), 1.0) == [SendToSink(FIRST, released)]
    source.validate()
    assert source.receive(SECOND, Release("l", 5), 1.0) == [
        LeaseEnded("l", "released"),
        SendToSink(SECOND, released),
    ]
    assert source.num_leases == 0


def test_a_rank_that_has_released_a_lease_knows_it_no_more():
    source = held_by_both(7)
    read = answer(source, Read("l", [0]), FIRST)
    answer(source, Release("l", 0), FIRST)
    assert not source.may_send(read)
    for message in (Hold("l", 0, 0), Read("l", [0]), Release("l", 0)):
        assert answer(source, message, FIRST) == SendToSink(FIRST, Ended("l", "unknown"))
    source.send_away(FIRST)
    assert source.num_leases == 1


def test_a_lease_waits_for_ranks_that_have_not_come():
    source = held_by_first(7)
    answer(source, Release("l", 0), FIRST)
    assert source.num_leases == 1
    answer(source, Hold("l", 0, 0), SECOND)
    assert source.receive(SECOND, Release("l", 0), 1.0)[0] == LeaseEnded("l", "released")


@pytest.mark.parametrize("peer", [SINK, TWIN, LONE])
@pytest.mark.parametrize("source", [held_by_first, held_by_both], ids=["first", "both"])
def test_only_the_ranks_of_one_sink_hold_a_lease(source, peer):
    source = source(7)
    if peer == TWIN:
        answer(source, Hold("l", 0, 0), SECOND)
    refused = SendToSink(peer, Ended("l", "held by another"))
    assert answer(source, Hold("l", 0, 0), peer) == refused


def test_a_sink_of_one_rank_shares_its_lease_with_no_rank():
    source = held_by_first()
    source.open("m", 1, 0.0)
    answer(source, Hold("m", 0, 0), SINK)
    assert answer(source, Hold("m", 0, 0), FIRST) == SendToSink(
        FIRST, Ended("m", "held by another")
    )


@pytest.mark.parametrize("silent", [FIRST, SECOND])
def test_a_silent_rank_lets_the_lease_expire(silent):
    source = held_by_both(7)
    answer(source, Hold("l", 0, 1), SECOND if silent == FIRST else FIRST, now_s=20.0)
    assert source.next_wake_s() == TIMING.ttl_s
    expired = Ended("l", "expired")
    assert source.sweep(TIMING.ttl_s) == [
        LeaseEnded("l", "expired"),
        SendToSink(FIRST, expired),
        SendToSink(SECOND, expired),
    ]


def test_a_rank_that_does_not_come_in_time_lets_the_lease_expire():
    source = held_by_first(7)
    for now_s in (10.0, 20.0):
        answer(source, Hold("l", 0, 1), FIRST, now_s=now_s)
    assert source.sweep(TIMING.ttl_s)[0] == LeaseEnded("l", "expired")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda source: source.revoke("l", 1.0), "revoked"),
        (lambda source: source.receive(SECOND, Read("l", [9]), 1.0), "bad read"),
        (lambda source: source.send_away(SECOND), "bad message"),
    ],
    ids=["revoke", "bad read", "bad message"],
)
def test_all_holders_are_informed_of_an_end(end, reason):
    told = [SendToSink(peer, Ended("l", reason)) for peer in (FIRST, SECOND)]
    assert end(held_by_both(7)) == [LeaseEnded("l", reason), *told]


def rank_of_two() -> SourceMachine:
    """The second rank of a source of two ranks, to which a sink of two ranks is attached."""
    source = SourceMachine(
        incarnation="life of source",
        identity=msgspec.structs.replace(IDENTITY, shard=PAIR[1], group=PAIR),
        num_blocks=10,
        offers=OFFERS,
        timing=TIMING,
    )
    source.receive(SECOND, attach(rank_body(1)), 0.0)
    return source


def test_a_rank_whose_order_is_late_answers_when_the_lease_opens():
    source = rank_of_two()
    assert source.receive(SECOND, Hold("l", 0, 3), 0.1) == []
    source.validate()
    assert source.open("l", 4, 0.2) == [SendToSink(SECOND, Ready("l", 0, [], 3))]
    assert source.grow("l", (7,), 0.3) == [SendToSink(SECOND, Ready("l", 0, [7]))]
    assert source.next_wake_s() == 0.3 + TIMING.ttl_s


def test_a_lease_that_was_given_up_before_it_opened_ends_when_it_opens():
    source = rank_of_two()
    assert source.receive(SECOND, Hold("l", 0, 0), 0.1) == []
    assert source.receive(SECOND, Release("l", 5), 0.1) == []
    assert source.open("l", 4, 0.2)[1:] == [
        LeaseEnded("l", "released"),
        SendToSink(SECOND, Ended("l", "released", 5)),
    ]


def test_a_lease_that_does_not_open_in_time_is_unknown():
    source = rank_of_two()
    source.receive(SECOND, Hold("l", 0, 0), 0.1)
    due_s = 0.1 + TIMING.early_s
    assert source.next_wake_s() == due_s
    assert source.sweep(due_s - 0.01) == []
    assert source.sweep(due_s) == [SendToSink(SECOND, Ended("l", "unknown"))]
    assert source.next_wake_s() is None


def test_early_messages_are_bounded(monkeypatch):
    monkeypatch.setattr("kvtransfer.lease.source.MAX_EARLY", 1)
    source = rank_of_two()
    assert source.receive(SECOND, Hold("l", 0, 0), 0.1) == []
    assert answer(source, Hold("m", 0, 0), SECOND) == SendToSink(SECOND, Ended("m", "unknown"))


def test_a_rank_that_needs_no_bytes_holds_the_lease_and_reads_nothing():
    """Another rank of the source has the same heads and sends their KV."""
    heads = KVLayout(16, KVFormat.BF16, (KVSection(1, 1, 64),))
    one, other = (Identity("model 1", heads, shard, group=PAIR) for shard in PAIR)
    source = SourceMachine(
        incarnation="life of source",
        identity=other,
        num_blocks=10,
        offers=Offers(),
        timing=TIMING,
    )
    lone = changed(identity=Identity("model 1", heads))
    assert isinstance(answer(source, attach(lone)).message, Attached)
    source.open("l", 1, 0.0)
    source.grow("l", (7,), 0.0)
    assert answer(source, Hold("l", 0, 0)) == SendToSink(SINK, Ready("l", 0, [7], 0))
    assert source.receive(SINK, Read("l", [0]), 1.0)[0] == LeaseEnded("l", "bad read")
    assert agree(one, lone.identity).record_bytes == heads.block_bytes


# ---------------------------------------------------------------- bugs of the caller


def test_a_lease_opened_twice_is_a_bug():
    source = machine()
    source.open("l", 4, 0.0)
    with pytest.raises(AssertionError):
        source.open("l", 4, 0.0)


def test_a_lease_that_outgrows_itself_is_a_bug():
    with pytest.raises(AssertionError):
        held(7, num_blocks=1).grow("l", (8,), 0.0)


# ---------------------------------------------------------------- lease words


def opened(source: SourceMachine, lease_id: str) -> LeaseWord:
    """Opens a lease; returns its lease word."""
    (effect,) = source.open(lease_id, 1, 0.0)
    assert isinstance(effect, SetWord)
    return LeaseWord(effect.place, effect.generation)


def test_a_sink_is_told_the_word_of_its_lease_with_every_ready():
    source = machine(SINK, offers=WITH_WORDS)
    word = opened(source, "l")
    assert answer(source, Hold("l", 0, 3)) == SendToSink(SINK, Ready("l", 0, [], 3, word))
    assert source.grow("l", (7,), 0.0) == [SendToSink(SINK, Ready("l", 0, [7], word=word))]


def test_a_word_ends_before_the_end_of_its_lease_is_reported():
    source = machine(SINK, offers=WITH_WORDS)
    words = {name: opened(source, name) for name in ("revoked", "expired", "released")}
    answer(source, Hold("released", 0, 0), now_s=1.0)
    ends = [
        *source.receive(SINK, Release("released", 1), 1.0),
        *source.revoke("revoked", 1.0),
        *source.sweep(1.0 + TIMING.ttl_s),
    ]
    source.validate()
    for name, word in words.items():
        assert ends.index(SetWord(word.place, 0)) == ends.index(LeaseEnded(name, name)) - 1


def test_no_generation_is_used_twice():
    source = machine(offers=WITH_WORDS)
    generations = []
    for number in range(3):
        generations.append(opened(source, f"l{number}").generation)
        source.revoke(f"l{number}", 0.0)
    assert len({0, *generations}) == 4


def test_a_lease_beyond_the_number_of_words_has_none():
    source = machine(SINK, offers=WITH_WORDS)
    for number in range(NUM_WORDS):
        opened(source, f"l{number}")
    assert source.open("one more", 1, 0.0) == []
    assert answer(source, Hold("one more", 0, 0)) == SendToSink(SINK, Ready("one more", 0, [], 0))
    source.revoke("l0", 0.0)
    opened(source, "another")
    source.validate()

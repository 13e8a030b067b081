"""The sink's side of the lease protocol: its requests, its fetches, and its valid blocks."""

import msgspec
import pytest

from engine.layout import KVFormat, KVLayout, KVSection, Shard
from engine.messages import LeaseRef, TransferAddress
from engine.worker.events import PullDone, PullFailed
from kvtransfer.lease.effects import CloseSource, Fetch, SendToSource, Timing, UseSource
from kvtransfer.lease.pull import Means
from kvtransfer.lease.sink import MAX_DAMAGED, SinkMachine
from kvtransfer.messages import (
    Attach,
    Attached,
    AttachRefused,
    Data,
    Ended,
    Hold,
    Identity,
    Offers,
    Ready,
    Release,
    ShmOffer,
    decode_attach_body,
)
from kvtransfer.wire import agree

IDENTITY = Identity("model 1", KVLayout(16, KVFormat.BF16, (KVSection(2, 2, 64),)))
TIMING = Timing(ttl_s=30.0, hold_every_s=1.0, silence_s=6.0)
ADDRESS, ELSEWHERE = "tcp://source", "tcp://elsewhere"
SOURCE = TransferAddress("p0", "life 1", ADDRESS)
RESTARTED = TransferAddress("p0", "life 2", ADDRESS)
ANOTHER = TransferAddress("p1", "life 3", ELSEWHERE)
NUM_SOURCE_BLOCKS = 10
OFFERS = Offers(shm=ShmOffer("boot", 1, 2, 3, 4096))
WIRE = agree(IDENTITY, IDENTITY)


def lease(name: str = "l", num_blocks: int = 4, source: TransferAddress = SOURCE) -> LeaseRef:
    return LeaseRef(name, source, num_blocks)


def to(message: object, address: str = ADDRESS) -> SendToSource:
    return SendToSource(address, message)


def machine() -> SinkMachine:
    return SinkMachine(
        incarnation="life of sink",
        identity=IDENTITY,
        timing=TIMING,
    )


ACCEPT = Attached("life 1", IDENTITY, NUM_SOURCE_BLOCKS, OFFERS)
USE = UseSource(ADDRESS, WIRE, ACCEPT)


def attached(*, batch_blocks: int = 64, window_blocks: int = 64) -> SinkMachine:
    """A sink with lease `l` for sequence `s`, whose source has accepted the attachment."""
    sink = machine()
    sink.hold("s", lease(), 0.0)
    sink.receive(ADDRESS, ACCEPT, 0.0)
    sink.use_transport(ADDRESS, Means("zmq", batch_blocks, window_blocks, resends=True))
    return sink


def pulling(*, ready: int = 4, window_blocks: int = 64) -> SinkMachine:
    """Returns a sink that pulls blocks 0 to 3 of `l` into 50 to 53; the first `ready` are known."""
    sink = attached(window_blocks=window_blocks, batch_blocks=1 if window_blocks < 64 else 64)
    sink.receive(ADDRESS, Ready("l", 0, list(range(ready))), 0.0)
    sink.start("s", ((0, 50), (1, 51), (2, 52), (3, 53)), 0.0)
    return sink


def releasing() -> SinkMachine:
    sink = pulling()
    copied(sink, 0, 1, 2, 3)
    return sink


def sent(sink: SinkMachine, *indices: int, now_s: float = 0.0) -> list[object]:
    """Reports these blocks of `l` as sent by the source."""
    return sink.fetched(ADDRESS, "l", indices, now_s, are_good=True)


def copied(sink: SinkMachine, *indices: int, now_s: float = 0.0) -> list[object]:
    """Reports these blocks of `l` as copied from the source's memory."""
    return sink.fetched(ADDRESS, "l", indices, now_s, are_good=False)


def waiting() -> SinkMachine:
    """Returns a sink that has sent Attach and received nothing."""
    sink = machine()
    sink.hold("s", lease(), 0.0)
    return sink


STATES = {
    "unattached": waiting,
    "held": attached,
    "pulling": pulling,
    "partly ready": lambda: pulling(ready=2),
    "releasing": releasing,
}


@pytest.fixture(params=STATES.values(), ids=STATES.keys())
def sink(request):
    sink = request.param()
    yield sink
    sink.validate()


# ---------------------------------------------------------------- attaching and holding


def test_the_first_hold_at_a_source_introduces_the_sink():
    (effect,) = machine().hold("s", lease(), 0.0)
    assert effect.address == ADDRESS
    assert isinstance(effect.message, Attach)
    body = decode_attach_body(effect.message.body)
    assert (body.sink, body.source) == ("life of sink", "life 1")
    assert body.identity == IDENTITY


def test_a_second_hold_before_the_answer_sends_nothing():
    assert waiting().hold("t", lease("m"), 0.0) == []


def test_when_attached_every_lease_is_held_and_the_transport_is_chosen_first():
    sink = waiting()
    sink.hold("t", lease("m"), 0.0)
    assert sink.receive(ADDRESS, ACCEPT, 0.1) == [
        USE,
        to(Hold("l", 0, 0)),
        to(Hold("m", 0, 1)),
    ]


def test_a_hold_at_an_attached_source_is_sent_at_once():
    assert attached().hold("t", lease("m"), 0.0) == [to(Hold("m", 0, 1))]


def test_each_source_is_attached_by_itself():
    sink = waiting()
    (effect,) = sink.hold("t", lease("m", source=ANOTHER), 0.0)
    assert effect.address == ELSEWHERE
    effects = sink.receive(ADDRESS, ACCEPT, 0.1)
    assert [e.message.lease_id for e in effects if isinstance(e, SendToSource)] == ["l"]


def test_a_source_that_is_another_rank_than_the_lease_says_is_refused():
    identity = msgspec.structs.replace(IDENTITY, shard=Shard(1, 2))
    other = msgspec.structs.replace(ACCEPT, identity=identity)
    reason = "source refused: shard differs"
    effects = waiting().receive(ADDRESS, other, 0.1)
    assert effects == [PullFailed("s", reason), CloseSource(ADDRESS)]


def test_a_refusal_fails_every_pull_of_that_source_and_names_the_field():
    sink = waiting()
    sink.hold("t", lease("m"), 0.0)
    sink.hold("u", lease("n", source=ANOTHER), 0.0)
    reason = "source refused: layout.block_size differs"
    assert sink.receive(ADDRESS, AttachRefused("layout.block_size"), 0.1) == [
        PullFailed("s", reason),
        PullFailed("t", reason),
        CloseSource(ADDRESS),
    ]
    assert sink.num_pulls == 1


def test_after_a_refusal_the_next_hold_introduces_the_sink_again():
    sink = waiting()
    sink.receive(ADDRESS, AttachRefused("token"), 0.1)
    (effect,) = sink.hold("s", lease(), 0.2)
    assert isinstance(effect.message, Attach)


def test_an_answer_from_another_incarnation_fails_the_pulls():
    effects = waiting().receive(
        ADDRESS, Attached("life 2", IDENTITY, NUM_SOURCE_BLOCKS, OFFERS), 0.1
    )
    assert effects == [PullFailed("s", "source restarted"), CloseSource(ADDRESS)]


def test_a_restarted_source_fails_all_pulls_of_its_old_incarnation(sink):
    effects = sink.hold("t", lease("m", source=RESTARTED), 0.1)
    assert effects[:2] == [PullFailed("s", "source restarted"), CloseSource(ADDRESS)]
    assert isinstance(effects[2].message, Attach)
    assert decode_attach_body(effects[2].message.body).source == "life 2"
    assert sink.num_pulls == 1


def test_a_source_whose_blocks_cannot_be_read_is_refused():
    sink = attached()
    assert sink.refuse_source(ADDRESS, "no way in") == [
        PullFailed("s", "no way in"),
        CloseSource(ADDRESS),
    ]


# ---------------------------------------------------------------- a pull from hold to done


def test_a_pull_in_one_go():
    sink = attached()
    assert sink.receive(ADDRESS, Ready("l", 0, [7, 8]), 0.1) == []
    assert sink.start("s", ((0, 50), (1, 51)), 0.2) == [
        Fetch("s", ADDRESS, "l", (0, 1), (7, 8), (50, 51))
    ]
    assert copied(sink, 0, 1, now_s=0.3) == [to(Release("l", 0))]
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 0.4) == [
        PullDone("s", "zmq", pytest.approx(0.2), pytest.approx(0.2))
    ]
    assert sink.num_pulls == 0
    sink.validate()


def test_blocks_that_become_ready_later_are_fetched_then():
    sink = attached()
    assert sink.start("s", ((0, 50), (1, 51)), 0.1) == []
    assert sink.receive(ADDRESS, Ready("l", 0, [7]), 0.2) == [
        Fetch("s", ADDRESS, "l", (0,), (7,), (50,))
    ]
    assert copied(sink, 0, now_s=0.3) == []
    assert sink.receive(ADDRESS, Ready("l", 1, [8]), 0.4) == [
        Fetch("s", ADDRESS, "l", (1,), (8,), (51,))
    ]
    assert copied(sink, 1, now_s=0.5) == [to(Release("l", 0))]


def test_only_wanted_blocks_are_fetched():
    sink = attached()
    sink.start("s", ((2, 52),), 0.1)
    assert sink.receive(ADDRESS, Ready("l", 0, [6, 7, 8]), 0.2) == [
        Fetch("s", ADDRESS, "l", (2,), (8,), (52,))
    ]
    assert copied(sink, 2, now_s=0.3) == [to(Release("l", 0))]


def test_a_pull_of_nothing_is_done_at_once_and_released():
    sink = attached()
    assert sink.start("s", (), 0.1) == [PullDone("s", "zmq"), to(Release("l", 0))]
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 0.2) == []
    assert sink.num_pulls == 0


def test_a_pull_of_nothing_waits_to_be_attached():
    sink = waiting()
    assert sink.start("s", (), 0.1) == []
    sink.receive(ADDRESS, ACCEPT, 0.2)
    effects = sink.receive(ADDRESS, Ready("l", 0, []), 0.3)
    assert effects == [PullDone("s", ""), to(Release("l", 0))]


def test_a_start_before_the_source_has_answered_waits():
    sink = waiting()
    assert sink.start("s", ((0, 50),), 0.1) == []
    sink.receive(ADDRESS, ACCEPT, 0.2)
    (effect,) = sink.receive(ADDRESS, Ready("l", 0, [7]), 0.3)
    assert effect == Fetch("s", ADDRESS, "l", (0,), (7,), (50,))


def test_a_start_after_the_lease_was_lost_fails_at_once():
    sink = attached()
    assert sink.receive(ADDRESS, Ended("l", "expired"), 0.1) == [PullFailed("s", "lease expired")]
    assert sink.start("s", ((0, 50),), 0.2) == [PullFailed("s", "lease was lost while waiting")]


@pytest.mark.parametrize("index", [4, -1])
def test_a_lease_without_the_wanted_block_fails_at_once(index):
    effects = attached().start("s", ((0, 50), (index, 51)), 0.1)
    assert effects == [PullFailed("s", "lease is too short"), to(Release("l", 0))]


# ---------------------------------------------------------------- Ready messages


@pytest.mark.parametrize(
    ("told", "fetched"),
    [
        ([(0, [5, 6]), (0, [5, 6])], [(0, 5), (1, 6)]),
        ([(0, [5, 6]), (0, [5])], [(0, 5), (1, 6)]),
        ([(0, [5, 6]), (1, [6, 7])], [(0, 5), (1, 6), (2, 7)]),
        ([(1, [6]), (0, [5])], [(0, 5)]),
        ([(1, [6]), (0, [5]), (1, [6])], [(0, 5), (1, 6)]),
        ([(0, []), (0, [5])], [(0, 5)]),
        ([(2, []), (0, [5])], [(0, 5)]),
    ],
    ids=["repeated", "shorter", "overlapping", "gap", "gap filled", "empty", "empty ahead"],
)
def test_ready_blocks_are_taken_in_order_and_once(told, fetched):
    sink = attached()
    sink.start("s", ((0, 50), (1, 51), (2, 52), (3, 53)), 0.0)
    copies = []
    for first, blocks in told:
        for effect in sink.receive(ADDRESS, Ready("l", first, blocks), 0.1):
            assert isinstance(effect, Fetch)
            copies += zip(effect.indices, effect.source_blocks, effect.block_ids, strict=True)
        sink.validate()
    assert copies == [(i, block, 50 + i) for i, block in fetched]


@pytest.mark.parametrize(
    ("ready", "reason"),
    [
        (Ready("l", 0, [NUM_SOURCE_BLOCKS]), "source named a block it has not"),
        (Ready("l", 0, [-1]), "source named a block it has not"),
        (Ready("l", 0, [0, 1, 2, 3, 4]), "source named too many blocks"),
        (Ready("l", -2, [0, 1]), "source named too many blocks"),
    ],
)
def test_impossible_block_ids_end_the_pull(ready, reason):
    sink = attached()
    assert sink.receive(ADDRESS, ready, 0.1) == [PullFailed("s", reason), to(Release("l", 0))]


def test_messages_about_another_sources_lease_are_ignored():
    sink = pulling(ready=1)
    sink.hold("t", lease("m", source=ANOTHER), 0.0)
    sink.receive(ELSEWHERE, Attached("life 3", IDENTITY, NUM_SOURCE_BLOCKS, Offers()), 0.0)
    assert sink.receive(ELSEWHERE, Ready("l", 1, [9]), 0.1) == []
    assert sink.receive(ELSEWHERE, Ended("l", "revoked"), 0.1) == []
    assert sink.places(ELSEWHERE, Data("l", [0], 0)) == [None]
    assert sink.num_pulls == 2


@pytest.mark.parametrize(
    "message", [Ready("x", 0, [1]), Ended("x", "released", 0), Data("x", [0], 0)]
)
def test_messages_about_an_unknown_lease_are_ignored(sink, message):
    assert sink.receive(ADDRESS, message, 0.1) == []


@pytest.mark.parametrize("message", [ACCEPT, Ready("l", 0, [1]), Ended("l", "revoked")])
def test_messages_of_an_unknown_source_are_ignored(sink, message):
    assert sink.receive(ELSEWHERE, message, 0.1) == []


# ---------------------------------------------------------------- window of requested blocks


def test_no_more_blocks_are_requested_than_the_window_allows():
    sink = attached(batch_blocks=1, window_blocks=2)
    sink.receive(ADDRESS, Ready("l", 0, [0, 1, 2, 3]), 0.0)

    def requested(effects):
        return [index for e in effects if isinstance(e, Fetch) for index in e.indices]

    assert requested(sink.start("s", tuple((i, 50 + i) for i in range(4)), 0.0)) == [0, 1]
    assert sink.receive(ADDRESS, Ready("l", 4, []), 0.1) == []
    assert requested(copied(sink, 1, now_s=0.2)) == [2]
    assert requested(copied(sink, 0, now_s=0.3)) == [3]
    assert copied(sink, 2, now_s=0.4) == []
    assert copied(sink, 3, now_s=0.5) == [to(Release("l", 0))]


# ---------------------------------------------------------------- Data messages


def test_data_goes_to_the_blocks_that_wait_for_it():
    sink = pulling(window_blocks=2)
    assert sink.places(ADDRESS, Data("l", [0, 1], 0)) == [50, 51]


def test_data_without_a_waiting_pull_has_no_place():
    sink = pulling(window_blocks=2)
    copied(sink, 0, now_s=0.0)  # so block 2 is requested next, but not block 3
    assert sink.places(ADDRESS, Data("l", [0, 1, 2, 3, 99, -1], 0)) == [
        None,
        51,
        52,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize("state", ["unattached", "held", "releasing"])
def test_data_has_no_place_unless_it_was_requested(state):
    assert STATES[state]().places(ADDRESS, Data("l", [0, 1], 0)) == [None, None]


def test_data_that_comes_after_the_end_has_no_place_and_no_effect(sink):
    sink.abort("s", 0.1)
    late = Data("l", [0], 0)
    assert sink.places(ADDRESS, late) == [None]
    assert sink.receive(ADDRESS, late, 0.2) == []
    assert copied(sink, 0, now_s=0.2) == []
    assert sink.fetch_failed(ADDRESS, "l", "broken", 0.2) == []


def test_blocks_that_cannot_be_fetched_end_the_pull():
    effects = pulling().fetch_failed(ADDRESS, "l", "no way in", 0.1)
    assert effects == [PullFailed("s", "no way in"), to(Release("l", 0))]


def test_damaged_blocks_are_asked_for_again_a_limited_number_of_times():
    sink = pulling()
    again = [Fetch("s", ADDRESS, "l", (1, 2), (1, 2), (51, 52))]
    for _ in range(MAX_DAMAGED):
        assert sink.damaged(ADDRESS, "l", (1, 2), 0.1) == again
        sink.validate()
    assert sink.damaged(ADDRESS, "l", (1, 2), 0.1) == [
        PullFailed("s", "blocks arrive damaged"),
        to(Release("l", 0)),
    ]


def test_damaged_data_without_a_waiting_pull_changes_nothing():
    sink = pulling()
    copied(sink, 1)
    assert sink.damaged(ADDRESS, "l", (1,), 0.1) == []
    assert sink.damaged(ADDRESS, "x", (0,), 0.1) == []


# ---------------------------------------------------------------- batches, and lost blocks


def test_a_fetch_brings_no_more_than_a_batch():
    sink = attached(batch_blocks=3)
    sink.receive(ADDRESS, Ready("l", 0, [6, 7, 8, 9]), 0.1)
    assert sink.start("s", ((0, 50), (1, 51), (2, 52), (3, 53)), 0.2) == [
        Fetch("s", ADDRESS, "l", (0, 1, 2), (6, 7, 8), (50, 51, 52)),
        Fetch("s", ADDRESS, "l", (3,), (9,), (53,)),
    ]


def test_pulls_of_a_source_take_turns_where_the_window_is_full():
    sink = attached(batch_blocks=1, window_blocks=2)
    sink.hold("t", lease("m"), 0.0)
    for name in ("l", "m"):
        sink.receive(ADDRESS, Ready(name, 0, [0, 1, 2, 3]), 0.0)

    def fetched(effects):
        return [(e.lease_id, index) for e in effects for index in e.indices]

    blocks = tuple((i, 50 + i) for i in range(4))
    assert fetched(sink.start("s", blocks, 0.1)) == [("l", 0), ("l", 1)]
    assert fetched(sink.start("t", blocks[:2], 0.2)) == []
    assert fetched(sent(sink, 0, now_s=0.3)) == [("m", 0)]
    assert fetched(sent(sink, 1, now_s=0.4)) == [("l", 2)]
    sink.validate()
    assert fetched(sink.fetched(ADDRESS, "m", (0,), 0.5, are_good=True)) == [("m", 1)]
    sink.validate()
    assert fetched(sink.abort("t", 0.6)[2:]) == [("l", 3)]
    sink.validate()


def test_a_full_window_is_not_filled_block_by_block():
    sink = attached(batch_blocks=2, window_blocks=3)
    sink.receive(ADDRESS, Ready("l", 0, [0, 1, 2, 3]), 0.0)
    blocks = tuple((i, 50 + i) for i in range(4))
    first = Fetch("s", ADDRESS, "l", (0, 1), (0, 1), (50, 51))
    assert sink.start("s", blocks, 0.0) == [first]
    assert sent(sink, 1) == [Fetch("s", ADDRESS, "l", (2, 3), (2, 3), (52, 53))]


def test_short_pulls_wait_for_the_batch_of_a_long_one():
    sink = attached(batch_blocks=4, window_blocks=4)
    sink.receive(ADDRESS, Ready("l", 0, [0, 1, 2, 3]), 0.0)
    for name in ("m", "n"):
        sink.hold(name, lease(name, 1), 0.0)
        sink.receive(ADDRESS, Ready(name, 0, [9]), 0.0)

    def fetched(effects):
        return [(e.lease_id, *e.indices) for e in effects if isinstance(e, Fetch)]

    assert fetched(sink.start("m", ((0, 60),), 0.1)) == [("m", 0)]
    assert fetched(sink.start("s", tuple((i, 50 + i) for i in range(4)), 0.2)) == []
    assert fetched(sink.start("n", ((0, 61),), 0.3)) == []
    sink.validate()
    arrived = sink.fetched(ADDRESS, "m", (0,), 0.4, are_good=True)
    assert fetched(arrived) == [("l", 0, 1, 2, 3)]
    assert fetched(sent(sink, 0, 1, 2, 3, now_s=0.5)) == [("n", 0)]
    sink.validate()


def test_blocks_lost_on_the_way_are_asked_for_again():
    sink = pulling()
    sent(sink, 0, 2, now_s=0.5)
    assert sink.next_wake_s() == TIMING.hold_every_s
    again = Fetch("s", ADDRESS, "l", (1, 3), (1, 3), (51, 53))
    sink.receive(ADDRESS, Ready("l", 4, []), 1.9)
    assert again not in sink.sweep(1.9)
    assert again in sink.sweep(TIMING.reread_s)
    assert sink.num_rereads == 2
    assert to(Release("l", 0)) in sent(sink, 1, 3, now_s=2.5)


def test_one_sided_reads_are_not_asked_for_again():
    sink = attached()
    sink.use_transport(ADDRESS, Means("nixl"))
    sink.receive(ADDRESS, Ready("l", 0, [7]), 0.0)
    sink.start("s", ((0, 50),), 0.0)
    assert sink.sweep(TIMING.reread_s) == [to(Hold("l", 1, 1))]


# ---------------------------------------------------------------- valid blocks of failed pulls


def test_blocks_that_the_source_sent_are_good_whatever_follows():
    sink = pulling()
    sent(sink, 2, 0)
    (failed,) = sink.receive(ADDRESS, Ended("l", "expired"), 0.1)
    assert failed == PullFailed("s", "lease expired", (0, 2))


def test_blocks_that_were_copied_are_good_when_a_later_hold_was_answered():
    sink = pulling()
    copied(sink, 0, 1)
    (hold,) = [e.message for e in sink.sweep(1.0) if isinstance(e.message, Hold)]
    copied(sink, 2)
    sink.receive(ADDRESS, Ready("l", 4, [], hold.stamp), 1.1)
    assert sink.abort("s", 1.2)[0] == PullFailed("s", "aborted", (0, 1))


@pytest.mark.parametrize("stamp", [None, 0, 99])
def test_only_the_answer_to_a_later_hold_makes_copies_good(stamp):
    sink = pulling()
    copied(sink, 0, 1)
    sink.sweep(1.0)
    sink.receive(ADDRESS, Ready("l", 4, [], stamp), 1.1)
    assert sink.abort("s", 1.2)[0] == PullFailed("s", "aborted")


# ---------------------------------------------------------------- time when all blocks were sent


def done_early() -> SinkMachine:
    sink = pulling()
    assert sent(sink, 0, 1, 2, 3, now_s=0.5) == [
        PullDone("s", "zmq", transfer_s=0.5, exposed_s=0.5),
        to(Release("l", 0)),
    ]
    return sink


def test_a_pull_of_blocks_that_were_all_sent_waits_for_no_confirmation():
    sink = done_early()
    sink.validate()
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 0.6) == []
    assert sink.num_pulls == 0


def test_the_release_of_a_pull_that_is_done_is_repeated():
    sink = done_early()
    assert sink.sweep(1.0) == [to(Release("l", 0))]
    assert sink.sweep(2.0) == [to(Release("l", 0))]
    assert sink.receive(ADDRESS, Ended("l", "unknown"), 2.1) == []
    assert sink.num_pulls == 0


def test_a_pull_that_is_done_reports_nothing_more():
    sink = done_early()
    assert sink.abort("s", 0.6) == []
    assert sink.sweep(TIMING.silence_s + 0.5) == [CloseSource(ADDRESS)]
    assert sink.num_pulls == 0


def test_one_copied_block_makes_the_confirmation_necessary():
    sink = pulling()
    sent(sink, 0, 1, 2)
    assert copied(sink, 3) == [to(Release("l", 0))]


# ---------------------------------------------------------------- duration of pulls


def test_transfer_time_before_the_last_block_is_computed_is_hidden():
    sink = attached()
    sink.start("s", ((0, 50), (1, 51), (2, 52), (3, 53)), 0.0)
    sink.receive(ADDRESS, Ready("l", 0, [0, 1, 2]), 1.0)
    sent(sink, 0, 1, 2, now_s=1.5)
    sink.receive(ADDRESS, Ready("l", 3, [3]), 3.0)
    copied(sink, 3, now_s=3.25)
    (done,) = sink.receive(ADDRESS, Ended("l", "released", 0), 3.5)
    assert done == PullDone("s", "zmq", transfer_s=1.0, exposed_s=0.5)


def test_a_transfer_in_flight_at_that_time_is_hidden_up_to_it():
    sink = attached()
    sink.start("s", ((0, 50), (3, 53)), 0.0)
    sink.receive(ADDRESS, Ready("l", 0, [0, 1, 2]), 1.0)
    sink.receive(ADDRESS, Ready("l", 3, [3]), 2.0)
    copied(sink, 0, 3, now_s=2.5)
    (done,) = sink.receive(ADDRESS, Ended("l", "released", 0), 3.0)
    assert done == PullDone("s", "zmq", transfer_s=2.0, exposed_s=1.0)


# ---------------------------------------------------------------- ends of leases


@pytest.mark.parametrize("reason", ["revoked", "expired", "unknown", "held by another", "bad read"])
def test_a_lease_that_ends_at_its_source_fails_the_pull(sink, reason):
    effects = sink.receive(ADDRESS, Ended("l", reason), 0.1)
    assert effects == [PullFailed("s", f"lease {reason}")]
    assert sink.num_pulls == 0


@pytest.mark.parametrize("state", ["unattached", "held", "pulling", "partly ready"])
def test_a_release_that_this_pull_did_not_send_confirms_nothing(state):
    effects = STATES[state]().receive(ADDRESS, Ended("l", "released", 0), 0.1)
    assert effects == [PullFailed("s", "lease released")]


def test_the_release_of_a_former_pull_of_the_same_lease_confirms_nothing():
    sink = attached()
    assert to(Release("l", 0)) in sink.abort("s", 0.1)
    sink.hold("t", lease(), 0.2)
    sink.receive(ADDRESS, Ready("l", 0, [7]), 0.3)  # sent before the source received the release
    sink.start("t", ((0, 50),), 0.4)
    assert copied(sink, 0, now_s=0.5) == [to(Release("l", 1))]
    effects = sink.receive(ADDRESS, Ended("l", "released", 0), 0.6)
    assert effects == [PullFailed("t", "lease released")]


def test_an_abort_is_reported_at_once_and_sent_to_the_source():
    for state in ("held", "pulling", "partly ready", "releasing"):
        sink = STATES[state]()
        assert sink.abort("s", 0.1) == [PullFailed("s", "aborted"), to(Release("l", 0))], state
        assert sink.num_pulls == 0


def test_an_abort_before_the_source_has_answered_is_sent_afterwards():
    sink = waiting()
    assert sink.abort("s", 0.1) == [PullFailed("s", "aborted")]
    assert sink.receive(ADDRESS, ACCEPT, 0.2) == [
        USE,
        SendToSource(ADDRESS, Release("l", 0)),
    ]


def test_aborting_a_finished_pull_does_nothing(sink):
    sink.abort("s", 0.1)
    assert sink.abort("s", 0.2) == []
    assert sink.abort("never held", 0.2) == []


def test_nothing_follows_the_end_of_a_pull():
    sink = releasing()
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 0.1) == [PullDone("s", "zmq", 0.1, 0.1)]
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 0.2) == []
    assert sink.receive(ADDRESS, Ended("l", "unknown"), 0.2) == []
    assert sink.receive(ADDRESS, Ready("l", 0, [1]), 0.2) == []
    assert sink.sweep(5.0) == []


# ---------------------------------------------------------------- deadlines


def test_a_lease_is_renewed_while_its_sequence_waits_for_memory():
    sink = attached()
    sink.receive(ADDRESS, Ready("l", 0, [7, 8]), 0.0)
    for now_s in range(1, 100):
        assert sink.next_wake_s() == now_s
        assert sink.sweep(now_s - 0.1) == []
        assert sink.sweep(now_s) == [to(Hold("l", 2, now_s))]
        sink.receive(ADDRESS, Ready("l", 2, []), now_s)
    assert sink.num_pulls == 1


def test_a_release_is_repeated_until_it_is_confirmed():
    sink = releasing()
    assert sink.sweep(1.0) == [to(Release("l", 0))]
    assert sink.sweep(2.0) == [to(Release("l", 0))]
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 2.1) == [PullDone("s", "zmq", 2.1, 2.1)]


def test_nothing_is_sent_to_a_source_that_has_not_answered():
    assert waiting().sweep(1.0) == []


def test_a_silent_source_is_given_up(sink):
    sent_s = 1.0  # from this time at the latest, the source owes an answer
    sink.sweep(sent_s)
    effects = [e for now_s in (2.0, 3.0, 4.0, 5.0) for e in sink.sweep(now_s)]
    assert not [e for e in effects if isinstance(e, PullFailed)]
    effects = sink.sweep(sent_s + TIMING.silence_s)
    assert effects == [PullFailed("s", "source silent"), CloseSource(ADDRESS)]
    assert sink.num_pulls == 0
    assert sink.next_wake_s() is None


def test_one_answer_a_deadline_keeps_a_source(sink):
    # if attached, the sink has no unanswered message yet
    if sink.next_wake_s() == TIMING.hold_every_s:
        sink.sweep(1.0)
    sink.receive(ADDRESS, Ready("l", 0, [0]), 5.0)
    assert not [e for e in sink.sweep(5.9) if isinstance(e, PullFailed)]
    effects = sink.sweep(6.0)
    assert not [e for e in effects if e == PullFailed("s", "source silent")]


def test_own_pause_is_not_a_sources_silence():
    sink = attached()
    sink.receive(ADDRESS, Ready("l", 0, [7]), 0.0)
    assert sink.sweep(1000.0) == [to(Hold("l", 1, 1))]
    assert sink.num_pulls == 1


def test_blocks_that_never_come_fail_the_pull_though_the_source_answers():
    sink = pulling()
    for now_s in range(1, 6):
        assert to(Hold("l", 4, now_s)) in sink.sweep(now_s)
        sink.receive(ADDRESS, Ready("l", 4, []), now_s)
    assert sink.sweep(6.0) == [
        PullFailed("s", "source sends no blocks"),
        to(Release("l", 0)),
    ]


def test_blocks_are_waited_for_while_the_source_sends_those_of_other_pulls():
    sink = pulling()
    for now_s in range(1, 20):
        assert sink.sweep(now_s) == [to(Hold("l", 4, now_s))]
        sink.receive(ADDRESS, Data("of another pull", [0], 0), now_s)
    assert sink.sweep(19.0 + TIMING.silence_s)[0] == PullFailed("s", "source sends no blocks")


def test_an_unused_source_is_let_go():
    sink = releasing()
    sink.receive(ADDRESS, Ended("l", "released", 0), 3.0)
    assert sink.next_wake_s() == 3.0 + TIMING.ttl_s
    assert sink.sweep(3.0 + TIMING.ttl_s - 0.1) == []
    assert sink.sweep(3.0 + TIMING.ttl_s) == [CloseSource(ADDRESS)]
    assert sink.next_wake_s() is None


def test_a_dead_source_is_let_go_without_a_waiting_pull():
    sink = pulling()
    sink.abort("s", 1.0)
    assert sink.sweep(1.0 + TIMING.silence_s) == [CloseSource(ADDRESS)]


def test_a_machine_without_pulls_sleeps():
    assert machine().next_wake_s() is None
    assert machine().sweep(100.0) == []


# ---------------------------------------------------------------- bugs of the caller


def test_holding_twice_is_a_bug(sink):
    with pytest.raises(AssertionError):
        sink.hold("s", lease("m"), 0.0)
    with pytest.raises(AssertionError):
        sink.hold("t", lease(), 0.0)


def test_starting_twice_is_a_bug():
    with pytest.raises(AssertionError):
        pulling().start("s", (), 0.0)

"""The sink's half of the lease protocol: what it asks, when it fetches, and what it believes."""

import pytest

from engine.events import PullDone, PullFailed
from engine.layout import KVFormat, KVLayout, KVSection
from engine.messages import LeaseRef, TransferAddress
from kvtransfer.messages import (
    Attach,
    Attached,
    AttachRefused,
    Data,
    Ended,
    Hold,
    Identity,
    Ready,
    Release,
    ShmOffer,
    decode_attach_body,
)
from kvtransfer.protocol import (
    CloseSource,
    Copy,
    Fetch,
    SendToSource,
    SinkMachine,
    Timing,
    UseSource,
)

IDENTITY = Identity("model 1", KVLayout(16, KVFormat.BF16, (KVSection(2, 2, 64),)))
TIMING = Timing(ttl_s=30.0, hold_every_s=1.0, silence_s=6.0)
ADDRESS, ELSEWHERE = "tcp://source", "tcp://elsewhere"
SOURCE = TransferAddress("p0", "life 1", ADDRESS)
RESTARTED = TransferAddress("p0", "life 2", ADDRESS)
ANOTHER = TransferAddress("p1", "life 3", ELSEWHERE)
NUM_SOURCE_BLOCKS = 10
OFFER = ShmOffer("boot", 1, 2, 3, 4096)


def lease(name: str = "l", num_blocks: int = 4, source: TransferAddress = SOURCE) -> LeaseRef:
    return LeaseRef(name, source, num_blocks)


def to(message: object, address: str = ADDRESS) -> SendToSource:
    return SendToSource(address, message)


def machine(window_blocks: int = 64) -> SinkMachine:
    return SinkMachine(
        incarnation="life of sink",
        identity=IDENTITY,
        token="secret",
        timing=TIMING,
        window_blocks=window_blocks,
    )


ACCEPT = Attached("life 1", NUM_SOURCE_BLOCKS, OFFER)


def attached(sink: SinkMachine | None = None, now_s: float = 0.0) -> SinkMachine:
    """A sink that holds lease `l` for sequence `s` at a source that has accepted it."""
    sink = sink or machine()
    sink.hold("s", lease(), now_s)
    sink.receive(ADDRESS, ACCEPT, now_s)
    return sink


def pulling(*, ready: int = 4, window_blocks: int = 64) -> SinkMachine:
    """Blocks 0 to 3 of `l` are wanted at 50 to 53; of them `ready` are known, as 0 to 3."""
    sink = attached(machine(window_blocks))
    sink.receive(ADDRESS, Ready("l", 0, list(range(ready))), 0.0)
    sink.start("s", ((0, 50), (1, 51), (2, 52), (3, 53)), 0.0)
    return sink


def releasing() -> SinkMachine:
    sink = pulling()
    sink.fetched("l", (0, 1, 2, 3), 0.0)
    return sink


def waiting() -> SinkMachine:
    """Attach has been sent, and nothing heard."""
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
    assert (body.token, body.sink, body.source) == ("secret", "life of sink", "life 1")
    assert body.identity == IDENTITY


def test_a_second_hold_before_the_answer_says_nothing_more():
    assert waiting().hold("t", lease("m"), 0.0) == []


def test_when_attached_every_lease_is_held_and_the_transport_is_chosen_first():
    sink = waiting()
    sink.hold("t", lease("m"), 0.0)
    assert sink.receive(ADDRESS, ACCEPT, 0.1) == [
        UseSource(ADDRESS, NUM_SOURCE_BLOCKS, OFFER),
        to(Hold("l", 0)),
        to(Hold("m", 0)),
    ]


def test_a_hold_at_an_attached_source_is_sent_at_once():
    assert attached().hold("t", lease("m"), 0.0) == [to(Hold("m", 0))]


def test_each_source_is_attached_by_itself():
    sink = waiting()
    (effect,) = sink.hold("t", lease("m", source=ANOTHER), 0.0)
    assert effect.address == ELSEWHERE
    effects = sink.receive(ADDRESS, ACCEPT, 0.1)
    assert to(Hold("m", 0)) not in effects


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


def test_a_source_that_answers_as_somebody_else_is_not_believed():
    effects = waiting().receive(ADDRESS, Attached("life 2", NUM_SOURCE_BLOCKS, OFFER), 0.1)
    assert effects == [PullFailed("s", "source restarted"), CloseSource(ADDRESS)]


def test_a_lease_of_a_restarted_source_ends_everything_of_its_former_life(sink):
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
    sink.use_transport(ADDRESS, "shm")
    assert sink.receive(ADDRESS, Ready("l", 0, [7, 8]), 0.1) == []
    copies = (Copy(0, 7, 50), Copy(1, 8, 51))
    assert sink.start("s", ((0, 50), (1, 51)), 0.2) == [Fetch("s", ADDRESS, "l", copies)]
    assert sink.fetched("l", (0, 1), 0.3) == [to(Release("l", 0))]
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 0.4) == [PullDone("s", "shm")]
    assert sink.num_pulls == 0
    sink.validate()


def test_what_becomes_ready_later_is_fetched_then():
    sink = attached()
    assert sink.start("s", ((0, 50), (1, 51)), 0.1) == []
    assert sink.receive(ADDRESS, Ready("l", 0, [7]), 0.2) == [
        Fetch("s", ADDRESS, "l", (Copy(0, 7, 50),))
    ]
    assert sink.fetched("l", (0,), 0.3) == []
    assert sink.receive(ADDRESS, Ready("l", 1, [8]), 0.4) == [
        Fetch("s", ADDRESS, "l", (Copy(1, 8, 51),))
    ]
    assert sink.fetched("l", (1,), 0.5) == [to(Release("l", 0))]


def test_only_what_is_wanted_is_fetched():
    sink = attached()
    sink.start("s", ((2, 52),), 0.1)
    assert sink.receive(ADDRESS, Ready("l", 0, [6, 7, 8]), 0.2) == [
        Fetch("s", ADDRESS, "l", (Copy(2, 8, 52),))
    ]
    assert sink.fetched("l", (2,), 0.3) == [to(Release("l", 0))]


def test_a_pull_of_nothing_is_released_at_once_and_still_confirmed():
    sink = attached()
    assert sink.start("s", (), 0.1) == [to(Release("l", 0))]
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 0.2) == [PullDone("s", "")]


def test_a_pull_of_nothing_waits_to_be_attached():
    sink = waiting()
    assert sink.start("s", (), 0.1) == []
    sink.receive(ADDRESS, ACCEPT, 0.2)
    assert sink.receive(ADDRESS, Ready("l", 0, []), 0.3) == [to(Release("l", 0))]


def test_a_start_before_the_source_has_answered_waits():
    sink = waiting()
    assert sink.start("s", ((0, 50),), 0.1) == []
    sink.receive(ADDRESS, ACCEPT, 0.2)
    (effect,) = sink.receive(ADDRESS, Ready("l", 0, [7]), 0.3)
    assert effect == Fetch("s", ADDRESS, "l", (Copy(0, 7, 50),))


def test_a_start_after_the_lease_was_lost_fails_at_once():
    sink = attached()
    assert sink.receive(ADDRESS, Ended("l", "expired"), 0.1) == [PullFailed("s", "lease expired")]
    assert sink.start("s", ((0, 50),), 0.2) == [PullFailed("s", "lease was lost while waiting")]


@pytest.mark.parametrize("index", [4, -1])
def test_a_lease_without_the_wanted_block_fails_at_once(index):
    effects = attached().start("s", ((0, 50), (index, 51)), 0.1)
    assert effects == [PullFailed("s", "lease is too short"), to(Release("l", 0))]


# ---------------------------------------------------------------- Ready


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
            copies += effect.copies
        sink.validate()
    assert copies == [Copy(i, block, 50 + i) for i, block in fetched]


@pytest.mark.parametrize(
    ("ready", "reason"),
    [
        (Ready("l", 0, [NUM_SOURCE_BLOCKS]), "source named a block it has not"),
        (Ready("l", 0, [-1]), "source named a block it has not"),
        (Ready("l", 0, [0, 1, 2, 3, 4]), "source named too many blocks"),
        (Ready("l", -2, [0, 1]), "source named too many blocks"),
    ],
)
def test_a_source_that_names_what_cannot_be_ends_the_pull(ready, reason):
    sink = attached()
    assert sink.receive(ADDRESS, ready, 0.1) == [PullFailed("s", reason), to(Release("l", 0))]


def test_a_source_speaks_for_its_own_leases_only():
    sink = pulling(ready=1)
    sink.hold("t", lease("m", source=ANOTHER), 0.0)
    sink.receive(ELSEWHERE, Attached("life 3", NUM_SOURCE_BLOCKS, None), 0.0)
    assert sink.receive(ELSEWHERE, Ready("l", 1, [9]), 0.1) == []
    assert sink.receive(ELSEWHERE, Ended("l", "revoked"), 0.1) == []
    assert sink.places(ELSEWHERE, Data("l", [0], [0])) == [None]
    assert sink.num_pulls == 2


@pytest.mark.parametrize(
    "message", [Ready("x", 0, [1]), Ended("x", "released", 0), Data("x", [0], [0])]
)
def test_news_of_an_unknown_lease_is_ignored(sink, message):
    assert sink.receive(ADDRESS, message, 0.1) == []


@pytest.mark.parametrize("message", [ACCEPT, Ready("l", 0, [1]), Ended("l", "revoked")])
def test_news_of_an_unknown_source_is_ignored(sink, message):
    assert sink.receive(ELSEWHERE, message, 0.1) == []


# ---------------------------------------------------------------- the window


def test_no_more_blocks_are_requested_than_the_window_allows():
    sink = attached(machine(window_blocks=2))
    sink.receive(ADDRESS, Ready("l", 0, [0, 1, 2, 3]), 0.0)

    def requested(effects):
        return [copy.index for e in effects if isinstance(e, Fetch) for copy in e.copies]

    assert requested(sink.start("s", tuple((i, 50 + i) for i in range(4)), 0.0)) == [0, 1]
    assert sink.receive(ADDRESS, Ready("l", 4, []), 0.1) == []
    assert requested(sink.fetched("l", (1,), 0.2)) == [2]
    assert requested(sink.fetched("l", (0,), 0.3)) == [3]
    assert sink.fetched("l", (2,), 0.4) == []
    assert sink.fetched("l", (3,), 0.5) == [to(Release("l", 0))]


# ---------------------------------------------------------------- Data


def test_data_goes_to_the_blocks_that_wait_for_it():
    sink = pulling(window_blocks=2)
    assert sink.places(ADDRESS, Data("l", [0, 1], [0, 0])) == [50, 51]


def test_data_that_nobody_waits_for_has_no_place():
    sink = pulling(window_blocks=2)
    sink.fetched("l", (0,), 0.0)  # and so 2 is requested, and 3 is not
    assert sink.places(ADDRESS, Data("l", [0, 1, 2, 3, 99, -1], [0] * 6)) == [
        None,
        51,
        52,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize("state", ["unattached", "held", "releasing"])
def test_data_has_no_place_unless_it_was_requested(state):
    assert STATES[state]().places(ADDRESS, Data("l", [0, 1], [0, 0])) == [None, None]


def test_data_that_comes_after_the_end_has_no_place_and_no_effect(sink):
    sink.abort("s", 0.1)
    late = Data("l", [0], [0])
    assert sink.places(ADDRESS, late) == [None]
    assert sink.receive(ADDRESS, late, 0.2) == []
    assert sink.fetched("l", (0,), 0.2) == []
    assert sink.fetch_failed("l", "damaged", 0.2) == []


def test_a_damaged_block_ends_the_pull():
    effects = pulling().fetch_failed("l", "a block arrived damaged", 0.1)
    assert effects == [PullFailed("s", "a block arrived damaged"), to(Release("l", 0))]


# ---------------------------------------------------------------- ends


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
    sink.receive(ADDRESS, Ready("l", 0, [7]), 0.3)  # sent before the source knew of the release
    sink.start("t", ((0, 50),), 0.4)
    assert sink.fetched("l", (0,), 0.5) == [to(Release("l", 1))]
    effects = sink.receive(ADDRESS, Ended("l", "released", 0), 0.6)
    assert effects == [PullFailed("t", "lease released")]


def test_an_abort_is_reported_at_once_and_told_to_the_source():
    for state in ("held", "pulling", "partly ready", "releasing"):
        sink = STATES[state]()
        assert sink.abort("s", 0.1) == [PullFailed("s", "aborted"), to(Release("l", 0))], state
        assert sink.num_pulls == 0


def test_an_abort_before_the_source_has_answered_is_told_when_it_has():
    sink = waiting()
    assert sink.abort("s", 0.1) == [PullFailed("s", "aborted")]
    assert sink.receive(ADDRESS, ACCEPT, 0.2) == [
        UseSource(ADDRESS, NUM_SOURCE_BLOCKS, OFFER),
        SendToSource(ADDRESS, Release("l", 0)),
    ]


def test_aborting_what_is_over_does_nothing(sink):
    sink.abort("s", 0.1)
    assert sink.abort("s", 0.2) == []
    assert sink.abort("never held", 0.2) == []


def test_nothing_follows_the_end_of_a_pull():
    sink = releasing()
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 0.1) == [PullDone("s", "")]
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 0.2) == []
    assert sink.receive(ADDRESS, Ended("l", "unknown"), 0.2) == []
    assert sink.receive(ADDRESS, Ready("l", 0, [1]), 0.2) == []
    assert sink.sweep(5.0) == []


# ---------------------------------------------------------------- time


def test_a_lease_is_renewed_while_its_sequence_waits_for_memory():
    sink = attached()
    sink.receive(ADDRESS, Ready("l", 0, [7, 8]), 0.0)
    for now_s in range(1, 100):
        assert sink.next_wake_s() == now_s
        assert sink.sweep(now_s - 0.1) == []
        assert sink.sweep(now_s) == [to(Hold("l", 2))]
        sink.receive(ADDRESS, Ready("l", 2, []), now_s)
    assert sink.num_pulls == 1


def test_a_release_is_repeated_until_it_is_confirmed():
    sink = releasing()
    assert sink.sweep(1.0) == [to(Release("l", 0))]
    assert sink.sweep(2.0) == [to(Release("l", 0))]
    assert sink.receive(ADDRESS, Ended("l", "released", 0), 2.1) == [PullDone("s", "")]


def test_nothing_is_sent_to_a_source_that_has_not_answered():
    assert waiting().sweep(1.0) == []


def test_a_silent_source_is_given_up(sink):
    sent_s = 1.0  # or earlier; from then on it owes an answer
    sink.sweep(sent_s)
    effects = [e for now_s in (2.0, 3.0, 4.0, 5.0) for e in sink.sweep(now_s)]
    assert not [e for e in effects if isinstance(e, PullFailed)]
    effects = sink.sweep(sent_s + TIMING.silence_s)
    assert effects == [PullFailed("s", "source silent"), CloseSource(ADDRESS)]
    assert sink.num_pulls == 0
    assert sink.next_wake_s() is None


def test_one_answer_a_deadline_keeps_a_source(sink):
    if sink.next_wake_s() == TIMING.hold_every_s:  # attached, and has nothing to answer
        sink.sweep(1.0)
    sink.receive(ADDRESS, Ready("l", 0, [0]), 5.0)
    assert not [e for e in sink.sweep(5.9) if isinstance(e, PullFailed)]
    effects = sink.sweep(6.0)
    assert not [e for e in effects if e == PullFailed("s", "source silent")]


def test_a_sink_that_was_stopped_itself_blames_nobody():
    sink = attached()
    sink.receive(ADDRESS, Ready("l", 0, [7]), 0.0)
    assert sink.sweep(1000.0) == [to(Hold("l", 1))]
    assert sink.num_pulls == 1


def test_blocks_that_never_come_fail_the_pull_though_the_source_answers():
    sink = pulling()
    for now_s in range(1, 6):
        assert sink.sweep(now_s) == [to(Hold("l", 4))]
        sink.receive(ADDRESS, Ready("l", 4, []), now_s)
    assert sink.sweep(6.0) == [
        PullFailed("s", "source sends no blocks"),
        to(Release("l", 0)),
    ]


def test_blocks_are_waited_for_while_the_source_sends_those_of_other_pulls():
    sink = pulling()
    for now_s in range(1, 20):
        assert sink.sweep(now_s) == [to(Hold("l", 4))]
        sink.receive(ADDRESS, Data("of another pull", [0], [0]), now_s)
    assert sink.sweep(19.0 + TIMING.silence_s)[0] == PullFailed("s", "source sends no blocks")


def test_a_source_that_nobody_needs_is_let_go():
    sink = releasing()
    sink.receive(ADDRESS, Ended("l", "released", 0), 3.0)
    assert sink.next_wake_s() == 3.0 + TIMING.ttl_s
    assert sink.sweep(3.0 + TIMING.ttl_s - 0.1) == []
    assert sink.sweep(3.0 + TIMING.ttl_s) == [CloseSource(ADDRESS)]
    assert sink.next_wake_s() is None


def test_a_dead_source_is_let_go_though_nobody_waits_for_it():
    sink = pulling()
    sink.abort("s", 1.0)
    assert sink.sweep(1.0 + TIMING.silence_s) == [CloseSource(ADDRESS)]


def test_a_machine_without_pulls_sleeps():
    assert machine().next_wake_s() is None
    assert machine().sweep(100.0) == []


# ---------------------------------------------------------------- bugs of ours


def test_holding_twice_is_a_bug(sink):
    with pytest.raises(AssertionError):
        sink.hold("s", lease("m"), 0.0)
    with pytest.raises(AssertionError):
        sink.hold("t", lease(), 0.0)


def test_starting_twice_is_a_bug():
    with pytest.raises(AssertionError):
        pulling().start("s", (), 0.0)

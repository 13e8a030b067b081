"""Changes of a worker's role, and sequences that are handed over because of them."""

import pytest

from engine.messages import ROLE_CHANGED, WRONG_ROLE, Role, SeqId
from engine.worker.offers import moved_lease_id
from tests.kits.worker_core import (
    LENGTH,
    Blocks,
    Ran,
    Rig,
    Step,
    abort,
    blocks,
    cancel,
    decode,
    decoding,
    ended,
    first,
    generate,
    given_back,
    grown,
    hand_over,
    handed_over,
    hold,
    hold_prefix,
    kv_ready,
    lost,
    opened,
    prefill,
    prefilled,
    pull,
    pull_done,
    revoked,
    role_changed,
    set_role,
    started,
    token,
)

LEASED = moved_lease_id(SeqId("b"))


@pytest.fixture
def rig() -> Rig:
    """A decode worker that runs "a": six prompt tokens and two answer tokens, the last without
    KV."""
    r = Rig(Role.DECODE)
    r.arrive("a", 6, 70)
    r.step(71)
    assert r.take(Blocks()) == blocks(free=6, owned=2)
    return r


# ---------------------------------------------------------------- role changes


@pytest.mark.parametrize(
    ("role", "taken"),
    [
        (Role.PREFILL, {"prefill"}),
        (Role.DECODE, {"decode"}),
        (Role.MIXED, {"prefill", "decode", "generate"}),
        (Role.DRAINED, set()),
    ],
)
def test_new_work_is_taken_by_the_new_role(role, taken):
    for began in Role:
        rig = Rig(began)
        assert rig.take(set_role(role))[0] == role_changed(role)
        for kind, event in (("prefill", prefill), ("decode", decode), ("generate", generate)):
            wrong = [given_back(kind, WRONG_ROLE)]
            assert (rig.take(event(kind, 5)) == wrong) == (kind not in taken)


def test_a_fluid_worker_takes_whole_requests_in_both_roles():
    rig = Rig(Role.PREFILL, stretch=4.0)
    rig.play(
        (generate("a", 5), []),
        (set_role(Role.DECODE), [role_changed(Role.DECODE)]),
        (generate("b", 5), []),
        (
            set_role(Role.DRAINED),
            [
                role_changed(Role.DRAINED),
                given_back("b", ROLE_CHANGED),
                given_back("a", ROLE_CHANGED),
            ],
        ),
    )


def test_an_impossible_role_changes_nothing(rig):
    rig.core._possible = {Role.DECODE}
    core = rig.core
    assert core.handle(set_role(Role.PREFILL)) == [role_changed(Role.DECODE)]
    assert core.role is Role.DECODE


def test_waiting_prompts_are_given_back_and_running_ones_go_on():
    Rig(Role.PREFILL, num_blocks=4, chunk=4).play(
        (prefill("a", 8, more=1), []),
        (Step(), [started("a"), Ran("a", 0, 4)]),
        (prefill("b", range(20, 36), prefix=1), [hold_prefix("b", 1)]),
        (
            set_role(Role.DECODE),
            [role_changed(Role.DECODE), abort("b"), given_back("b", ROLE_CHANGED)],
        ),
        (Step(9), [Ran("a", 4, 8), prefilled("a", 9, LENGTH)]),
        (decode("c", 4), [hold("c", 1)]),
        (Blocks(), blocks(free=2, cached=2)),
    )


def test_a_lease_outlives_the_role_in_which_it_was_opened():
    rig = Rig(Role.PREFILL)
    rig.take(prefill("a", 6))
    rig.step()
    rig.play(
        (set_role(Role.DRAINED), [role_changed(Role.DRAINED)]),
        (Blocks(), blocks(free=6, leased=2)),
        (ended("a", "released"), []),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_incomplete_sequences_are_given_back():
    rig = Rig(Role.DECODE, max_running=2)
    rig.take(decode("ready", 4))
    rig.take(decode("pulling", range(20, 24)))
    rig.take(decode("queued", range(40, 44)))
    rig.step()
    rig.take(pull_done("ready"))
    back = {name: given_back(name, ROLE_CHANGED) for name in ("queued", "ready", "pulling")}
    rig.play(
        (
            set_role(Role.PREFILL),
            [
                role_changed(Role.PREFILL),
                *(abort("queued"), back["queued"]),
                *(abort("pulling"), back["pulling"]),
                back["ready"],
            ],
        ),
        (Blocks(), blocks(free=6, cached=1, in_flight=1)),
        (first("ready"), []),
        (pull_done("pulling"), []),
        (Blocks(), blocks(free=6, cached=2)),
    )


def test_running_sequences_go_on_beside_the_new_work(rig):
    rig.play(
        (set_role(Role.PREFILL), [role_changed(Role.PREFILL)]),
        (prefill("p", range(20, 23), more=1), []),
        (
            Step(72, 90),
            [
                *(started("p"), Ran("a", 7, 8), Ran("p", 0, 3)),
                *(token("a", 72), prefilled("p", 90, LENGTH)),
            ],
        ),
    )


def test_a_local_prompt_is_decoded_despite_a_new_role():
    Rig(Role.MIXED, chunk=4).play(
        (generate("a", 6), []),
        (Step(), [started("a"), Ran("a", 0, 4)]),
        (set_role(Role.DRAINED), [role_changed(Role.DRAINED)]),
        (Step(70), [Ran("a", 4, 6), prefilled("a", 70)]),
        (Step(71), [decoding("a"), Ran("a", 6, 7), token("a", 71)]),
    )


# ---------------------------------------------------------------- sequences that are handed over


def test_a_running_sequence_leaves_with_the_blocks_of_all_tokens_but_the_last(rig):
    rig.play(
        (
            hand_over("a", "b"),
            [opened(LEASED, 2), grown(LEASED, 0, 1), handed_over("a", LEASED, 2)],
        ),
        (Blocks(), blocks(free=6, leased=2)),
        (Step(), []),
        (cancel("a"), []),
        (ended(LEASED, "released"), []),
        (Blocks(), blocks(free=7, cached=1)),
    )
    assert rig.offers.counters == {"handed_over": 1}


def test_a_block_that_only_the_last_token_needs_is_not_leased(rig):
    rig.step(72)  # nine tokens, of which eight have KV
    rig.step(73)
    rig.take(cancel("a"))
    r = Rig(Role.DECODE)
    r.arrive("a", 7, 70)
    r.step(71)
    r.step(72)
    assert r.take(Blocks()) == blocks(free=5, owned=3)
    assert r.take(hand_over("a", "b"))[-1] == handed_over("a", LEASED, 3)


def test_a_sequence_leaves_before_its_first_step_too():
    rig = Rig(Role.MIXED)
    rig.take(generate("a", 8))
    rig.step(70)
    assert rig.take(hand_over("a", "b"))[-1] == handed_over("a", LEASED, 2)
    assert rig.take(Blocks()) == blocks(free=6, leased=2)


@pytest.mark.parametrize("role", list(Role))
def test_an_unknown_sequence_is_not_handed_over(role):
    rig = Rig(role)
    rig.take(prefill("p", 5))
    rig.take(decode("d", range(20, 25)))
    for name in ("p", "d", "x"):
        assert rig.take(hand_over(name, "b")) == [handed_over(name)]


def test_a_sequence_is_handed_over_once(rig):
    rig.take(hand_over("a", "b"))
    assert rig.take(hand_over("a", "c")) == [handed_over("a")]


def test_two_sequences_are_not_handed_over_as_the_same():
    rig = Rig(Role.MIXED)
    rig.take(generate("a", 3))
    rig.take(generate("c", range(20, 23)))
    rig.step()
    rig.take(hand_over("a", "b"))
    rig.play(
        (hand_over("c", "b"), [handed_over("c")]),
        (ended(LEASED, "released"), []),
        (Blocks(), blocks(free=8)),
    )


@pytest.mark.parametrize("gone", [cancel("b"), lost("g")])
def test_a_cancelled_hand_over_is_freed(rig, gone):
    rig.take(hand_over("a", "b"))
    rig.play(
        (gone, [revoked(LEASED)]),
        (Blocks(), blocks(free=6, leased=2)),
        (ended(LEASED, "revoked"), []),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_a_handed_over_sequence_continues_elsewhere():
    rig = Rig(Role.DECODE)
    rig.play(
        (decode("b", [*range(6), 70], more=2), [hold("b", 2)]),
        (first("b", 71), []),
        (Step(), [pull("b", (0, 0), (1, 1))]),
        (pull_done("b"), [kv_ready("b", 2)]),
        (Step(72), [decoding("b"), Ran("b", 7, 8), token("b", 72, LENGTH)]),
    )

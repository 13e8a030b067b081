"""Sequences arrive by a pull of their KV, and then decode token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.arrivals import HOLD_S, REST_S, STUCK_S
from engine.messages import GivenBack, Role
from engine.worker.events import AbortPull, Emit, StartPull
from tests.kits.worker_core import (
    LENGTH,
    STOP,
    Blocks,
    Ran,
    Rig,
    Step,
    abort,
    blocks,
    cancel,
    copy,
    decode,
    decoding,
    first,
    given_back,
    hold,
    kv_ready,
    lost,
    prefill,
    pull,
    pull_done,
    pull_failed,
    token,
)


def rig(**sizes) -> Rig:
    return Rig(Role.DECODE, **sizes)


# ---------------------------------------------------------------- arrivals


def test_a_lease_is_held_before_there_is_memory_and_pulled_when_there_is():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (Blocks(), blocks(free=8)),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (Blocks(), blocks(free=6, in_flight=2)),
        (Step(), []),
        (pull_done("a"), [kv_ready("a", 2)]),
        (Blocks(), blocks(free=6, owned=2)),
        (Step(), []),
        (first("a", 7), []),
        (Step(8), [decoding("a"), Ran("a", 6, 7), token("a", 8)]),
        (Step(9), [Ran("a", 7, 8), token("a", 9)]),
    )


def test_the_first_token_may_come_before_the_blocks():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (first("a", 7), []),
        (Step(), []),
        (pull_done("a"), [kv_ready("a", 2)]),
        (Step(8), [decoding("a"), Ran("a", 6, 7), token("a", 8)]),
    )


def test_the_first_token_may_come_before_memory():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (first("a", 7), []),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (pull_done("a"), [kv_ready("a", 2)]),
        (Step(8), [decoding("a"), Ran("a", 6, 7), token("a", 8)]),
    )


def test_a_step_computes_the_first_token_in_the_block_that_follows_a_full_one():
    r = rig()
    r.arrive("a", 8)
    r.play(
        (Blocks(), blocks(free=6, owned=2)),
        (Step(), [decoding("a"), Ran("a", 8, 9), token("a")]),
        (Blocks(), blocks(free=5, owned=3)),
    )
    (row,) = r.rows
    assert (list(row.token_ids), row.start, list(row.block_table)) == ([99], 8, [0, 1, 2])


def test_events_of_unknown_sequences_change_nothing():
    unknown = [first("x"), cancel("x"), pull_done("x"), pull_failed("x"), lost("x")]
    rig().play(*[(event, []) for event in unknown])


def test_a_prompt_that_leaves_no_room_for_a_token_is_given_back():
    rig(num_blocks=2).play(
        (decode("a", 8), [given_back("a", "prompt exceeds the KV pool")]),
        (decode("b", 7), [hold("b", 2)]),
    )


# ---------------------------------------------------------------- admission


def test_sequences_are_admitted_in_order_of_arrival():
    r = rig(num_blocks=8)
    r.arrive("running", 12)
    r.play(
        (decode("large", range(20, 40)), [hold("large", 5)]),
        (decode("small", range(40, 42)), [hold("small", 1)]),
    )
    assert pull("large", *enumerate(range(4, 9))) not in r.step()
    r.play((cancel("running"), []))
    assert [type(e).__name__ for e in r.step()] == ["StartPull", "StartPull"]


def test_arriving_and_running_sequences_together_are_bounded():
    r = rig(max_running=2)
    r.arrive("a", 3)
    r.play(
        (decode("b", range(20, 23)), [hold("b", 1)]),
        (decode("c", range(40, 43)), [hold("c", 1)]),
        (Step(), [decoding("a"), pull("b", (0, 1)), Ran("a", 3, 4), token("a")]),
    )
    assert (r.decode.num_waiting, r.decode.num_running) == (2, 1)
    r.play((cancel("a"), []), (Step(), [pull("c", (0, 2))]))


def test_cached_blocks_are_not_pulled():
    r = rig()
    r.arrive("a", 9)
    r.play(
        (decode("b", [*range(8), 50, 51]), [hold("b", 3)]),
        (Step(), [decoding("a"), pull("b", (2, 3)), Ran("a", 9, 10), token("a")]),
        (Blocks(), blocks(free=4, owned=3, in_flight=1)),
        (pull_done("b"), [kv_ready("b", 1, cached=2)]),
        (cancel("a"), []),
        (Blocks(), blocks(free=5, owned=3)),
    )


def test_a_fully_cached_sequence_starts_an_empty_pull():
    r = rig()
    r.arrive("a", 8)
    r.play(
        (cancel("a"), []),
        (decode("b", 8), [hold("b", 2)]),
        (Step(), [pull("b")]),
        (Blocks(), blocks(free=6, owned=2)),
        (pull_done("b"), [kv_ready("b", 0, cached=2)]),
        (first("b"), []),
        (Step(), [decoding("b"), Ran("b", 8, 9), token("b")]),
    )


def test_a_queued_sequence_finds_what_is_cached_by_the_time_it_is_admitted():
    r = rig(max_running=1)
    r.arrive("a", 8)
    r.play(
        (decode("b", 8), [hold("b", 2)]),
        (Step(), [decoding("a"), Ran("a", 8, 9), token("a")]),
        (cancel("a"), []),
        (Step(), [pull("b")]),
    )


@pytest.mark.parametrize(("num_blocks", "admitted"), [(7, False), (8, True)])
def test_room_includes_the_growth_of_all_that_run(num_blocks, admitted):
    r = rig(num_blocks=num_blocks, growth=8)
    r.arrive("a", 7)
    r.take(decode("b", range(20, 27)))
    starts = [e for e in r.step() if type(e).__name__ == "StartPull"]
    assert bool(starts) == admitted


def test_room_for_growth_ends_where_an_answer_ends():
    r = rig(num_blocks=7, growth=8)
    r.arrive("a", 7)
    r.take(decode("b", range(20, 27), more=2))
    assert pull("b", (0, 2), (1, 3)) in r.step()


def test_a_sequence_that_is_alone_needs_no_room_for_growth():
    rig(num_blocks=3, growth=80).play(
        (decode("a", 9), [hold("a", 3)]), (Step(), [pull("a", (0, 0), (1, 1), (2, 2))])
    )


# ---------------------------------------------------------------- cancels


def test_a_sequence_that_waits_alone_for_leased_memory_is_given_back():
    r = Rig(Role.PREFILL, stretch=4.0, num_blocks=4)
    r.take(prefill("p", 12))
    r.step()
    r.step()  # three blocks are leased until another worker has pulled them
    r.play(
        (decode("a", range(20, 26)), [hold("a", 2)]),
        (Step(), []),
        (decode("b", range(30, 36)), [hold("b", 2)]),
    )
    r.now_s += STUCK_S / 2
    r.play((Step(), []), (cancel("a"), [abort("a")]), (Step(), []))
    r.now_s += STUCK_S / 2
    r.play((Step(), []))  # `b` has been at the head of the queue for half of STUCK_S
    assert r.decode.arrivals.stuck_until_s == r.now_s + STUCK_S / 2
    r.now_s += STUCK_S / 2
    r.play((Step(), [abort("b"), given_back("b", "no memory came free")]), (Step(), []))
    assert r.decode.counters["stuck"] == 1
    assert r.decode.arrivals.stuck_until_s is None


def test_a_sequence_waits_for_memory_of_those_that_run():
    r = rig(num_blocks=3)
    r.arrive("a", 6)
    r.step()
    r.play((decode("b", 6), [hold("b", 2)]))
    for _ in range(2):
        r.now_s += STUCK_S
        r.step()
    assert r.decode.counters["stuck"] == 0
    assert r.decode.num_waiting == 1


def test_a_queued_sequence_is_cancelled_by_giving_its_lease_up():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (cancel("a"), [abort("a")]),
        (pull_failed("a", "aborted"), []),
        (Step(), []),
    )


def test_blocks_of_an_aborted_pull_stay_in_flight_until_nothing_writes_to_them():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (cancel("a"), [abort("a")]),
        (Blocks(), blocks(free=6, in_flight=2)),
        (first("a"), []),
        (pull_failed("a", "aborted"), []),
        (Blocks(), blocks(free=8)),
    )


def test_a_pull_that_ends_well_just_before_its_abort_leaves_its_blocks_cached():
    rig().play(
        (decode("a", 9), [hold("a", 3)]),
        (Step(), [pull("a", (0, 0), (1, 1), (2, 2))]),
        (cancel("a"), [abort("a")]),
        (pull_done("a"), []),
        (Blocks(), blocks(free=6, cached=2)),
        (cancel("a"), []),
    )


def test_blocks_of_an_aborted_pull_are_not_reused_before_it_ends():
    rig(num_blocks=3).play(
        (decode("a", 6), [hold("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (cancel("a"), [abort("a")]),
        (decode("b", 6), [hold("b", 2)]),
        (Step(), []),
        (pull_failed("a", "aborted"), []),
        (Step(), [pull("b", (0, 0), (1, 1))]),
    )


def test_cached_blocks_of_an_aborted_pull_are_let_go_when_it_is_over():
    r = rig()
    r.arrive("a", 8)
    r.play(
        (cancel("a"), []),
        (decode("b", 12), [hold("b", 3)]),
        (Step(), [pull("b", (2, 2))]),
        (cancel("b"), [abort("b")]),
        (Blocks(), blocks(free=5, owned=2, in_flight=1)),
        (pull_failed("b", "aborted"), []),
        (Blocks(), blocks(free=6, cached=2)),
    )


def test_a_sequence_that_waits_for_its_first_token_is_cancelled_at_once():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (pull_done("a"), [kv_ready("a", 2)]),
        (cancel("a"), []),
        (Blocks(), blocks(free=7, cached=1)),
        (first("a"), []),
        (Step(), []),
    )


def test_a_running_sequence_is_cancelled_at_once():
    r = rig()
    r.arrive("a", 6)
    r.play((cancel("a"), []), (Blocks(), blocks(free=7, cached=1)), (Step(), []))


def test_sequences_of_a_lost_gateway_are_dropped_in_every_state():
    r = rig(max_running=3)
    r.arrive("running", 4, gateway="g1")
    r.take(decode("here", range(20, 24), gateway="g1"))
    r.step()
    r.take(pull_done("here"))
    r.take(decode("pulling", range(40, 44), gateway="g1"))
    r.step()
    r.play(
        (decode("queued", range(60, 64), gateway="g1"), [hold("queued", 1)]),
        (decode("theirs", range(80, 84), gateway="g2"), [hold("theirs", 1)]),
        (lost("g1"), [abort("queued"), abort("pulling")]),
        (Blocks(), blocks(free=5, cached=2, in_flight=1)),
        (pull_failed("queued", "aborted"), []),
        (pull_failed("pulling", "aborted"), []),
        (Blocks(), blocks(free=6, cached=2)),
    )
    (started,) = r.step()
    assert started.seq_id == "theirs"


# ---------------------------------------------------------------- failed pulls


def test_a_sequence_whose_lease_is_lost_while_it_is_queued_is_given_back():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (pull_failed("a", "source silent"), [given_back("a", "pull failed: source silent")]),
        (Step(), []),
    )


def test_a_sequence_whose_pull_fails_is_given_back():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (pull_failed("a", "lease expired"), [given_back("a", "pull failed: lease expired")]),
        (Blocks(), blocks(free=8)),
        (first("a"), []),
    )


def test_a_pull_that_fails_twice_is_given_back_once():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (pull_failed("a", "source silent"), [given_back("a", "pull failed: source silent")]),
        (pull_failed("a", "lease was lost while waiting"), []),
        (Blocks(), blocks(free=8)),
    )


def test_blocks_of_a_failed_pull_are_not_found_by_others():
    r = rig()
    r.take(decode("a", 8))
    r.step()
    r.play(
        (pull_failed("a"), [given_back("a", "pull failed: why")]),
        (decode("b", 8), [hold("b", 2)]),
        (Step(), [pull("b", (0, 0), (1, 1))]),
    )


# ---------------------------------------------------------------- pulls that resume


@pytest.mark.parametrize(
    ("arrived", "kept", "missing"),
    [
        ((), 0, [0, 1, 2]),
        ((0,), 1, [1, 2]),
        ((1, 0), 2, [2]),
        ((0, 2), 1, [1, 2]),  # block 2 follows a gap, so it is not kept
        ((1, 2), 0, [0, 1, 2]),
        ((0, 1, 2), 2, [2]),  # the last block is not full, so it has no hash
    ],
)
def test_the_next_attempt_pulls_only_the_missing_blocks(arrived, kept, missing):
    r = rig()
    r.take(decode("a", 10))
    r.step()
    r.play(
        (pull_failed("a", arrived=arrived), [given_back("a", "pull failed: why", kept=4 * kept)]),
        (Blocks(), blocks(free=8 - kept, cached=kept)),
        (decode("b", 10), [hold("b", 3)]),
    )
    (started,) = r.step()
    assert [index for index, _ in started.blocks] == missing
    assert r.decode.counters["kept_blocks"] == kept


def test_blocks_of_a_failed_pull_extend_the_cached_prefix():
    r = rig()
    r.arrive("a", 4)
    r.take(cancel("a"))
    r.play(
        (decode("b", 13), [hold("b", 4)]),
        (Step(), [pull("b", (1, 1), (2, 2), (3, 3))]),
        (pull_failed("b", arrived=[1]), [given_back("b", "pull failed: why", kept=8)]),
        (Blocks(), blocks(free=6, cached=2)),
        (decode("c", 13), [hold("c", 4)]),
    )
    (started,) = r.step()
    assert [index for index, _ in started.blocks] == [2, 3]


def test_blocks_of_a_cancelled_pull_stay_cached():
    rig().play(
        (decode("a", 9), [hold("a", 3)]),
        (Step(), [pull("a", (0, 0), (1, 1), (2, 2))]),
        (cancel("a"), [abort("a")]),
        (pull_failed("a", "aborted", [0]), []),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_the_time_of_a_pull_is_reported():
    rig().play(
        (decode("a", 6), [hold("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (
            pull_done("a", transfer_s=0.5, exposed_s=0.125),
            [kv_ready("a", 2, transfer_s=0.5, exposed_s=0.125)],
        ),
    )


# ---------------------------------------------------------------- running


def test_a_sequence_ends_at_its_greatest_length():
    r = rig()
    r.arrive("a", 6, more=3)
    r.play(
        (Step(8), [decoding("a"), Ran("a", 6, 7), token("a", 8)]),
        (Step(9), [Ran("a", 7, 8), token("a", 9, LENGTH)]),
        (Blocks(), blocks(free=6, cached=2)),
        (Step(), []),
    )


def test_a_sequence_ends_at_a_stop():
    r = rig()
    r.arrive("a", 6, stops=(5, 8))
    r.play(
        (Step(8), [decoding("a"), Ran("a", 6, 7), token("a", 8, STOP)]),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_a_stop_is_banned_until_the_answer_is_long_enough():
    r = rig()
    r.arrive("a", 6, least=2, stops=(5, 8))
    banned = []
    for _ in range(3):
        r.step()
        banned.append(r.rows[0].banned)
    assert banned == [(5, 8), (), ()]


def test_blocks_that_an_answer_fills_are_cached_with_it():
    r = rig()
    r.arrive("a", 6, more=6)
    for sampled in (70, 71, 72, 73, 74):
        r.step(sampled)
    r.play(
        (Blocks(), blocks(free=6, cached=2)),
        (decode("b", [*range(6), 99, 70, 71, 72]), [hold("b", 3)]),
        (Step(), [pull("b", (2, 2))]),
    )


def test_a_budget_smaller_than_the_batch_serves_the_oldest():
    r = rig(budget=1)
    r.arrive("a", 3)
    r.arrive("b", range(20, 23))
    assert r.step() == [Ran("a", 4, 5), token("a")]
    r.take(cancel("a"))
    assert r.step() == [decoding("b"), Ran("b", 3, 4), token("b")]


def crowded() -> Rig:
    """Two sequences that fill the pool. In the second step each needs another block."""
    r = rig(num_blocks=4)
    for name, prompt in (("old", range(7)), ("young", range(20, 27))):
        r.take(decode(name, prompt))
    r.step()
    for name in ("old", "young"):
        r.take(pull_done(name))
        r.take(first(name))
    r.step()
    return r


def test_the_youngest_is_given_back_when_memory_is_short():
    crowded().play(
        (Blocks(), blocks(owned=4)),
        (Step(), [given_back("young", "preempted"), Ran("old", 8, 9), token("old")]),
        (Blocks(), blocks(cached=1, owned=3)),
    )


def test_a_preempted_sequence_leaves_the_beginning_of_its_prefix_cached():
    r = crowded()
    r.step()
    r.play((cancel("old"), []), (decode("young", [*range(20, 27), 99, 99]), [hold("young", 3)]))
    (started,) = r.step()
    assert [index for index, _ in started.blocks] == [1, 2]


def test_a_sequence_is_given_back_itself_when_no_younger_one_runs():
    r = rig(num_blocks=4)
    r.arrive("a", 7)
    r.play(
        (decode("b", range(20, 27)), [hold("b", 2)]),
        (Step(), [decoding("a"), pull("b", (0, 2), (1, 3)), Ran("a", 7, 8), token("a")]),
        (Step(), [given_back("a", "preempted")]),
        (Blocks(), blocks(cached=2, in_flight=2)),
        (pull_done("b"), [kv_ready("b", 2)]),
        (first("b"), []),
        (Step(), [decoding("b"), Ran("b", 7, 8), token("b")]),
    )


def test_preempting_goes_on_until_a_block_comes_free():
    r = rig(num_blocks=5)
    for name, prompt in (("old", range(7)), ("young", range(20, 28)), ("youngest", range(20, 28))):
        r.take(decode(name, prompt))
        r.step()
        r.take(pull_done(name))
    r.take(first("old"))
    r.step()
    r.play(
        (Blocks(), blocks(free=1, owned=4)),  # "young" and "youngest" share blocks
        (first("young"), []),
        (first("youngest"), []),
        (
            Step(),
            [
                given_back("youngest", "preempted"),
                given_back("young", "preempted"),
                Ran("old", 8, 9),
                token("old"),
            ],
        ),
        (Blocks(), blocks(cached=2, owned=3)),
    )


# ------------------------------------------------------------ steps delayed for moved sequences


@pytest.fixture
def held() -> Rig:
    """A running sequence, and a moved sequence whose KV is being pulled."""
    r = rig()
    r.arrive("a", 3)
    r.step()
    r.play(
        (decode("b", range(20, 25), is_moved=True), [hold("b", 2)]),
        (first("b"), []),
        (Step(), [pull("b", (0, 2), (1, 3))]),
    )
    assert r.core.held_until_s == r.now_s + HOLD_S
    return r


def test_a_step_is_held_so_that_moved_sequences_are_in_it(held):
    held.now_s += HOLD_S / 2
    held.play(
        (Step(), []),
        (pull_done("b"), [kv_ready("b", 2)]),
        (Step(), [decoding("b"), Ran("a", 4, 5), Ran("b", 5, 6), token("a"), token("b")]),
    )
    assert held.core.held_until_s is None
    assert held.decode.counters["held_steps"] == 1
    assert held.decode.counters["held_steps:late"] == 0


def test_a_step_is_held_briefly_and_the_next_one_is_not(held):
    held.now_s += HOLD_S
    held.play((Step(), [Ran("a", 4, 5), token("a")]), (Step(), [Ran("a", 5, 6), token("a")]))
    assert held.core.held_until_s is None
    assert held.decode.counters["held_steps"] == held.decode.counters["held_steps:late"] == 1


def test_later_arrivals_do_not_extend_a_held_step(held):
    held.now_s += HOLD_S / 2
    held.take(decode("c", range(40, 43), is_moved=True))
    held.play((Step(), [pull("c", (0, 4))]))
    assert held.core.held_until_s == HOLD_S
    held.now_s = HOLD_S
    held.play((Step(), [Ran("a", 4, 5), token("a")]), (Step(), [Ran("a", 5, 6), token("a")]))


def test_a_later_arrival_holds_a_step_of_its_own(held):
    held.now_s += HOLD_S
    held.step()
    held.now_s += REST_S
    held.take(decode("c", range(40, 43), is_moved=True))
    held.play((Step(), [pull("c", (0, 4))]))
    assert held.core.held_until_s == held.now_s + HOLD_S


def test_no_step_is_held_soon_after_a_held_step(held):
    held.take(pull_done("b"))
    held.step()  # this step was delayed
    held.take(decode("c", range(40, 43), is_moved=True))
    held.now_s += REST_S / 2
    held.play((Step(), [pull("c", (0, 4)), Ran("a", 5, 6), Ran("b", 6, 7), token("a"), token("b")]))
    held.now_s += REST_S  # not delayed either, because the sequence was already passed over once
    held.play((Step(), [Ran("a", 6, 7), Ran("b", 7, 8), token("a"), token("b")]))
    assert held.decode.counters["held_steps"] == 1


def test_a_hold_that_delays_no_sequence_is_not_counted():
    r = rig()
    for name, prompt in (("a", range(3)), ("b", range(20, 25))):
        r.take(decode(name, prompt, is_moved=True))
        r.take(first(name))
        r.step()
        assert r.core.held_until_s is not None
        r.take(pull_done(name))
        r.step()
    assert r.decode.counters["held_steps"] == 1  # the delay of a's step for b


@pytest.mark.parametrize("event", [pull_failed("b"), cancel("b"), lost("g2")])
def test_a_step_is_not_held_for_a_failed_pull(event):
    r = rig()
    r.arrive("a", 3)
    r.take(decode("b", range(20, 25), is_moved=True, gateway="g2"))
    r.step()
    assert r.core.held_until_s is not None
    r.take(event)
    assert r.step() == [decoding("a"), Ran("a", 3, 4), token("a")]


def test_prompts_wait_for_a_held_step_too():
    r = Rig(Role.MIXED)
    r.take(decode("b", range(20, 25), is_moved=True))
    r.take(prefill("c", 3))
    r.play((Step(), [pull("b", (0, 0), (1, 1))]), (pull_done("b"), [kv_ready("b", 2)]))
    assert r.core.held_until_s == HOLD_S  # until b's first token has arrived too
    r.play((first("b"), []))
    r.step()
    assert [row.seq_id for row in r.rows] == ["b", "c"]


# ---------------------------------------------------------------- copies of moving sequences


def hold_copy(r: Rig, name: str, prompt, **fields) -> None:
    """Submits a copy of a sequence and pulls its KV."""
    r.take(copy(name, prompt, **fields))
    r.step()
    r.take(pull_done(name))


def test_a_copy_without_room_is_given_back_and_blocks_no_sequence():
    r = rig(num_blocks=5)
    r.arrive("a", 7)
    r.play(
        (copy("moved.copy", range(20, 36)), [hold("moved.copy", 4)]),
        (decode("b", range(40, 43)), [hold("b", 1)]),
        (
            Step(),
            [
                decoding("a"),
                abort("moved.copy"),
                given_back("moved.copy", "preempted"),
                pull("b", (0, 2)),
                Ran("a", 7, 8),
                token("a"),
            ],
        ),
        (pull_failed("moved.copy", "aborted"), []),
        (Blocks(), blocks(free=2, owned=2, in_flight=1)),
    )
    assert r.decode.counters["copies_dropped"] == 1


def test_copies_are_dropped_before_running_sequences():
    r = rig(num_blocks=5)
    r.arrive("a", 8)
    for name, prompt in (("old.copy", range(20, 24)), ("young.copy", range(40, 44))):
        hold_copy(r, name, prompt)
    r.step()
    r.step()
    r.play(
        (Blocks(), blocks(owned=5)),
        (Step(), [given_back("young.copy", "preempted"), Ran("a", 12, 13), token("a")]),
        (Blocks(), blocks(owned=5)),
    )
    assert r.decode.counters["preempted"] == 0


def test_copies_are_dropped_before_a_sequence_waits_for_memory():
    r = rig(num_blocks=3)
    hold_copy(r, "moved.copy", range(8))
    r.play(
        (decode("b", range(20, 29)), [hold("b", 3)]),
        (Step(), [given_back("moved.copy", "preempted"), pull("b", (0, 2), (1, 1), (2, 0))]),
    )


def test_a_complete_copy_takes_no_running_place():
    r = rig(max_running=1)
    hold_copy(r, "moved.copy", range(8))
    assert r.decode.num_waiting == 1
    r.play((decode("b", range(20, 23)), [hold("b", 1)]), (Step(), [pull("b", (0, 2))]))


def test_a_copy_is_held_until_cancelled_and_its_blocks_are_found():
    r = rig()
    hold_copy(r, "moved.copy", range(8))
    r.play(
        (Blocks(), blocks(free=6, owned=2)),
        (decode("moved", range(10)), [hold("moved", 3)]),
        (cancel("moved.copy"), []),
        (Step(), [pull("moved", (2, 2))]),
        (copy("moved.copy", range(8)), [hold("moved.copy", 2)]),
    )


def test_copies_of_a_lost_gateway_are_released():
    r = rig()
    hold_copy(r, "moved.copy", range(8), gateway="g1")
    r.play((lost("g1"), []), (Blocks(), blocks(free=6, cached=2)))


@settings(max_examples=20)  # a unit test may take 50 ms
@given(
    st.lists(st.tuples(st.sampled_from(["decode", "copy", "step", "cancel"]), st.integers(1, 9)))
)
def test_no_sequence_waits_or_is_preempted_while_a_copy_is_held(events):
    r = rig(num_blocks=6, max_running=9)
    alive: dict[str, bool] = {}  # by sequence id; True for a complete copy
    waiting: set[str] = set()  # sequences that wait for memory, without copies

    def step() -> None:
        effects = r.step()
        pulled = [e.seq_id for e in effects if isinstance(e, StartPull)]
        gone = [e.message.seq_id for e in effects if _is_given_back(e)]
        waiting.difference_update(pulled)
        for name in gone:
            del alive[name]
        if waiting or not all(name.startswith("copy") for name in gone):
            assert not any(alive.values())
        for name in pulled:
            r.take(pull_done(name))
            r.take(first(name))
            alive[name] = name.startswith("copy")
        for aborted in (e.seq_id for e in effects if isinstance(e, AbortPull)):
            r.take(pull_failed(aborted, "aborted"))
        r.core.validate()

    for number, (kind, size) in enumerate(events):
        name, prompt = f"{kind}{number}", range(100 * number, 100 * number + 2 * size)
        if kind == "step":
            step()
        elif kind == "cancel" and alive:
            victim = list(alive)[size % len(alive)]
            r.take(cancel(victim))
            del alive[victim]
            waiting.discard(victim)
        elif kind == "copy":
            r.take(copy(name, prompt))
            alive[name] = False
        elif kind == "decode":
            r.take(decode(name, prompt, more=50))
            alive[name] = False
            waiting.add(name)
    for name in list(alive):
        r.take(cancel(name))
    counts = r.pool.counts()
    assert counts.free + counts.cached == 6


def _is_given_back(effect) -> bool:
    return isinstance(effect, Emit) and isinstance(effect.message, GivenBack)

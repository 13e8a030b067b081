"""Schedulers with a shared pool: how events and budget are divided, and the load reports."""

from itertools import pairwise

import pytest

from decode.acceptance import Proposer
from engine.messages import (
    HASH_BYTES,
    PREEMPTED,
    GatewayId,
    LoadReport,
    PinBlocks,
    Role,
    SessionEnd,
    SessionUse,
    StepReport,
    UnpinBlocks,
)
from engine.worker.batch import BatchResult, RowResult
from engine.worker.events import FromGateway
from engine.worker.steps import MAX_STEPS_OF_A_KIND
from tests.kits.worker_core import (
    LENGTH,
    SAMPLED,
    STOP,
    Blocks,
    FixedSpeculator,
    Ran,
    Rig,
    Step,
    blocks,
    cancel,
    decode,
    decoding,
    ended,
    first,
    generate,
    given_back,
    grown,
    here,
    hold,
    kv_ready,
    lost,
    opened,
    prefill,
    prefilled,
    pull,
    pull_done,
    started,
    token,
)

WRONG_ROLE = "wrong role"
A_AND_B_RAN = (Ran("a", 6, 7), Ran("b", 10, 11))
B_DONE = prefilled("b", 9)

# ---------------------------------------------------------------- roles


@pytest.mark.parametrize(
    ("role", "event"),
    [
        (Role.DECODE, prefill("a", 5)),
        (Role.DECODE, generate("a", 5)),
        (Role.PREFILL, decode("a", 5)),
        (Role.PREFILL, generate("a", 5)),
    ],
)
def test_a_sequence_that_this_role_cannot_serve_is_given_back(role, event):
    rig = Rig(role)
    rig.play((event, [given_back("a", WRONG_ROLE)]), (Step(), []), (Blocks(), blocks(free=8)))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.MIXED])
def test_a_worker_ignores_what_is_meant_for_stores(role):
    hashes = [bytes(HASH_BYTES)]
    hints = (
        SessionUse("k", "s", hashes, 60.0),
        SessionEnd("k", "s"),
        PinBlocks("k", hashes),
        UnpinBlocks("k", hashes),
    )
    rig = Rig(role)
    rig.play(*((FromGateway(GatewayId("g"), hint), []) for hint in hints))
    rig.play((Blocks(), blocks(free=8)))


def test_a_mixed_worker_takes_all_kinds_of_sequences():
    rig = Rig(Role.MIXED)
    rig.play((prefill("a", 5), []), (generate("b", 5), []), (decode("c", 5), [hold("c", 2)]))


def test_a_generated_sequence_is_decoded_where_it_was_prefilled():
    Rig(Role.MIXED).play(
        (generate("a", 6, more=3), []),
        (Step(7), [started("a"), Ran("a", 0, 6), prefilled("a", 7)]),
        (Blocks(), blocks(free=6, owned=2)),
        (Step(8), [decoding("a"), Ran("a", 6, 7), token("a", 8)]),
        (Step(9), [Ran("a", 7, 8), token("a", 9, LENGTH)]),
        (Blocks(), blocks(free=6, cached=2)),
    )


def test_a_generated_sequence_that_ends_with_its_first_token_is_not_decoded():
    Rig(Role.MIXED).play(
        (generate("a", 6, stops=(7,)), []),
        (Step(7), [started("a"), Ran("a", 0, 6), prefilled("a", 7, STOP)]),
        (Blocks(), blocks(free=7, cached=1)),
        (Step(), []),
    )


def test_a_prompt_is_computed_beside_a_hand_over_and_both_are_decoded():
    rig = Rig(Role.DECODE, stretch=4.0)
    rig.play(
        (decode("a", 5), [hold("a", 2)]),
        (generate("b", range(20, 30), more=2), []),
        (Step(), [pull("a", (0, 0), (1, 1)), started("b"), Ran("b", 0, 8)]),
        (pull_done("a"), [kv_ready("a", 2)]),
        (first("a", 7), []),
        (Step(8, 9), [decoding("a"), Ran("a", 5, 6), Ran("b", 8, 10), token("a", 8), B_DONE]),
        (Step(10, 11), [decoding("b"), *A_AND_B_RAN, token("a", 10), token("b", 11, LENGTH)]),
        (cancel("a"), []),
        (Blocks(), blocks(free=5, cached=3)),
    )


def test_decoding_sequences_have_a_row_in_every_step_beside_prompts():
    rig = Rig(Role.DECODE, stretch=4.0, num_blocks=50, budget=9, chunk=8)
    rig.take(generate("a", 3))
    rig.step()
    for name in "bc":
        rig.take(generate(name, 20))
    for _ in range(5):  # computes both prompts; the first in chunks of at most 8 tokens
        rig.step()
        assert [row.seq_id for row in rig.rows][:1] == ["a"]
        assert sum(len(row.token_ids) for row in rig.rows) <= 9
    assert not rig.prefill.num_running + rig.prefill.num_waiting


@pytest.mark.parametrize("gone", [cancel("b"), lost("h")])
def test_cancelling_a_local_prompt_leaves_the_hand_over_alone(gone):
    rig = Rig(Role.DECODE, stretch=4.0)
    rig.play(
        (decode("a", 5), [hold("a", 2)]),
        (generate("b", range(20, 30), gateway="h"), []),
        (Step(), [pull("a", (0, 0), (1, 1)), started("b", gateway="h"), Ran("b", 0, 8)]),
        (gone, []),
        (Blocks(), blocks(free=4, cached=2, in_flight=2)),
        (pull_done("a"), [kv_ready("a", 2)]),
        (first("a", 7), []),
        (Step(8), [decoding("a"), Ran("a", 5, 6), token("a", 8)]),
    )


def test_a_local_prompt_with_a_taken_id_is_given_back():
    rig = Rig(Role.DECODE, stretch=4.0)
    rig.take(decode("a", 5))
    rig.take(generate("a", range(20, 23)))
    assert given_back("a", "the id is in use") in rig.step()
    rig.core.validate()
    assert rig.pool.counts().owned == 0


def test_adopted_sequences_are_not_bounded_by_the_number_that_may_be_pulled():
    rig = Rig(Role.MIXED, max_running=1, budget=32)
    rig.play((generate("a", 3), []), (generate("b", range(20, 23)), []))
    rig.step()
    assert rig.step() == [
        decoding("a"),
        decoding("b"),
        Ran("a", 3, 4),
        Ran("b", 3, 4),
        token("a"),
        token("b"),
    ]


def test_a_mixed_worker_decodes_a_prompt_from_its_own_cache():
    rig = Rig(Role.MIXED)
    rig.take(prefill("a", 8, more=1))
    rig.step()
    rig.play(
        (decode("b", 8), [hold("b", 2)]),
        (Step(), [pull("b")]),
        (pull_done("b"), [kv_ready("b", 0, cached=2)]),
    )


@pytest.mark.parametrize("role", list(Role))
def test_events_of_unknown_sequences_change_nothing_in_any_role(role):
    unknown = [cancel("x"), first("x"), lost("x"), ended("x", "expired"), pull_done("x")]
    Rig(role).play(*[(event, []) for event in unknown])


# ---------------------------------------------------------------- steps


def test_decode_gets_the_budget_first_and_prefill_the_rest():
    rig = Rig(Role.MIXED, budget=5, chunk=5)
    rig.play(
        (generate("a", 3), []),
        (Step(), [started("a"), Ran("a", 0, 3), prefilled("a")]),
        (generate("b", range(20, 27)), []),
        (Step(), [decoding("a"), started("b"), Ran("a", 3, 4), Ran("b", 0, 4), token("a")]),
        (Step(), [Ran("a", 4, 5), Ran("b", 4, 7), token("a"), prefilled("b")]),
        (Step(), [decoding("b"), Ran("a", 5, 6), Ran("b", 7, 8), token("a"), token("b")]),
    )


def test_prefill_waits_when_decode_takes_the_whole_budget():
    rig = Rig(Role.MIXED, budget=3, chunk=3)
    rig.take(generate("a", 3))
    rig.step()
    rig.take(generate("b", range(20, 22)))
    rig.step()
    rig.take(generate("c", range(40, 41)))
    rig.step()
    rig.take(prefill("d", range(60, 62)))
    assert [row.seq_id for row in run(rig)] == ["a", "b", "c"]
    rig.take(cancel("a"))
    assert [row.seq_id for row in run(rig)] == ["b", "c", "d"]


def run(rig):
    rig.step()
    return rig.rows


def test_there_is_no_plan_when_there_is_nothing_to_compute():
    assert Rig(Role.MIXED).core.plan(0.0) == (None, [])


def test_effects_of_planning_come_also_without_a_plan():
    rig = Rig(Role.DECODE)
    rig.take(decode("a", 5))
    assert rig.core.plan(0.0) == (None, [pull("a", (0, 0), (1, 1))])


def test_blocks_of_a_cancelled_prompt_are_free_when_its_step_has_ended():
    rig = Rig(Role.PREFILL, num_blocks=8)
    rig.take(prefill("a", 5, more=1))
    rig.core.plan(0.0)
    assert rig.core.handle(cancel("a")) == []
    assert rig.take(Blocks()) == blocks(free=6, in_flight=2)
    rig.core.validate()
    assert rig.core.finish(BatchResult([RowResult((7,))]), 0.0) == []
    assert rig.take(Blocks()) == blocks(free=8)


def test_a_chunk_is_planned_behind_the_one_in_flight():
    rig = Rig(Role.PREFILL, chunk=4)
    rig.take(prefill("a", 9))
    first, _ = rig.core.plan(0.0)
    second, _ = rig.core.plan(0.0)
    assert [(row.start, row.end) for row in (*first.rows, *second.rows)] == [(0, 4), (4, 8)]
    assert rig.core.finish(BatchResult([RowResult()]), 0.0) == [grown("a", 0)]
    third, _ = rig.core.plan(0.0)
    assert [(row.start, row.end) for row in third.rows] == [(8, 9)]
    assert rig.core.finish(BatchResult([RowResult()]), 0.0) == [grown("a", 1)]
    assert rig.core.plan(0.0) == (None, [])
    assert rig.core.finish(BatchResult([RowResult((7,))]), 0.0)[-1] == prefilled("a", 7)
    rig.core.validate()


def test_only_two_steps_are_in_flight():
    rig = Rig(Role.PREFILL, chunk=4)
    rig.take(prefill("a", 9))
    rig.core.plan(0.0)
    rig.core.plan(0.0)
    with pytest.raises(AssertionError, match="must be finished"):
        rig.core.plan(0.0)


def test_a_token_is_planned_behind_one_that_is_not_known_yet():
    rig = Rig(Role.DECODE)
    rig.arrive("a", 3, more=3, least=2, stops=(5,))
    first, _ = rig.core.plan(0.0)
    second, _ = rig.core.plan(0.0)
    [known], [pending] = first.rows, second.rows
    assert (known.start, known.token_ids, known.is_pending) == (3, [SAMPLED], False)
    assert (pending.start, pending.is_pending) == (4, True)
    assert (known.banned, pending.banned) == ((5,), ())
    assert rig.take(Blocks()) == blocks(free=6, owned=2)  # the pending token already has a block
    rig.core.finish(BatchResult([RowResult((7,))]), 0.0)
    assert rig.core.plan(0.0) == (None, [])  # the step in flight samples the last token
    assert rig.core.finish(BatchResult([RowResult((8,))]), 0.0) == [token("a", 8, LENGTH)]
    assert rig.take(Blocks()) == blocks(free=7, cached=1)


def test_a_row_is_void_if_its_sequence_has_ended_with_the_step_before():
    rig = Rig(Role.DECODE)
    rig.arrive("a", 3, stops=(5,))
    rig.core.plan(0.0)
    rig.core.plan(0.0)
    assert rig.core.finish(BatchResult([RowResult((5,))]), 0.0) == [token("a", 5, STOP)]
    assert rig.take(Blocks()) == blocks(free=6, cached=1, in_flight=1)
    rig.arrive("a", 2)  # reuses the same id
    assert rig.core.finish(BatchResult([RowResult((6,))]), 0.0) == []
    rig.core.validate()
    assert rig.decode.counters["void_rows"] == 1


def test_a_step_waits_for_the_one_in_flight_if_memory_is_short():
    rig = Rig(Role.DECODE, num_blocks=3)
    rig.arrive("a", 3)
    rig.arrive("b", 3)
    rig.core.plan(0.0)
    assert rig.core.plan(0.0) == (None, [])
    rig.core.finish(BatchResult([RowResult((7,)), RowResult((7,))]), 0.0)
    plan, effects = rig.core.plan(0.0)
    assert [row.seq_id for row in plan.rows] == ["a"]
    assert effects == [given_back("b", PREEMPTED)]


def test_a_step_with_drafts_waits_for_the_one_in_flight():
    rig = Rig(Role.DECODE, speculator=FixedSpeculator(Proposer.DRAFT))
    rig.arrive("a", 3)
    rig.core.plan(0.0)
    assert rig.core.plan(0.0) == (None, [])


def test_after_a_step_events_are_handled_again():
    rig = Rig(Role.PREFILL)
    rig.take(prefill("a", 5, more=1))
    rig.core.plan(0.0)
    rig.core.finish(BatchResult([RowResult((7,))]), 0.0)
    assert rig.core.handle(cancel("a")) == []


def test_a_result_must_have_one_entry_per_row():
    rig = Rig(Role.PREFILL)
    rig.take(prefill("a", 5))
    rig.core.plan(0.0)
    with pytest.raises(AssertionError, match="2 results of 1 rows"):
        rig.core.finish(BatchResult([RowResult((7,)), RowResult((8,))]), 0.0)


# ---------------------------------------------------------------- state of both schedulers


def test_prefill_takes_no_block_that_a_pull_writes_to():
    rig = Rig(Role.MIXED, num_blocks=3)
    rig.take(decode("a", 7))
    rig.step()
    rig.play(
        (generate("b", range(20, 25)), []), (Step(), []), (Blocks(), blocks(free=1, in_flight=2))
    )


def test_a_cancel_reaches_both_schedulers():
    rig = Rig(Role.MIXED, chunk=4)
    rig.take(generate("prompt", 6))
    rig.take(decode("pull", range(20, 24)))
    rig.step()
    rig.take(pull_done("pull"))
    rig.play((cancel("prompt"), []), (cancel("pull"), []), (Blocks(), blocks(free=6, cached=2)))


def test_a_lost_gateway_is_lost_to_both_schedulers():
    rig = Rig(Role.MIXED, chunk=4)
    rig.take(generate("prompt", 6, gateway="g1"))
    rig.take(decode("pull", range(20, 24), gateway="g1"))
    rig.take(prefill("theirs", range(40, 44), gateway="g2"))
    rig.step()
    rig.take(pull_done("pull"))
    rig.play((lost("g1"), []), (Blocks(), blocks(free=5, cached=2, leased=1)))


def test_a_load_report_counts_every_block_and_sequence():
    rig = Rig(Role.MIXED, num_blocks=12, chunk=8, budget=16, max_running=1)
    rig.take(prefill("cached", 4, more=1))
    rig.take(prefill("leased", range(20, 26)))
    rig.step()
    rig.take(decode("pulling", range(40, 46)))
    rig.take(decode("queued", range(60, 66)))
    rig.take(generate("computing", range(80, 90)))
    rig.step()
    rig.take(prefill("waiting", range(100, 140)))
    assert rig.core.load(open_leases=1, counters={"pulls_done": 3.0}) == LoadReport(
        free_blocks=4,
        cached_blocks=1,
        owned_blocks=3,
        leased_blocks=2,
        in_flight_blocks=2,
        waiting_seqs=3,
        running_seqs=1,
        open_leases=1,
        counters={"pulls_done": 3.0},
        prompt_tokens=10 + 40,
        decode_seqs=2,
        decode_blocks=4,
        context_tokens=12,
    )


def reported(rig: Rig) -> LoadReport:
    return rig.core.load(open_leases=0, counters={})


def promised(rig: Rig) -> tuple[int, int, int, int]:
    load = reported(rig)
    return load.prompt_tokens, load.decode_seqs, load.decode_blocks, load.context_tokens


def test_the_workload_is_the_prompt_first_and_the_decode_later():
    rig = Rig(Role.MIXED, chunk=4)
    rig.take(generate("a", 6, more=3))
    assert promised(rig) == (6, 0, 0, 0)
    rig.step()
    assert promised(rig) == (6, 0, 0, 0)  # the whole prompt counts, also its computed part
    rig.step(7)
    assert promised(rig) == (0, 1, 2, 7)
    rig.step(8)
    rig.step(9)  # the last token
    assert promised(rig) == (0, 0, 0, 0)


def test_the_workload_counts_waiting_sequences_but_not_cancelled_ones():
    rig = Rig(Role.DECODE, max_running=1)
    rig.take(decode("pulling", 4))
    rig.take(decode("queued", range(20, 26)))
    rig.step()
    assert promised(rig) == (0, 2, 3, 10)
    rig.take(cancel("pulling"))  # the transfer still writes to the blocks
    assert promised(rig) == (0, 1, 2, 6)
    rig.take(cancel("queued"))
    assert promised(rig) == (0, 0, 0, 0)


def test_the_workload_counts_pulling_prompts_but_not_cancelled_ones():
    rig = Rig(Role.PREFILL)
    rig.take(prefill("a", 9, prefix=2))
    rig.step()
    assert promised(rig) == (9, 0, 0, 0)
    rig.take(cancel("a"))
    assert promised(rig) == (0, 0, 0, 0)


# ---------------------------------------------------------------- measured step costs


def timed_step(rig: Rig, seconds: float = 0.5, token: int = 99) -> None:
    """Runs a step with a time measured by the runner."""
    rig.seconds = seconds
    rig.step(token)
    rig.seconds = None


def test_a_report_has_the_size_and_time_of_steps():
    rig = Rig(Role.MIXED, chunk=4, budget=8)
    rig.take(generate("a", 6))
    timed_step(rig, 0.1)
    timed_step(rig, 0.2)
    timed_step(rig, 0.3)
    rig.take(generate("b", range(20, 23)))
    timed_step(rig, 0.4)
    assert reported(rig).steps == [
        StepReport(0.3, num_rows=1, num_context_tokens=7),
        StepReport(0.1, num_prefill_tokens=4, prefill_squares=16),
        StepReport(0.2, num_prefill_tokens=2, prefill_squares=36 - 16),
        StepReport(0.4, 3, 9, num_rows=1, num_context_tokens=8),
    ]
    assert reported(rig).steps == []  # the steps have been reported already


def test_untimed_steps_are_not_reported():
    rig = Rig(Role.MIXED)
    rig.take(generate("a", 3))
    for _ in range(3):
        rig.step()
    assert reported(rig).steps == []


def test_reported_steps_are_few_and_spread_over_the_time():
    rig = Rig(Role.MIXED, num_blocks=200)
    rig.take(generate("a", 3, more=700))
    for number in range(500):
        timed_step(rig, 1.0 + number)
    decodes = [step for step in reported(rig).steps if step.num_rows]
    assert MAX_STEPS_OF_A_KIND / 2 <= len(decodes) <= MAX_STEPS_OF_A_KIND
    numbers = [step.seconds for step in decodes]
    gaps = {b - a for a, b in pairwise(numbers)}
    assert len(gaps) == 1  # all gaps are equal
    assert numbers[0] < 500 / 4
    assert numbers[-1] > 500 * 3 / 4


def test_prompts_do_not_crowd_out_the_steps_that_decode():
    rig = Rig(Role.MIXED, num_blocks=200, chunk=1, budget=8)
    rig.take(generate("a", 3))
    for _ in range(5):
        timed_step(rig)
    rig.take(generate("b", range(20, 120)))
    for _ in range(90):
        timed_step(rig)
    steps = reported(rig).steps
    # the prompt takes three steps first
    assert sum(not step.num_prefill_tokens for step in steps) == 2
    assert len(steps) <= 2 * MAX_STEPS_OF_A_KIND


@pytest.mark.parametrize("proposer", [Proposer.DRAFT, Proposer.NGRAM])
def test_steps_with_drafts_are_not_reported(proposer):
    rig = Rig(Role.MIXED, num_blocks=50, speculator=FixedSpeculator(proposer, 2))
    rig.take(generate("a", [5, 6] * 4, more=40))
    rig.step(5)
    for number in range(4):
        timed_step(rig, token=6 - number % 2)
        assert any(row.max_drafted for row in rig.rows)
    assert reported(rig).steps == []
    speculator = rig.decode.drafts.speculator
    speculator.proposer, speculator.may_see = None, False
    timed_step(rig)
    assert [step.num_rows for step in reported(rig).steps] == [1]


def test_steps_in_which_the_draft_catches_up_are_not_reported():
    rig = Rig(Role.MIXED, num_blocks=50, speculator=FixedSpeculator(None))
    rig.take(generate("a", 3, more=40))
    rig.step()
    seen = []
    for _ in range(8):
        timed_step(rig)
        seen += [bool(row.draft_token_ids) for row in rig.rows]
    assert sum(seen) == 2  # drafts occur only when a block is full
    assert len(reported(rig).steps) == 8 - 2


def test_prompts_with_log_probabilities_are_not_reported():
    rig = Rig(Role.PREFILL)
    rig.take(prefill("a", 6, num_top=2))
    timed_step(rig)
    assert reported(rig).steps == []


def test_a_prefix_computed_by_prefill_is_found_by_a_later_one_of_another_gateway():
    rig = Rig(Role.PREFILL)
    rig.take(prefill("a", 5, more=1, gateway="g1"))
    rig.step()
    rig.play(
        (prefill("b", 6, gateway="g2"), []),
        (
            Step(),
            [
                opened("b", 2),
                grown("b", 0),
                started("b", cached=4, lease=here("b", 2), gateway="g2"),
                Ran("b", 4, 6),
                grown("b", 1),
                prefilled("b", gateway="g2"),
            ],
        ),
    )

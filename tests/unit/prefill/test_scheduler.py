"""Prompts that are queued, computed in chunks, and leased to sinks."""

import pytest

from engine.messages import Role, Sampling
from prefill.scheduler import FULL_STEP_TOKENS
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
    decoding,
    ended,
    generate,
    given_back,
    grown,
    here,
    hold_prefix,
    lost,
    opened,
    prefill,
    prefilled,
    pull,
    pull_done,
    pull_failed,
    revoked,
    score,
    started,
    token,
)


def rig(**sizes) -> Rig:
    return Rig(Role.PREFILL, **sizes)


# ---------------------------------------------------------------- chunks


def test_a_prompt_is_computed_chunk_by_chunk():
    rig(chunk=4).play(
        (prefill("a", 9), []),
        (Step(), [opened("a", 3), started("a", lease=here("a", 3)), Ran("a", 0, 4), grown("a", 0)]),
        (Step(), [Ran("a", 4, 8), grown("a", 1)]),
        (Step(7), [Ran("a", 8, 9), grown("a", 2), prefilled("a", 7)]),
        (Step(), []),
        (Blocks(), blocks(free=5, leased=3)),
    )


def test_chunks_share_the_budget_in_order_of_arrival():
    rig(chunk=8, budget=10, num_blocks=16).play(
        (prefill("a", 10, more=1), []),
        (prefill("b", range(20, 30), more=1), []),
        (prefill("c", range(40, 50), more=1), []),
        (Step(), [started("a"), started("b"), Ran("a", 0, 8), Ran("b", 0, 2)]),
        (Step(), [Ran("a", 8, 10), Ran("b", 2, 10), *done("a"), *done("b")]),
        (Step(), [started("c"), Ran("c", 0, 8)]),
    )


def done(name):
    return [prefilled(name, finish=LENGTH)]


def test_a_step_that_completes_a_prompt_takes_little_else():
    size = FULL_STEP_TOKENS
    rig(chunk=4 * size, budget=4 * size, num_blocks=4 * size).play(
        (prefill("a", size, more=1), []),
        (prefill("b", range(9 * size, 11 * size), more=1), []),
        (Step(), [started("a"), Ran("a", 0, size), *done("a")]),
        (prefill("c", range(20 * size, 20 * size + 8), more=1), []),
        (Step(), [started("b"), Ran("b", 0, 2 * size), *done("b")]),
        (prefill("d", range(30 * size, 32 * size), more=1), []),
        (Step(), [started("c"), started("d"), Ran("c", 0, 8), Ran("d", 0, size - 8), *done("c")]),
    )


def test_a_chunk_stops_in_the_middle_of_a_block_when_the_budget_is_spent():
    r = rig(budget=6)
    r.play(
        (prefill("a", 8), []),
        (Step(), [opened("a", 2), started("a", lease=here("a", 2)), Ran("a", 0, 6), grown("a", 0)]),
        (Step(), [Ran("a", 6, 8), grown("a", 1), prefilled("a")]),
    )


def test_only_the_last_chunk_samples():
    r = rig(chunk=4)
    r.play((prefill("a", 6), []))
    r.step()
    assert [row.sampling for row in r.rows] == [None]
    r.step()
    (row,) = r.rows
    assert row.sampling is not None
    assert (list(row.token_ids), row.start, list(row.block_table)) == ([4, 5], 4, [0, 1])


@pytest.mark.parametrize(("least", "banned"), [(0, ()), (1, (3, 5)), (2, (3, 5))])
def test_an_answer_that_must_be_longer_may_not_begin_with_a_stop(least, banned):
    r = rig()
    r.take(prefill("a", 6, least=least, stops=(3, 5)))
    r.step()
    assert [row.banned for row in r.rows] == [banned]


# ---------------------------------------------------------------- leases


def test_the_last_partial_block_is_ready_only_at_the_end():
    rig(chunk=6).play(
        (prefill("a", 7), []),
        (Step(), [opened("a", 2), started("a", lease=here("a", 2)), Ran("a", 0, 6), grown("a", 0)]),
        (Step(), [Ran("a", 6, 7), grown("a", 1), prefilled("a")]),
    )


def test_a_chunk_that_fills_no_block_does_not_grow_the_lease():
    rig(chunk=3).play(
        (prefill("a", 7), []),
        (Step(), [opened("a", 2), started("a", lease=here("a", 2)), Ran("a", 0, 3)]),
        (Step(), [Ran("a", 3, 6), grown("a", 0)]),
        (Step(), [Ran("a", 6, 7), grown("a", 1), prefilled("a")]),
    )


def test_cached_blocks_of_a_lease_are_ready_at_once():
    r = rig()
    compute(r, "a", 8)
    r.play(
        (ended("a", "released"), []),
        (Blocks(), blocks(free=6, cached=2)),
        (prefill("b", 12), []),
        (
            Step(),
            [
                opened("b", 3),
                grown("b", 0, 1),
                started("b", cached=8, lease=here("b", 3)),
                Ran("b", 8, 12),
                grown("b", 2),
                prefilled("b"),
            ],
        ),
    )


def compute(r: Rig, name: str, prompt) -> None:
    """Submits a prompt and computes it at once."""
    r.take(prefill(name, prompt))
    while r.step():
        pass


def test_blocks_that_another_prompt_is_still_leasing_are_shared():
    r = rig()
    compute(r, "a", 9)
    r.play(
        (Blocks(), blocks(free=5, leased=3)),
        (prefill("b", [*range(8), 50, 51]), []),
        (
            Step(),
            [
                opened("b", 3),
                grown("b", 0, 1),
                started("b", cached=8, lease=here("b", 3)),
                Ran("b", 8, 10),
                grown("b", 3),
                prefilled("b"),
            ],
        ),
        (Blocks(), blocks(free=4, leased=4)),
        (ended("a", "released"), []),
        (Blocks(), blocks(free=5, leased=3)),
        (ended("b", "released"), []),
        (Blocks(), blocks(free=6, cached=2)),
    )


@pytest.mark.parametrize(("num_tokens", "cached"), [(7, 4), (8, 4), (9, 8)])
def test_a_prefix_hit_leaves_a_token_to_sample_from(num_tokens, cached):
    r = rig()
    compute(r, "a", 12)
    r.take(prefill("b", num_tokens, more=1))
    assert r.step()[:2] == [started("b", cached=cached), Ran("b", cached, num_tokens)]


def test_equal_prompts_that_start_together_are_both_computed():
    r = rig()
    r.play(
        (prefill("a", 5, more=1), []),
        (prefill("b", 5, more=1), []),
        (
            Step(),
            [started("a"), started("b"), Ran("a", 0, 5), Ran("b", 0, 5), *done("a"), *done("b")],
        ),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_a_prompt_whose_first_token_is_its_last_opens_no_lease():
    rig().play(
        (prefill("a", 5, more=1), []),
        (Step(7), [started("a"), Ran("a", 0, 5), prefilled("a", 7, LENGTH)]),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_a_stop_as_first_token_ends_the_lease():
    rig().play(
        (prefill("a", 5, stops=(7,)), []),
        (
            Step(7),
            [
                opened("a", 2),
                started("a", lease=here("a", 2)),
                Ran("a", 0, 5),
                grown("a", 0, 1),
                prefilled("a", 7, STOP),
                revoked("a"),
            ],
        ),
        (Blocks(), blocks(free=6, leased=2)),
        (ended("a", "revoked"), []),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_a_lease_that_its_sink_releases_early_does_not_stop_the_prompt():
    rig(chunk=4).play(
        (prefill("a", 9), []),
        (Step(), [opened("a", 3), started("a", lease=here("a", 3)), Ran("a", 0, 4), grown("a", 0)]),
        (ended("a", "released"), []),
        (Blocks(), blocks(free=5, owned=3)),
        (Step(), [Ran("a", 4, 8)]),
        (Step(), [Ran("a", 8, 9), prefilled("a")]),
        (Blocks(), blocks(free=6, cached=2)),
    )


def test_a_lease_that_expires_gives_an_unfinished_prompt_back():
    rig(chunk=4).play(
        (prefill("a", 9), []),
        (Step(), [opened("a", 3), started("a", lease=here("a", 3)), Ran("a", 0, 4), grown("a", 0)]),
        (ended("a", "expired"), [given_back("a", "lease expired")]),
        (Blocks(), blocks(free=7, cached=1)),
        (Step(), []),
    )


@pytest.mark.parametrize("reason", ["released", "revoked", "expired"])
def test_the_end_of_a_computed_prompts_lease_is_not_reported(reason):
    r = rig()
    compute(r, "a", 6)
    r.play(
        (Blocks(), blocks(free=6, leased=2)),
        (ended("a", reason), []),
        (Blocks(), blocks(free=7, cached=1)),
        (ended("a", reason), []),
    )


# ---------------------------------------------------------------- offered prefixes


def test_an_offered_prefix_is_pulled_and_the_rest_computed():
    r = rig()
    r.play(
        (prefill("a", 11, prefix=2), [hold_prefix("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (Blocks(), blocks(free=5, owned=1, in_flight=2)),
        (Step(), []),
        (
            pull_done("a"),
            [
                opened("a", 3),
                grown("a", 0, 1),
                started("a", cached=8, lease=here("a", 3), pulled=2),
            ],
        ),
        (Blocks(), blocks(free=5, leased=3)),
        (Step(), [Ran("a", 8, 11), grown("a", 2), prefilled("a")]),
        (ended("a", "released"), []),
        (Blocks(), blocks(free=6, cached=2)),
    )
    assert r.prefill.counters == {"pulled_prefix_blocks": 2}


def test_locally_cached_blocks_are_not_pulled():
    r = rig()
    compute(r, "a", 4)
    r.take(ended("a", "released"))
    r.play(
        (prefill("b", 13, more=1, prefix=3), [hold_prefix("b", 3)]),
        (Step(), [pull("b", (1, 1), (2, 2))]),
        (pull_done("b"), [started("b", cached=12, pulled=2)]),
        (Step(), [Ran("b", 12, 13), *done("b")]),
    )


def test_an_offer_of_cached_blocks_is_given_up():
    r = rig()
    compute(r, "a", 8)
    r.take(ended("a", "released"))
    r.play(
        (prefill("b", 9, more=1, prefix=2), [hold_prefix("b", 2)]),
        (Step(), [abort("b"), started("b", cached=8), Ran("b", 8, 9), *done("b")]),
        (pull_failed("b", "aborted"), []),
    )
    assert not r.prefill.counters


@pytest.mark.parametrize(("num_tokens", "pulled"), [(8, 1), (9, 2)])
def test_a_pulled_prefix_leaves_a_token_to_sample_from(num_tokens, pulled):
    r = rig()
    r.play(
        (prefill("a", num_tokens, more=1, prefix=2), [hold_prefix("a", 2)]),
        (Step(), [pull("a", *((i, i) for i in range(pulled)))]),
        (pull_done("a"), [started("a", cached=4 * pulled, pulled=pulled)]),
        (Step(), [Ran("a", 4 * pulled, num_tokens), *done("a")]),
    )


def test_others_go_ahead_of_a_prompt_that_pulls():
    rig().play(
        (prefill("a", 9, more=1, prefix=2), [hold_prefix("a", 2)]),
        (prefill("b", range(20, 25), more=1), []),
        (Step(), [pull("a", (0, 0), (1, 1)), started("b"), Ran("b", 0, 5), *done("b")]),
        (pull_done("a"), [started("a", cached=8, pulled=2)]),
        (Step(), [Ran("a", 8, 9), *done("a")]),
    )


def test_a_prompt_whose_pull_is_over_waits_for_no_later_one():
    rig(budget=8, chunk=8).play(
        (prefill("a", 9, more=1, prefix=2), [hold_prefix("a", 2)]),
        (prefill("b", range(20, 36), more=1), []),
        (Step(), [pull("a", (0, 0), (1, 1)), started("b"), Ran("b", 0, 8)]),
        (pull_done("a"), [started("a", cached=8, pulled=2)]),
        (Step(), [Ran("a", 8, 9), Ran("b", 8, 15), *done("a")]),
    )


@pytest.mark.parametrize(
    ("arrived", "kept"), [((), 0), ((0,), 1), ((1,), 0), ((0, 2), 1), ((0, 1, 2), 3)]
)
def test_blocks_that_a_pull_does_not_bring_are_computed(arrived, kept):
    r = rig(chunk=16)
    r.play(
        (prefill("a", 13, more=1, prefix=3), [hold_prefix("a", 3)]),
        (Step(), [pull("a", (0, 0), (1, 1), (2, 2))]),
        (pull_failed("a", arrived=arrived), [started("a", cached=4 * kept)]),
        (Blocks(), blocks(free=4, owned=4)),
        (Step(), [Ran("a", 4 * kept, 13), *done("a")]),
        (Blocks(), blocks(free=5, cached=3)),
    )
    assert r.prefill.counters["fallbacks:prefix_pull_failed"] == 1
    assert r.prefill.counters["pulled_prefix_blocks"] == kept


def test_an_offer_that_ends_while_the_prompt_waits_costs_only_the_pull():
    r = rig()
    r.play(
        (prefill("a", 9, more=1, prefix=2), [hold_prefix("a", 2)]),
        (pull_failed("a", "source silent"), []),
        (pull_failed("a", "source silent"), []),
        (Step(), [started("a"), Ran("a", 0, 8)]),
    )
    assert r.prefill.counters == {"fallbacks:prefix_pull_failed": 1}


def test_a_pull_that_fails_twice_is_computed_once():
    rig().play(
        (prefill("a", 9, more=1, prefix=2), [hold_prefix("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (pull_failed("a", "source silent"), [started("a")]),
        (pull_failed("a", "lease was lost while waiting"), []),
        (Step(), [Ran("a", 0, 8)]),
    )


def test_prompts_that_wait_for_memory_hold_no_offers():
    r = rig(num_blocks=4)
    compute(r, "a", 12)
    r.play(
        (prefill("b", range(50, 58), more=1, prefix=1), [hold_prefix("b", 1)]),
        (prefill("c", range(60, 68), more=1, prefix=1), [hold_prefix("c", 1)]),
        (Step(), [abort("b"), abort("c")]),
        (Step(), []),
        (pull_failed("b", "aborted"), []),
        (pull_failed("c", "aborted"), []),
        (cancel("c"), []),
        (ended("a", "released"), []),
        (Step(), [started("b"), Ran("b", 0, 8), *done("b")]),
    )
    assert r.prefill.counters == {"fallbacks:prefix_without_memory": 2}


def test_a_prompt_that_continues_here_pulls_its_prefix_too():
    r = Rig(Role.MIXED)
    r.play(
        (generate("a", 6, prefix=1), [hold_prefix("a", 1)]),
        (Step(), [pull("a", (0, 0))]),
        (pull_done("a"), [started("a", cached=4, pulled=1)]),
        (Step(7), [Ran("a", 4, 6), prefilled("a", 7)]),
        (Step(8), [decoding("a"), Ran("a", 6, 7), token("a", 8)]),
    )


def test_a_prompt_cancelled_while_it_waits_gives_its_offer_up():
    rig().play(
        (prefill("a", 9, prefix=2), [hold_prefix("a", 2)]),
        (cancel("a"), [abort("a")]),
        (pull_failed("a", "aborted"), []),
        (Step(), []),
    )


@pytest.mark.parametrize(
    ("end", "cached"),
    [(pull_failed("a", "aborted"), 0), (pull_failed("a", "aborted", [0]), 1), (pull_done("a"), 2)],
    ids=["nothing came", "a block came", "all came"],
)
@pytest.mark.parametrize("why", [cancel("a"), lost("g")], ids=["cancelled", "gateway lost"])
def test_blocks_of_an_aborted_pull_stay_in_flight_until_nothing_writes_to_them(why, end, cached):
    rig().play(
        (prefill("a", 9, prefix=2), [hold_prefix("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (why, [abort("a")]),
        (Blocks(), blocks(free=5, owned=1, in_flight=2)),
        (why, []),
        (Step(), []),
        (end, []),
        (Blocks(), blocks(free=8 - cached, cached=cached)),
        (end, []),
    )


# ---------------------------------------------------------------- cancels and lost gateways


def test_a_prompt_cancelled_while_it_waits_never_starts():
    rig().play((prefill("a", 6), []), (cancel("a"), []), (Step(), []))


def test_a_prompt_cancelled_while_it_is_computed_ends_its_lease():
    rig(chunk=4).play(
        (prefill("a", 9), []),
        (Step(), [opened("a", 3), started("a", lease=here("a", 3)), Ran("a", 0, 4), grown("a", 0)]),
        (cancel("a"), [revoked("a")]),
        (Blocks(), blocks(free=5, leased=3)),
        (Step(), []),
        (ended("a", "revoked"), []),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_a_prompt_without_a_lease_is_cancelled_at_once():
    rig(chunk=4).play(
        (prefill("a", 9, more=1), []),
        (Step(), [started("a"), Ran("a", 0, 4)]),
        (cancel("a"), []),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_a_computed_prompt_is_cancelled_by_ending_its_lease():
    r = rig()
    compute(r, "a", 6)
    r.play(
        (cancel("a"), [revoked("a")]),
        (Blocks(), blocks(free=6, leased=2)),
        (ended("a", "revoked"), []),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_a_cancel_that_comes_twice_or_late_changes_nothing():
    r = rig()
    compute(r, "a", 6)
    r.play((ended("a", "released"), []), (cancel("a"), []), (cancel("never"), []))


def test_prompts_and_leases_of_a_lost_gateway_are_dropped():
    r = rig(chunk=4, num_blocks=16)
    r.take(prefill("leased", 4, gateway="g1"))
    r.step()
    r.play(
        (prefill("computing", range(20, 29), gateway="g1"), []),
        (prefill("theirs", range(40, 45), gateway="g2"), []),
    )
    assert r.step()[-2:] == [grown("computing", 1), grown("theirs", 4)]
    r.play(
        (prefill("waiting", 6, gateway="g1"), []),
        (lost("g1"), [revoked("computing"), revoked("leased")]),
        (ended("computing", "revoked"), []),
        (Blocks(), blocks(free=12, cached=1, leased=3)),
        (Step(), [Ran("theirs", 4, 5), grown("theirs", 5), prefilled("theirs", gateway="g2")]),
        (ended("leased", "revoked"), []),
        (ended("theirs", "released"), []),
        (Blocks(), blocks(free=13, cached=3)),
    )


# ---------------------------------------------------------------- memory


def test_a_prompt_larger_than_the_pool_is_given_back():
    rig(num_blocks=2).play(
        (prefill("a", 9), [given_back("a", "prompt exceeds the KV pool")]),
        (prefill("b", 8, more=1), []),
        (Step(), [started("b"), Ran("b", 0, 8), *done("b")]),
    )


def test_a_prompt_waits_for_memory_and_starts_when_a_lease_ends():
    r = rig(num_blocks=4)
    compute(r, "a", 12)
    r.play(
        (prefill("b", range(50, 58), more=1), []),
        (Step(), []),
        (Blocks(), blocks(free=1, leased=3)),
        (ended("a", "released"), []),
        (Step(), [started("b"), Ran("b", 0, 8), *done("b")]),
    )


def test_a_small_prompt_does_not_overtake_a_large_one():
    r = rig(num_blocks=4)
    compute(r, "a", 12)
    r.play(
        (prefill("large", range(50, 58), more=1), []),
        (prefill("small", range(60, 63), more=1), []),
        (Step(), []),
        (ended("a", "released"), []),
        (
            Step(),
            [
                started("large"),
                started("small"),
                Ran("large", 0, 8),
                Ran("small", 0, 3),
                *done("large"),
                *done("small"),
            ],
        ),
    )


def test_a_prompt_that_waits_for_memory_still_finds_its_prefix_afterwards():
    r = rig(num_blocks=4)
    compute(r, "a", 4)
    compute(r, "b", range(20, 32))
    r.play(
        (ended("a", "released"), []),
        (prefill("c", 8, more=1), []),
        (Step(), []),
        (Blocks(), blocks(cached=1, leased=3)),
        (ended("b", "released"), []),
        (Step(), [started("c", cached=4), Ran("c", 4, 8), *done("c")]),
    )


def counts(r: Rig) -> tuple[int, int, int]:
    return r.prefill.num_waiting, r.prefill.num_running, len(r.prefill.leases.opened)


def test_waiting_and_running_prompts_are_counted():
    r = rig(chunk=4, num_blocks=4)
    for name, prompt in (("a", range(12)), ("b", range(20, 32)), ("c", range(40, 44))):
        r.take(prefill(name, prompt))
    assert counts(r) == (3, 0, 0)
    r.step()
    assert counts(r) == (2, 1, 1)


# ---------------------------------------------------------------- log-probabilities, rows


def test_the_tokens_of_a_prompt_are_scored_chunk_by_chunk():
    r = rig(chunk=4)
    r.take(prefill("a", 9, more=1, num_top=2))
    scored = []
    for _ in range(3):
        (*_, last) = r.step()
        scored.append((list(r.rows[0].scored), r.rows[0].num_top))
    assert scored == [([1, 2, 3, 4], 2), ([5, 6, 7, 8], 2), ([], 2)]
    assert last.message.prompt_logprobs == [score(i) for i in range(1, 9)]


def test_a_scored_prompt_is_computed_even_if_cached():
    r = rig()
    compute(r, "a", 8)
    r.take(ended("a", "released"))
    r.take(prefill("b", 8, more=1, num_top=0))
    assert r.step()[:2] == [started("b"), Ran("b", 0, 8)]
    r.play((Blocks(), blocks(free=6, cached=2)))


def test_a_prompt_that_is_scored_gives_an_offered_prefix_up():
    rig().play(
        (prefill("a", 8, more=1, num_top=0, prefix=1), [hold_prefix("a", 1), abort("a")]),
        (pull_failed("a", "aborted"), []),
        (Blocks(), blocks(free=8)),
    )


def test_other_prompts_are_not_scored():
    r = rig()
    r.take(prefill("a", 6, more=1))
    (*_, last) = r.step()
    assert (r.rows[0].scored, r.rows[0].num_top) == ((), 0)
    assert (last.message.logprobs, last.message.prompt_logprobs) == (None, [])


def test_the_first_token_comes_with_its_log_probability():
    r = rig()
    r.take(prefill("a", 6, more=1, sampling=Sampling(logprobs=0)))
    (*_, last) = r.step(7)
    assert last.message.logprobs == score(7)


def test_the_draft_model_computes_every_chunk_and_penalties_see_the_whole_prompt():
    r = rig(chunk=4)
    r.take(prefill("a", 6, sampling=Sampling(repetition_penalty=2.0)))
    r.step()
    (row,) = r.rows
    assert (list(row.draft_token_ids), row.history) == ([0, 1, 2, 3], None)
    r.step()
    (row,) = r.rows
    assert (list(row.draft_token_ids), row.prompt_len) == ([4, 5], 6)
    assert list(row.history)[:6] == list(range(6))


def test_an_adopted_sequence_keeps_its_history():
    r = Rig(Role.MIXED)
    r.take(generate("a", 6, sampling=Sampling(repetition_penalty=2.0)))
    r.step(7)
    r.step(8)
    assert list(r.rows[0].history) == [0, 1, 2, 3, 4, 5, 7, 8]


# ---------------------------------------------------------------- invalid messages


def test_an_id_in_use_is_refused():
    reason = "the id is in use"
    r = rig(chunk=4)
    r.take(prefill("a", 6))
    r.play((prefill("a", 6, gateway="g2"), [given_back("a", reason, gateway="g2")]))
    r.step()
    r.play((prefill("a", 6), [given_back("a", reason)]))
    r.step()  # the prompt's KV is leased now
    r.play((prefill("a", 6), [given_back("a", reason)]))
    r.take(ended("a", "released"))
    r.play((prefill("a", 6), []))


def test_a_prompt_with_a_fault_is_given_back():
    r = rig(vocab_size=50)
    reason = "a token id is not in the vocabulary"
    r.play((prefill("a", [50]), [given_back("a", reason, hopeless=True)]), (Step(), []))

"""Running sequences whose steps verify draft tokens."""

from array import array

import pytest

from decode.acceptance import Proposer
from engine.messages import Role, Sampling
from engine.worker.batch import BatchResult, RowResult
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
    first,
    given_back,
    hold,
    kv_ready,
    pull,
    pull_done,
    score,
    token,
    tokens,
)

REPEATING = (1, 2, 3, 4, 5, 1, 2)  # the prompt; the first output token is 3


def rig(proposer=Proposer.DRAFT, num_tokens=3, **sizes) -> Rig:
    speculator = FixedSpeculator(proposer, num_tokens)
    return Rig(Role.DECODE, speculator=speculator, **sizes)


def row_of(r: Rig, name: str):
    (row,) = [row for row in r.rows if row.seq_id == name]
    return row


# ---------------------------------------------------------------- the proposer of drafts


def test_correct_tokens_of_the_draft_model_are_taken():
    r = rig()
    r.arrive("a", 6)
    r.play(
        (Step((7, 8, 9)), [decoding("a"), Ran("a", 6, 7), tokens("a", 7, 8, 9, drafted=3)]),
        (Step((1, 2, 3, 4)), [Ran("a", 9, 10), tokens("a", 1, 2, 3, 4, drafted=3)]),
        (Step(5), [Ran("a", 13, 14), tokens("a", 5, drafted=3)]),
    )


def test_tokens_that_followed_the_same_tokens_are_drafted():
    r = rig(Proposer.NGRAM, 4)
    r.arrive("a", REPEATING, 3)
    r.step((4, 5, 9))
    row = row_of(r, "a")
    assert (row.draft, row.num_to_draft, row.draft_token_ids) == ([4, 5, 1, 2], 0, [3])
    assert r.decode.counters["drafted:ngram"] == 4
    assert r.decode.counters["accepted:ngram"] == 2
    assert r.decode.counters["accepted_len:2"] == 1


def test_without_a_match_a_row_is_plain():
    r = rig(Proposer.NGRAM)
    r.arrive("a", 6)
    assert r.step(7) == [decoding("a"), Ran("a", 6, 7), token("a", 7)]
    assert r.decode.counters["spec_steps"] == 0
    assert (r.decode.counters["steps"], r.decode.counters["step_tokens"]) == (1, 1)


def test_results_of_drafts_are_learned_and_forgotten_with_the_sequence():
    r = rig()
    r.arrive("a", 6)
    r.step((7, 8, 9))
    r.take(cancel("a"))
    speculator = r.decode.drafts.speculator
    assert speculator.learned == [("a", 3, 2)]
    assert speculator.forgotten == ["a"]


# ---------------------------------------------------------------- lengths of drafts


@pytest.mark.parametrize(("more", "drafted"), [(2, 0), (3, 1), (4, 2), (5, 3), (9, 3)])
def test_a_draft_leaves_room_for_the_token_that_follows_it(more, drafted):
    r = rig()
    r.arrive("a", 6, more=more)
    r.step()
    assert row_of(r, "a").max_drafted == drafted


@pytest.mark.parametrize(("least", "drafted"), [(0, 3), (1, 3), (2, 0), (3, 1), (4, 2), (5, 3)])
def test_a_ban_for_one_token_of_a_row_holds_for_all(least, drafted):
    r = rig()
    r.arrive("a", 6, least=least, stops=(5,))
    r.step()
    row = row_of(r, "a")
    assert (row.max_drafted, row.banned) == (drafted, (5,) if least > 1 else ())


@pytest.mark.parametrize(("budget", "drafted"), [(2, [0, 0]), (5, [1, 0]), (10, [3, 1])])
def test_drafts_take_half_of_the_budget_that_plain_rows_leave(budget, drafted):
    r = rig(budget=budget)
    r.arrive("a", 3)
    r.arrive("b", range(20, 23))
    r.step()
    assert [row.max_drafted for row in r.rows] == drafted


# ---------------------------------------------------------------- memory for drafts


def test_blocks_for_rejected_tokens_come_back_at_once():
    r = rig(num_tokens=6)
    r.arrive("a", 6)
    plan, _ = r.core.plan(0.0)
    assert len(plan.rows[0].block_table) == 4  # blocks for 6 + 1 + 6 tokens
    assert r.pool.counts().owned == 4
    r.core.finish(result(plan, (7,)), 0.0)
    assert r.pool.counts().owned == 2
    r.core.validate()


def result(plan, *chosen):
    rows = zip(plan.rows, chosen, strict=True)
    return BatchResult([RowResult(tokens, row.max_drafted) for row, tokens in rows])


def test_blocks_for_kept_tokens_stay():
    r = rig(num_tokens=6)
    r.arrive("a", 6)
    r.step((1, 2, 3, 4, 5, 6, 7))
    r.play((Blocks(), blocks(free=4, owned=4)))


def test_a_draft_is_as_long_as_memory_allows_and_preempts_no_sequence():
    r = rig(num_blocks=4, num_tokens=6)
    r.arrive("a", 6)
    r.arrive("b", range(20, 26))
    effects = r.step()
    assert given_back("b", "preempted") not in effects
    # a and b have 8 and 7 tokens, and two blocks each.
    assert [row.max_drafted for row in r.rows] == [0, 1]


def test_a_draft_takes_nothing_that_others_will_need_soon():
    r = rig(num_blocks=8, num_tokens=8, growth=8, budget=64)
    r.arrive("a", 6)
    r.arrive("b", range(20, 26))
    r.step()
    # a and b have 8 and 7 tokens, and two blocks each. Of the other 4 blocks, each may use 2.
    assert [row.max_drafted for row in r.rows] == [8, 8]
    r = rig(num_blocks=7, num_tokens=8, growth=4, budget=64)
    r.arrive("a", 6)
    r.arrive("b", range(20, 26))
    r.decode.memory.growth_tokens = 8  # so only 3 blocks remain for drafts that could use 4
    r.step()
    assert [row.max_drafted for row in r.rows] == [4, 5]


def test_a_sequence_is_admitted_before_there_are_blocks_for_drafts():
    r = rig(num_blocks=4, num_tokens=8, budget=64)
    r.arrive("a", 6)
    r.play(
        (decode("b", range(20, 26)), [hold("b", 2)]),
        (
            Step(),
            [
                decoding("a"),
                pull("b", (0, 2), (1, 3)),
                Ran("a", 6, 7),
                tokens("a", SAMPLED, drafted=1),
            ],
        ),
    )


# ---------------------------------------------------------------- ends of sequences


def test_an_answer_ends_at_a_stop_that_was_drafted():
    r = rig()
    r.arrive("a", 6, stops=(8,))
    assert r.step((7, 8, 9, 1))[-1] == tokens("a", 7, 8, drafted=3, accepted=2, finish=STOP)
    assert r.decode.num_running == 0
    assert r.pool.counts().owned == 0


def test_an_answer_ends_at_its_greatest_length_within_a_step():
    r = rig()
    r.arrive("a", 6, more=5)
    assert r.step((7, 8, 9, 1))[-1] == tokens("a", 7, 8, 9, 1, drafted=3, finish=LENGTH)


def test_log_probabilities_end_where_the_answer_ends():
    r = rig()
    r.arrive("a", 6, stops=(8,), sampling=Sampling(logprobs=0))
    (*_, done) = r.step((7, 8, 9, 1))
    assert done.message.logprobs == [score(7), score(8)]


def test_kept_tokens_fill_blocks_that_others_find():
    r = rig(num_tokens=6)
    r.arrive("a", 6, more=10)
    r.step((1, 2, 3, 4, 5, 6, 7))
    r.take(cancel("a"))
    r.take(decode("b", [*range(6), SAMPLED, 1, 2, 3, 4, 5, 0]))
    (started,) = r.step()
    assert [index for index, _ in started.blocks] == [3]


# ---------------------------------------------------------------- the draft model's own KV


def test_the_draft_model_computes_its_last_proposal_if_that_was_kept():
    r = rig()
    r.arrive("a", 6)
    seen = []
    for chosen in ((1, 2, 3, 4), (5,), (6, 7), (8, 9, 1, 2), (3,)):
        r.step(chosen)
        seen.append(row_of(r, "a").draft_token_ids)
    assert seen == [[SAMPLED], [3, 4], [5], [7], [1, 2]]


def test_the_draft_model_catches_up_when_a_block_is_full():
    r = rig(None)
    r.arrive("a", 6)
    seen = []
    for chosen in range(1, 9):
        r.step(chosen)
        seen.append(list(row_of(r, "a").draft_token_ids))
    # Steps at positions 6 to 13: the tokens at 7 and at 11 complete a block.
    assert seen == [[], [SAMPLED, 1], [], [], [], [2, 3, 4, 5], [], []]


def test_a_block_is_found_when_both_models_have_computed_it():
    r = rig(None)
    r.arrive("a", 6)
    r.decode.drafts.speculator.may_see = False
    for chosen in range(1, 6):
        r.step(chosen)
    r.play((Blocks(), blocks(free=5, owned=3)), (cancel("a"), []))
    r.play((Blocks(), blocks(free=7, cached=1)))  # the cached block is the prompt's


def test_without_a_draft_model_every_full_block_is_found():
    r = Rig(Role.DECODE, speculator=FixedSpeculator(None, has_draft_model=False))
    r.arrive("a", 6)
    for chosen in range(1, 6):
        r.step(chosen)
    r.play((cancel("a"), []), (Blocks(), blocks(free=6, cached=2)))


def test_drafts_of_ngrams_leave_the_draft_model_behind_until_a_block_is_full():
    r = rig(Proposer.NGRAM, 2)
    r.arrive("a", REPEATING, 3)
    seen = []
    for chosen in ((4, 5, 1), (2,), (3,), (9,)):
        r.step(chosen)
        seen.append(list(row_of(r, "a").draft_token_ids))
    # The tokens of the rows themselves are at positions 7, 10, 11 and 12.
    assert seen == [[3], [], [4, 5, 1, 2], []]


# ---------------------------------------------------------------- contents of a row


def test_rows_carry_their_tokens_if_there_are_penalties():
    r = rig()
    r.arrive("a", 6, sampling=Sampling(presence_penalty=1.0))
    r.arrive("b", range(20, 23))
    r.step()
    a, b = row_of(r, "a"), row_of(r, "b")
    assert a.history[:7] == array("i", [*range(6), SAMPLED])
    assert (a.prompt_len, b.history) == (6, None)


# ---------------------------------------------------------------- invalid messages


@pytest.mark.parametrize("token_id", [5, 99], ids=["stop", "length"])
def test_a_first_token_that_ends_the_answer_ends_it(token_id):
    r = rig()
    r.take(decode("a", 6, more=1 if token_id == 99 else 9, stops=(5,)))
    r.step()
    r.take(pull_done("a"))
    finish = STOP if token_id == 5 else LENGTH
    (ended,) = r.take(first("a", token_id))
    assert (ended.message.token_ids, ended.message.finish) == ([], finish)
    r.play((Step(), []), (Blocks(), blocks(free=7, cached=1)))


def test_a_first_token_beyond_the_vocabulary_gives_the_sequence_back():
    reason = "the first token is not in the vocabulary"
    r = rig(vocab_size=50)
    r.play(
        (decode("a", 6), [hold("a", 2)]),
        (Step(), [pull("a", (0, 0), (1, 1))]),
        (pull_done("a"), [kv_ready("a", 2)]),
        (first("a", 50), [given_back("a", reason)]),
        (Blocks(), blocks(free=7, cached=1)),
    )


def test_an_id_in_use_is_refused():
    r = rig()
    r.arrive("a", 6)
    again = given_back("a", "the id is in use", gateway="g2")
    r.play((decode("a", 6, gateway="g2"), [again]))
    r.take(decode("b", 3))
    r.play((decode("b", 3), [given_back("b", "the id is in use")]))

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.lab.speculate.figures import (
    BatchRun,
    Passes,
    RunKey,
    SpeculateMeasured,
    acceptance_by_position,
    expected_tokens,
    expected_total,
    mean_acceptance,
    predicted_speedup,
    results,
)
from bench.lab.speculate.plan import (
    CALIBRATED_LENS,
    FEWEST_REPEATED,
    GOALS,
    NUM_CHOICES,
    identity_asks,
    repeating_asks,
    until_end,
)
from bench.lab.speculate.study import SpeculateStudy
from engine.config import Speculate

FEW = settings(max_examples=20)  # a unit test may take 50 ms
PLAN = SpeculateStudy(shape="tiny", threads=2)
PASSES = Passes(
    plain_s=1.0,
    verify_s=[1.0 + 0.05 * num for num in CALIBRATED_LENS],
    draft_s=[0.1 * num for num in CALIBRATED_LENS],
)


def run_of(*, seconds=1.0, steps=((1.0, 1, 0, 0),), drafts=((0, 0, 1),), answers=((7, 8),)):
    """Returns a run whose tokens follow from its drafts."""
    return BatchRun(
        seconds=seconds,
        outside_s=seconds / 10,
        num_tokens=sum(rows * (accepted + 1) for _, accepted, rows in drafts),
        steps=[*steps],
        drafts=[*drafts],
        answers=[[*answer] for answer in answers],
    )


def drafting_run(drafted, kept, *, seconds):
    """Returns a run with one row per number in `kept`, its accepted draft tokens."""
    return run_of(
        seconds=seconds,
        steps=[(seconds / len(kept), 1, drafted, drafted)] * len(kept),
        drafts=[(drafted, accepted, 1) for accepted in kept],
    )


# Plan of the benchmark.


def test_each_setup_has_the_workloads_of_its_models():
    cells = {s.name: [c.thing for c in PLAN.cells_of(s)[::3]] for s in PLAN.setups_of()}
    assert cells == {
        "bundled": ["bundled_text", "bundled_text_sampled", "bundled_repeat"],
        "tiny": ["tiny_random", "tiny_random_sampled", "tiny_repeat"],
        "tiny_bad": ["tiny_bad_random"],
    }
    *_, bad = PLAN.setups_of()
    assert Speculate.NGRAM not in bad.modes
    assert Speculate.OFF in bad.modes


# Prompts of the benchmark.


def test_a_repeating_prompt_holds_an_earlier_answer_and_asks_for_no_more_than_it():
    prompts = [[1, 2], [3, 4], [5, 6]]
    answers = [[*range(20, 60)], [*range(20, 40), 0, *range(60, 80)], [0] * 40]
    first, second = repeating_asks(prompts, answers, end_token_ids=(9, 0), num_tokens=30, seed=0)
    assert first.prompt[:2] == first.prompt[-2:] == [1, 2]
    assert first.prompt[-3] == 0
    assert len(first.prompt) == 2 + 40 + 1 + 2
    assert first.num_tokens == 30
    assert second.num_tokens == 20  # the second text ends here; the third is too short to be used
    assert second.num_tokens >= FEWEST_REPEATED


@FEW
@given(st.lists(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_an_answer_ends_before_the_first_token_that_ends_it(answer, ends):
    found = until_end(answer, tuple(ends))
    assert answer[: len(found)] == found
    assert not ends & {*found}
    assert len(found) == len(answer) or answer[len(found)] in ends


def test_requests_to_compare_are_of_all_kinds():
    asks = identity_asks([[1, 2, 3]], 200, end_token_ids=(0, 1), seed=0)
    assert len(asks) == 200
    assert asks == identity_asks([[1, 2, 3]], 200, end_token_ids=(0, 1), seed=0)
    samplings = [ask.sampling for ask in asks]
    for has in (
        lambda s: s.temperature == 0,
        lambda s: s.temperature == 1,
        lambda s: s.top_p < 1,
        lambda s: s.top_k > 0,
        lambda s: s.min_p > 0,
        lambda s: s.repetition_penalty > 1,
        lambda s: s.presence_penalty > 0,
        lambda s: s.frequency_penalty > 0,
        lambda s: s.logit_bias,
        lambda s: s.grammar is not None,
    ):
        assert 5 < sum(map(bool, map(has, samplings))) < 195
    assert any(ask.min_tokens for ask in asks)
    seeds = [sampling.seed for sampling in samplings]
    assert sum(b == a + 1 for a, b in pairwise(seeds)) > NUM_CHOICES


# Measured and expected values.


def test_the_mean_acceptance_counts_tokens_behind_accepted_ones_only():
    # the second draft token was rejected, so the others were not tested
    assert mean_acceptance([(4, 1, 1)]) == 1 / 2
    assert mean_acceptance([(2, 2, 3)]) == 1
    assert mean_acceptance([(0, 0, 9)]) is None


@FEW
@given(st.floats(0, 0.99), st.integers(0, 8))
def test_expected_tokens_are_a_geometric_sum(acceptance, drafted):
    assert expected_tokens(acceptance, drafted) == pytest.approx(
        sum(acceptance**place for place in range(drafted + 1))
    )
    assert expected_tokens(1.0, drafted) == drafted + 1


def test_expectation_matches_tokens_of_equal_acceptance():
    """Of 27 drafts of two tokens, 9 lose the first token and 6 the second: two thirds are
    accepted."""
    drafts = [(2, 0, 9), (2, 1, 6), (2, 2, 12)]
    acceptance = mean_acceptance(drafts)
    assert acceptance == pytest.approx(2 / 3)
    assert expected_total(drafts, acceptance) == pytest.approx(27 + 6 + 24)
    for place, (share, _) in enumerate(acceptance_by_position(drafts), start=1):
        assert share == pytest.approx(acceptance**place)


def test_the_predicted_speed_up_is_expected_tokens_over_the_time_of_single_passes():
    run = drafting_run(2, [2, 2], seconds=9.0)
    assert predicted_speedup(run, PASSES) == pytest.approx(3 / (1.1 + 0.2))
    between = drafting_run(3, [3], seconds=9.0)
    assert predicted_speedup(between, PASSES) == pytest.approx(4 / (1.15 + 0.3))


# Results of the benchmark.


def measured_with(seconds):
    """Returns three repetitions; `seconds` has each cell's and mode's time for the tokens of
    `off`."""
    measured = SpeculateMeasured(identical={"int8": 1.0, "fp32": 0.9}, background=[0.01])
    for setup in PLAN.setups_of():
        for batch in PLAN.sizes:
            measured.passes[setup.name, batch] = PASSES
        for cell in PLAN.cells_of(setup):
            for mode in setup.modes:
                key = RunKey(cell.thing, cell.batch, mode)
                measured.runs[key] = [
                    run_of(seconds=scale * seconds(cell, mode))
                    if mode is Speculate.OFF
                    else drafting_run(2, [0], seconds=scale * seconds(cell, mode))
                    for scale in (1, 2, 4)
                ]
    return measured


def by_name(measured):
    return {result.name: result for result in results(PLAN, measured)}


def test_promised_result_is_the_lowest_of_its_cells():
    slow = {("tiny_random_sampled", 1): 0.5, ("bundled_text", 8): 0.8, ("tiny_bad_random", 32): 2.0}

    def seconds(cell, mode):
        return 1.0 if mode is Speculate.OFF else slow.get((cell.thing, cell.batch), 0.25)

    found = by_name(measured_with(seconds))
    assert found["speedup/draft_b1"].value == pytest.approx(2)
    assert found["speedup/draft_b8"].value == pytest.approx(1.25)
    assert found["speedup/ngram_repeat_b1"].value == pytest.approx(4)
    assert found["speedup/worst"].value == pytest.approx(0.5)
    assert found["speedup/worst"].of_limit == pytest.approx(0.5 / 0.97)
    assert {name: found[name].limit for name in GOALS} == GOALS
    assert found["identical_share"].value == 1
    assert found["identical_share/fp32"].value == 0.9


def test_acceptance_by_place_has_its_expectation():
    measured = measured_with(lambda cell, mode: 1.0)
    for key, runs in measured.runs.items():
        if (key.thing, key.mode) == ("tiny_random", Speculate.DRAFT):
            runs[:] = [drafting_run(2, [2, 2, 0], seconds=1.0)]
            runs *= 3
    found = by_name(measured)
    assert found["acceptance/tiny_random_draft_p1"].value == pytest.approx(2 / 3)
    assert found["acceptance/tiny_random_draft_p2"].value == pytest.approx(2 / 3)
    assert found["expected_acceptance/tiny_random_draft_p2"].value == pytest.approx((4 / 5) ** 2)
    assert "acceptance/tiny_random_off_p1" not in found

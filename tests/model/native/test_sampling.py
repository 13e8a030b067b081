"""The C++ sampler chooses the same tokens as the definition, with any number of threads."""

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Sampling
from engine.model.native.sampling import sample
from engine.model.runner import TorchRunner
from engine.model.sampling import choosing as definition
from engine.model.sampling.choosing import TokenChoice
from engine.worker.batch import BatchPlan, Row
from tests.kits.checkpoints import tiny_checkpoint
from tests.kits.models.sampling_cases import (
    KINDS,
    LOGITS,
    choices_of,
    choices_of_kind,
    random_logits,
    with_seed,
)
from tests.kits.models.teams import team_of

pytestmark = pytest.mark.torch

INF = math.inf


@pytest.fixture(params=["best", "avx2"])
def team(request):
    """The library for this processor, and a library for processors without AVX-512."""
    return team_of(request.param, 2)


def check(team, logits, samplings, *, positions=None, banned=None):
    """Asserts that both samplers choose the same token for every row. Returns the tokens."""
    positions = range(len(samplings)) if positions is None else positions
    banned = [()] * len(samplings) if banned is None else banned
    return check_choices(team, logits, choices_of(samplings, positions, banned))


def check_choices(team, logits, choices):
    before = logits.clone()
    found = sample(logits, choices, team=team)
    expected = definition.sample(logits, choices)
    assert found.dtype == torch.int64
    assert found.tolist() == expected.tolist()
    assert torch.equal(logits, before)
    return found


NUM_ROWS = 40
VOCABS = (1, 3, 64, 1000, 1024, 5003)


@pytest.mark.parametrize("shape", LOGITS)
@pytest.mark.parametrize("kind", KINDS)
def test_cpp_chooses_the_tokens_of_the_definition(team, kind, shape):
    for vocab in VOCABS:
        logits = LOGITS[shape](NUM_ROWS, vocab)
        before = logits.clone()
        assert sample(logits, choices_of_kind(kind, NUM_ROWS), team=team).tolist() == defined(
            kind, shape, vocab
        )
        assert torch.equal(logits, before)


@cache
def defined(kind, shape, vocab):
    """Returns the tokens of the definition. They are cached, because all teams must choose them."""
    return definition.sample(
        LOGITS[shape](NUM_ROWS, vocab), choices_of_kind(kind, NUM_ROWS)
    ).tolist()


def test_a_large_vocabulary_gives_the_same_result(team):
    drawn = [with_seed(kind, seed) for seed, kind in enumerate([*KINDS.values()] * 2)]
    check(team, random_logits(len(drawn), 128_256), drawn)


temperatures = st.just(0.0) | st.floats(-2, 2).map(lambda power: 10.0**power)
samplings = st.builds(
    Sampling,
    temperature=temperatures,
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    top_k=st.just(0) | st.integers(1, 400),
    min_p=st.just(0.0) | st.floats(1e-6, 1.0),
    seed=st.integers(-(2**64), 2**64),
)


@st.composite
def batches(draw):
    """Generates logits, samplings, positions and banned ids of up to 40 rows."""
    num_rows = draw(st.integers(1, 40))
    vocab = draw(st.integers(1, 700))
    logits = random_logits(
        num_rows, vocab, seed=draw(st.integers(0, 2**30)), scale=draw(st.floats(0.0, 30.0))
    )
    if draw(st.booleans()):
        logits = logits.round()
    rows = st.tuples(
        samplings, st.integers(0, 2**40), st.lists(st.integers(0, vocab - 1), max_size=5).map(tuple)
    )
    drawn = draw(st.lists(rows, min_size=num_rows, max_size=num_rows))
    return logits, *zip(*drawn, strict=True)


@given(batches(), st.sampled_from(["best", "avx2"]), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_every_row_of_any_batch_gets_the_token_of_the_definition(batch, kernels, threads):
    logits, drawn, positions, banned = batch
    check(team_of(kernels, threads), logits, drawn, positions=positions, banned=banned)


def test_plain_python_chooses_the_same_tokens(team):
    logits = random_logits(15, 75).mul(4).round().div(4)
    drawn = [with_seed(kind, 2**63 + 1 + i) for i, kind in enumerate(KINDS.values())]
    for start in range(0, 1000, 50):
        positions = range(start, start + len(drawn))
        choices = choices_of(drawn, positions, [(i, 3 * i, 74) for i in range(len(drawn))])
        expected = [
            definition.reference_sample(row.tolist(), choice)
            for row, choice in zip(logits, choices, strict=True)
        ]
        assert sample(logits, choices, team=team).tolist() == expected


def test_a_row_has_the_same_token_in_any_batch_with_any_threads():
    logits = random_logits(30, 1003)
    drawn = [with_seed(kind, i) for i, kind in enumerate([*KINDS.values()] * 2)]
    positions = [100 + i for i in range(30)]
    banned = [(i, i + 1) if i % 4 == 0 else () for i in range(30)]
    choices = choices_of(drawn, positions, banned)
    together = sample(logits, choices, team=team_of("best", 1))
    for kernels in ("best", "avx2"):
        for threads in (1, 2, 3):
            team = team_of(kernels, threads)
            assert torch.equal(sample(logits, choices, team=team), together)
            alone = [sample(logits[i : i + 1], choices[i : i + 1], team=team) for i in range(30)]
            assert torch.equal(torch.cat(alone), together)


def test_banned_ids_are_never_chosen(team):
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    greedy = [Sampling(temperature=0.0)]
    for banned, expected in (((), 1), ((1,), 2), ((1, 2, 1), 3), ((0, 1, 2, 3), 0)):
        assert check(team, logits, greedy, banned=[banned]).tolist() == [expected]
        check(team, logits, [Sampling(top_p=0.5)], banned=[banned])


def test_rows_without_a_finite_best_follow_the_definition(team):
    logits = torch.tensor([[-INF] * 70, [0.0] * 30 + [INF] * 40, [-INF] * 69 + [-3e38]])
    for kind in KINDS.values():
        check(team, logits, [kind] * 3)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-9, 1e9, 1e25, 1e300])
@pytest.mark.parametrize("masks", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.5}], ids=str)
def test_extreme_temperatures_are_exact(team, temperature, masks):
    drawn = [Sampling(temperature=temperature, seed=seed, **masks) for seed in range(40)]
    check(team, random_logits(40, 301), drawn)
    check(team, random_logits(40, 301, scale=1e-30), drawn)
    check(team, random_logits(40, 301, scale=5e37), drawn)


def test_tied_scores_of_different_logits_are_kept_or_dropped_together(team):
    """In fp64 all small logits have the same distance from the best logit."""
    logits = torch.tensor([[1e20, *(i * 1e-30 for i in range(99))]]).expand(200, -1)
    for masks in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}):
        drawn = [Sampling(temperature=1e20, seed=seed, **masks) for seed in range(200)]
        found = check(team, logits, drawn)
        assert len(set(found.tolist())) > 50


def test_an_empty_batch_is_accepted(team):
    assert sample(torch.empty(0, 9), [], team=team).shape == (0,)


def test_near_ties_in_fp32_are_resolved(team):
    """Two tokens have the least and the most noise. The logit of the second token moves in steps of
    an ulp around the value at which this token begins to win.
    """
    vocab, drawn, position = 2**15, Sampling(temperature=0.7, seed=9), 4
    noise = noise_of(drawn.seed, position, vocab)
    order = noise.argsort().tolist()
    for least, most in zip(order[:25], order[-25:], strict=True):
        logit = (drawn.temperature * (noise[least] - noise[most])).float()
        logits = torch.full((9, vocab), -200.0)
        logits[:, least] = 0.0
        logits[:, most] = logit + torch.arange(-4, 5) * logit.abs() * 2.0**-23
        found = check(team, logits, [drawn] * 9, positions=[position] * 9)
        assert set(found.tolist()) == {least, most}


def test_the_lower_id_wins_a_tie_of_score_and_noise(team):
    """With this many tokens, a few tokens have the same word of noise."""
    vocab, seed, position = 2**18, 3, 11
    found, order = noise_of(seed, position, vocab).sort(stable=True)
    twins = (found.diff() == 0).nonzero().flatten().tolist()
    assert twins
    for i in twins:
        logits = torch.full((1, vocab), -INF)
        logits[0, order[i : i + 2]] = 1.5
        first = check(team, logits, [Sampling(seed=seed)], positions=[position])
        assert first.item() == min(order[i : i + 2].tolist())


def test_a_runner_gives_the_tokens_of_the_definition(tmp_path_factory):
    runner = TorchRunner(tiny_checkpoint(tmp_path_factory, "llama"), block_size=4, num_blocks=60)
    runner.open()
    rows = [
        Row(f"s{i}", [i, 7, 3 * i], 0, [i], with_seed(kind, i), banned=(i,))
        for i, kind in enumerate(KINDS.values())
    ]
    with torch.inference_mode():
        logits = runner._forward.logits(rows, [3 * i + 2 for i in range(len(rows))])
    expected = definition.sample(logits, [TokenChoice(row.sampling, 3, row.banned) for row in rows])
    assert list(runner.run(BatchPlan(rows)).tokens) == expected.tolist()
    runner.close()


def noise_of(seed, position, vocab):
    noise = definition.gumbel_noise(torch.tensor([seed]), torch.tensor([position]), range(vocab))
    return noise[0]

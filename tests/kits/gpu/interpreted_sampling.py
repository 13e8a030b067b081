"""Runs the Triton sampler under triton's interpreter: it must choose the reference tokens.

`test_triton_sampling.py` runs this file in its own process, because triton decides on import
whether it interprets kernels.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import math
import random

import pytest
import torch

from engine.messages import Sampling
from engine.model.sampling import choosing as definition
from engine.model.sampling import cuda as triton_sampling
from engine.model.sampling.choosing import TokenChoice
from tests.kits.models.sampling_cases import (
    KINDS,
    LOGITS,
    choices_of,
    choices_of_kind,
    random_logits,
    with_seed,
)

# Like a GPU, convert numbers beyond a type's maximum to infinity without a warning.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Makes tiles so small that small vocabularies have several tiles."""
    monkeypatch.setattr(triton_sampling, "TILE", 512)


def check(logits, choices):
    before = logits.clone()
    found = triton_sampling.sample(logits, choices)
    assert found.dtype == torch.int64
    assert found.tolist() == definition.sample(logits, choices).tolist()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return found


@pytest.mark.parametrize("shape", LOGITS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_choice_over_every_kind_of_logits(kind, shape):
    check(LOGITS[shape](2, 703), choices_of_kind(kind, 2))


@pytest.mark.parametrize("vocab", [1, 3, 512, 513])
def test_vocabularies_of_any_size(vocab):
    drawn = [with_seed(kind, seed) for seed, kind in enumerate(KINDS.values())]
    check(random_logits(len(drawn), vocab), choices_of(drawn, range(15), [()] * 15))


def test_a_large_vocabulary_and_a_row_that_is_no_neighbour(monkeypatch):
    monkeypatch.setattr(triton_sampling, "TILE", 2**15)
    drawn = [with_seed(KINDS[kind], 5) for kind in ("noisy", "top_p", "top_k", "all masks")]
    logits = random_logits(4, 2**18 + 64)[:, : 2**18]
    check(logits, choices_of(drawn, [2**40 + i for i in range(4)], [()] * 4))


def test_rows_with_penalties_bans_biases_and_masks():
    logits = random_logits(4, 600)
    mask = torch.zeros(19, dtype=torch.int32).numpy().view("uint32")
    mask[5] = 0b1011
    choices = [
        TokenChoice(Sampling(seed=1), 3, banned=(7, 8)),
        TokenChoice(Sampling(seed=2, repetition_penalty=1.3), 3, history=[5, 6, 5], prompt_len=1),
        TokenChoice(Sampling(seed=3, logit_bias=((9, 80.0),)), 3),
        TokenChoice(Sampling(seed=4, top_k=3), 3, mask=mask),
    ]
    found = check(logits, choices).tolist()
    assert found[2] == 9
    assert found[3] in (160, 161, 163)
    with pytest.raises(IndexError):
        triton_sampling.sample(logits, [TokenChoice(Sampling(), 0, banned=(600,))] * 4)


def test_rows_without_a_finite_best():
    logits = torch.tensor(
        [
            [-INF] * 70,
            [0.0] * 30 + [INF] * 40,
            [-INF] * 69 + [-3e38],
            [1.0] * 20 + [NAN] + [2.0] * 49,
            [INF] * 69 + [NAN],
        ]
    )
    for kind in KINDS.values():
        check(logits, [TokenChoice(kind, 5)] * 5)


def test_min_p_above_one_leaves_nothing_and_gives_the_first_id():
    check(random_logits(2, 50), [TokenChoice(Sampling(min_p=1.5), 0)] * 2)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e25, 1e300])
@pytest.mark.parametrize("masks", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.5}], ids=str)
def test_extreme_temperatures_are_exact(temperature, masks):
    choices = [TokenChoice(Sampling(temperature, seed=seed, **masks), 0) for seed in range(3)]
    for scale in (1e-30, 5e37):
        check(random_logits(3, 301, scale=scale), choices)


def test_tied_scores_of_different_logits_are_kept_or_dropped_together():
    """In fp64 all small logits have the same distance to the best logit."""
    logits = torch.tensor([[1e20, *(i * 1e-30 for i in range(99))]]).expand(8, -1)
    for masks in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}):
        drawn = [Sampling(temperature=1e20, seed=seed, **masks) for seed in range(8)]
        found = check(logits, [TokenChoice(each, 0) for each in drawn])
        assert len(set(found.tolist())) > 4


def test_near_ties_in_fp32_are_resolved():
    """Two tokens have the least and the most noise. The logit of the token with the most noise
    moves in steps of one ulp around the value from which it wins.
    """
    vocab, drawn, position = 2**12, Sampling(temperature=0.7, seed=9), 4
    noise = noise_of(drawn.seed, position, vocab)
    order = noise.argsort().tolist()
    for least, most in zip(order[:2], order[-2:], strict=True):
        logit = (drawn.temperature * (noise[least] - noise[most])).float()
        logits = torch.full((9, vocab), -200.0)
        logits[:, least] = 0.0
        logits[:, most] = logit + torch.arange(-4, 5) * logit.abs() * 2.0**-23
        found = check(logits, [TokenChoice(drawn, position)] * 9)
        assert set(found.tolist()) == {least, most}


def test_the_lower_id_wins_a_tie_of_score_and_noise(monkeypatch):
    """Among this number of tokens, a few have the same noise word."""
    monkeypatch.setattr(triton_sampling, "TILE", 2**15)
    vocab, seed, position = 2**18, 3, 11
    found, order = noise_of(seed, position, vocab).sort(stable=True)
    twins = (found.diff() == 0).nonzero().flatten().tolist()
    assert twins
    for i in twins[:3]:
        logits = torch.full((1, vocab), -INF)
        logits[0, order[i : i + 2]] = 1.5
        first = check(logits, [TokenChoice(Sampling(seed=seed), position)])
        assert first.item() == min(order[i : i + 2].tolist())


def test_drawn_batches():
    rng = random.Random(0)
    for case in range(12):
        num_rows, vocab = rng.randint(1, 4), rng.randint(1, 1200)
        logits = random_logits(num_rows, vocab, seed=case, scale=rng.uniform(0, 30))
        if rng.random() < 0.5:
            logits = logits.round()
        check(logits, [drawn_choice(rng, vocab) for _ in range(num_rows)])


def drawn_choice(rng, vocab):
    sampling = Sampling(
        temperature=rng.choice([0.0, 10 ** rng.uniform(-2, 2)]),
        top_p=rng.choice([1.0, rng.random()]),
        top_k=rng.choice([0, rng.randint(1, 400)]),
        min_p=rng.choice([0.0, 10 ** rng.uniform(-6, 0)]),
        seed=rng.randint(-(2**64), 2**64),
    )
    banned = tuple(rng.randrange(vocab) for _ in range(rng.choice([0, 0, 3])))
    return TokenChoice(sampling, rng.randint(0, 2**40), banned)


def test_an_empty_batch_is_accepted():
    assert triton_sampling.sample(torch.empty(0, 9), []).shape == (0,)


def noise_of(seed, position, vocab):
    noise = definition.gumbel_noise(torch.tensor([seed]), torch.tensor([position]), range(vocab))
    return noise[0]

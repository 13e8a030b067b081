"""Drawn tokens follow softmax: Pearson's chi-square test with 200,000 tokens at one position.

Seeds are fixed, so each test either always passes or always fails.
"""

import gc
import math
from array import array
from itertools import islice

import numpy as np
import pytest
import torch

from engine.messages import Sampling
from engine.model.native import sampling as native
from engine.model.sampling import choosing as definition
from engine.model.sampling.changes import reference_changed
from engine.model.sampling.choosing import TokenChoice
from tests.kits.models.teams import team_of

pytestmark = pytest.mark.torch

NUM_SAMPLES = 200_000
BATCH_ROWS = 10_000
POSITION = 9
VOCAB = 24
MAX_DEVIATIONS = 4.0  # a normal variable exceeds this in one of 16,000 cases
TEMPERATURES = [0.3, 0.7, 1.0, 1.5]
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(7)) * 1.5


@pytest.fixture(autouse=True)
def _without_searches_for_garbage():  # hundreds of thousands of objects would be searched
    gc.disable()
    yield
    gc.enable()


def torch_sampler(logits, choices):
    return definition.sample(logits, choices)


def native_sampler(logits, choices):
    return native.sample(logits, choices, team=team_of("best", 2))


def choices_of_seeds(kind, **others):
    """Returns one choice for each seed; all else is equal."""
    values = {name: getattr(kind, name) for name in kind.__struct_fields__ if name != "seed"}
    for seed in range(NUM_SAMPLES):
        yield TokenChoice(Sampling(seed=seed, **values), POSITION, **others)


def counts_of(sampler, choices):
    """Returns how often each id occurs."""
    logits = LOGITS.expand(BATCH_ROWS, -1)
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    while batch := list(islice(choices, BATCH_ROWS)):
        counts += torch.bincount(sampler(logits, batch), minlength=VOCAB)
    assert counts.sum() == NUM_SAMPLES
    return counts.numpy()


def expected_probabilities(kind, **others):
    """Returns the softmax of the changed logits at the temperature, cut by top_k and top_p."""
    logits = np.array(reference_changed(LOGITS.tolist(), TokenChoice(kind, POSITION, **others)))
    weights = np.exp((logits - logits.max()) / kind.temperature)
    order = np.argsort(-weights)
    order = order[: kind.top_k or VOCAB]
    cumulated = np.cumsum(weights[order])
    order = order[: 1 + int((cumulated < kind.top_p * cumulated[-1]).sum())]
    kept = np.zeros(VOCAB)
    kept[order] = weights[order]
    return kept / kept.sum()


def deviations(counts, probabilities):
    """Returns Pearson's statistic as a normal variable, by Wilson and Hilferty. Rare ids are
    pooled.

    Returns infinity if an impossible id occurs.
    """
    expected = probabilities * counts.sum()
    if counts[expected == 0].any():
        return math.inf
    common = expected >= 10
    expected = np.append(expected[common], expected[~common].sum())
    counts = np.append(counts[common], counts[~common].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    ratio = ((counts - expected) ** 2 / expected).sum() / freedom
    spread = 2 / (9 * freedom)
    return (ratio ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def follow(counts, kind, **others):
    return abs(deviations(counts, expected_probabilities(kind, **others))) < MAX_DEVIATIONS


@pytest.mark.parametrize(
    ("sampler", "temperature"),
    [(native_sampler, temperature) for temperature in TEMPERATURES] + [(torch_sampler, 0.7)],
)
def test_samples_of_many_seeds_follow_exactly_softmax(sampler, temperature):
    kind = Sampling(temperature=temperature)
    counts = counts_of(sampler, choices_of_seeds(kind))
    assert follow(counts, kind)
    assert not follow(counts, Sampling(temperature=1.03 * temperature))


def test_samples_of_many_positions_follow_softmax():
    kind = Sampling(seed=5)
    choices = (TokenChoice(kind, position) for position in range(NUM_SAMPLES))
    assert follow(counts_of(native_sampler, choices), kind)


PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.4}
CONTEXT = {"history": array("i", [3, 5, 3, 8, 20, 3, 8, 21, 21]), "prompt_len": 4}
CHANGED = {
    "top_p": (Sampling(temperature=1.5, top_p=0.8), {}),
    "top_k": (Sampling(temperature=0.7, top_k=6), {}),
    "all": (
        Sampling(
            temperature=1.5, top_k=12, top_p=0.95, logit_bias=((7, 3.0), (11, -1.5)), **PENALTIES
        ),
        {**CONTEXT, "drafted": [7, 1], "banned": (2,), "mask": np.array([0xF7F9FF], np.uint32)},
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_changed_and_bounded_samples_follow_the_remaining_softmax(name):
    """torch's implementation chooses the same tokens, which `test_changes` checks."""
    kind, others = CHANGED[name]
    counts = counts_of(native_sampler, choices_of_seeds(kind, **others))
    assert follow(counts, kind, **others)
    assert not follow(counts, Sampling(temperature=kind.temperature))

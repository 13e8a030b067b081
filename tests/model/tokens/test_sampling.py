"""Bounds work as defined, all implementations choose the same tokens, and batches have no
influence.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Sampling
from engine.model.sampling import choosing as module
from engine.model.sampling.choosing import (
    TokenChoice,
    gumbel_noise,
    philox,
    reference_philox,
    reference_sample,
    sample,
)

pytestmark = pytest.mark.torch

# Random123's kat_vectors for philox4x32, 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, expected):
    words = philox([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
    assert [word.item() for word in words] == expected
    assert reference_philox(counter, key) == expected


def test_noise_is_the_word_of_the_token_id_across_tiles(monkeypatch):
    seed, position = 0x1234_5678_9ABC_DEF0, 77
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), range(11))
    for token_id in range(11):
        key = (seed & 0xFFFFFFFF, seed >> 32)
        word = reference_philox((token_id // 4, position, 0, 0), key)[token_id % 4]
        assert noise[0, token_id].item() == pytest.approx(
            -math.log(-math.log((word + 0.5) / 2**32))
        )
    logits = torch.randn(3, 1001)
    choices = [TokenChoice(Sampling(seed=i), 5 + i) for i in range(3)]
    whole = sample(logits, choices)
    monkeypatch.setattr(module, "CPU_TILE", 64)
    assert torch.equal(sample(logits, choices), whole)


def counts_over_positions(logits, sampling, num_positions):
    choices = [TokenChoice(sampling, position) for position in range(num_positions)]
    tokens = sample(logits.expand(num_positions, -1), choices)
    return torch.bincount(tokens, minlength=logits.numel())


samplings = st.builds(
    Sampling,
    temperature=st.just(0.0) | st.floats(0.05, 3.0),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    top_k=st.just(0) | st.integers(1, 14),
    min_p=st.just(0.0) | st.floats(0.001, 1.0),
    seed=st.integers(-(2**64), 2**64),
)
VOCAB = 10
rows = st.tuples(
    # A grid, so that logits are often equal.
    st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=VOCAB, max_size=VOCAB),
    samplings,
    st.integers(0, 2**20),
    st.lists(st.integers(0, VOCAB - 1), max_size=4).map(tuple),
)


@given(st.lists(rows, min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_every_row_of_a_batch_has_the_token_of_plain_python(batch):
    choices = [TokenChoice(*drawn) for _, *drawn in batch]
    logits = [row[0] for row in batch]
    assert sample(torch.tensor(logits), choices).tolist() == [
        reference_sample(*row) for row in zip(logits, choices, strict=True)
    ]


def test_a_row_has_the_same_token_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    vocab = 1003
    logits = torch.randn(24, vocab, generator=generator) * 3
    kinds = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.5, seed=5),
        Sampling(top_k=40, top_p=0.9, seed=6),
        Sampling(top_p=0.8, seed=7),
        Sampling(min_p=0.05, seed=8),
        Sampling(top_k=7, seed=9),
    ]
    choices = [
        TokenChoice(kinds[i % len(kinds)], 100 + i // 3, (i, i + 1) if i % 5 == 0 else ())
        for i in range(24)
    ]
    alone = [sample(logits[i : i + 1], choices[i : i + 1]).item() for i in range(24)]
    assert alone == sample(logits, choices).tolist()


def test_noise_has_the_same_bits_in_any_batch():
    seeds, positions = torch.arange(5), torch.arange(5) + 50
    together = gumbel_noise(seeds, positions, range(203))
    for i in range(5):
        alone = gumbel_noise(seeds[i : i + 1], positions[i : i + 1], range(203))
        assert torch.equal(alone[0], together[i])


def test_zero_temperature_makes_no_noise(monkeypatch):
    monkeypatch.setattr(module, "gumbel_noise", None)
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert sample(logits, [TokenChoice(Sampling(temperature=0.0), 0)]).tolist() == [1]
    assert sample(logits, [TokenChoice(Sampling(temperature=0.0), 0, (1,))]).tolist() == [2]
    assert logits.tolist() == [[0.0, 3.0, 3.0, 1.0]]


def test_without_top_k_and_top_p_nothing_is_sorted(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "topk", None)
    sample(torch.randn(2, 9), [TokenChoice(Sampling(min_p=0.1), 0), TokenChoice(Sampling(), 0)])


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e9])
def test_extreme_temperatures_choose_an_id(temperature):
    logits = torch.tensor([[-50.0, 20.0, 19.0]])
    token = sample(logits, [TokenChoice(Sampling(temperature=temperature, top_p=0.5), 0)]).item()
    assert token == 1 if temperature < 1 else token in (0, 1, 2)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_k=1, seed=4), Sampling(top_p=1e-9, seed=4), Sampling(min_p=1.0, seed=4)],
)
def test_the_best_id_survives_every_mask(sampling):
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    tokens = sample(logits, [TokenChoice(sampling, position) for position in range(50)])
    assert torch.equal(tokens, logits.argmax(dim=-1))


def test_all_ids_tied_at_a_bound_stay():
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.5), Sampling(min_p=math.exp(-1) - 1e-9)):
        assert counts_over_positions(logits, sampling, 2000).ne(0).tolist() == [True] * 4 + [False]

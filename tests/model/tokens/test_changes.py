"""Penalties, biases and masks have the defined effect, and all three implementations agree."""

import math
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from engine.messages import Sampling
from engine.model.native import sampling as native
from engine.model.sampling import choosing as definition
from engine.model.sampling.changes import GREATEST, changed, reference_changed
from engine.model.sampling.choosing import TokenChoice, reference_sample
from tests.kits.models.teams import team_of

pytestmark = pytest.mark.torch

INF = math.inf
VOCAB = 40
GREEDY = 0.0


def torch_sampler(logits, choices):
    return definition.sample(logits, choices)


def native_sampler(logits, choices):
    return native.sample(logits, choices, team=team_of("best", 2))


def avx2_sampler(logits, choices):
    return native.sample(logits, choices, team=team_of("avx2", 2))


SAMPLERS = [torch_sampler, native_sampler, avx2_sampler]


@pytest.fixture(params=SAMPLERS)
def sampler(request):
    if request.param is not torch_sampler:
        team_of("best", 2)
    return request.param


def changed_row(logits, sampling, **choice):
    return changed(torch.tensor([logits]), [TokenChoice(sampling, 0, **choice)])[0].tolist()


def mask_of(allowed, num_words):
    words = np.zeros(num_words, np.uint32)
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def test_each_penalty_changes_its_own_tokens_only():
    logits = [4.0, -4.0, 0.0, 4.0, -4.0, 4.0]
    context = {"history": [0, 1, 2, 3], "drafted": [4, 3, 3], "prompt_len": 3}  # 5 does not occur
    for sampling, expected in (
        (Sampling(repetition_penalty=2.0), [2.0, -8.0, 0.0, 2.0, -8.0, 4.0]),
        (Sampling(repetition_penalty=0.5), [8.0, -2.0, 0.0, 8.0, -2.0, 4.0]),
        (Sampling(frequency_penalty=0.5), [4.0, -4.0, 0.0, 2.5, -4.5, 4.0]),
        (Sampling(presence_penalty=0.5), [4.0, -4.0, 0.0, 3.5, -4.5, 4.0]),
        (Sampling(presence_penalty=-0.5), [4.0, -4.0, 0.0, 4.5, -3.5, 4.0]),
        (Sampling(logit_bias=((1, 1.5), (5, -1.0))), [4.0, -2.5, 0.0, 4.0, -4.0, 3.0]),
        (
            Sampling(
                repetition_penalty=2.0,
                frequency_penalty=0.25,
                presence_penalty=1.0,
                logit_bias=((3, 10.0), (0, 1.0)),
            ),
            [3.0, -8.0, 0.0, 10.25, -9.25, 4.0],
        ),
    ):
        assert changed_row(logits, sampling, **context) == expected


def test_a_prompt_may_end_among_the_drafted_tokens():
    sampling = Sampling(presence_penalty=1.0)
    context = {"history": [0, 1], "drafted": [1, 2]}
    for prompt_len, expected in ((3, [0.0, 0.0, -1.0]), (4, [0.0] * 3), (0, [-1.0] * 3)):
        assert changed_row([0.0] * 3, sampling, **context, prompt_len=prompt_len) == expected


def test_repetition_penalty_equals_transformers():
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    contexts = torch.randint(VOCAB, (7, 25), generator=torch.Generator().manual_seed(3))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(contexts, logits.clone())
    sampling = Sampling(repetition_penalty=1.3)
    choices = [TokenChoice(sampling, 0, history=row.tolist(), prompt_len=9) for row in contexts]
    assert torch.equal(changed(logits, choices), expected)


def test_the_last_of_several_biases_for_an_id_counts():
    assert changed_row([1.0, 2.0], Sampling(logit_bias=((0, 9.0), (0, -1.0)))) == [0.0, 2.0]


def test_a_mask_allows_the_ids_whose_bits_are_set_and_none_beyond_its_words():
    allowed = {0, 3, 31, 32, 63}
    for num_words in (2, 3):
        found = changed_row([1.0] * 70, Sampling(), mask=mask_of(allowed, num_words))
        assert {i for i, x in enumerate(found) if x == 1.0} == allowed
        assert {x for i, x in enumerate(found) if i not in allowed} == {-INF}
    assert changed_row([1.0] * 3, Sampling(), mask=mask_of({1, 63}, 9)) == [-INF, 1.0, -INF]


def test_logits_without_changes_are_left_alone():
    logits = torch.randn(3, 5)
    assert changed(logits, [TokenChoice(Sampling(), 0, history=[1, 2])] * 3) is logits
    before = logits.clone()
    plain = TokenChoice(Sampling(), 0)
    some = changed(logits, [plain, TokenChoice(Sampling(), 0, (1,)), plain])
    assert torch.equal(logits, before)
    assert torch.equal(some[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("temperature", [GREEDY, 1.0])
def test_the_first_id_is_chosen_if_none_is_allowed(sampler, temperature):
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 4)
    sampling = Sampling(temperature=temperature, top_p=0.9)
    nothing = np.zeros(1, np.uint32)
    found = sampler(
        logits,
        [
            TokenChoice(sampling, 0, mask=nothing),
            TokenChoice(sampling, 0, mask=nothing[:0]),
            TokenChoice(sampling, 0, banned=(2, 0, 1)),
            TokenChoice(sampling, 0, banned=(1,), mask=mask_of({1}, 1)),
        ],
    )
    assert found.tolist() == [0] * 4


@pytest.mark.parametrize("temperature", [GREEDY, 0.5])
def test_an_allowed_id_is_chosen_despite_any_logit_and_penalty(sampler, temperature):
    logits = torch.tensor([[3.0, -INF, 3.0], [3.0, -3e38, 3.0], [-INF] * 3])
    sampling = Sampling(temperature=temperature, repetition_penalty=1e30, frequency_penalty=1e300)
    choice = TokenChoice(sampling, 0, history=[1, 1, 0], mask=mask_of({1}, 1))
    assert sampler(logits, [choice] * 3).tolist() == [1] * 3


def with_an_id_outside(outside):
    penalty = Sampling(presence_penalty=1.0)
    yield TokenChoice(penalty, 0, history=[1, outside])
    yield TokenChoice(penalty, 0, history=[1], drafted=[outside], prompt_len=2)
    yield TokenChoice(Sampling(), 0, banned=(outside,))
    yield TokenChoice(Sampling(logit_bias=((outside, 1.0),)), 0)


@pytest.mark.parametrize("outside", [-1, 4, 2**31 - 1, 2**31, 2**32 - 1])
def test_ids_outside_the_vocabulary_are_refused(sampler, outside):
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    fine = TokenChoice(Sampling(temperature=0.0, presence_penalty=0.5), 0, history=[1, 1])
    for choice in with_an_id_outside(outside):
        with pytest.raises(IndexError):
            sampler(logits, [choice])
        with pytest.raises(IndexError):
            sampler(logits.expand(3, -1), [fine, choice, fine])
        assert sampler(logits, [fine]).tolist() == [1]


def test_a_history_may_grow_when_its_token_has_been_chosen(sampler):
    sampling = Sampling(temperature=0.0, presence_penalty=1.0)
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.7]])
    history = array("i")
    for _ in range(4):
        history.append(int(sampler(logits, [TokenChoice(sampling, 0, history=history)])))
    assert history.tolist() == [0, 1, 2, 3]


extremes = st.sampled_from([0.0, -0.0, 1e-45, -1e-38, 3.4e38, -3.4e38, 7e37])
numbers = st.integers(-12, 12).map(lambda i: i / 4) | extremes  # a grid, so that logits often tie
penalties = st.integers(-8, 8).map(lambda i: i / 4) | st.sampled_from([1e30, -1e38, 1e300, 1e-40])
ids = st.integers(0, VOCAB - 1)
favourites = st.integers(0, 5) | ids  # so that some ids occur often
samplings = st.builds(
    Sampling,
    temperature=st.just(0.0) | st.floats(0.05, 3.0),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    top_k=st.just(0) | st.integers(1, 50),
    min_p=st.just(0.0) | st.floats(0.001, 1.0),
    seed=st.integers(0, 2**64),
    repetition_penalty=st.just(1.0) | st.floats(0.5, 2.0) | st.sampled_from([1e-30, 1e30, 1e300]),
    presence_penalty=st.just(0.0) | penalties,
    frequency_penalty=st.just(0.0) | penalties,
    logit_bias=st.lists(st.tuples(favourites, numbers | penalties), max_size=6).map(tuple),
)
choices = st.builds(
    TokenChoice,
    samplings,
    st.integers(0, 2**20),
    banned=st.just(()) | st.lists(ids, max_size=5),
    history=st.none()
    | st.lists(favourites, max_size=30)
    | st.lists(favourites, max_size=30).map(lambda tokens: array("i", tokens)),
    drafted=st.lists(favourites, max_size=4).map(tuple),
    prompt_len=st.integers(0, 36),
    mask=st.none()
    | st.lists(st.integers(0, 2**32 - 1), max_size=3).map(lambda w: np.array(w, np.uint32)),
)
rows = st.tuples(st.lists(numbers | st.just(-INF), min_size=VOCAB, max_size=VOCAB), choices)


@given(st.lists(rows, min_size=1, max_size=5))
def test_all_implementations_choose_the_same_and_torch_equals_plain_python(batch):
    drawn = [choice for _, choice in batch]
    logits = torch.tensor([row for row, _ in batch])
    expected = [
        row if choice.is_plain else reference_changed(row, choice)
        for row, choice in zip(logits.tolist(), drawn, strict=True)
    ]
    assert changed(logits, drawn).tolist() == expected
    tokens = [reference_sample(*row) for row in zip(logits.tolist(), drawn, strict=True)]
    assert [sample(logits, drawn).tolist() for sample in SAMPLERS] == [tokens] * len(SAMPLERS)


def random_choices(num_rows, vocab, rng):
    """Generates rows of all kinds, with long histories."""
    for row in range(num_rows):
        history = array("i", rng.integers(0, vocab, rng.integers(0, 3000)).astype(np.int32))
        is_penalised, is_biased, is_masked, is_greedy = rng.random(4) < 0.5
        sampling = Sampling(
            temperature=0.0 if is_greedy else float(rng.uniform(0.1, 2.0)),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([0, 20])),
            seed=row,
            repetition_penalty=float(rng.uniform(0.7, 1.8)) if is_penalised else 1.0,
            presence_penalty=float(rng.uniform(-2, 2)) if is_penalised else 0.0,
            frequency_penalty=float(rng.uniform(-0.1, 2)) if is_penalised else 0.0,
            logit_bias=tuple(
                (int(i), float(rng.uniform(-10, 10))) for i in rng.integers(0, vocab, 30)
            )
            if is_biased
            else (),
        )
        yield TokenChoice(
            sampling,
            len(history),
            history=history,
            drafted=rng.integers(0, vocab, 3).tolist(),
            prompt_len=len(history) // 2,
            mask=rng.integers(0, 2**32, -(-vocab // 32), dtype=np.uint32) if is_masked else None,
        )


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 4096, 5003])
def test_long_histories_and_odd_vocabularies_give_the_same_tokens(vocab):
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(0, 3, (40, vocab)).astype(np.float32))
    drawn = list(random_choices(40, vocab, rng))
    expected = torch_sampler(logits, drawn).tolist()
    assert native_sampler(logits, drawn).tolist() == expected
    assert avx2_sampler(logits, drawn).tolist() == expected
    alone = [native_sampler(logits[i : i + 1], drawn[i : i + 1]).item() for i in range(40)]
    assert alone == expected


def test_logits_of_bf16_are_changed_in_fp32(sampler):
    logits = torch.randn(30, 200, generator=torch.Generator().manual_seed(5)).bfloat16()
    rng = np.random.default_rng(0)
    drawn = list(random_choices(30, 200, rng))
    assert torch.equal(sampler(logits, drawn), sampler(logits.float(), drawn))


def test_the_limit_is_the_greatest_finite_number_of_fp32():
    assert torch.finfo(torch.float32).max == GREATEST

"""Speculation, handoff and memory pressure change no token: 200 requests of every kind."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.commands.defaults import BUNDLED_DRAFT, BUNDLED_MODEL
from engine.config import Speculate, WeightFormat
from engine.grammar.guides import LlGuides
from engine.messages import Grammar, GrammarKind, Role, Sampling
from tests.kits.models.pools import Asked, KeenSpeculator, Pools, Worker, counted

pytestmark = pytest.mark.torch

NUM_REQUESTS = 200
NUM_BLOCKS = 1024
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
TEXTS = ("import os\n", "def f(", "class A:\n    def __init__(self", "    return ", "for i in ")
EOS = (0, 1)


@pytest.fixture(scope="module")
def runners():
    from engine.model.runner import TorchRunner

    opened = [
        TorchRunner(
            BUNDLED_MODEL, draft=BUNDLED_DRAFT, num_blocks=NUM_BLOCKS, weights=WeightFormat.INT8
        )
        for _ in range(2)
    ]
    for runner in opened:
        runner.open()
    yield opened
    for runner in opened:
        runner.close()


@pytest.fixture(scope="module")
def guides(runners):
    return LlGuides(
        BUNDLED_MODEL / "tokenizer.json", vocab_size=runners[0].vocab_size, eos_token_ids=EOS
    )


def requests(num_requests: int, seed: int) -> list[Asked]:
    """Mixed temperatures, masks, penalties, biases, grammars, lengths; some with one prompt."""
    from router.text.tokenizer import load_text_model

    text = load_text_model(BUNDLED_MODEL)
    rng = random.Random(seed)
    asked: list[Asked] = []
    while len(asked) < num_requests:
        prompt = text.encode_text(rng.choice(TEXTS) * rng.randint(1, 9), 4096)
        sampling = _sampling(rng)
        stops = () if rng.random() < 0.3 else EOS
        for i in range(rng.choice((1, 1, 1, 3))):  # n
            each = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
            asked.append(
                Asked(
                    tuple(prompt),
                    Sampling(**{**each, "seed": sampling.seed + i}),
                    max_tokens=rng.randint(1, 32),
                    min_tokens=rng.choice((0, 0, 1)),
                    stop_token_ids=EOS if sampling.grammar is not None else stops,
                )
            )
    return asked[:num_requests]


def _sampling(rng: random.Random) -> Sampling:
    penalised, biased = rng.random() < 0.3, rng.random() < 0.2
    grammar = None
    if rng.random() < 0.2:
        grammar = rng.choice(
            (Grammar(GrammarKind.JSON_SCHEMA, SCHEMA), Grammar(GrammarKind.REGEX, "[a-z]{3,30}"))
        )
    return Sampling(
        temperature=rng.choice((0.0, 0.0, 0.5, 1.0, 1.5)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 40)),
        min_p=rng.choice((0.0, 0.05)),
        seed=rng.getrandbits(32),
        repetition_penalty=1.2 if penalised else 1.0,
        frequency_penalty=0.4 if penalised else 0.0,
        presence_penalty=-0.3 if penalised else 0.0,
        logit_bias=((11, 3.0), (200, -5.0)) if biased else (),
        grammar=grammar,
        logprobs=rng.choice((None, None, 2)),
    )


@pytest.fixture(scope="module")
def expected(runners, guides):
    """Colocated, without speculation."""
    worker = Worker("mixed", Role.MIXED, runners[0], guides=guides)
    return Pools(worker, worker).answer(requests(NUM_REQUESTS, seed=1))


def check(found: list[Asked], expected: list[Asked]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.answer == other.answer, one.sampling
        assert one.logprobs == other.logprobs
        assert one.is_finished


@pytest.mark.parametrize("speculate", [Speculate.NGRAM, Speculate.DRAFT, Speculate.AUTO])
def test_speculation_changes_no_token_colocated(runners, guides, expected, speculate):
    worker = Worker(
        "mixed",
        Role.MIXED,
        runners[0],
        speculate=speculate,
        guides=guides,
        speculator=KeenSpeculator,
    )
    check(Pools(worker, worker).answer(requests(NUM_REQUESTS, seed=1)), expected)
    assert _num_drafted(worker) > 0


@pytest.mark.parametrize("speculate", list(Speculate))
def test_speculation_changes_no_token_handed_over(runners, guides, expected, speculate):
    source = Worker(
        "prefill",
        Role.PREFILL,
        runners[0],
        speculate=speculate,
        guides=guides,
        speculator=KeenSpeculator,
    )
    sink = Worker(
        "decode",
        Role.DECODE,
        runners[1],
        speculate=speculate,
        guides=guides,
        speculator=KeenSpeculator,
    )
    check(Pools(source, sink).answer(requests(NUM_REQUESTS, seed=1)), expected)
    assert (_num_drafted(sink) > 0) == (speculate is not Speculate.OFF)


@pytest.mark.parametrize("speculate", [Speculate.OFF, Speculate.AUTO])
def test_prompts_that_the_decode_worker_computes_beside_hand_overs_are_answered_alike(
    runners, guides, expected, speculate
):
    source = Worker("prefill", Role.PREFILL, runners[0], guides=guides)
    sink = Worker(
        "decode",
        Role.DECODE,
        runners[1],
        speculate=speculate,
        guides=guides,
        speculator=KeenSpeculator,
        prefills_locally=True,
    )
    pools = Pools(source, sink, every_local=2)
    check(pools.answer(requests(NUM_REQUESTS, seed=1)), expected)
    assert pools.num_local >= NUM_REQUESTS // 2


@pytest.mark.parametrize("speculate", [Speculate.OFF, Speculate.AUTO])
def test_sequences_that_had_to_go_for_want_of_memory_come_back_with_the_same_tokens(
    runners, guides, expected, speculate
):
    source = Worker("prefill", Role.PREFILL, runners[0], guides=guides)
    sink = Worker(
        "decode",
        Role.DECODE,
        runners[1],
        speculate=speculate,
        guides=guides,
        speculator=KeenSpeculator,
        num_blocks=24,
        growth_tokens=1,  # nobody is kept out for what others may need later
    )
    found = Pools(source, sink).answer(requests(NUM_REQUESTS, seed=1))
    check(found, expected)
    assert sum(asked.num_given_back for asked in found) > 0


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), speculate=st.sampled_from(Speculate))
def test_other_requests_are_no_exception(runners, guides, seed, speculate):
    plain = Worker("plain", Role.MIXED, runners[0], guides=guides)
    wanted = Pools(plain, plain).answer(requests(12, seed))
    source = Worker("prefill", Role.PREFILL, runners[0], guides=guides)
    sink = Worker(
        "decode",
        Role.DECODE,
        runners[1],
        speculate=speculate,
        guides=guides,
        speculator=KeenSpeculator,
    )
    check(Pools(source, sink).answer(requests(12, seed)), wanted)


def _num_drafted(worker: Worker) -> float:
    return sum(v for name, v in counted(worker).items() if name.startswith("drafted:"))

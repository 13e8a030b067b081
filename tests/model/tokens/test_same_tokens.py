"""Speculation, hand-over and memory pressure change no token: 200 requests of every kind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.commands.defaults import BUNDLED_MODEL
from engine.config import Speculate
from engine.grammar.guides import LlGuides
from engine.messages import Role
from tests.kits.models.pools import KeenSpeculator, Pools, Worker, counted
from tests.kits.models.requests import EOS, check, requests

pytestmark = pytest.mark.torch

NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def guides(runners):
    return LlGuides(
        BUNDLED_MODEL / "tokenizer.json", vocab_size=runners[0].vocab_size, eos_token_ids=EOS
    )


@pytest.fixture(scope="module")
def expected(runners, guides):
    """The answers of colocated serving without speculation."""
    worker = Worker("mixed", Role.MIXED, runners[0], guides=guides)
    return Pools(worker, worker).answer(requests(NUM_REQUESTS, seed=1))


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
def test_prompts_computed_at_the_decode_worker_get_the_same_tokens(
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
def test_preempted_sequences_continue_with_the_same_tokens(runners, guides, expected, speculate):
    source = Worker("prefill", Role.PREFILL, runners[0], guides=guides)
    sink = Worker(
        "decode",
        Role.DECODE,
        runners[1],
        speculate=speculate,
        guides=guides,
        speculator=KeenSpeculator,
        num_blocks=24,
        growth_tokens=1,  # no sequence is refused for the later needs of others
    )
    found = Pools(source, sink).answer(requests(NUM_REQUESTS, seed=1))
    check(found, expected)
    assert sum(asked.num_given_back for asked in found) > 0


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), speculate=st.sampled_from(Speculate))
def test_any_random_requests_get_the_same_tokens(runners, guides, seed, speculate):
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

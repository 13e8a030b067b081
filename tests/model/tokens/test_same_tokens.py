"""Speculation, hand-over and scarce memory change no token: 100 requests of every kind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import Speculate
from engine.grammar.guides import LlGuides
from engine.messages import Role
from tests.kits.models.pools import KeenSpeculator, Pools, Worker, counted
from tests.kits.models.requests import EOS, check, requests

pytestmark = pytest.mark.torch

NUM_REQUESTS = 100


@pytest.fixture(scope="module")
def guides(runners):
    return LlGuides(
        BUNDLED_MODEL / "tokenizer.json", vocab_size=runners[0].vocab_size, eos_token_ids=EOS
    )


@pytest.fixture(scope="module")
def worker(runners, guides):
    """Makes a worker. A decode worker uses the second runner, other roles the first."""

    def make(role, speculate=Speculate.OFF, **options):
        runner = runners[role is Role.DECODE]
        options |= {"speculate": speculate, "guides": guides, "speculator": KeenSpeculator}
        return Worker(role, role, runner, **options)

    return make


@pytest.fixture(scope="module")
def expected(worker):
    """Returns the answers of serving on one mixed worker without speculation."""
    plain = worker(Role.MIXED)
    return Pools(plain, plain).answer(requests(NUM_REQUESTS, seed=1))


@pytest.mark.parametrize("speculate", [Speculate.NGRAM, Speculate.DRAFT, Speculate.AUTO])
def test_speculation_changes_no_token_colocated(worker, expected, speculate):
    both = worker(Role.MIXED, speculate)
    check(Pools(both, both).answer(requests(NUM_REQUESTS, seed=1)), expected)
    assert _num_drafted(both) > 0


@pytest.mark.parametrize("speculate", list(Speculate))
def test_speculation_changes_no_token_handed_over(worker, expected, speculate):
    source, sink = (worker(role, speculate) for role in (Role.PREFILL, Role.DECODE))
    check(Pools(source, sink).answer(requests(NUM_REQUESTS, seed=1)), expected)
    assert (_num_drafted(sink) > 0) == (speculate is not Speculate.OFF)


@pytest.mark.parametrize("speculate", [Speculate.OFF, Speculate.AUTO])
def test_prompts_computed_at_the_decode_worker_get_the_same_tokens(worker, expected, speculate):
    sink = worker(Role.DECODE, speculate, stretch=4.0)
    pools = Pools(worker(Role.PREFILL), sink, every_local=2)
    check(pools.answer(requests(NUM_REQUESTS, seed=1)), expected)
    assert pools.num_local >= NUM_REQUESTS // 2


@pytest.mark.parametrize("speculate", [Speculate.OFF, Speculate.AUTO])
def test_preempted_sequences_continue_with_the_same_tokens(worker, expected, speculate):
    # With a growth of 1, no sequence is refused for the future needs of other sequences.
    sink = worker(Role.DECODE, speculate, num_blocks=24, growth_tokens=1)
    found = Pools(worker(Role.PREFILL), sink).answer(requests(NUM_REQUESTS, seed=1))
    check(found, expected)
    assert sum(asked.num_given_back for asked in found) > 0


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), speculate=st.sampled_from(Speculate))
def test_any_random_requests_get_the_same_tokens(worker, seed, speculate):
    plain = worker(Role.MIXED)
    wanted = Pools(plain, plain).answer(requests(12, seed))
    source, sink = worker(Role.PREFILL), worker(Role.DECODE, speculate)
    check(Pools(source, sink).answer(requests(12, seed)), wanted)


def _num_drafted(worker: Worker) -> float:
    return sum(v for name, v in counted(worker).items() if name.startswith("drafted:"))

"""Sequences handed over at random steps get the same answers as sequences that stay."""

import random

import pytest

from deploy.base.defaults import BUNDLED_MODEL
from engine.config import Speculate
from engine.grammar.guides import LlGuides
from engine.messages import Role
from tests.kits.models.pools import KeenSpeculator, Pools, Worker
from tests.kits.models.requests import EOS, check, requests

pytestmark = pytest.mark.torch

NUM_REQUESTS = 60


def answered(runners, *, speculate: Speculate, rng: random.Random | None):
    guides = LlGuides(
        BUNDLED_MODEL / "tokenizer.json", vocab_size=runners[0].vocab_size, eos_token_ids=EOS
    )
    options = {"guides": guides, "speculate": speculate, "max_running": 128}
    workers = [
        Worker(f"w{i}", Role.MIXED, runner, speculator=KeenSpeculator, **options)
        for i, runner in enumerate(runners)
    ]
    pools = Pools(workers[0], *workers, moves=rng)
    return pools.answer(requests(NUM_REQUESTS, seed=3)), pools


@pytest.fixture(scope="module")
def expected(runners):
    return answered(runners, speculate=Speculate.OFF, rng=None)[0]


@pytest.mark.parametrize("speculate", [Speculate.OFF, Speculate.AUTO])
def test_moving_a_sequence_any_number_of_times_changes_no_token(runners, expected, speculate):
    found, pools = answered(runners, speculate=speculate, rng=random.Random(7))
    check(found, expected)
    assert pools.num_moves.total() > NUM_REQUESTS
    # Copies save transfers. The number of saved blocks varies, because drafting depends on
    # durations.
    assert pools.num_found > pools.num_pulled / 2
    # The draft model had missed tokens of some rows. It computes them later, and drafts as usual.
    assert pools.num_moves[False] > 0

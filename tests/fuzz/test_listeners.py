"""Unauthenticated bytes at a worker's listeners do not stop service to clients with the secret."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.listeners import (
    LISTENERS,
    Listeners,
    is_served,
    listening,
    spoiled_opening,
    throw,
)

MAX_GROWTH_MIB = 48


@pytest.fixture(scope="module")
def listeners() -> Iterator[Listeners]:
    with listening() as found:
        for name in LISTENERS:
            assert is_served(found, name)
        before_mib = found.memory_mib()
        yield found
        assert found.memory_mib() - before_mib < MAX_GROWTH_MIB


@pytest.mark.parametrize("name", LISTENERS)
def test_a_listener_serves_others_after_any_first_bytes(listeners, name):
    @given(st.integers(0, 2**32 - 1), st.integers(1, 4))
    def serves(seed, num_strangers):
        rng = random.Random(seed)
        for _ in range(num_strangers):
            throw(listeners, name, spoiled_opening(name, rng))
        assert is_served(listeners, name)

    serves()


@pytest.mark.parametrize("name", LISTENERS)
def test_random_bytes_harm_no_listener(listeners, name):
    @given(st.lists(st.binary(max_size=2000), max_size=4))
    def serves(pieces):
        throw(listeners, name, pieces)
        assert is_served(listeners, name)

    serves()

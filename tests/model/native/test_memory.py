"""Memory of packed weights."""

import pytest

from engine.model.memory import ALIGNMENT, CHUNK, Pieces

pytestmark = pytest.mark.torch


def test_small_pieces_follow_one_another():
    memory = Pieces()
    first, second = memory.take(100), memory.take(1)
    assert second.data_ptr() - first.data_ptr() == 2 * ALIGNMENT
    first.fill_(1)
    assert len(first) == 100
    assert not second.any()


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK, CHUNK + 1])
def test_pieces_are_zeros_on_a_cache_line(num_bytes):
    memory = Pieces()
    memory.take(CHUNK - ALIGNMENT)
    piece = memory.take(num_bytes)
    assert len(piece) == num_bytes
    assert piece.data_ptr() % ALIGNMENT == 0
    assert not piece[-ALIGNMENT:].any()

"""Memory of packed weights returns to the system after it was freed."""

from pathlib import Path

import pytest
import torch

from engine.devices.heap import return_freed_memory
from engine.model.memory import ALIGNMENT, CHUNK, Pieces

pytestmark = pytest.mark.torch


def test_small_pieces_follow_one_another():
    memory = Pieces()
    first, second = memory.reserve(100), memory.reserve(1)
    assert second.data_ptr() - first.data_ptr() == 2 * ALIGNMENT
    first.fill_(1)
    assert len(first) == 100
    assert not second.any()


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK, CHUNK + 1])
def test_pieces_are_zeros_on_a_cache_line(num_bytes):
    memory = Pieces()
    memory.reserve(CHUNK - ALIGNMENT)
    piece = memory.reserve(num_bytes)
    assert len(piece) == num_bytes
    assert piece.data_ptr() % ALIGNMENT == 0
    assert not piece[-ALIGNMENT:].any()


def anonymous_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_freed_memory_goes_back_to_the_system():
    held = [torch.ones(10_000) for _ in range(4000)]  # 160 MB in pieces
    last = held.pop()  # the end of the heap, so the heap cannot shrink
    before = anonymous_kib()
    held.clear()
    return_freed_memory()
    assert anonymous_kib() < before - 100_000
    assert last.all()

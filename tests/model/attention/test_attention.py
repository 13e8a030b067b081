"""The metadata of a batch is right, and the reference attention equals attention computed by
hand.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layout import KVFormat, KVLayout, KVSection
from engine.model.attention.base import Extent, Scoring, build_batch, reference_attention
from engine.model.attention.kvcache import KVCache, allocate_buffer
from engine.worker.batch import Row

pytestmark = pytest.mark.torch


def empty_cache(*, block_size=4, num_blocks=12, num_kv_heads=1, head_dim=2):
    section = KVSection(num_layers=1, num_kv_heads=num_kv_heads, head_dim=head_dim)
    layout = KVLayout(block_size, KVFormat.FP32, (section,))
    return KVCache(layout, allocate_buffer(layout, num_blocks))


def test_metadata_names_every_slot_that_is_written():
    rows = [Row("a", [0] * 3, 2, [9, 5, 7], None), Row("b", [0], 0, [3], None)]
    batch = build_batch(rows, empty_cache(block_size=4))
    assert batch.slot_mapping.tolist() == [38, 39, 20, 12]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.context_lens.tolist() == [5, 1]
    assert batch.block_tables.tolist() == [[9, 5], [3, 0]]
    assert batch.extents == (Extent(0, 3, 5), Extent(3, 1, 1))


def test_metadata_has_the_types_that_kernels_expect():
    batch = build_batch([Row("a", [0], 0, [1], None)], empty_cache())
    assert batch.slot_mapping.dtype == torch.int64
    for small in (batch.cu_seqlens_q, batch.context_lens, batch.block_tables):
        assert small.dtype == torch.int32
        assert small.is_contiguous()


@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 16]),
)
@settings(max_examples=60)
def test_slots_follow_the_block_table(lengths, block_size):
    tables = [[100 * i + n for n in range(30)] for i in range(len(lengths))]
    rows = [
        Row(f"s{i}", [0] * now, start, tables[i], None) for i, (start, now) in enumerate(lengths)
    ]
    batch = build_batch(rows, empty_cache(block_size=block_size))
    assert batch.slot_mapping.tolist() == [
        row.block_table[position // block_size] * block_size + position % block_size
        for row in rows
        for position in range(row.start, row.end)
    ]


def attention_by_hand(*, window=None, softcap=None):
    """Computes attention for two tokens with K [1, 0] and [0, 2], V [1, 10] and [3, 30]. The query
    of the last token is [2, 1].
    """
    scores = [2.0 * 0.5, 2.0 * 0.5] if softcap is None else [softcap * math.tanh(1 / softcap)] * 2
    weights = [math.exp(score) for score in scores]
    if window == 1:
        weights[0] = 0.0
    total = sum(weights)
    return [(weights[0] * 1 + weights[1] * 3) / total, (weights[0] * 10 + weights[1] * 30) / total]


@pytest.mark.parametrize(
    "scoring", [Scoring(0.5), Scoring(0.5, window=1), Scoring(0.5, softcap=0.3)]
)
def test_the_reference_equals_attention_computed_by_hand(scoring):
    cache = empty_cache(block_size=1)
    batch = build_batch([Row("a", [0, 0], 0, [7, 2], None)], cache)
    key = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]])
    cache.write(0, batch.slot_mapping, key, torch.tensor([[[1.0, 10.0]], [[3.0, 30.0]]]))
    query = torch.tensor([[[5.0, -4.0]], [[2.0, 1.0]]])
    first, last = reference_attention(query, cache, 0, batch, scoring)[:, 0].tolist()
    assert first == [1.0, 10.0]
    assert last == pytest.approx(attention_by_hand(window=scoring.window, softcap=scoring.softcap))

"""The fast path equals the reference, whatever the batch, and rows cannot touch one another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import Row
from engine.layout import KVFormat, KVLayout, KVSection
from engine.model.attention import Scoring, build_batch, paged_attention, reference_attention
from engine.model.kvcache import KVCache, allocate_buffer

pytestmark = pytest.mark.torch

NUM_BLOCKS = 64
TOLERANCE = 2e-6


def filled_cache(*, num_kv_heads=2, head_dim=8, block_size=4, kv_format=KVFormat.FP32):
    layout = KVLayout(
        block_size=block_size,
        kv_format=kv_format,
        sections=(KVSection(num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim),),
    )
    cache = KVCache(layout, allocate_buffer(layout, NUM_BLOCKS))
    for view in (*cache.keys, *cache.values):
        view.copy_(torch.randn(view.shape))
    return cache


def rows_of(cache, lengths):
    """Rows of (tokens before, tokens now), with scattered blocks."""
    free = torch.randperm(NUM_BLOCKS).tolist()
    rows = []
    for i, (start, query_len) in enumerate(lengths):
        table = [free.pop() for _ in range(cache.layout.num_blocks_for(start + query_len))]
        rows.append(Row(f"s{i}", [0] * query_len, start, table, None))
    return rows


def random_query(rows, num_heads, head_dim):
    return torch.randn(sum(len(row.token_ids) for row in rows), num_heads, head_dim)


def assert_fast_equals_reference(cache, rows, scoring, num_heads):
    batch = build_batch(rows, cache)
    query = random_query(rows, num_heads, cache.section.head_dim)
    fast = paged_attention(query, cache, 1, batch, scoring)
    slow = reference_attention(query, cache, 1, batch, scoring)
    assert fast.shape == query.shape
    torch.testing.assert_close(fast, slow, rtol=0, atol=TOLERANCE)


MIXED = [(6, 1), (0, 5), (9, 3), (0, 1), (20, 1), (3, 4), (7, 1)]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 1)])
def test_fast_equals_reference_for_every_head_shape(num_heads, num_kv_heads, head_dim):
    torch.manual_seed(head_dim + num_heads)
    cache = filled_cache(num_kv_heads=num_kv_heads, head_dim=head_dim)
    assert_fast_equals_reference(cache, rows_of(cache, MIXED), Scoring(head_dim**-0.5), num_heads)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 8, 1000])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_fast_equals_reference_for_every_window_and_softcap(window, softcap):
    torch.manual_seed(0)
    cache = filled_cache()
    scoring = Scoring(0.3, window=window, softcap=softcap)
    assert_fast_equals_reference(cache, rows_of(cache, MIXED), scoring, 4)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_fast_equals_reference_over_a_bf16_cache(block_size):
    torch.manual_seed(0)
    cache = filled_cache(kv_format=KVFormat.BF16, block_size=block_size)
    lengths = MIXED if block_size > 1 else MIXED[:4]
    assert_fast_equals_reference(cache, rows_of(cache, lengths), Scoring(0.3), 4)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=8),
    window=st.none() | st.integers(1, 12),
    softcap=st.none() | st.just(2.0),
)
@settings(max_examples=40, deadline=None)
def test_fast_equals_reference_for_any_ragged_batch(lengths, window, softcap):
    torch.manual_seed(len(lengths))
    cache = filled_cache()
    scoring = Scoring(0.3, window=window, softcap=softcap)
    assert_fast_equals_reference(cache, rows_of(cache, lengths), scoring, 4)


@pytest.mark.parametrize(
    "scoring", [Scoring(0.3), Scoring(0.3, window=5), Scoring(0.3, softcap=1.0)]
)
def test_a_row_gets_the_same_result_alone_and_in_company(scoring):
    torch.manual_seed(0)
    cache = filled_cache()
    rows = rows_of(cache, MIXED)
    query = random_query(rows, 4, 8)
    together = paged_attention(query, cache, 0, build_batch(rows, cache), scoring)
    parts = query.split([len(row.token_ids) for row in rows])
    alone = [
        paged_attention(part, cache, 0, build_batch([row], cache), scoring)
        for row, part in zip(rows, parts, strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "scoring", [Scoring(0.3), Scoring(0.3, window=5), Scoring(0.3, softcap=1.0)]
)
def test_not_a_number_in_memory_of_others_reaches_no_row(scoring):
    torch.manual_seed(0)
    cache = filled_cache()
    rows = rows_of(cache, MIXED)
    batch = build_batch(rows, cache)
    own = torch.zeros(NUM_BLOCKS, 1, cache.layout.block_size, 1, dtype=torch.bool)
    for row in rows:
        for position in range(row.end):
            nth, offset = divmod(position, cache.layout.block_size)
            own[row.block_table[nth], 0, offset] = True
    query = random_query(rows, 4, 8)
    expected = paged_attention(query, cache, 0, batch, scoring)
    for view in (cache.keys[0], cache.values[0]):
        view.masked_fill_(~own, torch.nan)
    assert torch.equal(paged_attention(query, cache, 0, batch, scoring), expected)


def test_metadata_names_every_slot_that_is_written():
    cache = filled_cache(block_size=4)
    rows = [Row("a", [0] * 3, 2, [9, 5, 7], None), Row("b", [0], 0, [3], None)]
    batch = build_batch(rows, cache)
    assert batch.slot_mapping.tolist() == [38, 39, 20, 12]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.context_lens.tolist() == [5, 1]
    assert batch.block_tables.tolist() == [[9, 5], [3, 0]]

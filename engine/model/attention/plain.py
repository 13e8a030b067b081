"""Attention over paged KV in plain torch, for any device and any KV format.

It serves if no kernel can be used, and tests compare the kernels with it. It gathers whole blocks
by block table, dequantises them into contiguous K and V, and calls torch's own attention.

A span is computed in one call. It is either one row of several queries, or several rows of one
query each. Rows in one span have KV lengths with the same number of bits, and are padded to the
longest row. The gather also reads tokens outside a row's window, context or memory. They are set to
zero after the gather, and the mask hides them.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.model.attention.base import AttentionBatch, Extent, Scoring
from engine.model.attention.kvcache import KVCache, dequantise


@dataclass(frozen=True, slots=True)
class Span:
    """KV that queries read together: n rows of one query each, or one row (n = 1) of several
    queries.

    Of the gathered tokens [n, num_blocks * block_size], those in `tokens` are used.

    `mask` is added to the scores: [n, 1, 1, num_tokens] if rows have one query each, else
    [query_len, num_tokens]. None: all tokens are used. With `is_causal`, tokens up to each query's
    own are used (then KV and queries have the same length).
    """

    queries: slice | torch.Tensor  # indices of the rows' queries in the flat batch
    query_len: int
    block_ids: torch.Tensor  # [n, num_blocks]
    tokens: slice
    unseen: tuple[torch.Tensor, torch.Tensor] | None  # (row, token) pairs that no query may read
    mask: torch.Tensor | None
    is_causal: bool = False


def attend(  # noqa: PLR0913 - the seam of all implementations
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    scoring: Scoring,
) -> torch.Tensor:
    """Stores K and V, then attends: an `Attend`, as `engine.model.attention.base` defines it."""
    cache.write(layer, batch.slot_mapping, key, value)
    return paged_attention(query, cache, layer, batch, scoring)


def paged_attention(
    query: torch.Tensor, cache: KVCache, layer: int, batch: AttentionBatch, scoring: Scoring
) -> torch.Tensor:
    """Computes the attention of `query` [num_tokens, num_heads, head_dim] over each row's
    blocks.
    """
    plan = (scoring, query.dtype)
    spans = batch.plans.get(plan)
    if spans is None:
        spans = batch.plans[plan] = _plan_spans(batch, cache, scoring, query.dtype)
    out = torch.empty_like(query)
    for span in spans:
        key = _gather(cache, cache.keys, cache.key_scales, layer, span).to(query.dtype)
        value = _gather(cache, cache.values, cache.value_scales, layer, span).to(query.dtype)
        attention = _attend_one if span.query_len == 1 else _attend_many
        out[span.queries] = attention(query[span.queries], key, value, span, scoring)
    return out


def _gather(
    cache: KVCache,
    elements: list[torch.Tensor],
    scales: list[torch.Tensor] | None,
    layer: int,
    span: Span,
) -> torch.Tensor:
    """Gathers K or V of a span's rows, [n, num_kv_heads, num_tokens, head_dim]. Unseen tokens are
    zero.
    """
    blocks = span.block_ids.flatten()
    stored_scales = None if scales is None else scales[layer].index_select(0, blocks)
    stored = elements[layer].index_select(0, blocks)
    if cache.kv_format.has_scales:
        stored = dequantise(stored, stored_scales, cache.kv_format)
    stored = stored.unflatten(0, span.block_ids.shape)  # [n, blocks, heads, block_size, head_dim]
    found = stored.transpose(1, 2).flatten(2, 3)[:, :, span.tokens]
    if span.unseen is not None:
        row, token = span.unseen
        found[row, :, token] = 0
    return found


def _attend_one(
    query: torch.Tensor,  # [n, num_heads, head_dim]
    key: torch.Tensor,  # [n, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    span: Span,
    scoring: Scoring,
) -> torch.Tensor:
    """Attends rows with one query each. The query heads of one KV head are passed to torch as
    queries.
    """
    grouped = query.unflatten(1, (key.shape[1], -1))  # [n, num_kv_heads, group, head_dim]
    return _attend(grouped, key, value, span, scoring).reshape(query.shape)


def _attend_many(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    span: Span,
    scoring: Scoring,
) -> torch.Tensor:
    """Attends one row with several queries.

    KV heads are passed to torch as the batch, so that the query heads of one KV head read the same
    memory.
    """
    grouped = query.unflatten(1, (key.shape[1], -1))  # [query_len, kv heads, group, head_dim]
    grouped = grouped.permute(1, 2, 0, 3)  # [kv heads, group, query_len, head_dim]
    shared = (*grouped.shape[:2], *key.shape[2:])
    key, value = key[0][:, None].expand(shared), value[0][:, None].expand(shared)
    result = _attend(grouped, key, value, span, scoring)
    return result.permute(2, 0, 1, 3).reshape(query.shape)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, scoring: Scoring
) -> torch.Tensor:
    """Computes the attention of [a, b, queries, head_dim] over [a, b, num_tokens, head_dim]."""
    scaling, _, softcap = scoring
    if softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=span.mask, is_causal=span.is_causal, scale=scaling
        )
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap))
    if span.mask is not None:
        scores += span.mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value


def _plan_spans(
    batch: AttentionBatch, cache: KVCache, scoring: Scoring, dtype: torch.dtype
) -> list[Span]:
    """Divides all rows into spans. `dtype` is the scores' type."""
    spans = []
    groups = defaultdict(list)
    for row, extent in enumerate(batch.extents):
        if extent.query_len > 1:
            spans.append(_span_of_many(batch, cache, row, scoring, dtype))
        else:
            groups[_kv_len(extent, scoring.window).bit_length()].append(row)
    for rows in groups.values():
        spans.append(_span_of_one(batch, cache, rows, scoring.window, dtype))
    return spans


def _kv_len(extent: Extent, window: int | None) -> int:
    """Returns the number of tokens to which a row's last query attends."""
    return min(extent.context_len, window or extent.context_len)


def _span_of_one(
    batch: AttentionBatch, cache: KVCache, rows: list[int], window: int | None, dtype: torch.dtype
) -> Span:
    """Returns the span of these rows, which have one query each."""
    size = cache.layout.block_size
    extents = [batch.extents[row] for row in rows]
    queries = [extent.query_start for extent in extents]
    side_by_side = queries[-1] - queries[0] == len(rows) - 1
    starts = [extent.context_len - _kv_len(extent, window) for extent in extents]
    ends = _column([extent.context_len for extent in extents], cache.device)
    first_block = _column([start // size for start in starts], cache.device)  # [n, 1]
    num_blocks = max(
        -(-extent.context_len // size) - start // size
        for extent, start in zip(extents, starts, strict=True)
    )
    # A table may end before the padding of its row. The padding may be any block.
    nth = first_block + torch.arange(num_blocks, device=cache.device)
    nth = nth.clamp(max=batch.block_tables.shape[1] - 1)
    position = first_block * size + torch.arange(num_blocks * size, device=cache.device)
    hidden = (position < _column(starts, cache.device)) | (position >= ends)
    return Span(
        queries=slice(queries[0], queries[-1] + 1)
        if side_by_side
        else torch.tensor(queries, device=cache.device),
        query_len=1,
        block_ids=batch.block_tables[rows].gather(1, nth),
        tokens=slice(None),
        unseen=hidden.nonzero(as_tuple=True),
        mask=_hide(hidden, dtype)[:, None, None],
    )


def _span_of_many(
    batch: AttentionBatch, cache: KVCache, row: int, scoring: Scoring, dtype: torch.dtype
) -> Span:
    """Returns the span of a row that has several queries."""
    size = cache.layout.block_size
    extent = batch.extents[row]
    end = extent.context_len
    window = scoring.window or end
    first_query = end - extent.query_len
    start = max(0, first_query - window + 1)
    first_block = start // size
    is_causal = first_query == 0 and window >= end and scoring.softcap is None
    mask = None
    if not is_causal:
        positions = torch.arange(start, end, device=cache.device)  # [num_tokens]
        distance = positions[first_query - start :, None] - positions  # [query_len, num_tokens]
        mask = _hide((distance < 0) | (distance >= window), dtype)
    return Span(
        queries=slice(extent.query_start, extent.query_start + extent.query_len),
        query_len=extent.query_len,
        block_ids=batch.block_tables[row : row + 1, first_block : -(-end // size)],
        tokens=slice(start - first_block * size, end - first_block * size),
        unseen=None,
        mask=mask,
        is_causal=is_causal,
    )


def _column(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)[:, None]


def _hide(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a mask to add to scores; it hides the tokens that are True in `hidden`."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)

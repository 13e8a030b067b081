"""Attention of a ragged batch over paged KV.

Each row of a batch extends one sequence by `q` tokens; its queries see the sequence's context up to
themselves, the present tokens included. K and V are read only from the cache record, never from the
projections just computed: then what a token sees does not depend on where a chunk ended, on a
prefix hit, or on which worker computed it, even where the record holds fewer bits than they do.

    AttentionBatch       what the layers of one forward pass share: built once, on the host
    paged_attention      the fast path in plain torch; kernels take its place behind its signature
    reference_attention  the same, one row and one head at a time: slow, and kept to check the other

Shapes: query and result [num_tokens, num_heads, head_dim], rows of the batch one after another.
Query head h reads KV head h // (num_heads // num_kv_heads). A window of w lets a token see itself
and the w - 1 tokens before it. A softcap c turns a score s into c * tanh(s / c).

Rows with q = 1 are computed together, padded to the longest of a group; to bound the padding, a
group holds rows whose KV lengths need the same number of bits. Padding repeats a row's own last
token and is masked out, so a row never touches memory of another sequence: not even a NaN there can
reach it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.batch import Row
from engine.model.kvcache import KVCache


class Scoring(NamedTuple):
    """How a layer turns queries and keys into scores; layers of one model may differ."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """One row: its queries in the flat batch, and the length of its context after them."""

    query_start: int
    query_len: int
    context_len: int


@dataclass(frozen=True, slots=True)
class Span:
    """KV that queries of equal length read together, n rows padded to `num_tokens` of KV.

    `mask` is added to the scores: [n, 1, 1, num_tokens] where rows have one query each, else
    [query_len, num_tokens]. None: every token is seen or, where `is_causal`, those up to the
    query's own (then KV and queries have the same length).
    """

    queries: slice | torch.Tensor  # where the rows' queries lie in the flat batch
    query_len: int
    row_ids: torch.Tensor  # of KVCache.gather
    num_tokens: int
    mask: torch.Tensor | None
    is_causal: bool = False


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which KV each row reads and where it writes; the same for every layer."""

    extents: tuple[Extent, ...]
    cu_seqlens_q: torch.Tensor  # [num_rows + 1] int32
    context_lens: torch.Tensor  # [num_rows] int32
    block_tables: torch.Tensor  # [num_rows, max_blocks] int64, padded with 0
    slot_mapping: torch.Tensor  # [num_tokens] int64
    write_rows: torch.Tensor  # row ids of `slot_mapping`
    spans: dict[Scoring, list[Span]] = field(default_factory=dict)  # planned at first use


def build_batch(rows: Sequence[Row], cache: KVCache) -> AttentionBatch:
    """Metadata of `rows`, which belong to different sequences, on the cache's device."""
    size = cache.layout.block_size
    extents = []
    tables = []
    start = 0
    for row in rows:
        extents.append(Extent(start, len(row.token_ids), row.end))
        start += len(row.token_ids)
        tables.append(row.block_table[: cache.layout.num_blocks_for(row.end)])
    longest = max(map(len, tables))
    padded = [[*table, *[0] * (longest - len(table))] for table in tables]
    slots = [
        row.block_table[position // size] * size + position % size
        for row in rows
        for position in range(row.start, row.end)
    ]
    slot_mapping = torch.tensor(slots, device=cache.device)
    return AttentionBatch(
        extents=tuple(extents),
        cu_seqlens_q=_int32([*(e.query_start for e in extents), start], cache.device),
        context_lens=_int32([e.context_len for e in extents], cache.device),
        block_tables=torch.tensor(padded, device=cache.device),
        slot_mapping=slot_mapping,
        write_rows=cache.row_ids(slot_mapping[:, None]),
    )


def paged_attention(
    query: torch.Tensor, cache: KVCache, layer: int, batch: AttentionBatch, scoring: Scoring
) -> torch.Tensor:
    """Attention of `query` [num_tokens, num_heads, head_dim] over the blocks of each row."""
    spans = batch.spans.get(scoring)
    if spans is None:
        spans = batch.spans[scoring] = _plan_spans(batch, cache, scoring, query.dtype)
    num_kv_heads = cache.section.num_kv_heads
    out = torch.empty_like(query) if len(spans) > 1 else query
    for span in spans:
        kv = cache.gather(layer, span.row_ids, span.num_tokens).to(query.dtype)
        key, value = kv[:, :num_kv_heads], kv[:, num_kv_heads:]  # [n, kv heads, tokens, head_dim]
        attend = _attend_one if span.query_len == 1 else _attend_many
        result = attend(query[span.queries], key, value, span, scoring)
        if len(spans) == 1:
            return result
        out[span.queries] = result
    return out


def _attend_one(
    query: torch.Tensor,  # [n, num_heads, head_dim]
    key: torch.Tensor,  # [n, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    span: Span,
    scoring: Scoring,
) -> torch.Tensor:
    """Rows of one query each: the heads that share a KV head stand where queries would."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # [n, num_kv_heads, group, head_dim]
    return _attend(grouped, key, value, span, scoring).reshape(query.shape)


def _attend_many(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    span: Span,
    scoring: Scoring,
) -> torch.Tensor:
    """One row of several queries: KV heads stand where the batch would, so that the heads which
    share one read the same memory."""
    grouped = query.unflatten(1, (key.shape[1], -1)).permute(
        1, 2, 0, 3
    )  # [kv heads, group, q, dim]
    shared = (grouped.shape[0], grouped.shape[1], span.num_tokens, grouped.shape[3])
    key, value = key[0][:, None].expand(shared), value[0][:, None].expand(shared)
    result = _attend(grouped, key, value, span, scoring)
    return result.permute(2, 0, 1, 3).reshape(query.shape)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span, scoring: Scoring
) -> torch.Tensor:
    """Attention of [a, b, queries, head_dim] over [a, b, num_tokens, head_dim]."""
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
    """All rows, in spans. `dtype` is that of the scores."""
    spans = []
    groups = defaultdict(list)
    for row, extent in enumerate(batch.extents):
        if extent.query_len > 1:
            spans.append(_span_of_many(batch, cache, row, scoring, dtype))
        else:
            kv_len = min(extent.context_len, scoring.window or extent.context_len)
            groups[kv_len.bit_length()].append(row)
    for rows in groups.values():
        spans.append(_span_of_one(batch, cache, rows, scoring.window, dtype))
    return spans


def _span_of_one(
    batch: AttentionBatch, cache: KVCache, rows: list[int], window: int | None, dtype: torch.dtype
) -> Span:
    """The span of rows that have one query each."""
    device = cache.device
    queries = [batch.extents[row].query_start for row in rows]
    ends = [batch.extents[row].context_len for row in rows]
    lens = [min(end, window or end) for end in ends]
    starts = torch.tensor([[e - n] for e, n in zip(ends, lens, strict=True)], device=device)
    last = torch.tensor([[n - 1] for n in lens], device=device)  # [n, 1]
    token = torch.arange(max(lens), device=device)  # [num_tokens]
    positions = starts + torch.minimum(token, last)  # [n, num_tokens]
    padded = min(lens) < max(lens)
    side_by_side = queries[-1] - queries[0] == len(rows) - 1
    return Span(
        queries=slice(queries[0], queries[-1] + 1)
        if side_by_side
        else torch.tensor(queries, device=device),
        query_len=1,
        row_ids=cache.row_ids(_slots(batch, cache, rows, positions)),
        num_tokens=max(lens),
        mask=_hide(token > last, dtype)[:, None, None] if padded else None,
    )


def _span_of_many(
    batch: AttentionBatch, cache: KVCache, row: int, scoring: Scoring, dtype: torch.dtype
) -> Span:
    """The span of a row that has several queries."""
    extent = batch.extents[row]
    window = scoring.window or extent.context_len
    first_query = extent.context_len - extent.query_len
    start = max(0, first_query - window + 1)
    positions = torch.arange(start, extent.context_len, device=cache.device)  # [num_tokens]
    is_causal = first_query == 0 and window >= extent.context_len and scoring.softcap is None
    mask = None
    if not is_causal:
        distance = positions[first_query - start :, None] - positions  # [query_len, num_tokens]
        mask = _hide((distance < 0) | (distance >= window), dtype)
    return Span(
        queries=slice(extent.query_start, extent.query_start + extent.query_len),
        query_len=extent.query_len,
        row_ids=cache.row_ids(_slots(batch, cache, [row], positions[None])),
        num_tokens=len(positions),
        mask=mask,
        is_causal=is_causal,
    )


def _slots(
    batch: AttentionBatch, cache: KVCache, rows: list[int], positions: torch.Tensor
) -> torch.Tensor:
    """Slots of `positions` [n, num_tokens] of the sequences in `rows`."""
    size = cache.layout.block_size
    tables = batch.block_tables
    if len(rows) < len(tables):
        tables = tables[torch.tensor(rows, device=tables.device)]
    nth = positions // size
    return tables.gather(1, nth) * size + (positions - nth * size)


def _hide(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask that, added to scores, hides what is `hidden`."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


def reference_attention(
    query: torch.Tensor, cache: KVCache, layer: int, batch: AttentionBatch, scoring: Scoring
) -> torch.Tensor:
    """What `paged_attention` computes, said plainly: in fp32, per row, per head, per query."""
    out = torch.empty_like(query)
    group = query.shape[1] // cache.section.num_kv_heads
    ends = batch.cu_seqlens_q.tolist()
    for row, context_len in enumerate(batch.context_lens.tolist()):
        blocks = batch.block_tables[row, : cache.layout.num_blocks_for(context_len)]
        for head in range(query.shape[1]):
            # [num_blocks, block_size, head_dim] → [context_len, head_dim]
            key = cache.keys[layer][blocks, head // group].flatten(0, 1)[:context_len].float()
            value = cache.values[layer][blocks, head // group].flatten(0, 1)[:context_len].float()
            for token in range(ends[row], ends[row + 1]):
                end = context_len - (ends[row + 1] - token) + 1  # the query's position, plus one
                start = max(0, end - scoring.window) if scoring.window else 0
                scores = key[start:end] @ query[token, head].float() * scoring.scaling
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                out[token, head] = torch.softmax(scores, dim=0) @ value[start:end]
    return out


def _int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)

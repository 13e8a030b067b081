"""Attention of a ragged batch over paged KV: the parts that every implementation shares.

Each row of a batch extends one sequence by `q` tokens: a prefill chunk, a decode step, or the
verification of a draft. A query attends to all earlier tokens of its sequence and to its own token.
K and V are read only from the cache record, never from the projections just computed. So a token's
result does not depend on where a chunk ended, on a prefix hit, or on the worker. This is true even
if the record has fewer bits than the projections.

    AttentionBatch       what the layers of one forward pass share: built once, on the host
    Attend               stores K and V of the batch's tokens, then attends: one per kind of device
    reference_attention  attends one row and one head at a time: slow, the reference of the others

Shapes: query and result [num_tokens, num_heads, head_dim], rows of the batch one after another; key
and value [num_tokens, num_kv_heads, head_dim]. Query head h reads KV head h // (num_heads //
num_kv_heads). With a window of w, a token attends to itself and to the w - 1 tokens before it. A
softcap c turns a score s into c * tanh(s / c). A row never reads memory of other sequences, nor
memory of its own sequence beyond its context: not even a NaN there can affect the row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from engine.model.attention.kvcache import KVCache, dequantise
from engine.worker.batch import Row


class Scoring(NamedTuple):
    """How a layer computes scores from queries and keys. Layers of one model may differ."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """One row: the number of its queries in the flat batch, and the context length after these
    queries.
    """

    query_start: int
    query_len: int
    context_len: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The KV blocks that each row reads and the slots that it writes. All layers share one
    batch.
    """

    extents: tuple[Extent, ...]
    cu_seqlens_q: torch.Tensor  # [num_rows + 1] int32
    context_lens: torch.Tensor  # [num_rows] int32
    block_tables: torch.Tensor  # [num_rows, max_blocks] int32, padded with 0
    slot_mapping: torch.Tensor  # [num_tokens] int64
    plans: dict = field(default_factory=dict)  # plans of the `Attend`, made once for all layers


# (query, key, value, cache, layer, batch, scoring) → attention, of query's shape and dtype
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, KVCache, int, AttentionBatch, Scoring], torch.Tensor
]


def build_batch(rows: Sequence[Row], cache: KVCache) -> AttentionBatch:
    """Builds the metadata of `rows`, on the cache's device. Each row belongs to another
    sequence.
    """
    query_lens = [len(row.token_ids) for row in rows]
    ends = [row.end for row in rows]
    cu_seqlens_q = np.concatenate(([0], np.cumsum(query_lens)))
    tables = _tables(rows, [cache.layout.num_blocks_for(end) for end in ends])
    row_of = np.repeat(np.arange(len(rows)), query_lens)  # [num_tokens]
    position = np.arange(len(row_of)) + (np.array(ends) - cu_seqlens_q[1:])[row_of]
    nth, offset = np.divmod(position, cache.layout.block_size)
    slots = tables[row_of, nth].astype(np.int64) * cache.layout.block_size + offset
    return AttentionBatch(
        extents=tuple(map(Extent, cu_seqlens_q[:-1].tolist(), query_lens, ends)),
        cu_seqlens_q=_int32(cu_seqlens_q, cache.device),
        context_lens=_int32(ends, cache.device),
        block_tables=_int32(tables, cache.device),
        slot_mapping=torch.from_numpy(slots).to(cache.device),
    )


def reference_attention(
    query: torch.Tensor, cache: KVCache, layer: int, batch: AttentionBatch, scoring: Scoring
) -> torch.Tensor:
    """Defines attention over the record: computed in fp32, for one row, one head and one query at a
    time.
    """
    out = torch.empty_like(query)
    group = query.shape[1] // cache.section.num_kv_heads
    starts = batch.cu_seqlens_q.tolist()
    for row, context_len in enumerate(batch.context_lens.tolist()):
        blocks = batch.block_tables[row, : cache.layout.num_blocks_for(context_len)]
        for head in range(query.shape[1]):
            key, value = _context(cache, layer, blocks, head // group, context_len)
            for token in range(starts[row], starts[row + 1]):
                end = context_len - (starts[row + 1] - token) + 1  # position of the query, plus one
                start = max(0, end - scoring.window) if scoring.window else 0
                scores = key[start:end] @ query[token, head].float() * scoring.scaling
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                out[token, head] = torch.softmax(scores, dim=0) @ value[start:end]
    return out


def _context(
    cache: KVCache, layer: int, blocks: torch.Tensor, kv_head: int, context_len: int
) -> list[torch.Tensor]:
    """Returns K and V of one head of a row, each [context_len, head_dim] in fp32."""
    found = []
    for elements, scales in (
        (cache.keys, cache.key_scales),
        (cache.values, cache.value_scales),
    ):
        stored = [elements[layer][blocks, kv_head]]  # [num_blocks, block_size, head_dim]
        stored.append(None if scales is None else scales[layer][blocks, kv_head])
        found.append(dequantise(*stored, cache.kv_format).flatten(0, 1)[:context_len])
    return found


def _tables(rows: Sequence[Row], nums_blocks: Sequence[int]) -> np.ndarray:
    """Returns the blocks of each row's context, [num_rows, max_blocks] int32, padded with 0."""
    tables = np.zeros((len(rows), max(nums_blocks)), dtype=np.int32)
    used = np.arange(tables.shape[1]) < np.array(nums_blocks)[:, None]
    blocks = (row.block_table[:num] for row, num in zip(rows, nums_blocks, strict=True))
    tables[used] = list(chain.from_iterable(blocks))
    return tables


def _int32(values: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32)).to(device)

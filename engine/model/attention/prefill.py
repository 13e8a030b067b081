"""Ways to attend long rows on a GPU, beside the Triton kernels: torch's and FlashInfer's.

A way is called after the rows' K and V were stored, in a record in bf16. With `takes_cached`, the
way reads the record, so it can attend rows with cached tokens. Otherwise it reads the projections.

The libraries see the record as pages: K of a layer is a view of all blocks, with the strides of a
block, a head and a token. The other layers of a block only make the stride between pages larger.

    torch-sdpa         fresh rows, one by one
    torch-varlen       fresh rows together (FlashAttention 2, which takes pages of 256 tokens only)
    torch-varlen-fa3   all rows (FlashAttention 3 by the package flash-attn-3, on Hopper)
    flashinfer         all rows (the package flashinfer-python)

Both packages are optional. `choice.py` compares every way with the Triton kernels before it is
used. Only torch-sdpa has been tried on a GPU yet. The other ways were tested with stand-ins for the
libraries.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.model.attention.base import AttentionBatch, Extent, Scoring
from engine.model.attention.kvcache import KVCache
from engine.model.memory import brought, held

LONG_ROW = 256  # least queries of a long row; for shorter rows a launch of their own is too slow
FLASH_HEAD_DIMS = range(8, 257, 8)
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_BYTES = 128 << 20  # workspace, of the size that its documentation advises
FA3_MODULE = "flash_attn_interface"
FA3_CAPABILITY = 9


class Way(Protocol):
    """Attends long rows. One process at a time may open a way, and one thread uses it."""

    name: str
    takes_cached: bool

    def is_available(self, device: torch.device) -> bool:
        """True if the required packages are installed and support this device."""
        ...

    def open(self, device: torch.device) -> None:
        """Prepares the way for use. May raise any exception."""
        ...

    def close(self) -> None:
        """Undoes the effects of `open` on this process."""
        ...

    def takes(self, head_dim: int, scoring: Scoring) -> bool:
        """True if this way supports heads of this size and this scoring."""
        ...

    def attend(  # noqa: PLR0913 - as the seam of all attention
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        rows: Sequence[int],
        scoring: Scoring,
    ) -> None:
        """Writes the attention results of these rows of the batch to `out`."""
        ...


class RaggedRows(NamedTuple):
    """Rows of a batch, in the form that the libraries expect."""

    tokens: slice | torch.Tensor  # indices of the rows' tokens in the flat batch
    cu_seqlens_q: torch.Tensor
    max_q: int
    max_k: int
    context_lens: torch.Tensor
    block_tables: torch.Tensor


class SdpaWay:
    """Attends rows one after another with torch's `scaled_dot_product_attention`."""

    name = "torch-sdpa"
    takes_cached = False

    def is_available(self, device: torch.device) -> bool:
        """Always true: torch supports this attention on every device."""
        return True

    def open(self, device: torch.device) -> None:
        """Does nothing, because this way needs no preparation."""

    def close(self) -> None:
        """Does nothing, because `open` has no effects."""

    def takes(self, head_dim: int, scoring: Scoring) -> bool:
        """True if torch's flash attention supports heads of this size and this scoring."""
        is_plain = scoring.softcap is None and scoring.window is None
        return is_plain and head_dim in FLASH_HEAD_DIMS

    def attend(  # noqa: PLR0913
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        rows: Sequence[int],
        scoring: Scoring,
    ) -> None:
        """Attends each row in a call of its own."""
        for extent in (batch.extents[row] for row in rows):
            tokens = slice(extent.query_start, extent.query_start + extent.query_len)
            heads = (x[tokens].transpose(0, 1)[None] for x in (query, key, value))
            result = scaled_dot_product_attention(
                *heads,  # [1, heads, tokens, head_dim]
                is_causal=True,
                scale=scoring.scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            out[tokens] = result[0].transpose(0, 1)


class VarlenWay:
    """Attends with `torch.nn.attention.varlen`, by FlashAttention 2 or 3."""

    def __init__(self, *, has_fa3: bool) -> None:
        self.takes_cached = has_fa3
        self.name = "torch-varlen-fa3" if has_fa3 else "torch-varlen"

    def is_available(self, device: torch.device) -> bool:
        """True if torch has this function with the arguments that this class uses."""
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            return False
        from torch.nn.attention import varlen

        if not self.takes_cached:
            return _has_parameters(varlen.varlen_attn, "scale", "window_size", "enable_gqa")
        return (
            _has_parameters(varlen.varlen_attn, "seqused_k", "block_table", "enable_gqa")
            and importlib.util.find_spec(FA3_MODULE) is not None
            and torch.cuda.get_device_capability(device)[0] == FA3_CAPABILITY
        )

    def open(self, device: torch.device) -> None:
        """Makes torch use FlashAttention 3 in this process, if this object is for version 3."""
        if self.takes_cached:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")

    def close(self) -> None:
        """Makes torch use FlashAttention 2 in this process again."""
        if self.takes_cached:
            from torch.nn.attention import (
                current_flash_attention_impl,
                restore_flash_attention_impl,
            )

            if current_flash_attention_impl() == "FA3":
                restore_flash_attention_impl()

    def takes(self, head_dim: int, scoring: Scoring) -> bool:
        """True unless the layer has a softcap."""
        return scoring.softcap is None and head_dim in FLASH_HEAD_DIMS

    def attend(  # noqa: PLR0913
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        rows: Sequence[int],
        scoring: Scoring,
    ) -> None:
        """Attends all rows in one call of torch."""
        from torch.nn.attention.varlen import varlen_attn

        ragged = _ragged(batch, rows)
        call = partial(
            varlen_attn,
            scale=scoring.scaling,
            window_size=(-1 if scoring.window is None else scoring.window - 1, 0),
            enable_gqa=True,
        )
        queries, lens = query[ragged.tokens], ragged.cu_seqlens_q
        if self.takes_cached:
            keys, values = (x[layer].transpose(1, 2) for x in (cache.keys, cache.values))
            out[ragged.tokens] = call(
                queries,
                keys,  # [num_blocks, block_size, num_kv_heads, head_dim]
                values,
                lens,
                None,
                ragged.max_q,
                ragged.max_k,
                seqused_k=ragged.context_lens,
                block_table=ragged.block_tables,
            )
        else:
            keys, values = key[ragged.tokens], value[ragged.tokens]
            both = (lens, lens, ragged.max_q, ragged.max_q)
            out[ragged.tokens] = call(queries, keys, values, *both)


class FlashInferWay:
    """Attends with FlashInfer, over pages. Each batch is planned once, on the host."""

    name = "flashinfer"
    takes_cached = True

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[Scoring, object] = {}
        self._planned: dict[Scoring, torch.cuda.Event] = {}

    def is_available(self, device: torch.device) -> bool:
        """True if the package flashinfer is installed."""
        return importlib.util.find_spec("flashinfer") is not None

    def open(self, device: torch.device) -> None:
        """Allocates the workspace."""
        self._workspace = torch.empty(FLASHINFER_BYTES, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """Frees the workspace."""
        self._workspace = None
        self._wrappers.clear()
        self._planned.clear()

    def takes(self, head_dim: int, scoring: Scoring) -> bool:
        """True for the usual sizes of heads."""
        return head_dim in FLASHINFER_HEAD_DIMS

    def attend(  # noqa: PLR0913
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: AttentionBatch,
        rows: Sequence[int],
        scoring: Scoring,
    ) -> None:
        """Attends all rows in one call of FlashInfer."""
        which = (self.name, scoring, query.shape[1:])
        if which not in batch.plans:
            batch.plans[which] = self._plan(query, cache, batch, rows, scoring)
        tokens = _ragged(batch, rows).tokens
        pages = (cache.keys[layer], cache.values[layer])  # [num_blocks, heads, block_size, dim]
        out[tokens] = batch.plans[which].run(query[tokens], pages)

    def _plan(
        self,
        query: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        rows: Sequence[int],
        scoring: Scoring,
    ) -> object:
        """Returns FlashInfer's wrapper for this scoring, planned for this batch."""
        wrapper = self._wrapper(scoring)
        extents = [batch.extents[row] for row in rows]
        block_size = cache.layout.block_size
        nums_blocks = [cache.layout.num_blocks_for(extent.context_len) for extent in extents]
        tables = _ragged(batch, rows).block_tables
        lasts = [
            extent.context_len - (num - 1) * block_size
            for extent, num in zip(extents, nums_blocks, strict=True)
        ]
        wrapper.plan(
            _host(_ends(extent.query_len for extent in extents)),
            _host(_ends(nums_blocks)),
            torch.cat([table[:num] for table, num in zip(tables, nums_blocks, strict=True)]),
            _host(lasts),
            query.shape[1],
            cache.section.num_kv_heads,
            query.shape[2],
            block_size,
            causal=True,
            sm_scale=scoring.scaling,
            window_left=-1 if scoring.window is None else scoring.window - 1,
            logits_soft_cap=scoring.softcap,
            q_data_type=query.dtype,
            kv_data_type=cache.keys[0].dtype,
        )
        self._planned[scoring].record()
        return wrapper

    def _wrapper(self, scoring: Scoring) -> object:
        """Returns FlashInfer's wrapper for this scoring. Waits until the copy of its last plan is
        complete.

        A plan is in pinned memory, which the next plan overwrites.
        """
        if scoring not in self._wrappers:
            from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

            self._wrappers[scoring] = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            self._planned[scoring] = torch.cuda.Event()
        self._planned[scoring].synchronize()
        return self._wrappers[scoring]


SDPA = SdpaWay()


def all_ways() -> tuple[Way, ...]:
    """Returns every way. None of them is open yet."""
    return SDPA, VarlenWay(has_fa3=False), VarlenWay(has_fa3=True), FlashInferWay()


def _ragged(batch: AttentionBatch, rows: Sequence[int]) -> RaggedRows:
    """Returns these rows of the batch. The result is made once for all layers."""
    which = ("ragged", rows)
    if which not in batch.plans:
        batch.plans[which] = _make_ragged(batch, rows)
    return batch.plans[which]


def _make_ragged(batch: AttentionBatch, rows: Sequence[int]) -> RaggedRows:
    device = batch.block_tables.device
    extents = [batch.extents[row] for row in rows]
    context_lens, block_tables = batch.context_lens, batch.block_tables
    if len(rows) < len(batch.extents):
        index = brought(np.array(rows), device)
        context_lens, block_tables = context_lens[index], block_tables[index]
    cu_seqlens_q = _ends(extent.query_len for extent in extents)
    return RaggedRows(
        tokens=_tokens(extents, device),
        cu_seqlens_q=brought(np.array(cu_seqlens_q, np.int32), device),
        max_q=max(extent.query_len for extent in extents),
        max_k=max(extent.context_len for extent in extents),
        context_lens=context_lens,
        block_tables=block_tables,
    )


def _tokens(extents: Sequence[Extent], device: torch.device) -> slice | torch.Tensor:
    """Returns the indices of the rows' tokens in the flat batch: a slice if they are adjacent."""
    ranges = [range(e.query_start, e.query_start + e.query_len) for e in extents]
    if all(left.stop == right.start for left, right in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return brought(np.concatenate([np.arange(each.start, each.stop) for each in ranges]), device)


def _ends(lens: Iterable[int]) -> list[int]:
    """Returns prefix sums of these lengths, starting with 0."""
    return list(accumulate(lens, initial=0))


def _host(numbers: Sequence[int]) -> torch.Tensor:
    """Returns an int32 tensor in host memory, which is pinned if there is a GPU."""
    return held(np.array(numbers, np.int32), pinned=torch.cuda.is_available())


def _has_parameters(function: Callable, *names: str) -> bool:
    return inspect.signature(function).parameters.keys() >= set(names)

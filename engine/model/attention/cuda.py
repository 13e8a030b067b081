"""Attention over paged KV on CUDA: chooses and launches the Triton kernels for a batch.

    attend      an `Attend`: stores K and V, then attends, for any KV format

Rows are divided by the number of tile rows that their queries need (queries × the query heads of a
KV head). There is one launch for rows of up to 16 (decode), one for rows of up to 64 (verification,
ends of prompts) and one for longer rows (prefill chunks). The first two launches always split
contexts. The last one splits contexts if it has too few units to fill the GPU. `kernels.py` defines
units, items and splits.

**CUDA graphs.** A launch depends on the host's data only through `extents`: the query lengths and,
for prefill, the length of the context. Context lengths, block tables and slots are read on the
device. So a captured step can be replayed with any contexts. For this, all `extents` of the step
have the same number of queries, and its `block_tables` are as wide as the longest context needs.
Padding tokens have slot `packing.PAD_SLOT`, so their K and V are not stored. Rows of padding may
have `context_len` 0. A query before the start of its row attends to nothing, so its result is zero.

**Prefill by other libraries.** Long rows may be attended in another way (`prefill`), which is
chosen by measuring when a model is opened. The record must be bf16, and so must K and V. Then, for
rows without cached tokens, the record has exactly the bits of the projections. So it makes no
difference which of the two the library reads. In every other format, the projections have more bits
than the record that later tokens read, and the answer would depend on where chunks end.

**Rotary embeddings** are not fused with storing K and V. transformers rotates queries and keys
inside each model's own attention class, in several ways, and the hook gets only the rotated ones. A
rotation by zero in the classes would still cost its multiplications, so their code would have to be
patched. torch.compile already fuses the rotation with its neighbours between projections and hook,
such as norms of heads. Further fusion would only save one write and one read of K.

Splits, and with them the order of sums, depend on the number of rows in the batch. So results of a
row in two batches differ by rounding. triton is needed when this is called, not when it is
imported. It runs on CPU tensors if triton interprets (TRITON_INTERPRET=1), but not on tensors of a
device that is not the current one.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch

from engine.layout import KVFormat
from engine.model.attention.base import AttentionBatch, Extent, Scoring
from engine.model.attention.kvcache import KVCache
from engine.model.attention.prefill import LONG_ROW, SDPA, Way

ROWS_OF_LAUNCHES = (16, 64, 128)  # rows of query tiles; `tl.dot` needs at least 16 rows
ROWS_OF_WIDE_LAUNCHES = (16, 64)  # for heads whose tiles of 128 rows need too many registers
# Target number when contexts are split: more programs balance the load, fewer need less merging.
PROGRAMS_PER_SM = 4
NO_LEN = 2**31 - 1  # a number of queries that no row reaches
MERGE_CHUNK = 32  # number of splits that are merged at a time
STORE_TOKENS = 16  # tokens of one program, in batches of more than FEW_TOKENS
FEW_TOKENS = 256
# Number of multiprocessors that triton's interpreter pretends to have. It is small, so that tests
# meet splits of all kinds.
INTERPRETED_SMS = 4


class Launch(NamedTuple):
    """One run of the attention kernel, over all rows with `min_len` to `max_len` queries."""

    min_len: int
    max_len: int
    unit_len: int  # queries in a unit
    rows_m: int  # rows of a unit's tile
    num_units: int
    longest: int  # largest number of queries in a row
    num_spare: int  # splits beyond the first split of each unit; 0: contexts are not split


class LaunchPlan(NamedTuple):
    """The launches for one batch."""

    launches: tuple[Launch, ...]
    elsewhere: tuple[int, ...]  # rows that `prefill` attends instead of the kernels


class RowLimits(NamedTuple):
    """The numbers of queries from which on `prefill` attends a row."""

    fresh: int  # limit for rows without cached tokens
    cached: int  # limit for rows with cached tokens


class Tiling(NamedTuple):
    """The tile sizes and launch options of the attention kernel."""

    tile: int  # tokens of K and V that a program reads at a time
    num_warps: int
    num_stages: int


def available() -> bool:
    """True if triton is installed."""
    return importlib.util.find_spec("triton") is not None


def attend(  # noqa: PLR0913 - the seam of all implementations
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    scoring: Scoring,
    prefill: Way | None = SDPA,
) -> torch.Tensor:
    """Stores K and V, then attends: an `Attend`, as `engine.model.attention.base` defines it.

    `prefill` attends the long rows that it supports, if the record's format allows this.
    """
    query, key, value = map(_with_whole_heads, (query, key, value))
    store(key, value, cache, layer, batch.slot_mapping)
    limits = _limits(query, key, value, cache, scoring, prefill)
    plan = _plan_of(batch, query, cache, limits)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if plan.elsewhere:
        prefill.attend(query, key, value, out, cache, layer, batch, plan.elsewhere, scoring)
    for launch in plan.launches:
        _attend(query, out, cache, layer, batch, scoring, launch, limits.fresh)
    return out


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KVCache,
    layer: int,
    slot_mapping: torch.Tensor,
) -> None:
    """Quantises K and V [num_tokens, num_kv_heads, head_dim] and writes them to the slots
    [num_tokens].
    """
    keys, values, key_scales, value_scales = _record(cache, layer)
    num_tokens, num_kv_heads, head_dim = key.shape
    tokens = 1 if num_tokens <= FEW_TOKENS else STORE_TOKENS
    loaded = head_dim // 2 if cache.kv_format is KVFormat.INT4 else head_dim
    grid = (-(-num_tokens // tokens), num_kv_heads)
    _kernels().store_kernel[grid](
        key,
        value,
        slot_mapping,
        keys,
        values,
        key_scales,
        value_scales,
        num_tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        *keys.stride()[:2],
        *key_scales.stride()[:2],
        FORMAT=cache.kv_format.value,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.layout.block_size,
        WIDTH=_power_of_two(loaded),
        TOKENS=tokens,
        num_warps=1 if tokens == 1 else 4,
    )


def plan_launches(
    extents: Sequence[Extent],
    *,
    group: int,
    num_kv_heads: int,
    num_sms: int,
    limits: RowLimits,
    all_rows_m: Sequence[int],
) -> LaunchPlan:
    """Assigns each row to a launch of the kernel, or to `prefill`.

    `group` is the number of query heads per KV head. `all_rows_m` are the launches' tile rows.
    """
    elsewhere, others = [], []
    for row, extent in enumerate(extents):
        is_fresh = extent.query_len == extent.context_len
        if extent.query_len >= (limits.fresh if is_fresh else limits.cached):
            elsewhere.append(row)
        else:
            others.append(extent.query_len)
    launches = []
    min_len = 1
    for rows_m in all_rows_m:
        is_last = rows_m == all_rows_m[-1]
        unit_len = max(rows_m // group, 1 if is_last else 0)
        max_len = limits.cached - 1 if is_last else unit_len
        lens = [n for n in others if min_len <= n <= max_len]
        if lens:
            num_units = sum(-(-n // unit_len) for n in lens)
            is_full = is_last and num_units * num_kv_heads >= 2 * num_sms
            wanted = -(-PROGRAMS_PER_SM * num_sms // num_kv_heads)
            launches.append(
                Launch(
                    min_len=min_len,
                    max_len=max_len,
                    unit_len=unit_len,
                    rows_m=max(rows_m, _power_of_two(group)),
                    num_units=num_units,
                    longest=max(lens),
                    num_spare=0 if is_full else max(wanted, num_units),
                )
            )
        min_len = max(min_len, max_len + 1)
    return LaunchPlan(tuple(launches), tuple(elsewhere))


def tiling(kv_format: KVFormat, width: int, rows_m: int) -> Tiling:
    """Returns the tile sizes for `rows_m` rows of queries, over heads of `width` elements.

    With few rows, memory is the limit: a tile has 16 KiB of K and 16 KiB of V, three tiles of each
    are in flight, and two programs share a multiprocessor. With many rows, arithmetic is the limit:
    tile sizes suit the tensor cores.
    """
    if rows_m <= 16:
        tile = 16384 * 8 // (width * kv_format.element_bits)
        return Tiling(tile=min(max(tile, 16), 128), num_warps=4, num_stages=3)
    # Elements of a tile, limited by the number of registers.
    elements = 4096 if kv_format is KVFormat.FP32 else 8192
    return Tiling(
        tile=min(max(elements // width, 16), 128 if rows_m <= 64 else 64),
        num_warps=4 if rows_m <= 64 else 8,
        num_stages=2 if kv_format is KVFormat.FP32 else 3,
    )


def _attend(  # noqa: PLR0913
    query: torch.Tensor,
    out: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: AttentionBatch,
    scoring: Scoring,
    launch: Launch,
    fresh_len: int,
) -> None:
    """Runs one launch of the kernel, then merges the splits."""
    keys, values, key_scales, value_scales = _record(cache, layer)
    if cache.kv_format.has_scales:  # the kernel reads elements as bytes and scales as words
        words = (x.view(torch.int32) for x in (keys, values, key_scales, value_scales))
        keys, values, key_scales, value_scales = words
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = cache.section.num_kv_heads
    num_rows = len(batch.extents)
    is_split = launch.num_spare > 0
    num_items = launch.num_units + launch.num_spare
    shape = (num_items, num_kv_heads, launch.rows_m) if is_split else (1,)
    peaks = torch.empty(shape, dtype=torch.float32, device=query.device)
    norms = torch.empty_like(peaks)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    width = max(_power_of_two(head_dim), 16)
    cut = tiling(cache.kv_format, width, launch.rows_m)
    lengths = (batch.cu_seqlens_q, batch.context_lens)
    window = scoring.window or 0
    which = {
        "HEAD_DIM": head_dim,
        "GROUP": num_heads // num_kv_heads,
        "MIN_LEN": launch.min_len,
        "MAX_LEN": launch.max_len,
        "UNIT_LEN": launch.unit_len,
        "ROWS_M": launch.rows_m,
        "WIDTH": width,
        "TILE": cut.tile,
    }
    kernels = _kernels()
    kernels.attention_kernel[num_items, num_kv_heads](
        query,
        out,
        partial,
        peaks,
        norms,
        *lengths,
        batch.block_tables,
        keys,
        values,
        key_scales,
        value_scales,
        num_rows,
        launch.num_spare,
        fresh_len,
        window,
        scoring.scaling,
        scoring.softcap or 1.0,
        *query.stride()[:2],
        batch.block_tables.stride(0),
        *keys.stride()[:2],
        *key_scales.stride()[:2],
        FORMAT=cache.kv_format.value,
        DOT=_dot_type(query.dtype, cache.kv_format),
        BLOCK_SIZE=cache.layout.block_size,
        SPLIT=is_split,
        HAS_WINDOW=scoring.window is not None,
        HAS_SOFTCAP=scoring.softcap is not None,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **which,
    )
    if is_split:
        kernels.merge_kernel[num_rows * launch.longest, num_heads](
            out,
            partial,
            peaks,
            norms,
            *lengths,
            num_rows,
            launch.num_spare,
            fresh_len,
            window,
            launch.longest,
            CHUNK=MERGE_CHUNK,
            num_warps=4,
            **which,
        )


def _limits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KVCache,
    scoring: Scoring,
    prefill: Way | None,
) -> RowLimits:
    """Returns the numbers of queries above which `prefill` attends a row."""
    reads_the_record = cache.kv_format is KVFormat.BF16 and (
        {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}
    )
    if prefill is None or not reads_the_record or not prefill.takes(query.shape[2], scoring):
        return RowLimits(NO_LEN, NO_LEN)
    return RowLimits(LONG_ROW, LONG_ROW if prefill.takes_cached else NO_LEN)


def _plan_of(
    batch: AttentionBatch, query: torch.Tensor, cache: KVCache, limits: RowLimits
) -> LaunchPlan:
    """Returns the batch's launch plan. It is made once for all layers of the same kind."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = cache.section.num_kv_heads
    which = ("triton", num_heads // num_kv_heads, num_kv_heads, limits)
    if which not in batch.plans:
        is_wide = head_dim > 128 or cache.kv_format is KVFormat.FP32
        batch.plans[which] = plan_launches(
            batch.extents,
            group=num_heads // num_kv_heads,
            num_kv_heads=num_kv_heads,
            num_sms=_num_sms(cache.device),
            limits=limits,
            all_rows_m=ROWS_OF_WIDE_LAUNCHES if is_wide else ROWS_OF_LAUNCHES,
        )
    return batch.plans[which]


def _record(cache: KVCache, layer: int) -> tuple[torch.Tensor, ...]:
    """Returns a layer's elements and scales. In formats without scales, the elements are returned
    in their place, and the kernel does not read them.
    """
    keys, values = cache.keys[layer], cache.values[layer]
    if cache.key_scales is None:
        return keys, values, keys, values
    return keys, values, cache.key_scales[layer], cache.value_scales[layer]


def _with_whole_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dot_type(dtype: torch.dtype, kv_format: KVFormat) -> object:
    """Returns the operand type of the dot products: fp32 if K and V are fp32, else the queries'
    type.

    Triton's interpreter multiplies bf16 numbers as if they were integers, so there it is fp32 too.
    """
    language = _kernels().tl
    if kv_format.has_scales and dtype is not torch.float32 and not _is_interpreted():
        return language.float16
    if kv_format is KVFormat.FP32 or dtype is torch.float32 or _is_interpreted():
        return language.float32
    return language.bfloat16 if dtype is torch.bfloat16 else language.float16


@cache
def _kernels() -> ModuleType:
    from engine.model.attention import kernels as triton_kernels

    return triton_kernels


@cache
def _is_interpreted() -> bool:
    kernels = _kernels()
    return not isinstance(kernels.attention_kernel, kernels.triton.JITFunction)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()

"""Triton kernels over the KV record: storing K and V, and attention of ragged rows.

`cuda.py` launches the kernels and explains their purpose; this module explains how they work. Its
import needs triton.

    store_kernel      quantises new K and V and scatters them into the record
    attention_kernel  queries of one row against a split of its context, for one KV head
    merge_kernel      combines the splits of a context

**Units, items.** The queries of a row are cut into units of `UNIT_LEN` tokens. The query heads that
share a KV head are rows of the same tile: row m of the tile is query m // GROUP of the unit and
head m % GROUP of the group. So K and V are read once for all these heads. If there are too few
units to fill the GPU, contexts are cut into splits. An item is one split of one unit. Items are
numbered over rows, then units, then splits. A program finds its item from the lengths of all rows,
by prefix sums over ROWS_AT_ONCE rows at a time. So the grid of a captured CUDA graph stays the same
while the lengths change, and the compiled code supports any number of rows. `_share` defines the
number of splits; there are never more items than the host expects.

The position of a query may be before its row's first token. Such queries pad captured rows: they
attend to nothing, and their result is zero.

**Scales** are not applied to elements. A scale of K is multiplied with a column of scores, a scale
of V with a column of probabilities, so elements are only converted, in registers. An int4 element
is low + q * step, so

    score = step * sum(query * q) + low * sum(query)       and likewise for V.

Byte i of int4 contains elements i and i + head_dim / 2. Unpacking makes them neighbours. So in int4
tiles column c is element c // 2 + c % 2 * head_dim / 2. Queries are loaded and results stored in
this order; nothing else depends on it.

Scores are in units of log 2, because the hardware computes exp2. A tile's running maximum may be
-inf before any token was visible; `_finite` prevents exp2 from computing (-inf) - (-inf).

Source: split contexts, Flash-Decoding, Dao et al., 2023; online softmax, FlashAttention-2, 2023.
"""
# ruff: noqa: FBT003, PLR0913, PLR0915, SIM300 - constants go by position, and look like ours

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
HEADROOM: tl.constexpr = tl.constexpr(14.0)  # weights reach 2**14: fp16 then keeps small ones
LEAST_EXPONENT: tl.constexpr = tl.constexpr(63)  # exponent of 2**-64, as fp32 stores it
SIGN_AND_FRACTION: tl.constexpr = tl.constexpr(~0x7F800000)  # a step of int4 may be negative
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
# Number of rows that are read at a time to count a batch's items.
ROWS_AT_ONCE: tl.constexpr = tl.constexpr(128)
SUBNORMAL_ROUNDER: tl.constexpr = tl.constexpr(24576.0)  # 1.5 * 2**14: rounds to multiples of 2**-9

# Two words become four (eight) pairs of fp16: byte (nibble) i of both words become neighbours.
# For an integer n < 1024, 0x6400 | n is the fp16 number 1024 + n. triton's interpreter does not run
# this assembly.
FP8_BYTES: tl.constexpr = tl.constexpr("""
{
    .reg .b32 pair;
    .reg .b16 below, above;
    prmt.b32 pair, $4, $5, 0x0040;
    mov.b32 {below, above}, pair;
    cvt.rn.f16x2.e4m3x2 $0, below;
    prmt.b32 pair, $4, $5, 0x0051;
    mov.b32 {below, above}, pair;
    cvt.rn.f16x2.e4m3x2 $1, below;
    prmt.b32 pair, $4, $5, 0x0062;
    mov.b32 {below, above}, pair;
    cvt.rn.f16x2.e4m3x2 $2, below;
    prmt.b32 pair, $4, $5, 0x0073;
    mov.b32 {below, above}, pair;
    cvt.rn.f16x2.e4m3x2 $3, below;
}
""")
INT8_BYTES: tl.constexpr = tl.constexpr("""
{
    .reg .b32 pair, shift;
    mov.b32 shift, 0x64806480;
    prmt.b32 pair, $4, $5, 0x0400;
    lop3.b32 pair, pair, 0x00FF00FF, 0x64806480, 0x6A;
    sub.rn.f16x2 $0, pair, shift;
    prmt.b32 pair, $4, $5, 0x0501;
    lop3.b32 pair, pair, 0x00FF00FF, 0x64806480, 0x6A;
    sub.rn.f16x2 $1, pair, shift;
    prmt.b32 pair, $4, $5, 0x0602;
    lop3.b32 pair, pair, 0x00FF00FF, 0x64806480, 0x6A;
    sub.rn.f16x2 $2, pair, shift;
    prmt.b32 pair, $4, $5, 0x0703;
    lop3.b32 pair, pair, 0x00FF00FF, 0x64806480, 0x6A;
    sub.rn.f16x2 $3, pair, shift;
}
""")
INT4_NIBBLES: tl.constexpr = tl.constexpr("""
{
    .reg .b32 pair, above, shift;
    mov.b32 shift, 0x64006400;
    prmt.b32 pair, $8, $9, 0x0400;
    shr.u32 above, pair, 4;
    lop3.b32 pair, pair, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 above, above, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 $0, pair, shift;
    sub.rn.f16x2 $4, above, shift;
    prmt.b32 pair, $8, $9, 0x0501;
    shr.u32 above, pair, 4;
    lop3.b32 pair, pair, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 above, above, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 $1, pair, shift;
    sub.rn.f16x2 $5, above, shift;
    prmt.b32 pair, $8, $9, 0x0602;
    shr.u32 above, pair, 4;
    lop3.b32 pair, pair, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 above, above, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 $2, pair, shift;
    sub.rn.f16x2 $6, above, shift;
    prmt.b32 pair, $8, $9, 0x0703;
    shr.u32 above, pair, 4;
    lop3.b32 pair, pair, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 above, above, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 $3, pair, shift;
    sub.rn.f16x2 $7, above, shift;
}
""")


@triton.jit(do_not_specialize=["num_tokens"])
def store_kernel(
    key,  # [num_tokens, num_kv_heads, HEAD_DIM]; elements of a head are neighbours
    value,
    slot_mapping,  # [num_tokens] int64; negative: not to be stored
    keys,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM] elements of the layer's record
    values,
    key_scales,  # [num_blocks, num_kv_heads, BLOCK_SIZE]; anything where the format has none
    value_scales,
    num_tokens,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # elements loaded at once: HEAD_DIM (in int4, half of it) and padding
    TOKENS: tl.constexpr,
):
    """Stores TOKENS tokens of one head in the record. Grid: (tokens / TOKENS, num_kv_heads)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    stored = slot >= 0
    slot = tl.where(stored, slot, 0)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    record = block * block_stride + head * head_stride
    scale_at = block * scale_block_stride + head * scale_head_stride + offset
    token = token.to(tl.int64)
    _store(
        key + token * key_stride_token + head * key_stride_head,
        keys + record,
        key_scales + scale_at,
        offset,
        stored,
        FORMAT,
        HEAD_DIM,
        WIDTH,
    )
    _store(
        value + token * value_stride_token + head * value_stride_head,
        values + record,
        value_scales + scale_at,
        offset,
        stored,
        FORMAT,
        HEAD_DIM,
        WIDTH,
    )


@triton.jit
def _store(
    source,  # [TOKENS] pointers to heads
    elements,  # [TOKENS] pointers to the heads of the record's blocks
    scales,  # [TOKENS] pointers
    offset,  # [TOKENS] token within the block
    stored,  # [TOKENS]
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    if FORMAT == "int4":
        half: tl.constexpr = HEAD_DIM // 2
        there = stored[:, None] & (column < half)[None, :]
        first = tl.load(source[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
        second = tl.load(source[:, None] + half + column[None, :], mask=there, other=0.0)
        second = second.to(tl.float32)
        below = tl.minimum(first, second)
        above = tl.maximum(first, second)
        low = tl.min(tl.where((column < half)[None, :], below, float("inf")), 1)
        high = tl.max(tl.where((column < half)[None, :], above, float("-inf")), 1)
        low_bits = _bf16_bits(low)
        low = (low_bits << 16).to(tl.float32, bitcast=True)
        step_bits = _bf16_bits(tl.div_rn(high - low, tl.full(high.shape, 15.0, tl.float32)))
        step = (step_bits << 16).to(tl.float32, bitcast=True)
        packed = _int4(first, low, step) | (_int4(second, low, step) << 4)
        at = elements[:, None] + (offset * half)[:, None] + column[None, :]
        tl.store(at, packed.to(tl.uint8), mask=there)
        tl.store(scales, (low_bits << 16) | step_bits, mask=stored)
    else:
        there = stored[:, None] & (column < HEAD_DIM)[None, :]
        x = tl.load(source[:, None] + column[None, :], mask=there, other=0.0)
        at = elements[:, None] + (offset * HEAD_DIM)[:, None] + column[None, :]
        if FORMAT == "fp8_e4m3" or FORMAT == "int8":
            largest: tl.constexpr = 448.0 if FORMAT == "fp8_e4m3" else 127.0
            x = x.to(tl.float32)
            peak = tl.max(tl.abs(x), 1)
            scale = tl.div_rn(peak, tl.full(peak.shape, largest, tl.float32))
            x = tl.div_rn(x, tl.broadcast_to(_nonzero(scale)[:, None], x.shape))
            x = tl.minimum(tl.maximum(x, -largest), largest)
            x = _round(x) if FORMAT == "int8" else _round_to_e4m3(x)
            tl.store(scales, scale, mask=stored)
        elif FORMAT == "bf16" and x.dtype != tl.bfloat16:
            bits = _bf16_bits(x.to(tl.float32))
            x = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(at, x.to(elements.dtype.element_ty), mask=there)


@triton.jit
def _int4(x, low, step):
    """Returns the int4 codes q of `x` [n, width], as int32."""
    divisor = tl.broadcast_to(_nonzero(step)[:, None], x.shape)
    q = _round(tl.div_rn(x - low[:, None], divisor))
    return tl.minimum(tl.maximum(q, 0.0), 15.0).to(tl.int32)


@triton.jit
def _nonzero(scale):
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _round(x):
    """Rounds to the nearest integer, halves to even, for |x| < 2**22."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _bf16_bits(x):
    """Rounds fp32 `x` to bf16, halves to even; returns the 16 bits in an int32.

    This function and the next use integer arithmetic, because triton's interpreter truncates where
    the hardware rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _round_to_e4m3(x):
    """Rounds `x`, |x| <= 448, to the nearest e4m3 number, halves to even."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) << 20
    subnormal = (x + SUBNORMAL_ROUNDER) - SUBNORMAL_ROUNDER  # multiples of 2**-9
    return tl.where(tl.abs(x) < 2.0**-6, subnormal, normal.to(tl.float32, bitcast=True))


@triton.jit
def _share(
    cu_seqlens_q,
    context_lens,
    num_rows,
    num_spare,
    fresh_len,
    window,
    MIN_LEN: tl.constexpr,
    MAX_LEN: tl.constexpr,
    UNIT_LEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the largest number of tiles of context in one split.

    A row of u units over t tiles of context has u * t tiles of work; W is the sum over all rows.
    (The context of a row is all tokens that any of its queries attends to.) Each unit has ceil(t /
    ceil(W / num_spare)) splits, less than t * num_spare / W + 1. So the number of items exceeds the
    number of units by at most num_spare.
    """
    work = 0
    for first in range(0, num_rows, ROWS_AT_ONCE):
        units, tiles = _work(
            cu_seqlens_q, context_lens, first + tl.arange(0, ROWS_AT_ONCE), num_rows, fresh_len,
            window, MIN_LEN, MAX_LEN, UNIT_LEN, TILE,
        )  # fmt: skip
        work += tl.sum(units * tiles, 0)
    return tl.maximum((work + num_spare - 1) // num_spare, 1)


@triton.jit
def _work(
    cu_seqlens_q,
    context_lens,
    row,
    num_rows,
    fresh_len,
    window,
    MIN_LEN: tl.constexpr,
    MAX_LEN: tl.constexpr,
    UNIT_LEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns two numbers for each row: its units, and the tiles of context that each unit reads.
    Both are 0 for rows that this launch does not attend.

    Only rows of MIN_LEN to MAX_LEN queries have units. Rows without cached tokens have none if they
    have `fresh_len` queries or more, because another way attends them.
    """
    there = row < num_rows
    context_len = tl.load(context_lens + row, mask=there, other=0)
    query_len = tl.load(cu_seqlens_q + row + 1, mask=there, other=0)
    query_len -= tl.load(cu_seqlens_q + row, mask=there, other=0)
    mine = there & _mine(query_len, context_len, fresh_len, MIN_LEN, MAX_LEN)
    first_tile = _first_seen(context_len - query_len, window) // TILE
    units = tl.where(mine, (query_len + UNIT_LEN - 1) // UNIT_LEN, 0)
    return units, tl.where(mine, (context_len + TILE - 1) // TILE - first_tile, 0)


@triton.jit
def _splits(tiles, share, SPLIT: tl.constexpr):
    """Returns the number of splits of each unit, for rows with this number of tiles."""
    if SPLIT:
        return (tiles + share - 1) // share
    return tl.full(tiles.shape, 1, tl.int32)


@triton.jit
def _row_of(
    item,
    share,
    cu_seqlens_q,
    context_lens,
    num_rows,
    fresh_len,
    window,
    MIN_LEN: tl.constexpr,
    MAX_LEN: tl.constexpr,
    UNIT_LEN: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Returns an item's row, and the number of items of all rows before this row. The row is
    `num_rows` or more if the item does not exist.
    """
    row = 0
    before = 0
    end = 0
    for first in range(0, num_rows, ROWS_AT_ONCE):
        units, tiles = _work(
            cu_seqlens_q, context_lens, first + tl.arange(0, ROWS_AT_ONCE), num_rows, fresh_len,
            window, MIN_LEN, MAX_LEN, UNIT_LEN, TILE,
        )  # fmt: skip
        ends = end + tl.cumsum(units * _splits(tiles, share, SPLIT), 0)
        end = tl.max(ends, 0)
        is_earlier = ends <= item
        row += tl.sum(is_earlier.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_earlier, ends, 0), 0))
    return row, before


@triton.jit
def _items_before(
    row,
    share,
    cu_seqlens_q,
    context_lens,
    fresh_len,
    window,
    MIN_LEN: tl.constexpr,
    MAX_LEN: tl.constexpr,
    UNIT_LEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the number of items, with splits, of all rows before `row`."""
    items = 0
    for first in range(0, row, ROWS_AT_ONCE):
        units, tiles = _work(
            cu_seqlens_q, context_lens, first + tl.arange(0, ROWS_AT_ONCE), row, fresh_len, window,
            MIN_LEN, MAX_LEN, UNIT_LEN, TILE,
        )  # fmt: skip
        items += tl.sum(units * _splits(tiles, share, True), 0)
    return items


@triton.jit
def _mine(query_len, context_len, fresh_len, MIN_LEN: tl.constexpr, MAX_LEN: tl.constexpr):
    fresh = (query_len == context_len) & (query_len >= fresh_len)
    return (query_len >= MIN_LEN) & (query_len <= MAX_LEN) & (fresh == 0)


@triton.jit
def _first_seen(position, window):
    """Returns the first token to which a query at `position` attends; `window` 0 means no
    window.
    """
    return tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)


@triton.jit(do_not_specialize=["num_rows", "num_spare", "fresh_len", "window", "table_stride"])
def attention_kernel(
    query,  # [num_tokens, num_heads, HEAD_DIM]; elements of a head are neighbours
    out,  # shape of query, contiguous; with SPLIT, the next three are written:
    partial,  # [num_items, num_kv_heads, ROWS_M, HEAD_DIM] fp32: sums of V, weighted
    peaks,  # [num_items, num_kv_heads, ROWS_M] fp32: the largest score
    norms,  # [num_items, num_kv_heads, ROWS_M] fp32: the sum of exp2(score - peak)
    cu_seqlens_q,
    context_lens,
    block_tables,
    keys,
    values,
    key_scales,
    value_scales,
    num_rows,
    num_spare,
    fresh_len,
    window,
    scaling,
    softcap,
    query_stride_token,
    query_stride_head,
    table_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    scale_head_stride,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,  # operand type of the dot products
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    MIN_LEN: tl.constexpr,
    MAX_LEN: tl.constexpr,
    UNIT_LEN: tl.constexpr,
    ROWS_M: tl.constexpr,  # UNIT_LEN * GROUP, padded
    WIDTH: tl.constexpr,  # HEAD_DIM, padded
    TILE: tl.constexpr,  # tokens of K and V at a time
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Computes one item for one KV head. Grid: (items, num_kv_heads)."""
    item = tl.program_id(0)
    if not SPLIT:  # the last units have the longest contexts, so they are computed first
        item = tl.num_programs(0) - 1 - item
    kv_head = tl.program_id(1)
    share = 1
    if SPLIT:
        share = _share(
            cu_seqlens_q, context_lens, num_rows, num_spare, fresh_len, window,
            MIN_LEN, MAX_LEN, UNIT_LEN, TILE,
        )  # fmt: skip
    row, before = _row_of(
        item, share, cu_seqlens_q, context_lens, num_rows, fresh_len, window,
        MIN_LEN, MAX_LEN, UNIT_LEN, TILE, SPLIT,
    )  # fmt: skip
    if row >= num_rows:
        return

    query_start = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - query_start
    context_len = tl.load(context_lens + row)
    _, tiles = _work(
        cu_seqlens_q, context_lens, row, num_rows, fresh_len, window,
        MIN_LEN, MAX_LEN, UNIT_LEN, TILE,
    )  # fmt: skip
    splits = _splits(tiles, share, SPLIT)
    unit = (item - before) // splits
    split = (item - before) % splits
    # Position of the row's first query; negative if the query only pads the row.
    first_position = context_len - query_len
    begin, end = _stretch(context_len, first_position, query_len, unit, split, splits, window,
                          UNIT_LEN, TILE)  # fmt: skip

    m = tl.arange(0, ROWS_M)
    nth = unit * UNIT_LEN + m // GROUP  # index of each query in its row
    m_there = (m < UNIT_LEN * GROUP) & (nth < query_len)
    position = first_position + nth
    element, element_there = _elements(FORMAT, HEAD_DIM, WIDTH)
    q_there = m_there[:, None] & element_there[None, :]
    q_token = (query_start + nth).to(tl.int64)
    q_head = kv_head * GROUP + m % GROUP
    q_at = q_token * query_stride_token + q_head * query_stride_head
    q = tl.load(query + q_at[:, None] + element[None, :], mask=q_there, other=0.0)
    q_unit = tl.full([ROWS_M], 1.0, tl.float32) * scaling
    if not HAS_SOFTCAP:
        q_unit *= LOG2_E
    if DOT == tl.float16:
        q = q.to(tl.float32)
        unit_bits = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000
        unit_bits = tl.where(unit_bits > 0, unit_bits, 0x3F800000)
        q *= (0x7F000000 - unit_bits).to(tl.float32, bitcast=True)[:, None]
        q_unit *= unit_bits.to(tl.float32, bitcast=True)
    q_sum = tl.sum(q.to(tl.float32), 1)
    q = q.to(DOT)

    acc = tl.zeros([ROWS_M, WIDTH], tl.float32)
    lift = tl.zeros([ROWS_M], tl.float32)  # int4's low, which adds the same to all elements
    peak = tl.full([ROWS_M], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS_M], tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    keys += kv_head * head_stride
    values += kv_head * head_stride
    key_scales += kv_head * scale_head_stride
    value_scales += kv_head * scale_head_stride
    # First the whole tiles to which all queries attend, without masks; then the other tiles.
    whole = tl.minimum(end, first_position + unit * UNIT_LEN + 1) - begin
    whole_end = begin + tl.maximum(whole, 0) // TILE * TILE
    acc, lift, peak, norm = _scan(
        q, q_unit, q_sum, acc, lift, peak, norm, begin, whole_end, position,
        table, keys, values, key_scales, value_scales, window, softcap,
        block_stride, scale_block_stride,
        FORMAT, DOT, HEAD_DIM, BLOCK_SIZE, WIDTH, TILE, HAS_WINDOW, HAS_SOFTCAP, False,
    )  # fmt: skip
    acc, lift, peak, norm = _scan(
        q, q_unit, q_sum, acc, lift, peak, norm, whole_end, end, position,
        table, keys, values, key_scales, value_scales, window, softcap,
        block_stride, scale_block_stride,
        FORMAT, DOT, HEAD_DIM, BLOCK_SIZE, WIDTH, TILE, HAS_WINDOW, HAS_SOFTCAP, True,
    )  # fmt: skip
    acc += lift[:, None]

    if SPLIT:
        state = (item.to(tl.int64) * tl.num_programs(1) + kv_head) * ROWS_M + m
        tl.store(partial + state[:, None] * HEAD_DIM + element[None, :], acc, mask=q_there)
        tl.store(peaks + state, peak, mask=m_there)
        tl.store(norms + state, norm, mask=m_there)
    else:
        result = acc / tl.where(norm > 0.0, norm, 1.0)[:, None]
        out_at = (q_token * tl.num_programs(1) * GROUP + q_head) * HEAD_DIM
        out_at = out_at[:, None] + element[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=q_there)


@triton.jit
def _stretch(
    context_len,
    first_position,
    query_len,
    unit,
    split,
    splits,
    window,
    UNIT_LEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns the begin and end of the tokens that a unit reads in one split of its row.

    All units of a row have the same splits, of equal numbers of tiles. So a split may be empty for
    some units.
    """
    first_tile = _first_seen(first_position, window) // TILE
    tiles = (context_len + TILE - 1) // TILE - first_tile
    share = (tiles + splits - 1) // splits
    begin = (first_tile + split * share) * TILE
    end = tl.minimum(begin + share * TILE, context_len)
    last = tl.minimum((unit + 1) * UNIT_LEN, query_len)
    end = tl.minimum(end, first_position + last)
    unit_begin = _first_seen(first_position + unit * UNIT_LEN, window) // TILE * TILE
    return tl.maximum(begin, unit_begin), end


@triton.jit
def _scan(
    q,  # [ROWS_M, WIDTH]
    q_unit,  # [ROWS_M]: factors of the scores of q
    q_sum,  # [ROWS_M]
    acc,
    lift,
    peak,
    norm,
    begin,
    end,
    position,  # [ROWS_M] of the queries
    table,  # the row's block table
    keys,  # the KV head's elements in block 0
    values,
    key_scales,
    value_scales,
    window,
    softcap,
    block_stride,
    scale_block_stride,
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Runs the online softmax over tokens `begin` to `end`. Without MASKED, all queries attend to
    all tokens, and tiles are whole.
    """
    HAS_SCALES: tl.constexpr = FORMAT == "fp8_e4m3" or FORMAT == "int8" or FORMAT == "int4"
    token = begin + tl.arange(0, TILE)
    block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        there = token < end
        here = block.to(tl.int64)
        # Loads the next tile's block ids one tile early, because the loads of K and V depend on
        # them.
        block = tl.load(table + (token + TILE) // BLOCK_SIZE, mask=token + TILE < end, other=0)
        offset = token % BLOCK_SIZE
        scale_at = here * scale_block_stride + offset

        k = _tile(keys + here * block_stride, offset, there, FORMAT, DOT, HEAD_DIM, WIDTH, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")  # [ROWS_M, TILE]
        if HAS_SCALES:
            bits, low = _scale_bits(key_scales + scale_at, there, FORMAT, MASKED)
            scores *= bits.to(tl.float32, bitcast=True)[None, :]
            if FORMAT == "int4":
                scores += q_sum[:, None] * low[None, :]
        scores *= q_unit[:, None]
        if HAS_SOFTCAP:
            tanh = 2.0 * tl.sigmoid(scores * (2.0 / softcap)) - 1.0
            scores = tanh * (softcap * LOG2_E)
        if MASKED or HAS_WINDOW:
            seen = there[None, :] & (token[None, :] <= position[:, None])
            if HAS_WINDOW:
                seen &= token[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        if HAS_SCALES:
            bits, low = _scale_bits(value_scales + scale_at, there, FORMAT, MASKED)
            exponent = tl.maximum((bits >> 23) & 0xFF, LEAST_EXPONENT)
            scores += (exponent - 127).to(tl.float32)[None, :]

        highest = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - (base - HEADROOM)[:, None])
        fade = tl.exp2(peak - base)
        peak = highest
        acc *= fade[:, None]
        if HAS_SCALES:
            own = weights * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[None, :]
            norm = norm * fade + tl.sum(own, 1)
            lift = lift * fade
            if FORMAT == "int4":
                lift += tl.sum(own * low[None, :], 1)
            mantissa = (bits & SIGN_AND_FRACTION) | 0x3F800000
            weights *= mantissa.to(tl.float32, bitcast=True)[None, :]
        else:
            norm = norm * fade + tl.sum(weights, 1)
        v = _tile(values + here * block_stride, offset, there, FORMAT, DOT, HEAD_DIM, WIDTH, MASKED)
        acc = tl.dot(weights.to(DOT), v, acc, input_precision="tf32x3")
    return acc, lift, peak, norm


@triton.jit
def _tile(
    heads,  # [TILE] pointers to the head in each token's block
    offset,  # [TILE] token within its block
    there,  # [TILE]
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Loads elements [TILE, WIDTH] of K or V without scales; `_elements` defines the columns'
    order.
    """
    if FORMAT == "int4":
        words = _words(heads, offset, there, HEAD_DIM // 8, WIDTH // 8, MASKED)
        a, b, c, d, e, f, g, h = _nibbles(words, DOT)
        lower = _side_by_side(_side_by_side(a, b), _side_by_side(c, d))
        return _side_by_side(lower, _side_by_side(_side_by_side(e, f), _side_by_side(g, h)))
    if FORMAT == "fp8_e4m3" or FORMAT == "int8":
        words = _words(heads, offset, there, HEAD_DIM // 4, WIDTH // 4, MASKED)
        a, b, c, d = _bytes(words, FORMAT, DOT)
        return _side_by_side(_side_by_side(a, b), _side_by_side(c, d))
    return _words(heads, offset, there, HEAD_DIM, WIDTH, MASKED).to(DOT)


@triton.jit
def _elements(FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the index, in the head, of the element in each column of a tile; and True for columns
    whose element exists.
    """
    column = tl.arange(0, WIDTH)
    if FORMAT == "int4":
        word = column % (WIDTH // 8)
        byte = column // (WIDTH // 8) % 4
        half = column // (WIDTH // 2)
        return word * 4 + byte + half * (HEAD_DIM // 2), word < HEAD_DIM // 8
    if FORMAT == "fp8_e4m3" or FORMAT == "int8":
        word = column % (WIDTH // 4)
        return word * 4 + column // (WIDTH // 4), word < HEAD_DIM // 4
    return column, column < HEAD_DIM


@triton.jit
def _words(heads, offset, there, LENGTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Loads LENGTH words of each token's head [TILE, PADDED]; zeros after the head's end."""
    word = tl.arange(0, PADDED)
    at = (heads + offset * LENGTH)[:, None] + word[None, :]
    if MASKED:
        if LENGTH == PADDED:
            return tl.load(at, mask=there[:, None], other=0)
        return tl.load(at, mask=there[:, None] & (word < LENGTH)[None, :], other=0)
    if LENGTH == PADDED:
        return tl.load(at)
    return tl.load(at, mask=(word < LENGTH)[None, :], other=0)


@triton.jit
def _side_by_side(left, right):
    """Joins two tensors [n, width] to one tensor [n, 2 * width]."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@triton.jit
def _bytes(words, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """Unpacks the four bytes of each word, lowest byte first."""
    if DOT == tl.float16:
        return tl.inline_asm_elementwise(
            FP8_BYTES if FORMAT == "fp8_e4m3" else INT8_BYTES,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return (
        _byte(words, 0, FORMAT, DOT),
        _byte(words, 8, FORMAT, DOT),
        _byte(words, 16, FORMAT, DOT),
        _byte(words, 24, FORMAT, DOT),
    )


@triton.jit
def _byte(words, SHIFT: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr):
    byte = (words >> SHIFT).to(tl.int8)
    if FORMAT == "fp8_e4m3":
        return byte.to(tl.float8e4nv, bitcast=True).to(DOT)
    return byte.to(DOT)


@triton.jit
def _nibbles(words, DOT: tl.constexpr):
    """Unpacks each word's bytes into four-bit numbers: the lower halves of all bytes, lowest byte
    first, then the upper halves.
    """
    if DOT == tl.float16:
        return tl.inline_asm_elementwise(
            INT4_NIBBLES,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=2,
        )
    return (
        (words & 15).to(DOT),
        ((words >> 8) & 15).to(DOT),
        ((words >> 16) & 15).to(DOT),
        ((words >> 24) & 15).to(DOT),
        ((words >> 4) & 15).to(DOT),
        ((words >> 12) & 15).to(DOT),
        ((words >> 20) & 15).to(DOT),
        ((words >> 28) & 15).to(DOT),
    )


@triton.jit
def _scale_bits(at, there, FORMAT: tl.constexpr, MASKED: tl.constexpr):
    """Loads scales [TILE] as the bits of fp32, and int4's `low` as fp32."""
    stored = tl.load(at, mask=there, other=0) if MASKED else tl.load(at)
    low = ((stored >> 16) << 16).to(tl.float32, bitcast=True)
    return stored << 16 if FORMAT == "int4" else stored, low


@triton.jit(do_not_specialize=["num_rows", "num_spare", "fresh_len", "window", "longest"])
def merge_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM], contiguous
    partial,
    peaks,
    norms,
    cu_seqlens_q,
    context_lens,
    num_rows,
    num_spare,
    fresh_len,
    window,
    longest,  # number of queries of a row in this grid
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    MIN_LEN: tl.constexpr,
    MAX_LEN: tl.constexpr,
    UNIT_LEN: tl.constexpr,
    ROWS_M: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,  # number of splits that are merged at a time
):
    """Merges the splits of one query for one head. Grid: (num_rows * longest, num_heads)."""
    row = tl.program_id(0) // longest
    nth = tl.program_id(0) % longest
    head = tl.program_id(1)
    query_start = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - query_start
    context_len = tl.load(context_lens + row)
    if nth >= query_len or not _mine(query_len, context_len, fresh_len, MIN_LEN, MAX_LEN):
        return
    num_kv_heads = tl.num_programs(1) // GROUP
    share = _share(
        cu_seqlens_q, context_lens, num_rows, num_spare, fresh_len, window,
        MIN_LEN, MAX_LEN, UNIT_LEN, TILE,
    )  # fmt: skip
    _, tiles = _work(
        cu_seqlens_q, context_lens, row, num_rows, fresh_len, window,
        MIN_LEN, MAX_LEN, UNIT_LEN, TILE,
    )  # fmt: skip
    splits = _splits(tiles, share, True)
    first = nth // UNIT_LEN * splits + _items_before(
        row, share, cu_seqlens_q, context_lens, fresh_len, window, MIN_LEN, MAX_LEN, UNIT_LEN, TILE
    )
    m = nth % UNIT_LEN * GROUP + head % GROUP

    column = tl.arange(0, WIDTH)
    column_there = column < HEAD_DIM
    acc = tl.zeros([WIDTH], tl.float32)
    peak = float("-inf")
    norm = 0.0
    for start in range(0, splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        there = split < splits
        item = (first + split).to(tl.int64)
        state = (item * num_kv_heads + head // GROUP) * ROWS_M + m
        split_peak = tl.load(peaks + state, mask=there, other=float("-inf"))
        split_norm = tl.load(norms + state, mask=there, other=0.0)
        at = partial + state[:, None] * HEAD_DIM + column[None, :]
        sums = tl.load(at, mask=there[:, None] & column_there[None, :], other=0.0)
        highest = tl.maximum(peak, tl.max(split_peak, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(split_peak - base)
        fade = tl.exp2(peak - base)
        norm = norm * fade + tl.sum(weights * split_norm, 0)
        acc = acc * fade + tl.sum(weights[:, None] * sums, 0)
        peak = highest
    result = acc / tl.where(norm > 0.0, norm, 1.0)
    out_at = ((query_start + nth).to(tl.int64) * tl.num_programs(1) + head) * HEAD_DIM + column
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=column_there)
